"""What would not fit 32 bits in a kernel is refused, and what is taken fits."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.tile_arithmetic import Word, arithmetic, coord, launch  # noqa: F401

from outblas.core import configs
from outblas.core.artifact import example
from outblas.device import grid
from outblas.hopper import gemm, tma_wgmma, two_consumers
from outblas.hopper.core import bounds, tile_order

BF16 = torch.bfloat16
OWN = gemm.Config()
SMALL = (
    "tile_m=64,tile_n=64,consumers=1,producer_registers=0,consumer_registers=0,"
    "epilogue_stages=1,stages=8,cluster_m=1"
)
ELASTIC = configs.from_text(gemm.Config, f"{SMALL},tile_n=24,variable_tile_n=True")


def asked(M, N, K, *batch, **changed):
    """Matrices that overlap, but for C's. Sizes are all that counts."""
    given = example(BF16, None, "nt", (64, 64, 64))
    out = (*(0,) * len(batch), N, 1)
    zeros = (0,) * len(batch)
    return replace(
        given, M=M, N=N, K=K, batch=batch, a=(*zeros, K, 1), b=(*zeros, 1, K), out=out, **changed
    )


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (
            asked(1, 1, 8, 2**31 + 8),
            OWN,
            "batches of up to 2147481600 matrices, and was given 2147483656",
        ),
        (
            asked(1, 1, 8, 5, 2**31 - 2047),
            OWN,
            "batches of up to 2147481600 matrices, and was given 2147481601",
        ),
        (asked(2**31 - 2047, 1, 8), OWN, "extents up to 2147481600, and was given 2147481601x1x8"),
        (asked(64, 64, 0), OWN, "K from 1 on, and was given K = 0"),
        (
            asked(65, 65, 8, 2**30),
            SMALL,
            "up to 2147481600 cluster tiles, and was given 4294967296",
        ),
        (asked(2**22, 2**22, 8), SMALL, "up to 2147481600 cluster tiles, and was given 4294967296"),
        (
            asked(64, 64, 2**30),
            f"{SMALL},stream_k=True",
            "k tiles, and was given K = 1073741824",
        ),
        (asked(64, 64, 8192, 2**14), f"{SMALL},split_k=64", "2147483648 partial sums"),
    ],
    ids=["batch", "batches", "rows", "no K", "tiles of a batch", "tiles", "stream_k", "split_k"],
)
def test_what_does_not_fit_is_refused(problem, config, reason: str, swap: bool) -> None:
    config = configs.from_text(gemm.Config, config) if isinstance(config, str) else config
    config = replace(config, swap_ab=swap, k_serpentine=False)
    assert reason in str(gemm.unsupported(problem, config))
    small = replace(problem, M=64, N=64, K=4096, batch=(7,) * len(problem.batch))
    assert gemm.unsupported(small, config) is None


def test_wide_columns_that_end_beyond_32_bits_are_refused() -> None:
    """`Gemm.__call__` asks whether as many wide columns as there are reach N."""
    fits, beyond = asked(1, 1_400_000_000, 8), asked(1, 1_440_000_000, 8)
    assert gemm.unsupported(fits, ELASTIC) is None
    assert "its tiles may end 2147483647 rows and columns from the first" in str(
        gemm.unsupported(beyond, ELASTIC)
    )
    assert gemm.unsupported(beyond, replace(ELASTIC, variable_tile_n=False, tile_n=32)) is None


def test_the_longest_of_what_fits_is_taken() -> None:
    assert gemm.unsupported(asked(1, 1, 8, bounds.LARGEST), OWN) is None
    assert gemm.unsupported(asked(bounds.LARGEST, 1, 8), OWN) is None
    assert gemm.unsupported(asked(64, 64, 1), OWN) is None


def test_only_matrices_of_one_launch_count() -> None:
    """The other dimensions of a batch are walked call by call."""
    split = configs.from_text(gemm.Config, f"{SMALL},split_k=16,k_serpentine=False")
    assert gemm.unsupported(asked(64, 64, 8192, 2**10, 2**12), split) is None
    assert "partial sums" in str(gemm.unsupported(asked(64, 64, 8192, 2**22), split))
    assert gemm.unsupported(asked(64, 64, 64, 2**20, 2**20), OWN) is None


