"""The products of a pack, from lines, models and configurations."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import children

from outblas.base.shapes import DEEPGEMM
from outblas.call.product_groups import Groups
from outblas.call.product_storage import Storage
from outblas.call.products import Products, parse_line
from outblas.call.scaling import Scaling
from outblas.call.steps import Steps
from outblas.packing import build, products
from outblas.packing.products import of_config, of_model, parse_file, products_of

GATED = Steps(activation="swiglu")


def fp8(scaling: Scaling, dtype: str = "fp8-e4m3", **changes: Any) -> Products:
    return Products(((8, 8),), 64, 96, dtype, scaling=scaling, **changes)


LINES = {
    "128x4096x14336": Products(((128, 128),), 4096, 14336),
    "1-512,1024x64x96 float16": Products(((1, 512), (1024, 1024)), 64, 96, "float16"),
    "8x64x96 bias+gelu+residual batch-invariant": Products(
        ((8, 8),), 64, 96, steps=Steps(True, "gelu", True), batch_invariant=True
    ),
    "8x64x96 fp8-e4m3 1x128:128x128 bias": fp8(Scaling("1x128", "128x128"), steps=Steps(True)),
    "8x64x96 fp8-e4m3 tensorwise to-e4m3-pow2": fp8(
        Scaling("tensorwise", "tensorwise", result="e4m3-pow2")
    ),
    "8x64x96 fp8-e5m2-e4m3 rowwise fast-accum to-float16": fp8(
        Scaling("rowwise", "rowwise", True, "float16"), dtype="fp8-e5m2-e4m3"
    ),
    "8x64x96 to-float32": Products(((8, 8),), 64, 96, out_dtype="float32"),
    "8x64x96 batch:4 nn": Products(((8, 8),), 64, 96, layout="nn", batch=4),
    "8x64x96 tf32 bias": Products(((8, 8),), 64, 96, "tf32", steps=Steps(True)),
    "8x64x96 lda:100 ldb:97 ldc:65 align-a:2 align-b:16 align-out:8": Products(
        ((8, 8),), 64, 96, storage=Storage(100, 97, 65, 2, 16, 8)
    ),
    "8x64x96 swiglu groups:4 gathered scattered weighted zero-tail": Products(
        ((8, 8),), 64, 96, steps=GATED, groups=Groups(4, "rows", True, True, True, True)
    ),
    "8x64x96 groups:4:terms": Products(((8, 8),), 64, 96, layout="tn", groups=Groups(4, "terms")),
    "8x64x96 fp8-e4m3 1x128-rows:128x128 groups:4:masked": fp8(
        Scaling("1x128-rows", "128x128"), groups=Groups(4, "masked")
    ),
}


@pytest.mark.parametrize(("line", "products"), LINES.items(), ids=LINES)
def test_a_line_says_what_is_multiplied(line: str, products: Products) -> None:
    assert parse_line(line) == products
    assert parse_line(str(products)) == products


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("4096", "expected M or FIRST-LAST, then xNxK"),
        ("8x8x8 float8", "expected M or FIRST-LAST.*epilogue is 'float8'"),
        ("8x8x8 nt nn", "expected one layout"),
        ("5-4x8x8", "expected numbers and ranges such as 1-512,1024"),
        ("8x8x8 fp8-e4m3", "the dtype is fp8-e4m3, expected the recipes of scales"),
        ("8x8x8 tensorwise", "recipes given, expected a dtype of fp8-e4m3"),
        ("8x8x8 float16 to-bfloat16", "result given, expected a dtype of fp8-e4m3"),
        ("8x8x8 batch:4 groups:4", "batch:NUMBER is given, expected none with fp8 or groups"),
        ("8x8x8 batch:4 lda:9", "lda given, expected packed matrices in a batch"),
        ("8x8x8 to-float32 groups:4", "the result is float32, expected bfloat16 with groups"),
        ("8x8x8 fp8-e4m3 tensorwise:1x128", "recipes are tensorwise and 1x128, expected both of"),
        ("8x8x8 fp8-e4m3 1x128 fast-accum", "fast-accum is given, expected scales of tensorwise"),
        ("8x8x8 fp8-e4m3 1x128 rowwise", "expected one recipes"),
        ("8x8x8 fp8-e4m3 rowwise nn", "the layout is nn, expected nt"),
        ("8x8x8 fp8-e4m3 rowwise batch-invariant", "batch-invariant is given, expected none"),
        ("8x8x16 lda:15", "lda is 15, expected at least 16"),
        ("8x9x8 nn ldb:8", "ldb is 8, expected at least 9"),
        ("8x8x8 align-b:3", "align-b is 3, expected one of 1, 2, 4, 8, 16"),
        ("8x8x8 lda:8 groups:4", "lda given, expected packed matrices with groups"),
        ("8x8x8 fp8-e4m3 rowwise lda:9", "lda is 9, expected an even number with fp8"),
        ("8x8x8 groups:4:columns", "epilogue is 'groups:4:columns'"),
        ("8x8x8 gathered", "gathered given, expected groups:NUMBER beside it"),
        ("8x8x8 groups:4 top:0", "epilogue is 'top:0'"),
        ("8x8x8 groups:4 weighted", "weighted is given without scattered, expected both"),
        ("8x8x8 groups:4 tn", "the layout is tn, expected nt or nn"),
        ("8x8x8 float32 groups:4", "the dtype is float32, expected 16 bits or fp8 with groups"),
        ("8x8x8 groups:4 batch-invariant", "batch-invariant is given, expected none"),
        ("8x8x8 fp8-e4m3 groups:4 rowwise", "recipes are rowwise and rowwise, expected 1x128 and"),
        ("8x8x8 fp8-e4m3 groups:4 1x128:128x128 to-e4m3", "the result is e4m3, expected 16 bits"),
    ],
)
def test_a_line_that_says_something_else_is_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_line(line)


def test_a_bad_line_of_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "products.txt"
    path.write_text("8x64x96\n8x64\n", encoding="utf-8")

    with pytest.raises(ValueError, match=r"products\.txt:2: the line is '8x64'"):
        parse_file(path)


# ---- models


LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"[1]", "has a JSON list, expected the object", id="list"),
        pytest.param(b"[" * 100_000, "is not the JSON of .*: maximum recursion", id="deep list"),
        pytest.param(b'{"a":' * 100_000, "is not the JSON of .*: maximum", id="deep object"),
        pytest.param(b'{"vocab_size": ' + b"9" * 5000, "is not the JSON of", id="digits"),
        pytest.param(b"\xff", "is not UTF-8", id="bytes"),
        pytest.param(b" " * (products.LARGEST + 1), "has more than 16 MiB", id="large"),
        pytest.param(
            json.dumps(LLAMA | {"quantization_config": ["fp8"]}).encode(),
            r"quantization_config is \['fp8'\] in .*, expected an object",
            id="quantization",
        ),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)

    with pytest.raises(ValueError, match=message):
        of_model(str(path), "8")


@pytest.mark.parametrize("read", [products.parse_file, lambda path: of_model(str(path), "8")])
def test_a_fifo_in_the_place_of_a_file_is_not_waited_for(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)

    def refuses() -> bool:
        with pytest.raises(ValueError, match="is a FIFO, expected a regular file"):
            read(path)
        return True

    assert children.succeeds(refuses)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1-1000000000000x4096x4096", "has matrices of 4096000000000000 elements"),
        ("1-2000000x64x64", "have 2000000 numbers of rows, expected at most 1048576"),
        ("16x2147483647x2147483647", "has matrices of .* elements"),
        ("16x4096x4096 batch:9999999999", "has matrices of .* elements"),
        ("16x4096x4096 groups:9999999999", "has matrices of .* elements"),
    ],
)
def test_products_that_nobody_can_plan_are_refused_at_once(
    line: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        build.build([parse_line(line)], tmp_path / "a.outblas")


# ---- fp8 checkpoints
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def lines(**changes: Any) -> list[str]:
    return [str(each) for each in products_of(LLAMA | changes, ((8, 8),), 1, "config.json")]


def test_layers_of_an_fp8_checkpoint_have_scales_of_blocks_and_its_head_none() -> None:
    found = lines(quantization_config=BLOCKS, hidden_act="silu")

    assert "8x6144x4096 fp8-e4m3 nt 1x128:128x128" in found
    assert "8x28672x4096 fp8-e4m3 nt swiglu 1x128:128x128 to-e4m3" in found
    assert "8x4096x14336 fp8-e4m3 nt 1x128:128x128" in found
    assert [line for line in found if "fp8" not in line] == ["8x128256x4096 bfloat16 nt"]


def test_results_have_the_dtype_of_the_checkpoint() -> None:
    found = lines(quantization_config=BLOCKS, torch_dtype="float16")

    assert "8x6144x4096 fp8-e4m3 nt 1x128:128x128 to-float16" in found
    assert found[-1] == "8x128256x4096 float16 nt"


@pytest.mark.parametrize(
    ("quantization", "line"),
    [
        ({"quant_method": "fp8"}, "8x6144x4096 fp8-e4m3 nt tensorwise"),
        ({"quant_method": "fbgemm_fp8"}, "8x6144x4096 fp8-e4m3 nt rowwise"),
        ({"quant_method": "awq"}, "8x6144x4096 bfloat16 nt"),
        (None, "8x6144x4096 bfloat16 nt"),
    ],
)
def test_the_method_of_quantization_says_how_layers_are_scaled(
    quantization: Any, line: str
) -> None:
    assert lines(quantization_config=quantization)[0] == line


def test_blocks_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight_block_size is \[64, 64\] in config\.json"):
        lines(quantization_config=BLOCKS | {"weight_block_size": [64, 64]})


DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def test_latent_attention_has_the_sizes_that_deepgemm_measures() -> None:
    sizes = of_config(DEEPSEEK_V3, 1, "config.json")

    assert {(N, K) for _, N, K in DEEPGEMM} - {(4096, 7168), (7168, 2048)} <= set(sizes)


# ---- experts
MIXTRAL = LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2, "hidden_act": "silu"}
QWEN3_MOE = LLAMA | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
ROUTED_DEEPSEEK = DEEPSEEK_V3 | {
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "num_experts_per_tok": 8,
    "hidden_act": "silu",
    "quantization_config": BLOCKS,
}


EXPERT_LINES: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "every row as often as a token has experts": (
        MIXTRAL,
        1,
        (
            "2-8x28672x4096 bfloat16 nt swiglu groups:8 top:2",
            "2-8x4096x14336 bfloat16 nt groups:8",
            "1-4x8x4096 bfloat16 nt",  # the choice of experts
        ),
    ),
    "columns that processes share": (
        MIXTRAL,
        4,
        (
            "2-8x7168x4096 bfloat16 nt swiglu groups:8 top:2",
            "2-8x4096x3584 bfloat16 nt groups:8",
        ),
    ),
    "a layer without experts among others": (
        QWEN3_MOE | {"mlp_only_layers": [0]},
        1,
        ("1-4x12288x2048 bfloat16 nt",),
    ),
    "rows of narrow experts are gathered": (
        QWEN3_MOE,
        1,
        (
            "8-32x1536x2048 bfloat16 nt swiglu groups:128 gathered top:8",
            "8-32x2048x768 bfloat16 nt groups:128",
        ),
    ),
    "an fp8 checkpoint": (
        ROUTED_DEEPSEEK,
        1,
        (
            "8-32x4096x7168 fp8-e4m3 nt swiglu 1x128:128x128 groups:256",
            "8-32x7168x2048 fp8-e4m3 nt 1x128:128x128 groups:256",
            "1-4x4096x7168 fp8-e4m3 nt 1x128:128x128",  # the shared expert
            "1-4x36864x7168 fp8-e4m3 nt 1x128:128x128",  # the first layers
            "1-4x256x7168 bfloat16 nt",
        ),
    ),
    "no scales but those of blocks": (
        MIXTRAL | {"quantization_config": {"quant_method": "fp8"}},
        1,
        ("2-8x4096x14336 bfloat16 nt groups:8",),
    ),
}


@pytest.mark.parametrize("name", EXPERT_LINES)
def test_a_configuration_with_experts_has_their_groups(name: str) -> None:
    config, parallel, lines = EXPERT_LINES[name]

    products = [str(each) for each in products_of(config, ((1, 4),), parallel, "config.json")]

    assert not set(lines) - set(products)
