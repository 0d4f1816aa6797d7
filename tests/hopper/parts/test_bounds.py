"""What would not fit 32 bits in a kernel is refused, and what is taken fits."""

from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.gemm_problems import OWN_CONFIG, gemm_config
from support.huge_problems import huge
from support.tile_arithmetic import Word, coord, launch, scheduler_on_integers

from outblas.call.problem import Problem
from outblas.hopper import gemm, tma_wgmma, two_consumers
from outblas.hopper.parts import bounds, tile_order
from outblas.hopper.parts.config import HopperConfig

SMALL = (
    "tile_m=64,tile_n=64,consumers=1,producer_registers=0,consumer_registers=0,"
    "epilogue_stages=1,stages=8,cluster_m=1,k_serpentine=False"
)
SMALL_TILE = gemm_config(SMALL)
STREAM_K = gemm_config(f"{SMALL},stream_k=True")
SPLIT_K, SPLIT_K_16 = (gemm_config(f"{SMALL},split_k={count}") for count in (64, 16))
VARIABLE_TILE_N = gemm_config(f"{SMALL},tile_n=24,variable_tile_n=True")


# Single problems.


class Refusal(NamedTuple):
    """A problem that is refused with this config, and why."""

    problem: Problem
    config: HopperConfig
    reason: str


REFUSALS = {
    "batch": Refusal(
        huge(1, 1, 8, 2**31 + 8),
        OWN_CONFIG,
        "batches of up to 2147481600 matrices, but was given 2147483656",
    ),
    "batches": Refusal(
        huge(1, 1, 8, 5, 2**31 - 2047),
        OWN_CONFIG,
        "batches of up to 2147481600 matrices, but was given 2147481601",
    ),
    "rows": Refusal(
        huge(2**31 - 2047, 1, 8),
        OWN_CONFIG,
        "extents up to 2147481600, but was given 2147481601x1x8",
    ),
    "no K": Refusal(huge(64, 64, 0), OWN_CONFIG, "K of at least 1, but was given K = 0"),
    "tiles of a batch": Refusal(
        huge(65, 65, 8, 2**30),
        SMALL_TILE,
        "up to 2147481600 cluster tiles, but was given 4294967296",
    ),
    "tiles": Refusal(
        huge(2**22, 2**22, 8),
        SMALL_TILE,
        "up to 2147481600 cluster tiles, but was given 4294967296",
    ),
    "stream_k": Refusal(huge(64, 64, 2**30), STREAM_K, "k tiles, but was given K = 1073741824"),
    "split_k": Refusal(huge(64, 64, 8192, 2**14), SPLIT_K, "2147483648 partial sums"),
    "split_k of more": Refusal(huge(64, 64, 8192, 2**22), SPLIT_K_16, "partial sums"),
}
SWAP = pytest.mark.parametrize("swap", [False, True], ids=["A B", "B A"])


@SWAP
@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_refused(case: str, swap: bool) -> None:
    """Their configs take small problems."""
    problem, config, reason = REFUSALS[case]
    config = replace(config, swap_ab=swap, k_serpentine=False)
    small = replace(problem, M=64, N=64, K=4096, batch=(7,) * len(problem.batch))

    assert reason in str(gemm.unsupported(problem, config))
    assert gemm.unsupported(small, config) is None