@pytest.mark.parametrize("rung", [tma_wgmma, two_consumers])
def test_rungs_refuse_the_same(rung) -> None:
    assert "K = 0" in str(rung.unsupported(asked(64, 64, 0)))
    assert "extents up to" in str(rung.unsupported(asked(64, 64, 2**31 - 8)))
    assert "cluster tiles" in str(rung.unsupported(asked(2**23, 2**23, 64), rung.Config()))
    assert rung.unsupported(asked(64, 64, 64), rung.Config()) is None


def test_the_rule_s_own_config_is_checked_before_it_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a call without a config: how many tiles there are follows from the one that the rule
    gives."""
    monkeypatch.setattr(tile_order, "clusters", lambda *_: 132)
    many = asked(1000, 1000, 64, 2**30)
    assert gemm.unsupported(many) is None
    with pytest.raises(ValueError, match="cluster tiles, and was given"):
        gemm.plan(many)


EDGE = st.sampled_from(
    [1, 63, 64, 1000, 2**16 + 1, 2**24, 2**27, 2**30, 1_431_655_000, 2**31 - 2049, 2**31 - 2048]
)
CUTS = (
    "",
    "split_k=64",
    "split_k=3",
    "stream_k=True",
    "variable_tile_n=True",
    "variable_tile_n=True,tile_n=24",
    "cluster_k=8",
)


@settings(max_examples=130, deadline=None)
@given(data=st.data())
def test_what_is_taken_fits(arithmetic, data):  # noqa: F811
    """The scheduler's own arithmetic, on integers of 32 bits."""
    fits_32_bits(arithmetic, data)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(data=st.data())
def test_more_of_what_is_taken_fits(arithmetic, data):  # noqa: F811
    fits_32_bits(arithmetic, data)


def fits_32_bits(arithmetic, data):  # noqa: F811
    """Draws a launch, and looks at the first and last steps of its first and last clusters."""
    draw = data.draw
    M, N, K, batch = draw(EDGE), draw(EDGE), draw(EDGE), draw(EDGE)
    shared = draw(st.sampled_from(["", "cluster_n=2", "cluster_m=2"]))
    text = f"{SMALL},k_serpentine=False,{draw(st.sampled_from(CUTS))},{shared}"
    config = configs.from_text(gemm.Config, text)
    assume(gemm.unsupported(asked(M, N, K, batch), config) is None)
    scheduler = launch(config, M, N, K, batch, fit=132 // config.cluster)
    params = scheduler.params
    numbers = [n for n in (*params, *params.divmods) if isinstance(n, Word)]
    ends = tile_order.columns(config, N) * config.tile_n, params.clusters * config.cluster
    assert all(0 <= n < 2**31 for n in (*numbers, *ends)), text
    last = coord(config.cluster_m - 1, config.cluster_n - 1, config.cluster_k - 1)
    for cluster in {Word(0), params.clusters - 1}:
        one = replace(scheduler, cluster=cluster, coord=last)
        steps = Word(arithmetic.work_tile_count(one, config))
        for step in {Word(0), steps - 1} if steps else ():
            work = arithmetic.current_work(one, config, step)
            row = work.m * config.tile_m + Word(config.tile_m - 1)
            column = work.column + (config.tile_n - 1)
            assert row >= 0
            assert column >= 0
            partition = work.partition
            if config.split and partition.total > 1:
                end = (partition.workspace_index + partition.total) * Word(config.cluster)
                assert end * (config.tile_m * config.tile_n) > 0


@pytest.mark.parametrize("batch", [(2**31 + 8,), (3, 2**31 + 8), (2**31 + 8, 3), (2, 2**16, 2**16)])
def test_launches_of_triton_s_kernels_cover_any_batch(batch) -> None:
    """The portable kernel and `turing.cp_async` have no such bound: a launch has a part of the
    batch, and indices in it are below 2³¹ where its start is an address."""
    config = SimpleNamespace(block_m=16, block_n=16, block_k=32, group_m=8)
    given = asked(1, 20, 8, *batch)
    steps = [1] * len(batch)
    for i in reversed(range(len(batch) - 1)):
        steps[i] = steps[i + 1] * batch[i + 1]
    given = replace(given, out=(*steps, 1, 1))
    launches = sorted((chunk.offsets[3], chunk.programs) for chunk in grid.chunks_of(given, config))
    assert all(0 < programs <= grid.MAX_PROGRAMS for _, programs in launches)
    reached = 0
    for first, programs in launches:
        assert first == reached
        assert programs % 2 == 0  # tiles of a product
        reached += programs // 2
    assert reached == steps[0] * batch[0]
