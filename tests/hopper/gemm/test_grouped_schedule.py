"""Which CTA computes what in hopper.grouped: the schedule's own source on Python's integers. Lanes
of a warp are threads, which meet where they exchange values.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.own_source import run_source
from support.tile_arithmetic import Word, coord

from outblas.call.fp8 import BLOCK
from outblas.hopper.gemm import group_scheduler as schedule
from outblas.hopper.gemm.config import Config
from outblas.hopper.gemm.rule_tiles import shaped
from outblas.hopper.gemm.tile_scheduler import KPartition
from outblas.hopper.gemm.traits import BY_BALLOT, KernelTraits
from outblas.hopper.parts.config import HopperConfig

LANES = 32


class Warp:
    """The exchange of values among lanes that run as threads."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(LANES)
        self._values: list[Any] = [None] * LANES
        self._lane = threading.local()

    def run(self, body: Callable[[], Any]) -> list[Any]:
        """Runs a function in every lane. Returns the results."""
        results: list[Any] = [None] * LANES

        def lane(index: int) -> None:
            self._lane.index = index
            try:
                results[index] = body()
            except BaseException as error:
                results[index] = error
                self._barrier.abort()

        threads = [threading.Thread(target=lane, args=(index,)) for index in range(LANES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException) and not isinstance(
                result, threading.BrokenBarrierError
            ):
                raise result
        return results

    def _exchange(self, value: Any) -> list[Any]:
        self._values[self._lane.index] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found

    # ---- cute.arch
    def lane_idx(self) -> Word:
        return Word(self._lane.index)

    def shuffle_sync_up(self, value: Any, offset: int) -> Any:
        return self._exchange(value)[max(self._lane.index - offset, 0)]

    def shuffle_sync(self, value: Any, lane: int) -> Any:
        return self._exchange(value)[lane]

    def vote_ballot_sync(self, predicate: Any) -> int:
        return sum(bool(value) << lane for lane, value in enumerate(self._exchange(predicate)))

    def popc(self, value: int) -> Word:
        return Word(value.bit_count())

    def make_warp_uniform(self, value: Any) -> Any:
        return value


class Offsets(list[Word]):
    """The ends of groups in global memory."""

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)

    def __getitem__(self, index: Any) -> Any:
        assert index >= 0, f"offs[{index}] is read"
        return super().__getitem__(index)


class Scale(NamedTuple):
    """Scales in memory: where the first one lies, and how the others do."""

    iterator: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def moved(self, at: Sequence[int]) -> "Scale":
        steps = zip(at, self.stride, strict=True)
        return self._replace(iterator=self.iterator + sum(i * step for i, step in steps))

    def of(self, group: int) -> "Scale":
        """Returns those of a group, the last mode."""
        return Scale(self.moved((0, 0, group)).iterator, self.shape[:2], self.stride[:2])

    def __getitem__(self, at: Any) -> Any:
        assert at[:2] == (None, None)
        return self.of(at[2])


def on_integers(warp: Warp | None = None) -> SimpleNamespace:
    """The functions of the schedule's own source."""
    cute = {
        "arch": warp or Warp(),
        "domain_offset": lambda at, tensor: tensor.moved(at),
        "make_layout": lambda shape, stride: (shape, stride),
        "make_tensor": lambda iterator, layout: Scale(iterator, *layout),
    }
    scope = run_source(
        schedule,
        cute=cute,
        cutlass={"range": lambda count, unroll: range(count)},
        Int32=Word,
        replace=replace,
        KPartition=KPartition,
        BY_BALLOT=BY_BALLOT,
        KernelTraits=KernelTraits,
        BLOCK=BLOCK,
    )
    return SimpleNamespace(**scope, globals=scope)


