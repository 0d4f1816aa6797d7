"""Orders of tiles, and how workers share them out."""

import itertools
import re
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outblas.device.raster import ORDERS, PAD, order, schedule

KINDS = st.sampled_from(ORDERS)
SIDES = st.integers(1, 40)
GROUPS = st.integers(1, 20)


# ---- orders
@given(KINDS, SIDES, SIDES, GROUPS, GROUPS)
def test_every_order_visits_each_tile_once(
    kind: str, rows: int, columns: int, group_m: int, group_n: int
) -> None:
    tiles = order(kind, rows, columns, group_m, group_n)

    assert sorted(tiles) == list(range(rows * columns))


@pytest.mark.parametrize(
    ("arguments", "tiles"),
    [
        pytest.param(("row", 2, 3), [0, 1, 2, 3, 4, 5], id="row"),
        pytest.param(("consecutive", 2, 3), [0, 1, 2, 3, 4, 5], id="consecutive"),
        pytest.param(("column", 2, 3), [0, 3, 1, 4, 2, 5], id="column"),
        # m fastest inside, n fastest over groups, cut off at the edges
        pytest.param(("grouped", 3, 3, 2, 2), [0, 3, 1, 4, 2, 5, 6, 7, 8], id="grouped 2x2"),
        pytest.param(
            ("serpentine", 4, 3, 2),
            [0, 3, 1, 4, 2, 5, 8, 11, 7, 10, 6, 9],
            id="serpentine in bands of 2",
        ),
        pytest.param(("hilbert", 2, 2), [0, 2, 3, 1], id="hilbert"),
    ],
)
def test_an_order_of_a_small_grid(arguments: tuple[Any, ...], tiles: list[int]) -> None:
    assert order(*arguments) == tiles


def test_hilbert_steps_to_neighbours() -> None:
    """One step in all is diagonal where the longer side is odd and the shorter even and above 2;
    none is elsewhere.
    """
    for rows, columns in itertools.product(range(1, 25), repeat=2):
        tiles = [divmod(tile, columns) for tile in order("hilbert", rows, columns)]
        steps = [(abs(m - p), abs(n - q)) for (m, n), (p, q) in itertools.pairwise(tiles)]
        short, long = sorted((rows, columns))
        diagonal = [(1, 1)] if long % 2 == 1 and short % 2 == 0 and short > 2 else []
        assert [step for step in steps if sum(step) != 1] == diagonal, (rows, columns)


# ---- schedules
class Scheduled(NamedTuple):
    """A schedule, and what was asked for."""

    kind: str
    rows: int
    columns: int
    workers: int
    group: tuple[int, int]
    steps: list[list[int]]

    @property
    def tiles(self) -> int:
        """How many tiles there are."""
        return self.rows * self.columns

    @property
    def runs(self) -> list[list[int]]:
        """The tiles of each worker."""
        return [[tile for tile in run if tile != PAD] for run in zip(*self.steps, strict=True)]


@st.composite
def schedules(draw: st.DrawFn, kinds: st.SearchStrategy[str] = KINDS) -> Scheduled:
    """Schedules of one of the kinds for up to 40x40 tiles and 200 workers."""
    kind, rows, columns, workers = draw(kinds), draw(SIDES), draw(SIDES), draw(st.integers(1, 200))
    group = draw(GROUPS), draw(GROUPS)
    steps = schedule(kind, rows, columns, workers, *group)
    return Scheduled(kind, rows, columns, workers, group, steps)


@settings(max_examples=40)
@given(schedules())
def test_a_schedule_gives_no_worker_two_tiles_more_than_another(scheduled: Scheduled) -> None:
    lengths = [len(run) for run in scheduled.runs]

    assert len(lengths) == min(scheduled.workers, scheduled.tiles)
    assert max(lengths) - min(lengths) <= 1


@settings(max_examples=40)
@given(schedules(st.sampled_from([kind for kind in ORDERS if kind != "consecutive"])))
def test_a_schedule_goes_step_by_step_through_its_order(scheduled: Scheduled) -> None:
    dealt = list(itertools.chain(*scheduled.steps))[: scheduled.tiles]

    assert dealt == order(scheduled.kind, scheduled.rows, scheduled.columns, *scheduled.group)


@settings(max_examples=40)
@given(schedules(st.just("consecutive")))
def test_the_runs_of_consecutive_follow_each_other(scheduled: Scheduled) -> None:
    one_after_the_other = list(itertools.chain(*scheduled.runs))

    assert one_after_the_other == list(range(scheduled.tiles))


@pytest.mark.parametrize(
    ("rows", "columns", "workers", "steps"),
    [
        pytest.param(2, 3, 4, [[0, 1, 2, 3], [4, 5, PAD, PAD]], id="two steps"),
        pytest.param(1, 2, 132, [[0, 1]], id="more workers than tiles"),
    ],
)
def test_a_schedule_of_a_small_grid(
    rows: int, columns: int, workers: int, steps: list[list[int]]
) -> None:
    assert schedule("row", rows, columns, workers) == steps


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("spiral", 2, 2, 1), "kind is 'spiral', expected one of: row, column"),
        (("row", 0, 2, 1), "rows is 0, expected an integer of at least 1"),
        (("row", 2, -1, 1), "columns is -1"),
        (("row", 2, 2, 0), "workers is 0"),
        (("grouped", 2, 2, 1, 0), "group_m is 0"),
        (("grouped", 2, 2, 1, 1, 0.5), "group_n is 0.5"),
    ],
    ids=["kind", "rows", "columns", "workers", "group_m", "group_n"],
)
def test_a_schedule_of_wrong_sizes_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        schedule(*arguments)
