"""The products of a pack, from lines, models and configurations."""

import json
from pathlib import Path
from typing import Any

import pytest

from outblas.core.products import Products, parse_line, parse_rows
from outblas.core.shapes import HEADS, LAYERS
from outblas.core.steps import Steps
from outblas.packing.products import of_config, of_model, parse_file


@pytest.mark.parametrize(
    ("line", "products"),
    [
        ("128x4096x14336", Products(((128, 128),), 4096, 14336)),
        ("1-512,1024x64x96 float16", Products(((1, 512), (1024, 1024)), 64, 96, "float16")),
        (
            "8x64x96 nn swiglu",
            Products(((8, 8),), 64, 96, layout="nn", steps=Steps(activation="swiglu")),
        ),
        (
            "8x64x96 bias+gelu+residual batch-invariant",
            Products(((8, 8),), 64, 96, steps=Steps(True, "gelu", True), batch_invariant=True),
        ),
    ],
)
def test_a_line_says_what_is_multiplied(line: str, products: Products) -> None:
    assert parse_line(line) == products
    assert parse_line(str(products)) == products


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("4096", "expected M or FIRST-LAST, then xNxK"),
        ("8x0x8", "expected M or FIRST-LAST, then xNxK"),
        ("8x8x8 float8", "expected M or FIRST-LAST.*epilogue is 'float8'"),
        ("8x8x8 nt nn", "expected one layout"),
        ("5-4x8x8", "expected numbers and ranges such as 1-512,1024"),
        ("0x8x8", "expected numbers and ranges"),
        ("1-x8x8", "expected numbers and ranges"),
    ],
)
def test_a_line_that_says_something_else_is_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_line(line)


def test_rows_that_ranges_share_count_once() -> None:
    products = Products(parse_rows("3-5,1,4-6"), 8, 8)

    assert list(products.each_M()) == [1, 3, 4, 5, 6]


def test_a_file_has_products_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "products.txt"
    path.write_text("# layers\n8x64x96   # one\n\n1-2x8x8 nn\n", encoding="utf-8")

    assert [str(each) for each in parse_file(path)] == [
        "8x64x96 bfloat16 nt",
        "1-2x8x8 bfloat16 nn",
    ]


def test_a_bad_line_of_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "products.txt"
    path.write_text("8x64x96\n8x64\n", encoding="utf-8")

    with pytest.raises(ValueError, match=r"products\.txt:2: the line is '8x64'"):
        parse_file(path)


def test_a_file_without_products_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "products.txt"
    path.write_text("# none\n", encoding="utf-8")

    with pytest.raises(ValueError, match="has no products"):
        parse_file(path)


# ---- models
def test_every_model_has_a_head_of_the_width_of_its_layers() -> None:
    assert HEADS.keys() == LAYERS.keys()
    assert [K for _, K in HEADS.values()] == [layers[0][1] for layers in LAYERS.values()]


LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def test_the_layers_and_the_head_of_a_model_by_name() -> None:
    found = of_model("Llama-3-8B", "1-4")

    assert [(each.N, each.K) for each in found] == [*LAYERS["llama-3-8b"], (128256, 4096)]
    assert {each.rows for each in found} == {((1, 4),)}


def test_a_configuration_has_the_joined_layers_of_the_table() -> None:
    sizes = of_config(LLAMA, 1, "config.json")

    assert set(LAYERS["llama-3-8b"]) <= set(sizes)
    assert (128256, 4096) in sizes


def test_tensor_parallelism_divides_what_it_divides() -> None:
    assert of_config(LLAMA, 8, "config.json") == (
        ((4 + 2) * 128, 4096),
        (4 * 128, 4096),
        (128, 4096),
        (4096, 4 * 128),
        (2 * 1792, 4096),
        (1792, 4096),
        (4096, 1792),
        (16032, 4096),
    )


def test_key_heads_are_copied_where_there_are_too_few() -> None:
    sizes = of_config(LLAMA, 16, "config.json")

    assert sizes[2] == (128, 4096)


@pytest.mark.parametrize(
    ("changes", "parallel", "message"),
    [
        ({"hidden_size": None}, 1, "config.json lacks hidden_size"),
        ({"num_attention_heads": 30}, 4, "num_attention_heads is 30 .*multiple of"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    changes: dict[str, Any], parallel: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        of_config(LLAMA | changes, parallel, "config.json")


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_configuration_is_read_from_its_file_or_folder(as_folder: bool, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8")

    found = of_model(str(tmp_path if as_folder else path), "8", 2)

    assert (14336, 4096) in [(each.N, each.K) for each in found]


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"--model is 'gpt-9', expected llama-3-8b, .*config\.json"
    ):
        of_model("gpt-9", "1")


def test_a_model_by_name_is_not_divided() -> None:
    with pytest.raises(ValueError, match="--tensor-parallel is 2 with llama-3-8b"):
        of_model("llama-3-8b", "1", 2)
