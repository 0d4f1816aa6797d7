"""The host side of hopper.grouped: what it refuses, which tile it takes, how tensors are read. Its
machine code is in the snapshot.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from outblas.base import machines
from outblas.call.epilogue import View, glu_split
from outblas.call.grouped import Form, GroupedProblem, GroupedTensors, describe
from outblas.hopper.gemm import group_host as host
from outblas.hopper.gemm.compile import kernel_of
from outblas.hopper.gemm.group_rule import candidates
from outblas.hopper.gemm.group_variant import variant_of
from outblas.hopper.gemm.heuristic import Rates, rates
from outblas.hopper.parts.config import SHARED_MEMORY, HopperConfig
from tools.machine_code import KernelVariant, grouped_problem

BF16 = torch.bfloat16
H100, H200 = (rates(machines.find(name)) for name in ("h100", "h200"))
CONFIG = HopperConfig(tile_m=128, tile_n=128, stages=4, consumers=2, epilogue_stages=1)


def problem(
    form: Form = "ragged_m",
    groups: int = 8,
    M: int = 4096,
    N: int = 1536,
    K: int = 2048,
    *,
    layout: str = "",
    has: str = "",
    zero_tail: bool = False,
    activation: str = "",
    **fields: Any,
) -> GroupedProblem:
    """Returns a product of packed tensors, of which B has N columns. `layout`: of A and B, n
    row-major, t transposed; by default that which the kernel takes. `has`: any of bias, residual,
    aux, scatter, weights and gather. `fields`: those of a `KernelVariant`.
    """
    fields |= {name: "rows" for name in ("bias", "residual", "aux") if name in has}
    given = KernelVariant(
        kernel="hopper.grouped",
        arch=90,
        form=form,
        groups=groups,
        shape=(M, N // glu_split(activation), K),
        layout=layout or ("tn" if form == "ragged_k" else "nt"),
        activation=activation,
        gathers="gather" in has,
        scatters="scatter" in has,
        **fields,
    )
    whole = replace(grouped_problem(given), zero_tail=zero_tail, weighted="weights" in has)
    return replace(whole, rows_of_a=1000) if "gather" in has else whole


def masked(capacity: int, groups: int = 8, **given: Any) -> GroupedProblem:
    """Returns the product of groups that have room for `capacity` rows each."""
    return problem("masked", groups, groups * capacity, **given)


def ragged_n(*tensors: str) -> GroupedProblem:
    """Returns the product of 8 matrices of 1001x2048 with 4095 divided columns, which lie one after
    the other. `tensors`: any of residual and aux.
    """

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=BF16, device="meta")

    operands = empty(8, 1001, 2048), empty(4095, 2048).t()
    given = GroupedTensors(**{name: empty(1001, 4095) for name in tensors})
    return describe("ragged_n", *operands, empty(1001, 4095), 8, given)


def with_view(
    given: GroupedProblem, name: str, strides: tuple[int, ...], alignment: int = 16
) -> Any:
    """Returns the product with a tensor of its epilogue that lies in another way."""
    changed: dict[str, Any] = {name: View(strides, alignment)}
    return replace(given, epilogue=replace(given.epilogue, **changed))


@pytest.mark.parametrize(
    "given",
    [
        problem(),
        problem(layout="nn"),
        problem("ragged_k"),
        problem(dtype="float16", out_dtype="float32"),
        problem(groups=512),
        problem(groups=511, zero_tail=True),
        problem("ragged_k", groups=512, zero_tail=True),
        problem(M=1, K=8, N=8),
        problem(activation="gelu", has="bias residual aux"),
        problem("ragged_k", activation="swiglu", has="bias residual aux"),
        problem(activation="swiglu", has="scatter weights residual aux"),
        problem("ragged_k", zero_tail=True, has="bias"),
        problem(activation="swiglu", has="gather scatter weights residual aux bias"),
        problem(has="gather", zero_tail=True),
        replace(problem(has="gather"), rows_of_a=1, a=(3, 1)),
        problem(N=24, activation="geglu", out_dtype="float32"),
        with_view(problem(has="residual"), "residual", (0, 0), 2),
        ragged_n(),
        ragged_n("residual", "aux"),
        masked(1),
        masked(64, groups=512, activation="swiglu", has="bias residual aux"),
        masked(300, layout="nn", out_dtype="float32"),
    ],
)
def test_supported(given: GroupedProblem) -> None:
    assert host.unsupported(given) is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            problem(dtype="float32", out_dtype="float32"),
            "it supports bfloat16 and float16, but was given",
        ),
        (replace(problem(has="gather"), rows_of_a=0), "1 or more rows.*was given 0 rows"),
        (
            replace(problem(has="gather"), rows_of_a=2**24, a=(2**10, 1)),
            r"span less than 2\*\*34 elements, but was given 16777216 rows",
        ),
        (replace(problem(has="gather"), a=(1, 1000)), "mat_a has strides"),
        (problem(zero_tail=True, has="bias"), "only without an epilogue .* was given bias"),
        (problem(zero_tail=True, has="scatter"), "only without .* was given scatter_index"),
        (
            with_view(problem(has="aux"), "aux", (1, 4096)),
            r"rows of aux .* 1536 columns with strides \(1, 4096\)",
        ),
        (with_view(problem(has="aux"), "aux", (1540, 1)), "rows of aux"),
        (with_view(problem(has="aux"), "aux", (0, 1)), "rows of aux"),
        (with_view(problem(has="aux"), "aux", (1536, 1), 8), "rows of aux"),
        (
            replace(ragged_n(), out=(8190, 2)),
            r"contiguous rows of the result, but was given strides \(2, 8190\)",
        ),
        (problem(N=1544, activation="swiglu"), "rows of the result .* was given 772 columns"),
        (
            problem(N=1544, activation="swiglu", out_dtype="float32", layout="nn"),
            "halves of mat_b .* was given 1544 contiguous columns",
        ),
        (problem(groups=513), "it supports 512 groups, but was given 513"),
        (masked(16, groups=513), "it supports 512 groups, but was given 513"),
        (masked(2**22, groups=512), "it supports extents of 1 to .* but was given 2147483648x"),
        (masked(16, zero_tail=True), "no rows to zero where groups have places of their own"),
        (masked(16, N=1532), "rows of the result .* but was given 1532 columns"),
        (problem(groups=512, zero_tail=True), "it supports 511 groups, but was given 512"),
        (problem(K=0), "it supports extents of 1 to .* but was given 4096x1536x0"),
        (problem(layout="tt"), r"not divided among groups.* but mat_a has strides \(1, 4096\)"),
        (problem("ragged_k", layout="nn"), "not divided among groups.* but mat_a has"),
        (problem("ragged_k", layout="tt"), "not divided among groups.* but mat_b has"),
        (problem(K=2047), r"multiples of 8, but mat_a has strides \(2047, 1\)"),
        (problem(layout="nn", N=1531), "multiples of 8, but mat_b has strides"),
        (replace(problem(), alignment=(8, 16, 16)), "mat_a .* address that is a multiple of 8"),
        (problem(N=1532), "rows of the result .* but was given 1532 columns"),
        (replace(problem(), out=(1, 4096)), "rows of the result .* strides"),
        (replace(problem(), alignment=(16, 16, 8)), "rows of the result"),
        (replace(problem("ragged_k", M=1), a=(0, 0)), "positive multiples of 8"),
        # Of two layouts that an extent of 1 leaves open, one has the ragged dimension contiguous.
        (replace(problem(K=1), a=(1, 1)), r"but mat_a has strides \(1, 1\)"),
        (replace(problem("ragged_k", M=1), a=(2048, 1)), r"but mat_a has strides \(2048, 1\)"),
        (replace(problem("ragged_k", N=1), b=(1, 2048)), r"but mat_b has strides \(1, 2048\)"),
        (replace(problem(layout="tt"), exchanged=True), r"but mat_b has strides \(4096, 1\)"),
    ],
)
def test_what_is_refused_is_named(given: GroupedProblem, reason: str) -> None:
    found = host.unsupported(given)

    assert found is not None
    assert re.search(reason, found)


@pytest.mark.parametrize(
    ("given", "tile"),
    [
        pytest.param(problem(M=65536, N=14336, K=4096), (128, 256, 2), id="large groups"),
        pytest.param(problem(groups=256, M=65536, N=4096, K=7168), (128, 256, 2), id="256 rows"),
        pytest.param(problem(groups=128), (64, 128, 1), id="32 rows"),
        pytest.param(problem(groups=256, M=256), (64, 128, 1), id="one row"),
        pytest.param(masked(512, groups=128), (64, 128, 1), id="room for 512 rows"),
        pytest.param(masked(1, groups=256), (64, 128, 1), id="room for a row"),
        pytest.param(masked(4096, N=14336, K=4096), (128, 256, 2), id="room for 4096 rows"),
        pytest.param(problem("ragged_k", 128, 2048, 1536, 65536), (128, 256, 2), id="512 terms"),
        pytest.param(problem("ragged_k", 128, 2048, 1536, 4096), (64, 128, 1), id="32 terms"),
    ],
)
def test_the_tile_suits_the_groups(given: GroupedProblem, tile: tuple[int, int, int]) -> None:
    config = host.config_for(given, H100)

    assert (config.tile_m, config.tile_n, config.cluster_m) == tile


@pytest.mark.parametrize(
    ("on", "M", "N", "K", "tile"),
    [
        (H100, 7168, 4096, 4096, (64, 128, False)),
        (H200, 7168, 4096, 4096, (128, 256, True)),
        (H200, 7168, 4096, 1 << 20, (128, 256, False)),
    ],
    ids=["DRAM of an H100", "DRAM of an H200", "tensor cores of an H200"],
)
def test_results_of_few_terms_are_written_as_fast_as_dram_takes_them(
    on: Rates, M: int, N: int, K: int, tile: tuple[int, int, bool]
) -> None:
    config = host.config_for(problem("ragged_k", 256, M, N, K), on)

    assert (config.tile_m, config.tile_n, config.order == "row") == tile
    assert variant_of(problem("ragged_k", 256, M, N, K), config).traits.row_order == tile[-1]


@pytest.mark.parametrize("has", ["", "gather"])
def test_the_schedule_fits_beside_the_stages(has: str) -> None:
    for config in candidates(problem(has=has)):
        assert config.shared_memory_bytes + 4 * host.MOST_GROUPS <= SHARED_MEMORY


def test_groups_of_a_fixed_capacity_are_rows_of_one_matrix() -> None:
    """Also where they lie in wider rows, as a part of each does."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=BF16, device="meta")

    rows, counts = empty(8, 512, 4096)[..., :2048], torch.empty(8, dtype=torch.int32, device="meta")
    tensors = GroupedTensors(residual=empty(8, 512, 1536), counts=counts)
    given = describe("masked", rows, empty(8, 1536, 2048).mT, empty(8, 512, 1536), 8, tensors)

    assert (given.form, given.capacity, given.M) == ("ragged_m", 512, 4096)
    assert (given.a, given.out) == ((4096, 1), (1536, 1))
    assert given.epilogue.residual == View((1536, 1), 16)
    assert host.unsupported(given) is None


