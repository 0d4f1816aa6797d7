"""The epilogue of `hopper.gemm` without a GPU: how a call's tensors come, what is refused, the
machine code.
"""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from outblas.core import configs
from outblas.core import problem as operands
from outblas.core.epilogue import EpilogueArgs, glu_split
from outblas.hopper import gemm
from outblas.hopper.core import compile
from outblas.hopper.gemm import epilogue_load, epilogue_tile
from outblas.hopper.gemm.compile import compile_variant
from outblas.hopper.gemm.variant import example_variant

BF16 = torch.bfloat16
BASE, TALL = "", "tile_n=192,stages=5,epilogue_stages=1,cluster_m=1,pingpong=True"
SMALL = (
    "tile_m=64,consumers=1,cluster_m=1,epilogue_stages=1,producer_registers=0,consumer_registers=0"
)
STEPS = {"bias": "pairs", "residual": "staged", "aux": "staged"}


def problem(
    *shape: int, activation: str = "", turned: str = "", formats: str = "", **extra: Any
) -> Any:
    """Of M, N, K, with a row of bias and matrices; those in `turned` by columns, `extra` instead of
    others.
    """
    M, N, K = shape

    def made(name: str, *size: int) -> torch.Tensor:
        size = size[::-1] if name in turned else size
        t = torch.empty(size, dtype=BF16, device="meta")
        return t.t() if name in turned else t

    wide = N * glu_split(activation)
    found = {
        "bias": made("bias", wide),
        "residual": made("residual", M, N),
        "aux": made("aux", M, wide),
    } | extra
    scales = (torch.empty(M, 1, device="meta"), torch.empty((), device="meta")) if formats else None
    a, b, out = made("a", M, K), made("b" if "b" in turned else "w", wide, K).t(), made("out", M, N)
    return operands.problem(
        a, b, out, extra=EpilogueArgs(activation, **found), scales=scales, formats=formats
    )


def variant(given, text=BASE):
    return example_variant(
        cast(functools.partial, gemm.plan).args[0], given, configs.from_text(gemm.Config, text)
    )


@pytest.mark.parametrize(
    ("given", "text", "want"),
    [
        ({}, BASE, STEPS),
        ({"bias": torch.empty(64, 1)}, BASE, STEPS | {"bias": "rows"}),
        (
            {"residual": torch.empty(64, dtype=BF16), "aux": None},
            BASE,
            {"residual": "pairs", "aux": ""},
        ),
        ({"turned": "residual"}, BASE, STEPS | {"residual": "matrix"}),
        ({"turned": "out residual aux"}, BASE, STEPS | {"bias": "rows"}),
        (
            {"turned": "out residual aux", "activation": "swiglu"},
            BASE,
            STEPS | {"gated": True, "by_columns": True},
        ),
        ({}, "split_k=2,k_serpentine=False", STEPS | {"residual": "matrix"}),
        ({}, "tile_k=32", STEPS | {"residual": "matrix"}),
        (
            {"formats": "e4m3 e5m2"},
            BASE,
            STEPS | {"scale_a": "rows", "scale_b": "one", "formats": "e4m3 e5m2"},
        ),
        (
            {"formats": "e4m3 e5m2 promoted"},
            "swap_ab=True",
            {"formats": "e5m2 e4m3 promoted", "scale_a": "pairs"},
        ),
    ],
)
def test_how_tensors_come(given, text, want):
    form = variant(problem(64, 64, 64, **given), text).traits
    assert {name: getattr(form, name) for name in want} == want


@pytest.mark.parametrize(
    ("given", "text", "reason"),
    [
        ({"activation": "geglu"}, "swap_ab=True", "gated pairs need swap_ab"),
        (
            {"activation": "geglu"},
            "tile_n=80,cluster_m=1",
            "tile_n is 80, expected a multiple of 32",
        ),
        (
            {"formats": "e4m3 e4m3 promoted"},
            BASE,
            "needs 256 registers for sums and theirs of stages",
        ),
        (
            {"formats": "e4m3 e4m3 promoted"},
            f"{SMALL},tile_n=64,tile_k=128",
            "tile_k is 128, expected at most 64",
        ),
    ],
)
def test_what_is_refused(given: dict[str, Any], text: str, reason: str) -> None:
    config = configs.from_text(gemm.Config, text)
    assert reason in str(gemm.unsupported(problem(64, 64, 64, **given), config))
    assert gemm.unsupported(problem(64, 64, 64, **given)) is None


