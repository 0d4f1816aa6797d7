"""Which compile of hopper.gemm a problem takes: how it reads and writes a call's tensors, and what
else the kernel is told when it is compiled.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.gemm_problems import (
    BF16,
    FP32,
    OWN_CONFIG,
    gemm_config,
    problem_of,
    product,
    strided,
    variant_of,
)

from outblas.call import problem as operands
from outblas.call.epilogue import EpilogueArgs, glu_split
from outblas.call.problem import Problem
from outblas.hopper.gemm import canonical, subtiles

OWN = ""
PINGPONG = "tile_n=192,stages=5,epilogue_stages=1,cluster_m=1,pingpong=True"
SMALL_TILE = (
    "tile_m=64,consumers=1,cluster_m=1,epilogue_stages=1,producer_registers=0,consumer_registers=0"
)
THREE_CONSUMERS = (
    "tile_m=192,tile_n=192,consumers=3,producer_registers=32,consumer_registers=160,"
    "epilogue_stages=1"
)
PROMOTED = "tile_n=192,stages=5,epilogue_stages=1"  # of which fp8 sums in two steps have room
SPLIT_K = "split_k=2,k_serpentine=False"
Case = tuple[Problem, str, dict[str, Any]]


def epilogue(
    M: int,
    N: int,
    K: int,
    *,
    activation: str = "",
    by_columns: tuple[str, ...] = (),
    formats: str = "",
    **tensors: torch.Tensor | None,
) -> Problem:
    """A product with a row of bias, a residual and an aux, without data. The tensors named in
    `by_columns` lie so; B lies by columns unless it is named. `tensors` take the place of those of
    the epilogue, None: the call has none. `formats`: of fp8 operands.
    """

    def matrix(name: str, *size: int) -> torch.Tensor:
        if name in by_columns:
            return torch.empty(size[::-1], dtype=BF16, device="meta").t()
        return torch.empty(size, dtype=BF16, device="meta")

    columns = N * glu_split(activation)
    own = {
        "bias": matrix("bias", columns),
        "residual": matrix("residual", M, N),
        "aux": matrix("aux", M, columns),
    }
    scales = (torch.empty(M, 1, device="meta"), torch.empty((), device="meta")) if formats else None
    return operands.problem(
        matrix("a", M, K),
        matrix("b", columns, K).t(),
        matrix("out", M, N),
        extra=EpilogueArgs(activation, **own | tensors),
        scales=scales,
        formats=formats,
    )


def batch_with_output_strides(out: tuple[int, ...]) -> Problem:
    return product(64, 64, 64, batch=(3,), a=(0, 64, 1), b=(0, 1, 64), out=out)


def addend(*strides: int) -> Problem:
    return replace(product(64, 64, 64), scaled=True, c=strides, alignment=(16, 16, 16, 16))


def residual_at(offset: int) -> Problem:
    """A residual that begins so many elements past a multiple of 16 bytes."""
    given = epilogue(256, 192, 64, aux=None)
    view = given.epilogue.residual
    assert view is not None
    moved = replace(view, alignment=16 if offset % 8 == 0 else 2 * (offset & -offset))
    return replace(given, epilogue=replace(given.epilogue, residual=moved))


def written(width: int, staged: bool, by_columns: bool = False) -> dict[str, Any]:
    return {"width": width, "staged": staged, "by_columns": by_columns}


BARE: dict[str, Any] = {"bias": None, "residual": None, "aux": None}
SQUARE, BATCH = product(64, 64, 64), strided((3, 64, 64), (4096, 64, 1))
SWAPPED = "swap_ab=True"
# C's vectors, by TMA where they are 16 bytes, which stmatrix can transpose for 16-bit elements.
OUTPUTS: dict[str, Case] = {
    "bf16": (SQUARE, OWN, written(8, True)),
    "fp32": (product(64, 64, 64, FP32), OWN, written(4, True)),
    "fp32, rows of 68": (product(64, 68, 64, FP32), OWN, written(4, True)),
    "fp32, rows of 66": (product(64, 66, 64, FP32), OWN, written(2, False)),
    "rows of 66": (product(64, 66, 64), OWN, written(2, False)),
    "rows of 65": (product(64, 65, 64), OWN, written(1, False)),
    "2 bytes": (product(64, 64, 64, alignment=(16, 16, 2)), OWN, written(1, False)),
    "8 bytes": (product(64, 64, 64, alignment=(16, 16, 8)), OWN, written(2, False)),
    "60 columns in rows of 72, where TMA would write up to column 64": (
        product(64, 60, 64, out=(72, 1)),
        OWN,
        written(2, False),
    ),
    "no unit stride": (product(64, 64, 64, out=(512, 2)), OWN, written(1, False)),
    "a single row": (product(1, 64, 64, out=(1, 1)), OWN, written(8, True)),
    "a batch": (batch_with_output_strides((4104, 64, 1)), OWN, written(8, True)),
    "a batch of odd stride": (batch_with_output_strides((4097, 64, 1)), OWN, written(1, False)),
    "from registers": (SQUARE, "epilogue_stages=0", written(8, False)),
    "swapped": (product(16, 64, 64), SWAPPED, written(8, True, True)),
    "swapped, rows of 66": (product(16, 66, 64), SWAPPED, written(1, False, True)),
    "swapped, fp32": (product(16, 64, 64, FP32), SWAPPED, written(1, False, True)),
}
# A bias is read in pairs of a row; matrices that lie as C does go through shared memory.
AS_C_LIES = {"bias": "pairs", "residual": "staged", "aux": "staged"}
C_BY_COLUMNS = ("out", "residual", "aux")
ACCESSES: dict[str, Case] = {
    "a row and matrices": (epilogue(64, 64, 64), OWN, AS_C_LIES),
    "a column of bias": (
        epilogue(64, 64, 64, bias=torch.empty(64, 1)),
        OWN,
        AS_C_LIES | {"bias": "rows"},
    ),
    "a row of residual, no aux": (
        epilogue(64, 64, 64, residual=torch.empty(64, dtype=BF16), aux=None),
        OWN,
        {"residual": "pairs", "aux": ""},
    ),
    "a residual by columns": (
        epilogue(64, 64, 64, by_columns=("residual",)),
        OWN,
        AS_C_LIES | {"residual": "matrix"},
    ),
    "all by columns": (
        epilogue(64, 64, 64, by_columns=C_BY_COLUMNS),
        OWN,
        AS_C_LIES | {"bias": "rows"},
    ),
    "all by columns, gated": (
        epilogue(64, 64, 64, by_columns=C_BY_COLUMNS, activation="swiglu"),
        OWN,
        AS_C_LIES | {"gated": True, "by_columns": True},
    ),
    "split-K": (epilogue(64, 64, 64), SPLIT_K, AS_C_LIES | {"residual": "matrix"}),
    "stages too small": (epilogue(64, 64, 64), "tile_k=32", AS_C_LIES | {"residual": "matrix"}),
    "fp8": (
        epilogue(64, 64, 64, formats="e4m3 e5m2"),
        OWN,
        AS_C_LIES | {"scale_a": "rows", "scale_b": "one", "formats": "e4m3 e5m2"},
    ),
    "fp8, swapped": (
        epilogue(64, 64, 64, formats="e4m3 e5m2 promoted"),
        SWAPPED,
        {"formats": "e5m2 e4m3 promoted", "scale_a": "pairs"},
    ),
    # Only what is read may be a vector.
    "one row": (
        epilogue(1, 63, 64, activation="gelu"),
        OWN,
        {"bias": "columns", "residual": "columns", "aux": "matrix"},
    ),
    "a residual at 16 bytes": (residual_at(8), OWN, {"residual": "staged"}),
    "a residual at 8 bytes": (residual_at(4), OWN, {"residual": "matrix"}),
    "a residual at 2 bytes": (residual_at(1), OWN, {"residual": "matrix"}),
    "a row of addend": (addend(0, 1), OWN, {"addend": "pairs"}),
    "a column of addend": (addend(1, 0), OWN, {"addend": "rows"}),
    "an addend that TMA loads": (addend(64, 1), OWN, {"addend": "staged", "scaled": True}),
    "an addend that TMA cannot load": (addend(65, 1), OWN, {"addend": "matrix"}),
}
OTHERS: dict[str, Case] = {
    "a plain product": (
        SQUARE,
        OWN,
        {"plain": True, "batched": False, "ordered": False, "scaled": False, "addend": ""},
    ),
    "many tiles": (product(8192, 8192, 64), OWN, {"ordered": True}),
    "alpha": (replace(SQUARE, scaled=True), OWN, {"scaled": True, "plain": False}),
    "a batch": (problem_of(BATCH, BATCH, alignment=(16, 16, 16)), OWN, {"batched": True}),
    # GELU is a fit where sums are less exact than it.
    **{
        f"{activation}, K {K}": (
            epilogue(64, 64, K, activation=activation),
            OWN,
            {"function": function},
        )
        for K, activation, function in (
            (64, "gelu", "gelu"),
            (112, "gelu", "gelu_fit"),
            (4096, "geglu", "gelu_fit"),
            (4096, "gelu_tanh", "gelu_tanh"),
        )
    },
}
# Consumers take turns where stores of one hide behind products of another.
LARGE, SMALL, DEEP = (8192, 8192, 1024), (512, 512, 1024), "tile_n=128,tile_k=128,stages=3"
STAGGERED: dict[str, tuple[tuple[int, int, int], dict[str, Any], str, bool]] = {
    "many tiles with work after the product": (LARGE, {"activation": "gelu"}, OWN, True),
    "nothing after the product": (LARGE, BARE, OWN, False),
    "nothing after the product, always": (LARGE, BARE, "stagger=always", True),
    "three consumers": (LARGE, {"activation": "gelu"}, THREE_CONSUMERS, False),
    "three consumers, always": (LARGE, BARE, f"{THREE_CONSUMERS},stagger=always", True),
    "too few k tiles": ((8192, 8192, 384), {"activation": "gelu"}, OWN, False),
    "one tile a CTA": (SMALL, BARE, OWN, True),
    "one tile a CTA, three consumers": (SMALL, BARE, THREE_CONSUMERS, True),
    "one tile a CTA, by columns": (SMALL, BARE | {"by_columns": ("out",)}, OWN, True),
    "one tile a CTA, never": (SMALL, BARE, "stagger=never", False),
    "one tile a CTA, a residual that TMA loads": (SMALL, {"activation": "gelu"}, OWN, False),
    "one tile a CTA, wider than the stages of A": (SMALL, BARE, "stages=3", False),
    "one tile a CTA, deep k tiles": (SMALL, BARE, f"{DEEP},epilogue_stages=1", False),
    "one tile a CTA, C from registers": (SMALL, BARE, "epilogue_stages=0,stagger=always", False),
    "tiles of one consumer": (LARGE, {"activation": "gelu"}, PINGPONG, False),
    "split-K": (LARGE, {"activation": "gelu"}, SPLIT_K, False),
    "fp8 sums in two steps": (LARGE, {"formats": "e4m3 e5m2 promoted"}, PROMOTED, False),
}
TURNS: dict[str, Case] = {
    name: (epilogue(*shape, **given), config, {"staggered_tail": is_staggered})
    for name, (shape, given, config, is_staggered) in STAGGERED.items()
}
CASES = {
    f"{kind}: {name}": case
    for kind, cases in {
        "output": OUTPUTS,
        "access": ACCESSES,
        "trait": OTHERS,
        "turns": TURNS,
    }.items()
    for name, case in cases.items()
}


@pytest.mark.parametrize(("problem", "config", "traits"), CASES.values(), ids=CASES)
def test_a_variant_has_the_traits_of_its_call(
    problem: Problem, config: str, traits: dict[str, Any]
) -> None:
    variant = variant_of(problem, gemm_config(config))

    assert {name: getattr(variant.traits, name) for name in traits} == traits


# ---- a single row or column: C is written along its length, whichever of its strides is free
ROW, COLUMN = product(1, 4096, 64), product(4096, 1, 64)
ROWS = replace(product(1, 64, 64), batch=(3,), a=(0, 64, 1), b=(0, 1, 64), out=(64, 64, 1))
# A problem, whether its operands are swapped, the strides of C, its vectors, and `by_columns`.
SINGLE_ROWS: dict[str, tuple[Problem, bool, tuple[int, ...], int, bool]] = {
    "a row": (ROW, False, (8, 1), 8, False),
    "a row, swapped": (ROW, True, (1, 8), 8, True),
    "a column": (COLUMN, False, (1, 8), 8, True),
    "a column, swapped": (COLUMN, True, (8, 1), 8, False),
    "a batch of rows": (ROWS, False, (64, 8, 1), 8, False),
    "a batch of rows, swapped": (ROWS, True, (64, 1, 8), 8, True),
    "no neighbouring elements": (replace(ROW, out=(4096, 2)), True, (1, 2), 1, True),
    "not all at 16 bytes": (replace(ROWS, out=(60, 60, 1)), True, (60, 1, 8), 1, True),
    "a row of odd length": (product(1, 4095, 64), True, (1, 8), 1, True),
    "a column of a matrix": (replace(COLUMN, out=(4096, 1)), False, (4096, 1), 1, False),
    "an fp32 row": (replace(ROW, out_dtype=FP32), True, (1, 8), 1, True),
    "one element": (product(1, 1, 64), True, (8, 1), 1, False),
}


@pytest.mark.parametrize("name", SINGLE_ROWS)
def test_a_single_row_or_column_is_written_along_its_length(name: str) -> None:
    problem, swap_ab, strides, width, by_columns = SINGLE_ROWS[name]
    config = replace(OWN_CONFIG, swap_ab=swap_ab)

    product, _ = canonical.orient(problem, config)
    traits = variant_of(problem, config).traits

    assert canonical.output_strides(product) == strides
    assert (traits.width, traits.by_columns) == (width, by_columns)
    assert traits.staged == (width == 8)


@pytest.mark.parametrize(("by_columns", "granule"), [(True, 1), (False, 8)])
def test_a_gated_c_by_columns_may_have_any_number_of_them(by_columns: bool, granule: int) -> None:
    variant = variant_of(epilogue(64, 17, 64, activation="swiglu", by_columns=("out",), **BARE))

    traits = variant.traits
    assert (traits.staged, traits.by_columns) == (True, True)
    assert replace(traits, by_columns=by_columns).granule("nt", 2) == granule


# ---- what one compile serves
def test_one_compile_serves_all_orders_of_tiles_and_numbers_of_partitions() -> None:
    large = product(8192, 8192, 8192)
    other_order = replace(OWN_CONFIG, order="hilbert", group_m=4, sms=120)
    in_two, in_five = (gemm_config(f"split_k={n},k_serpentine=False") for n in (2, 5))

    assert variant_of(large, other_order) == variant_of(large)
    assert variant_of(large, in_five) == variant_of(large, in_two) != variant_of(large)


# ---- a matrix that lies as C does comes through the stages of the pipeline, in subtiles
@pytest.mark.parametrize("text", [OWN, PINGPONG, f"{SMALL_TILE},tile_n=16"])
def test_a_source_has_subtiles_that_fit_a_stage_and_stages_for_all(text: str) -> None:
    config, size = gemm_config(text), BF16.itemsize

    per_stage = subtiles.subtiles_per_stage(config, config, size)
    stages = subtiles.stages_per_tile(config, config, size)

    of_all = per_stage * config.warpgroups_per_tile
    assert of_all * subtiles.subtile_bytes(config, size) <= config.stage_bytes
    assert stages * per_stage >= len(subtiles.subtiles(config, size, config.tile_n))


def test_in_pingpong_the_source_leaves_the_last_k_tile_its_stage() -> None:
    config, given = gemm_config(PINGPONG), epilogue(256, 192, 64, aux=None)
    stages = subtiles.stages_per_tile(config, config, BF16.itemsize)
    enough = replace(config, stages=stages + config.in_flight)

    assert variant_of(given, enough).traits.residual == "staged"
    fewer = replace(enough, stages=enough.stages - 1)
    assert variant_of(given, fewer).traits.residual == "matrix"