def test_all_capacities_are_compiled_once() -> None:
    variants = {variant_of(masked(capacity), CONFIG) for capacity in (1, 64, 100, 512, 3000)}

    (variant,) = variants
    assert variant.traits.masked
    assert variant != variant_of(problem(), CONFIG)


TRAITS: dict[str, tuple[GroupedProblem, dict[str, Any]]] = {
    "a vector for each group": (problem(has="bias"), {"bias": "pairs"}),
    "a vector at any address": (
        with_view(problem(has="bias"), "bias", (1536, 0, 1), 2),
        {"bias": "columns"},
    ),
    "vectors that begin between pairs": (
        with_view(problem(has="bias"), "bias", (1537, 0, 1)),
        {"bias": "columns"},
    ),
    "every other element of a vector": (
        with_view(problem(has="bias"), "bias", (3072, 0, 2)),
        {"bias": "columns"},
    ),
    "matrices that lie as the result": (
        problem(has="residual aux"),
        {"residual": "staged", "aux": "staged"},
    ),
    "residuals of groups": (problem("ragged_k", has="residual"), {"residual": "staged"}),
    "a residual by columns": (
        with_view(problem(has="residual"), "residual", (1, 4096)),
        {"residual": "matrix"},
    ),
    "a residual that repeats": (
        with_view(problem("ragged_k", has="residual"), "residual", (0, 0, 1)),
        {"residual": "batch"},
    ),
    "a residual where rows are scattered": (
        problem(has="residual scatter"),
        {"residual": "scattered", "scatters": True, "plain": False},
    ),
    "weights alone": (problem(has="scatter weights"), {"weighted": True, "plain": False}),
    "an index alone": (problem(has="scatter"), {"weighted": False, "plain": True}),
    "ragged columns": (
        ragged_n("residual", "aux"),
        {"staged": False, "by_columns": True, "residual": "matrix", "aux": "matrix", "width": 1},
    ),
    "a fit of gelu where sums round as much": (
        problem(activation="gelu"),
        {"function": "gelu_fit"},
    ),
    "gelu itself where a sum may have one term": (
        problem("ragged_k", activation="gelu"),
        {"function": "gelu"},
    ),
}