ONE_WIDTH = replace(VARIABLE_TILE_N, variable_tile_n=False, tile_n=32)
TAKEN = {
    "the longest batch": (huge(1, 1, 8, bounds.LARGEST), OWN_CONFIG),
    "the most rows": (huge(bounds.LARGEST, 1, 8), OWN_CONFIG),
    "K of one": (huge(64, 64, 1), OWN_CONFIG),
    "wide columns that end within 32 bits": (huge(1, 1_400_000_000, 8), VARIABLE_TILE_N),
    "columns of one width, which end sooner": (huge(1, 1_440_000_000, 8), ONE_WIDTH),
    # A launch has the longest dimension of a batch; the others are walked call by call.
    "partial sums of the longest dimension": (huge(64, 64, 8192, 2**10, 2**12), SPLIT_K_16),
    "matrices of the longest dimension": (huge(64, 64, 64, 2**20, 2**20), OWN_CONFIG),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_just_fits_is_taken(name: str) -> None:
    problem, config = TAKEN[name]

    assert gemm.unsupported(problem, config) is None


def test_wide_columns_that_end_beyond_32_bits_are_refused() -> None:
    """`DenseTiles.make_schedule` asks whether as many wide columns as there are reach N."""
    reason = gemm.unsupported(huge(1, 1_440_000_000, 8), VARIABLE_TILE_N)

    assert "its tiles may reach row and column 2147483647" in str(reason)


@pytest.mark.parametrize("rung", [tma_wgmma, two_consumers], ids=lambda rung: rung.__name__)
def test_rungs_refuse_sizes_that_no_config_takes(rung: ModuleType) -> None:
    assert rung.unsupported(huge(64, 64, 64), rung.Config()) is None
    assert "K = 0" in str(rung.unsupported(huge(64, 64, 0)))
    assert "extents up to" in str(rung.unsupported(huge(64, 64, 2**31 - 8)))
    assert "cluster tiles" in str(rung.unsupported(huge(2**23, 2**23, 64), rung.Config()))


@pytest.fixture
def full_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which 132 clusters run at once."""
    monkeypatch.setattr(tile_order, "clusters", lambda *_: 132)


@pytest.mark.usefixtures("full_gpu")
def test_the_config_of_the_rule_is_checked_when_a_call_is_planned() -> None:
    """Without a config, how many tiles there are follows from the one that the rule gives."""
    many = huge(1000, 1000, 64, 2**30)

    assert gemm.unsupported(many) is None
    with pytest.raises(ValueError, match="cluster tiles, but was given"):
        gemm.plan(many)


# The scheduler's own arithmetic, on integers of 32 bits.

EDGES = st.sampled_from(
    [1, 63, 64, 1000, 2**16 + 1, 2**24, 2**27, 2**30, 1_431_655_000, 2**31 - 2049, 2**31 - 2048]
)
SCHEDULES = st.sampled_from(
    [
        "",
        "split_k=64",
        "split_k=3",
        "stream_k=True",
        "variable_tile_n=True",
        "variable_tile_n=True,tile_n=24",
        "cluster_k=8",
    ]
)
CLUSTERS = st.sampled_from(["", "cluster_n=2", "cluster_m=2"])
SMS = 132


class Taken(NamedTuple):
    """A call that is taken."""

    config: HopperConfig
    M: int
    N: int
    K: int
    batch: int


@st.composite
def taken(draw: st.DrawFn) -> Taken:
    """Calls that are taken, of sizes near the limits."""
    M, N, K, batch = draw(EDGES), draw(EDGES), draw(EDGES), draw(EDGES)
    cluster = draw(CLUSTERS)
    config = gemm_config(f"{SMALL},{draw(SCHEDULES)},{cluster}")
    assume(gemm.unsupported(huge(M, N, K, batch), config) is None)
    return Taken(config, M, N, K, batch)


@pytest.fixture(scope="module")
def arithmetic() -> SimpleNamespace:
    """The scheduler's own source on integers of 32 bits: those that would not fit raise."""
    return scheduler_on_integers()


@settings(max_examples=80, deadline=None)
@given(call=taken())
def test_what_is_taken_fits(arithmetic: SimpleNamespace, call: Taken) -> None:
    numbers_fit(call)
    steps_fit(arithmetic, call)


def numbers_fit(call: Taken) -> None:
    """What the host hands to the kernel fits, and where the last tiles and clusters end."""
    config = call.config
    params = launch(config, *call[1:], fit=SMS // config.cluster).params
    numbers = [number for number in (*params, *params.divmods) if isinstance(number, Word)]

    last_column = tile_order.columns(config, call.N) * config.tile_n
    ctas = params.clusters * config.cluster
    assert all(0 <= number < 2**31 for number in (*numbers, last_column, ctas))


def steps_fit(arithmetic: SimpleNamespace, call: Taken) -> None:
    """The first and last steps of the first and last clusters compute no number that does not
    fit.
    """
    config = call.config
    scheduler = launch(config, *call[1:], fit=SMS // config.cluster)
    last_cta = coord(config.cluster_m - 1, config.cluster_n - 1, config.cluster_k - 1)
    for cluster in {Word(0), scheduler.params.clusters - 1}:
        own = replace(scheduler, cluster=cluster, coord=last_cta)
        steps = Word(arithmetic.work_tile_count(own, config))
        for step in {Word(0), steps - 1} if steps else ():
            work = arithmetic.current_work(own, config, step)
            last_row = work.m * config.tile_m + Word(config.tile_m - 1)
            last_column = work.column + (config.tile_n - 1)
            assert last_row >= 0
            assert last_column >= 0
            assert sums_end(work.partition, config) > 0


def sums_end(partition: SimpleNamespace, config: HopperConfig) -> Word:
    """Where the partial sums end that the CTAs of a cluster add to; 1 where there are none."""
    if not config.split or partition.total <= 1:
        return Word(1)
    end = (partition.workspace_index + partition.total) * Word(config.cluster)
    return end * (config.tile_m * config.tile_n)
