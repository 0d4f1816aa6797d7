"""The epilogue of hopper.gemm without a GPU: how it reads a call's tensors, what it refuses, and
what it compiles to.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from support.gemm_problems import BF16, gemm_config
from support.gemm_problems import variant_of as variant_of_config

from outblas.core import problem as operands
from outblas.core.epilogue import EpilogueArgs, glu_split
from outblas.core.problem import Problem
from outblas.hopper import gemm
from outblas.hopper.gemm import epilogue_load, epilogue_tile
from outblas.hopper.gemm.variant import Variant
from outblas.hopper.parts import compile

OWN = ""
PINGPONG = "tile_n=192,stages=5,epilogue_stages=1,cluster_m=1,pingpong=True"
SMALL_TILE = (
    "tile_m=64,consumers=1,cluster_m=1,epilogue_stages=1,producer_registers=0,consumer_registers=0"
)
PROMOTED = "tile_n=192,stages=5,epilogue_stages=1"  # of which fp8 sums in two steps have room
SPLIT_K = "split_k=2,k_serpentine=False"


def problem(
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
    epilogue = {
        "bias": matrix("bias", columns),
        "residual": matrix("residual", M, N),
        "aux": matrix("aux", M, columns),
    }
    scales = (torch.empty(M, 1, device="meta"), torch.empty((), device="meta")) if formats else None
    return operands.problem(
        matrix("a", M, K),
        matrix("b", columns, K).t(),
        matrix("out", M, N),
        extra=EpilogueArgs(activation, **epilogue | tensors),
        scales=scales,
        formats=formats,
    )


def variant_of(given: Problem, config: str = OWN) -> Variant:
    return variant_of_config(given, gemm_config(config))


class AccessCase(NamedTuple):
    """Options of a problem, a config, and traits that they lead to."""

    given: dict[str, Any]
    config: str
    traits: dict[str, Any]


# A bias is read in pairs of a row; matrices that lie as C does go through shared memory.
AS_C_LIES = {"bias": "pairs", "residual": "staged", "aux": "staged"}
C_BY_COLUMNS = ("out", "residual", "aux")
ACCESSES = {
    "a row and matrices": AccessCase({}, OWN, AS_C_LIES),
    "a column of bias": AccessCase({"bias": torch.empty(64, 1)}, OWN, AS_C_LIES | {"bias": "rows"}),
    "a row of residual, no aux": AccessCase(
        {"residual": torch.empty(64, dtype=BF16), "aux": None},
        OWN,
        {"residual": "pairs", "aux": ""},
    ),
    "a residual by columns": AccessCase(
        {"by_columns": ("residual",)}, OWN, AS_C_LIES | {"residual": "matrix"}
    ),
    "all by columns": AccessCase({"by_columns": C_BY_COLUMNS}, OWN, AS_C_LIES | {"bias": "rows"}),
    "all by columns, gated": AccessCase(
        {"by_columns": C_BY_COLUMNS, "activation": "swiglu"},
        OWN,
        AS_C_LIES | {"gated": True, "by_columns": True},
    ),
    "split-K": AccessCase({}, SPLIT_K, AS_C_LIES | {"residual": "matrix"}),
    "stages too small for a residual": AccessCase(
        {}, "tile_k=32", AS_C_LIES | {"residual": "matrix"}
    ),
    "fp8": AccessCase(
        {"formats": "e4m3 e5m2"},
        OWN,
        AS_C_LIES | {"scale_a": "rows", "scale_b": "one", "formats": "e4m3 e5m2"},
    ),
    "fp8, swapped": AccessCase(
        {"formats": "e4m3 e5m2 promoted"},
        "swap_ab=True",
        {"formats": "e5m2 e4m3 promoted", "scale_a": "pairs"},
    ),
}


@pytest.mark.parametrize("case", ACCESSES.values(), ids=ACCESSES)
def test_tensors_are_read_and_written_as_they_lie(case: AccessCase) -> None:
    traits = variant_of(problem(64, 64, 64, **case.given), case.config).traits

    assert {name: getattr(traits, name) for name in case.traits} == case.traits


def test_an_aux_of_one_row_is_written_element_by_element() -> None:
    """Only what is read may be a vector."""
    traits = variant_of(problem(1, 63, 64, activation="gelu")).traits

    assert (traits.bias, traits.residual, traits.aux) == ("columns", "columns", "matrix")


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "gated pairs by rows in swapped tiles": (
        {"activation": "geglu"},
        "swap_ab=True",
        "gated pairs need swap_ab",
    ),
    "gated pairs in tiles of 80 columns": (
        {"activation": "geglu"},
        "tile_n=80,cluster_m=1",
        "tile_n is 80, expected a multiple of 32",
    ),
    "fp8 sums in two steps in large tiles": (
        {"formats": "e4m3 e4m3 promoted"},
        OWN,
        "needs 256 registers for its sums and those of a stage",
    ),
    "fp8 sums in two steps of 128": (
        {"formats": "e4m3 e4m3 promoted"},
        f"{SMALL_TILE},tile_n=64,tile_k=128",
        "tile_k is 128, expected at most 64",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_cannot_have_the_epilogue_is_refused(name: str) -> None:
    given, config, reason = REFUSED[name]

    assert reason in str(gemm.unsupported(problem(64, 64, 64, **given), gemm_config(config)))


def test_gated_pairs_by_rows_come_in_multiples_of_8_columns() -> None:
    given = problem(64, 60, 64, activation="swiglu", by_columns=("b",), aux=None)

    assert "multiples of 8 columns" in str(gemm.unsupported(given))


@pytest.mark.parametrize(("by_columns", "granule"), [(True, 1), (False, 8)])
def test_a_gated_c_by_columns_may_have_any_number_of_them(by_columns: bool, granule: int) -> None:
    given = problem(
        64, 17, 64, activation="swiglu", by_columns=("out",), bias=None, residual=None, aux=None
    )

    traits = variant_of(given).traits

    assert (traits.staged, traits.by_columns) == (True, True)
    assert replace(traits, by_columns=by_columns).granule("nt", 2) == granule


@pytest.mark.parametrize(
    ("K", "activation", "function"),
    [
        (64, "gelu", "gelu"),
        (112, "gelu", "gelu_fit"),
        (4096, "geglu", "gelu_fit"),
        (4096, "gelu_tanh", "gelu_tanh"),
    ],
)
def test_gelu_is_a_fit_where_sums_are_less_exact_than_it(
    K: int, activation: str, function: str
) -> None:
    assert variant_of(problem(64, 64, K, activation=activation)).traits.function == function


LARGE, SMALL = (8192, 8192, 1024), (512, 512, 1024)
BARE: dict[str, Any] = {"bias": None, "residual": None, "aux": None}
THREE_CONSUMERS = (
    "tile_m=192,tile_n=192,consumers=3,producer_registers=32,consumer_registers=160,"
    "epilogue_stages=1"
)
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
    "one tile a CTA, deep k tiles": (
        SMALL,
        BARE,
        "tile_n=128,tile_k=128,stages=3,epilogue_stages=1",
        False,
    ),
    "one tile a CTA, C from registers": (SMALL, BARE, "epilogue_stages=0,stagger=always", False),
    "tiles of one consumer": (LARGE, {"activation": "gelu"}, PINGPONG, False),
    "split-K": (LARGE, {"activation": "gelu"}, SPLIT_K, False),
    "fp8 sums in two steps": (LARGE, {"formats": "e4m3 e5m2 promoted"}, PROMOTED, False),
}


@pytest.mark.parametrize("name", STAGGERED)
def test_consumers_take_turns_where_stores_of_one_hide_behind_products_of_another(
    name: str,
) -> None:
    shape, given, config, is_staggered = STAGGERED[name]

    assert variant_of(problem(*shape, **given), config).traits.staggered_tail == is_staggered


@pytest.mark.parametrize("text", [OWN, PINGPONG, f"{SMALL_TILE},tile_n=16"])
class TestTheSource:
    """A matrix that lies as C does comes through the stages of the pipeline, in subtiles."""

    def test_has_subtiles_that_fit_a_stage(self, text: str) -> None:
        config, dtype = gemm_config(text), compile.NUMERIC[BF16]

        subtiles = epilogue_load.subtiles_per_stage(config, config, dtype)
        size = epilogue_load.subtile_bytes(config, dtype)

        assert subtiles * config.warpgroups_per_tile * size <= config.stage_bytes

    def test_has_stages_for_all_subtiles_of_a_tile(self, text: str) -> None:
        config, dtype = gemm_config(text), compile.NUMERIC[BF16]

        per_stage = epilogue_load.subtiles_per_stage(config, config, dtype)
        stages = epilogue_load.stages_per_tile(config, config, dtype)

        subtiles = epilogue_tile.subtiles(config, dtype, config.tile_n)
        assert stages * per_stage >= len(subtiles)