@pytest.mark.parametrize("name", TRAITS)
def test_tensors_are_read_and_written_as_they_lie(name: str) -> None:
    given, wanted = TRAITS[name]

    assert host.unsupported(given) is None
    traits = variant_of(given, CONFIG).traits

    assert {name: getattr(traits, name) for name in wanted} == wanted


def test_a_stage_without_room_for_a_residual_has_none() -> None:
    config = replace(CONFIG, tile_k=32)

    assert variant_of(problem(has="residual"), config).traits.residual == "matrix"


@pytest.mark.parametrize(("columns", "is_stored"), [(2048, False), (4096, True)])
def test_rows_are_gathered_into_memory_for_many_columns(
    columns: int, is_stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index may lie outside of A; K may be no multiple of 8."""
    a, b = torch.randn(6, 24, dtype=BF16)[:, :21], torch.randn(2, 21, columns, dtype=BF16)
    index = torch.tensor([5, -3, 9, 0, 2], dtype=torch.int32)
    out, offs = torch.empty(5, columns, dtype=BF16), torch.tensor([2, 5], dtype=torch.int32)
    tensors = GroupedTensors(a_index=index)
    launched: list[Any] = []

    def launch(given: GroupedProblem, carveout: int) -> Any:
        assert carveout == 0
        return lambda *operands: launched.append((given, *operands))

    monkeypatch.setattr(host, "launch", launch)
    host.run(describe("ragged_m", a, b, out, 2, tensors), a, b, out, offs, tensors)

    ((given, rows, *_, used),) = launched
    assert given.gathers == (used.a_index is not None) == (not is_stored)
    assert given.M == 5
    if is_stored:
        assert torch.equal(rows, a[[5, 0, 5, 0, 2]])
        assert given.a == rows.stride() == (24, 1)
        assert host.unsupported(replace(given, device=torch.device("cuda"))) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"epilogue_stages": 0},
        {"split_k": 2},
        {"stream_k": True},
        {"cluster_k": 2, "cluster_m": 1},
        {"variable_tile_n": True},
        {"pdl": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_config_with_a_lever_that_groups_do_not_have_is_refused(changes: dict[str, Any]) -> None:
    config = replace(CONFIG, **changes)

    with pytest.raises(ValueError, match=f"config: {next(iter(changes))} is"):
        kernel_of(config, variant_of(problem(), CONFIG).traits)