def traits(
    form: str,
    groups: int,
    zero_tail: bool = False,
    gated: bool = False,
    masked: bool = False,
    turns: bool = False,
) -> KernelTraits:
    capacity = -(-(groups + zero_tail) // BY_BALLOT) * BY_BALLOT
    return KernelTraits(
        width=8,
        by_columns=False,
        staged=True,
        batched=form == "ragged_k",
        form=form,
        capacity=capacity,
        zero_tail=zero_tail,
        gated=gated,
        masked=masked,
        turns=turns,
    )


def tile_config(
    tile_m: int = 128, tile_n: int = 256, cluster_m: int = 1, cluster_n: int = 1
) -> HopperConfig:
    return replace(shaped(Config(), tile_m, tile_m // 64, cluster_m, cluster_n), tile_n=tile_n)


class Launch(NamedTuple):
    """A call on a GPU where `clusters` clusters fit. `ends` are numbers of rows where groups have
    places of their own.
    """

    ends: tuple[int, ...]
    extent: int
    M: int  # of the result
    N: int
    K: int
    config: HopperConfig
    clusters: int
    traits: KernelTraits

    @property
    def group_rows(self) -> int | None:
        """The rows of such a place."""
        return self.extent // len(self.ends) if self.traits.masked else None


def columns_of_tiles(launch: Launch) -> int:
    """The columns of C that a tile has; a gated pair counts as one."""
    return launch.config.tile_n // (2 if launch.traits.gated else 1)


def params_of(launch: Launch, functions: SimpleNamespace) -> Any:
    config = launch.config
    rows = -(-launch.M // (config.tile_m * config.cluster_m))
    columns = -(-launch.N // (columns_of_tiles(launch) * config.cluster_n))
    return functions.GroupedParams(
        offs=Offsets(map(Word, launch.ends)),
        extent=Word(launch.extent),
        rows=Word(rows),
        columns=Word(columns),
        by_columns=Word(columns),
        by_matrix=Word(rows * columns),
        by_band=Word(columns * functions.band(config)),
        k_tiles=Word(-(-launch.K // config.tile_k)),
        clusters=Word(launch.clusters),
        a=None,
        a_index=None,
        group_rows=None if launch.group_rows is None else Word(launch.group_rows),
        turned=None,
        table=[Word(-1)] * launch.traits.capacity,
    )


def clamped(launch: Launch) -> list[tuple[int, int]]:
    """Where groups begin and end, the rows that are left over last where they count as a group."""
    if launch.group_rows is not None:
        begins = range(0, launch.extent, launch.group_rows)
        rooms = zip(begins, launch.ends, strict=True)
        return [(row, row + min(max(count, 0), launch.group_rows)) for row, count in rooms]
    found, before = [], 0
    for end in launch.ends:
        begin = min(max(before, 0), launch.extent)
        found.append((begin, min(max(end, begin), launch.extent)))
        before = end
    if launch.traits.zero_tail:
        found.append((min(max(before, 0), launch.extent), launch.extent))
    return found


def tile_counts(launch: Launch) -> list[int]:
    """The cluster tiles of each group and of all before it."""
    config = launch.config
    columns = -(-launch.N // (columns_of_tiles(launch) * config.cluster_n))
    counts = []
    for begin, end in clamped(launch):
        rows, below = divmod(-(-(end - begin) // config.tile_m), config.cluster_m)
        across = -(-columns // 2) if launch.traits.turns else columns
        counts.append(rows * columns + (below > 0) * across)
    counts += [0] * (launch.traits.capacity - len(counts))
    return list(itertools.accumulate(counts))


def works(launch: Launch) -> Iterator[Any]:
    """What every CTA computes at every step. The table is the one that the kernel would make."""
    functions = on_integers()
    params = params_of(launch, functions)
    if launch.traits.divides_terms:
        for thread in range(384):
            functions.make_order(params, Word(thread), 384, launch.traits.capacity)
    else:
        params.table[:] = map(Word, tile_counts(launch))
        functions.globals["find_group"] = lambda scheduler, tile: Word(
            sum(value <= tile for value in scheduler.params.table)
        )
    config = launch.config
    for cluster in range(launch.clusters):
        for m, n in itertools.product(range(config.cluster_m), range(config.cluster_n)):
            scheduler = functions.GroupedScheduler(
                params, Word(cluster), coord(m, n), launch.traits
            )
            for step in range(scheduler.work_tile_count(config)):
                yield scheduler.current_work(config, Word(step))


ENDS = st.lists(st.integers(0, 1500), min_size=1, max_size=40).map(lambda ends: tuple(sorted(ends)))
WRONG_ENDS = st.lists(st.integers(-50, 2000), min_size=1, max_size=12).map(tuple)
CONFIGS = st.sampled_from(
    [
        tile_config(),
        tile_config(cluster_m=2),
        tile_config(cluster_n=2),
        tile_config(64, 64),
        tile_config(128, 192, cluster_m=2),
    ]
)


@settings(max_examples=12, deadline=None)
@given(ends=ENDS | WRONG_ENDS, zero_tail=st.booleans(), turns=st.booleans())
@example(ends=tuple(range(13, 1300, 13)), zero_tail=True, turns=True)  # four times the lanes
def test_a_warp_counts_the_tiles_of_all_groups(
    ends: tuple[int, ...], zero_tail: bool, turns: bool
) -> None:
    of_groups = traits("ragged_m", len(ends), zero_tail, turns=turns)
    config = tile_config(cluster_m=2 if turns else 1)
    launch = Launch(ends, 1600, 1600, 640, 64, config, 1, of_groups)
    warp = Warp()
    functions = on_integers(warp)
    params = params_of(launch, functions)

    warp.run(lambda: functions.make_tile_counts(params, config, of_groups))

    assert params.table == tile_counts(launch)


@settings(max_examples=8, deadline=None)
@given(ends=st.lists(st.integers(0, 1500), min_size=1, max_size=100).map(sorted))
def test_a_warp_finds_the_group_of_a_tile(ends: list[int]) -> None:
    launch = Launch(
        tuple(ends), 1600, 1600, 512, 64, tile_config(), 1, traits("ragged_m", len(ends))
    )
    warp = Warp()
    functions = on_integers(warp)
    table = tile_counts(launch)
    params = params_of(launch, functions)._replace(table=[Word(count) for count in table])
    scheduler = functions.GroupedScheduler(params, Word(0), coord(), launch.traits)

    for tile in range(0, table[-1], 13):
        found = warp.run(functools.partial(functions.find_group, scheduler, Word(tile)))
        expected = next(group for group, total in enumerate(table) if tile < total)
        assert found == [expected] * LANES


COUNTS = st.lists(
    st.sampled_from([-(2**31), -1, 2**31 - 1]) | st.integers(0, 700), min_size=1, max_size=40
).map(tuple)
# Of rows: their ends in 1600, or how many there are in places of so many.
GROUPS = st.tuples(ENDS | WRONG_ENDS, st.just(0)) | st.tuples(
    COUNTS, st.sampled_from([1, 16, 129, 512])
)


@settings(max_examples=50, deadline=None)
@given(
    groups=GROUPS,
    zero_tail=st.booleans(),
    config=CONFIGS,
    N=st.sampled_from([8, 250, 1536]),
    clusters=st.sampled_from([1, 3, 66, 132]),
    gated=st.booleans(),
    turns=st.booleans(),
)
def test_ragged_rows_are_covered_once(
    groups: tuple[tuple[int, ...], int],
    zero_tail: bool,
    config: HopperConfig,
    N: int,
    clusters: int,
    gated: bool,
    turns: bool,
) -> None:
    """No tile is made of rows that are not there, but for the clusters in which a group ends; where
    they turn, none is.
    """
    ends, capacity = groups
    turns &= config.cluster_m == 2
    zero_tail &= not capacity
    of_groups = traits("ragged_m", len(ends), zero_tail, gated, capacity > 0, turns)
    extent = capacity * len(ends) or 1600
    launch = Launch(ends, extent, extent, N, 192, config, clusters, of_groups)
    k_tiles = 192 // config.tile_k

    covered: dict[int, list[tuple[int, int]]] = {}
    for work in works(launch):
        begin, end = clamped(launch)[min(work.matrix, len(ends) - 1)]
        is_tail = work.partition.begin == k_tiles
        if is_tail:
            begin, end = clamped(launch)[-1]
            assert work.partition.count == 1
            assert work.end_row == launch.extent
        else:
            assert work.partition == (0, k_tiles, 0, 1, 0, 0)
            assert work.end_row == end
        assert (work.row - begin) % config.tile_m == 0
        assert begin <= work.row < end + (0 if turns else config.tile_m * config.cluster_m)
        if work.row < end and work.column < N:
            key = len(ends) if is_tail else int(work.matrix)
            covered.setdefault(key, []).append((int(work.row), int(work.column)))

    for group, (begin, end) in enumerate(clamped(launch)):
        columns = range(0, N, columns_of_tiles(launch))
        tiles = itertools.product(range(begin, end, config.tile_m), columns)
        assert sorted(covered.get(group, [])) == sorted(tiles), group


@settings(max_examples=30, deadline=None)
@given(
    ends=ENDS | WRONG_ENDS,
    config=CONFIGS,
    shape=st.sampled_from([(64, 8), (300, 700), (768, 2048)]),
    clusters=st.sampled_from([1, 5, 66, 132]),
    gated=st.booleans(),
    row_order=st.booleans(),
)
def test_ragged_terms_are_covered_once(
    ends: tuple[int, ...],
    config: HopperConfig,
    shape: tuple[int, int],
    clusters: int,
    gated: bool,
    row_order: bool,
) -> None:
    M, N = shape
    of_groups = replace(traits("ragged_k", len(ends), gated=gated), row_order=row_order)
    launch = Launch(ends, 1600, M, N, 1600, config, clusters, of_groups)

    covered: dict[int, list[tuple[int, int]]] = {}
    for work in works(launch):
        begin, end = clamped(launch)[work.matrix]
        assert work.end_row is None
        assert work.backwards == 1
        assert work.partition.begin == 0
        last = work.first_term + (work.partition.count - 1) * config.tile_k
        if begin == end:
            assert (work.first_term, work.partition.count) == (launch.extent, 1)
        else:
            assert work.first_term == begin
            assert 0 < work.terms <= config.tile_k
            assert last + work.terms == end
        if work.row < M and work.column < N:
            covered.setdefault(int(work.matrix), []).append((int(work.row), int(work.column)))

    for group in range(len(ends)):
        columns = range(0, N, columns_of_tiles(launch))
        tiles = itertools.product(range(0, M, config.tile_m), columns)
        assert sorted(covered[group]) == sorted(tiles), group


@settings(max_examples=20, deadline=None)
@given(ends=ENDS | WRONG_ENDS, clusters=st.sampled_from([1, 5, 132]))
@example(ends=(0, 128, 128, 1536, 1600), clusters=3)
def test_groups_of_fp8_terms_have_whole_blocks(ends: tuple[int, ...], clusters: int) -> None:
    """A k tile is a block of two terms a word; a group without terms has none. Where groups end
    between blocks, none but blocks of A and B are read.
    """
    of_groups = replace(traits("ragged_k", len(ends)), formats="e4m3 e4m3 promoted 1x128 1x128")
    launch = Launch(ends, 1600, 128, 256, 800, tile_config(), clusters, of_groups)

    groups = set()
    for work in works(launch):
        begin, end = clamped(launch)[work.matrix]
        groups.add(int(work.matrix))
        assert work.first_term == begin // BLOCK * (BLOCK // 2)
        blocks = range(begin // BLOCK, -(-end // BLOCK)) if begin < end else ()
        assert work.partition == (0, len(blocks), 0, 1, 0, 0)
        assert all(block * BLOCK < launch.extent for block in blocks)
    assert groups == set(range(len(ends)))


def order_of(ends: Sequence[int], extent: int, threads: int) -> list[int]:
    launch = Launch(
        tuple(ends), extent, 64, 64, extent, tile_config(), 1, traits("ragged_k", len(ends))
    )
    functions = on_integers()
    params = params_of(launch, functions)
    for thread in range(threads):
        functions.make_order(params, Word(thread), threads, launch.traits.capacity)
    return [int(group) for group in params.table[: len(ends)]]


@pytest.mark.parametrize("threads", [256, 384])
def test_groups_with_the_most_terms_come_first(threads: int) -> None:
    assert order_of((4, 4, 27, 27, 30, 45), 50, threads) == [2, 5, 0, 4, 1, 3]


@settings(max_examples=20, deadline=None)
@given(ends=WRONG_ENDS)
def test_every_group_has_one_place_in_the_order_whatever_the_ends(ends: tuple[int, ...]) -> None:
    assert sorted(order_of(ends, 1600, 256)) == list(range(len(ends)))


def test_more_groups_than_threads_have_a_place_each() -> None:
    ends = range(3, 3 * 512 + 1, 3)

    assert order_of(ends, 2000, 256) == list(range(512))


class Tensors(NamedTuple):
    bias: Any


@dataclass(frozen=True)
class EpilogueOfCall:
    tensors: Tensors
    config: str = "that of all tiles"


class Biases:
    """A bias for each group, which is read as the kernel reads it."""

    def __getitem__(self, at: tuple[Any, None]) -> str:
        group, columns = at
        assert columns is None
        return f"the bias of group {group}"


def test_a_tile_reads_the_bias_of_its_group() -> None:
    launch = Launch((100, 300), 300, 300, 512, 64, tile_config(), 1, traits("ragged_m", 2))
    functions = on_integers()
    scheduler = functions.GroupedScheduler(None, Word(0), coord(), launch.traits)
    given = EpilogueOfCall(Tensors(Biases()))

    found = {
        (int(work.row), scheduler.tile_epilogue(given, work).tensors.bias) for work in works(launch)
    }

    assert found == {
        (0, "the bias of group 0"),
        (100, "the bias of group 1"),
        (228, "the bias of group 1"),
    }