@pytest.mark.parametrize(
    ("K", "activation", "want"),
    [
        (64, "gelu", "gelu"),
        (112, "gelu", "gelu_fit"),
        (4096, "geglu", "gelu_fit"),
        (4096, "gelu_tanh", "gelu_tanh"),
    ],
)
def test_gelu_is_a_fit_where_sums_are_less_exact(K, activation, want):
    assert variant(problem(64, 64, K, activation=activation)).traits.function == want


def test_x_of_one_row_is_no_vector() -> None:
    """Vectors are read, never written."""
    form = variant(problem(1, 63, 64, activation="gelu")).traits
    assert (form.bias, form.residual, form.aux) == ("columns", "columns", "matrix")


@pytest.mark.parametrize(
    ("shape", "given", "text", "want"),
    [
        ((8192, 8192, 1024), {"activation": "gelu"}, BASE, True),
        ((8192, 8192, 1024), {"bias": None, "residual": None, "aux": None}, BASE, False),
        ((8192, 8192, 384), {"activation": "gelu"}, BASE, False),  # too few slices
        ((512, 512, 1024), {"activation": "gelu"}, BASE, False),  # one tile a CTA
        ((8192, 8192, 1024), {"activation": "gelu"}, TALL, False),  # tiles of one consumer
        ((8192, 8192, 1024), {"activation": "gelu"}, "split_k=2,k_serpentine=False", False),
        (
            (8192, 8192, 1024),
            {"formats": "e4m3 e5m2 promoted"},
            "tile_n=192,stages=5,epilogue_stages=1",
            False,
        ),
    ],
)
def test_when_consumers_take_turns(shape, given, text, want):
    assert variant(problem(*shape, **given), text).traits.staggered_tail == want


def test_any_gated_columns_of_a_c_by_columns() -> None:
    form = variant(
        problem(64, 17, 64, activation="swiglu", turned="out", bias=None, residual=None, aux=None)
    ).traits
    assert form.staged
    assert form.by_columns
    assert form.granule("nt", 2) == 1
    assert replace(form, by_columns=False).granule("nt", 2) == 8


def test_pairs_in_rows_come_in_whole_granules() -> None:
    assert "multiples of 8 columns" in gemm.unsupported(
        problem(64, 60, 64, activation="swiglu", turned="b", aux=None)
    )


def test_subtiles_of_the_source_fit_the_stages_that_carry_them():
    dtype = compile.NUMERIC[BF16]
    for text in (BASE, TALL, f"{SMALL},tile_n=16"):
        config = configs.from_text(gemm.Config, text)
        per_stage = epilogue_load.subtiles_per_stage(config, config, dtype)
        size = epilogue_load.subtile_bytes(config, dtype)
        assert per_stage * config.warpgroups_per_tile * size <= config.stage_bytes
        subtiles = epilogue_tile.subtiles(config, dtype, config.tile_n)
        stages = epilogue_load.stages_per_tile(config, config, dtype)
        assert stages * per_stage >= len(subtiles)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("given", "text", "code"),
    [
        ({"activation": "gelu"}, BASE, ("ex2.approx", "m64n256k16")),
        ({"activation": "gelu", "aux": None}, TALL, ("max.NaN", "m64n192k16")),
        ({"activation": "swiglu"}, BASE, ("m64n256k16",)),
        ({"activation": "silu", "turned": "a b residual"}, f"{SMALL},tile_n=64", ()),
        ({"formats": "e4m3 e5m2", "activation": "relu"}, BASE, ("m64n256k32.f32.e4m3.e5m2",)),
        (
            {"formats": "e5m2 e4m3 promoted"},
            "tile_n=192,stages=5,epilogue_stages=1",
            ("m64n192k32.f32.e5m2.e4m3",),
        ),
    ],
)
def test_machine_code(
    given: dict[str, Any], text: str, code: tuple[str, ...], tmp_path: Path
) -> None:
    asked = variant(problem(4096, 4096, 4096, **given), text)
    remarks = tmp_path / "remarks.yaml"
    made = compile_variant(
        gemm.Gemm,
        asked,
        f"--keep-ptx --dump-dir={tmp_path} --remark-output={remarks} remarks{{ptx}}",
    )
    log = compile.assembler_log(remarks.read_text(encoding="utf-8"))
    assert "0 bytes spill stores, 0 bytes spill loads" in log
    assert not [line for line in log.splitlines() if "C75" in line]
    ptx = str(made.__ptx__)
    assert all(found in ptx for found in code)
    if (
        asked.traits.function == "silu"
    ):  # a product and a sum are two roundings, whatever is between them
        assert "fma.rn.f32" not in ptx
