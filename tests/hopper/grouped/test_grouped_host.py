"""The host side of hopper.grouped: what it refuses, which tile it takes, its machine code."""

import re
from dataclasses import replace

import pytest
import torch

from outblas.core.epilogue import Epilogue
from outblas.core.grouped import Form, GroupedProblem
from outblas.hopper.core import compile
from outblas.hopper.core.config import SHARED_MEMORY
from outblas.hopper.grouped import host

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SMS = 132


def problem(
    form: Form = "ragged_m",
    groups: int = 8,
    M: int = 4096,
    N: int = 1536,
    K: int = 2048,
    *,
    layout: str = "",
    dtype: torch.dtype = BF16,
    out_dtype: torch.dtype = BF16,
    zero_tail: bool = False,
) -> GroupedProblem:
    """Returns a product of packed tensors. `layout`: of A and B, n row-major, t transposed; by
    default that which the kernel takes.
    """
    layout = layout or {"ragged_m": "nt", "ragged_k": "tn"}[form]
    a = (K, 1) if layout[0] == "n" else (1, M)
    matrix = (N, 1) if layout[1] == "n" else (1, K)
    b = matrix if form == "ragged_k" else (N * K, *matrix)
    out = (N, 1) if form == "ragged_m" else (M * N, N, 1)
    return GroupedProblem(
        form,
        groups,
        M,
        N,
        K,
        a,
        b,
        out,
        dtype,
        out_dtype,
        torch.device("cuda"),
        (16, 16, 16),
        zero_tail,
    )


@pytest.mark.parametrize(
    "given",
    [
        problem(),
        problem(layout="nn"),
        problem("ragged_k"),
        problem(dtype=F16, out_dtype=F32),
        problem(groups=512),
        problem(groups=511, zero_tail=True),
        problem("ragged_k", groups=512, zero_tail=True),
        problem(M=1, K=8, N=8),
    ],
)
def test_supported(given: GroupedProblem) -> None:
    assert host.unsupported(given) is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (problem(dtype=F32, out_dtype=F32), "it supports bfloat16 and float16, but was given"),
        (replace(problem(), epilogue=Epilogue("relu")), "it supports no epilogue"),
        (replace(problem(), gathers=True), "it supports no a_index"),
        (replace(problem(), scatters=True), "it supports no scatter_index"),
        (problem(groups=513), "it supports 512 groups, but was given 513"),
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
        pytest.param(problem("ragged_k", 128, 2048, 1536, 65536), (128, 256, 2), id="512 terms"),
        pytest.param(problem("ragged_k", 128, 2048, 1536, 4096), (64, 128, 1), id="32 terms"),
    ],
)
def test_the_tile_suits_the_groups(given: GroupedProblem, tile: tuple[int, int, int]) -> None:
    config = host.config_for(given, SMS)

    assert (config.tile_m, config.tile_n, config.cluster_m) == tile


def test_the_schedule_fits_beside_the_stages() -> None:
    for config in host._candidates():
        assert config.shared_memory_bytes + 4 * host.MOST_GROUPS <= SHARED_MEMORY


def test_variants_have_names_of_their_own() -> None:
    given = [
        problem(),
        problem(layout="nn"),
        problem(dtype=F16),
        problem(out_dtype=F32),
        problem(groups=100),
        problem(zero_tail=True),
        problem("ragged_k"),
    ]
    made = [host.variant_of(p, config) for p in given for config in host._candidates()]

    assert len({variant.name for variant in made}) == len(made)


def test_few_numbers_of_groups_are_compiled_apart() -> None:
    config = host._candidates()[0]

    made = {host.variant_of(problem(groups=groups), config) for groups in range(1, 513)}

    assert len(made) == 3


@pytest.mark.compile
@pytest.mark.parametrize("given", [problem(groups=100), problem("ragged_k")], ids=lambda p: p.form)
def test_nothing_spills(given: GroupedProblem) -> None:
    """128 accumulators, the epilogue, and the search for a group fit into the registers."""
    variant = host.variant_of(given, host._candidates()[0])

    code = compile.compile_code(variant, lambda options: host.compile_variant(variant, options))

    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in code.log
    assert "serialized" not in code.log
    assert "wgmma.mma_async" in code.ptx
    assert "multicast::cluster" in code.ptx


@pytest.mark.compile
@pytest.mark.parametrize("form", ["ragged_m", "ragged_k"])
@pytest.mark.parametrize("number", range(len(host._TILES)))
@pytest.mark.slow
def test_every_tile_compiles(number: int, form: Form) -> None:
    variant = host.variant_of(problem(form), host._candidates()[number])

    code = compile.compile_code(variant, lambda options: host.compile_variant(variant, options))

    assert "0 bytes spill stores" in code.log
