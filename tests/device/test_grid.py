"""The launches that a call of the portable kernel or of `turing.cp_async` takes."""

from types import SimpleNamespace

import pytest
from support.huge_problems import numbered

from outblas.device import grid

CONFIG = SimpleNamespace(block_m=16, block_n=16, block_k=32, group_m=8)
TILES = 2  # of a product of 20 columns

LARGE_BATCHES = pytest.mark.parametrize(
    "batch",
    [(2**31 + 8,), (3, 2**31 + 8), (2**31 + 8, 3), (2, 2**16, 2**16)],
    ids=lambda batch: "x".join(map(str, batch)),
)


@LARGE_BATCHES
def test_a_launch_of_a_large_batch_has_no_more_programs_than_a_gpu_takes(
    batch: tuple[int, ...],
) -> None:
    launches = grid.chunks_of(numbered(batch), CONFIG)

    assert all(0 < launch.programs <= grid.MAX_PROGRAMS for launch in launches)


@LARGE_BATCHES
def test_launches_have_each_product_of_a_large_batch_once(batch: tuple[int, ...]) -> None:
    """Each has a part of the batch, from where its offset in C points on: so indices within it stay
    below 2³¹.
    """
    problem = numbered(batch)
    products = problem.out[0] * batch[0]

    launches = grid.chunks_of(problem, CONFIG)

    parts = sorted((launch.offsets[3], launch.programs // TILES) for launch in launches)
    ends = [first + count for first, count in parts]
    assert all(launch.programs % TILES == 0 for launch in launches)
    assert [first for first, _ in parts] == [0, *ends[:-1]]
    assert ends[-1] == products
