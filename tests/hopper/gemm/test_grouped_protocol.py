"""hopper.grouped on the model of the Hopper kernels' protocols (`protocol`): its own source under
random and adversarial delays, and the faults that the model has to find.
"""

from dataclasses import replace
from typing import NamedTuple

import pytest
from protocol.fault import ProtocolFault
from protocol.faults import Change, Fault
from protocol.grouped import GroupedCase, simulate_grouped
from protocol.schedules import TIMINGS

from outblas.hopper.gemm import rule_tiles
from outblas.hopper.gemm.config import Config
from outblas.hopper.parts.config import HopperConfig

OWN = replace(
    Config(), cluster_m=1, tile_n=128, k_serpentine=False, gpc_local=False, stagger="never"
)
FEW_STAGES = replace(OWN, stages=2, epilogue_stages=1)
TILES = {
    "two consumers": OWN,
    "one consumer": replace(rule_tiles.shaped(OWN, 64, 1, 1, 1), tile_n=64, epilogue_stages=1),
    "B multicast": replace(OWN, cluster_m=2),
    "few stages": FEW_STAGES,
    "A multicast": replace(OWN, cluster_n=2),
}
GATHERING = tuple(TILES)[:4]
SCALED_TILES = TILES | {  # of 256 rows, a consumer has two times 64
    "tall": replace(OWN, tile_m=256, stages=3, epilogue_stages=1)
}
ENDS = {
    "one group": (400,),
    "empty groups": (0, 130, 130, 400, 400),
    "a row each": (1, 2, 3, 4),
    "whole tiles": (128, 384, 512),
    "nothing": (0, 0),
}
THREE_ENDS = ENDS["empty groups"], ENDS["whole tiles"], (1, 200)
COUNTS = {  # of rows, in groups that have room for 192
    "decoding": (3, 0, 1, 64),
    "whole tiles": (128, 192, 0),
    "everything": (130, 130),
    "nothing": (0, 0),
}
LEFT_OVER = (100, 100, 333), (128, 130), (0, 400)
TURNING = *ENDS.values(), (128, 512, 897, 1537), (2176 + 129,)
Ends = tuple[int, ...]


def case_of(config: HopperConfig, form: str, ends: Ends, words: str = "") -> GroupedCase:
    """Returns a call. `form`: ragged_m, ragged_k, or masked, where groups have room for 192 rows
    each. `words`: its epilogue, "scaled" of fp8 operands, and "zero_tail".
    """
    names = frozenset(words.split())
    columns = config.tile_n * config.cluster_n * 2 // (2 if "gated" in names else 1)
    ragged = "ragged_k" if form == "ragged_k" else "ragged_m"
    case = GroupedCase(config, ragged, ends, 512, columns, 3, epilogue=names - {"zero_tail"})
    if form == "ragged_k":
        if "scaled" in names:  # groups of whole blocks of 128
            case = replace(case, ends=tuple(end // 32 * 128 for end in ends), extent=16 * 128)
        return replace(case, M=256)
    if form == "masked":
        case = replace(case, extent=192 * len(ends), capacity=192)
    return replace(case, K=config.tile_k * 6 * case.values, zero_tail="zero_tail" in names)


def turning_case(ends: Ends, words: str = "") -> GroupedCase:
    """Returns a call whose clusters turn for the last tile row of a group."""
    config = replace(FEW_STAGES, cluster_m=2)
    case = case_of(config, "ragged_m", ends, words)
    return replace(case, extent=ends[-1], N=3 * config.tile_n // (2 if "gated" in words else 1))


def runs_clean(case: GroupedCase, seed: int, slow: dict[str, float] | None = None) -> None:
    try:
        simulate_grouped(case, seed, slow=slow)
    except ProtocolFault as fault:
        pytest.fail(f"{fault}\nseed {seed}, {case}")


class Calls(NamedTuple):
    """Calls of a form, with each of `words` and of `ends`, of which a timing has a third."""

    form: str
    words: tuple[str, ...] = ("",)
    ends: tuple[Ends, ...] = tuple(ENDS.values())
    tiles: tuple[str, ...] = tuple(TILES)
    order: str = OWN.order

    def cases(self, tile: str, timing: int) -> list[tuple[GroupedCase, int]]:
        """What runs of a tile, with the seeds of its delays."""
        config = replace(SCALED_TILES[tile], order=self.order)
        place, cases = timing + self.tiles.index(tile), []
        for number, words in enumerate(self.words):
            for index, ends in enumerate(self.ends):
                if (seed := index % 3) == (place + number) % 3:
                    cases.append((case_of(config, self.form, ends, words), seed))
        return cases


EPILOGUES = ("residual", "aux", "gated", "gated residual aux")
WIDE = "scaled wide", "scaled wide residual"
ROOMS = tuple(COUNTS.values())
ALL_TILES = tuple(SCALED_TILES)
CALLS = {
    "groups of rows": Calls("ragged_m"),
    "groups of terms": Calls("ragged_k"),
    "tiles of terms along rows": Calls("ragged_k", ends=THREE_ENDS, order="row"),
    "zeros in what is left over": Calls("ragged_m", ("zero_tail",), LEFT_OVER),
    "an epilogue of rows": Calls("ragged_m", EPILOGUES, THREE_ENDS),
    "an epilogue of terms": Calls("ragged_k", EPILOGUES, THREE_ENDS),
    "registers to the rows of a group, as ragged columns": Calls(
        "ragged_m", ("unstaged",), THREE_ENDS
    ),
    "scattered rows": Calls(
        "ragged_m", ("scatter", "scatter aux", "scatter gated aux"), THREE_ENDS
    ),
    "masked groups": Calls("masked", ends=ROOMS),
    "an epilogue of masked groups": Calls("masked", (*EPILOGUES, "unstaged"), ROOMS),
    "scales of rows": Calls("ragged_m", ("scaled",), tiles=ALL_TILES),
    "scales of terms": Calls("ragged_k", ("scaled",), tiles=ALL_TILES),
    # Stages with a residual have no scales, and a group without terms has a residual alone.
    "scales of rows beside an epilogue": Calls(
        "ragged_m", ("scaled residual", "scaled gated residual"), THREE_ENDS
    ),
    "scales of terms beside an epilogue": Calls(
        "ragged_k", ("scaled residual", "scaled gated residual"), THREE_ENDS
    ),
    "scales of masked groups": Calls(
        "masked", ("scaled residual", "scaled residual wide"), ROOMS, tiles=ALL_TILES
    ),
    "scales of rows that begin anywhere, loaded from a granule on": Calls(
        "ragged_m", WIDE, (*ENDS.values(), (1, 131, 262, 391, 512)), tiles=ALL_TILES
    ),
    "scales of terms, loaded": Calls("ragged_k", WIDE, tuple(ENDS.values()), tiles=ALL_TILES),
    "scales of terms of gated pairs, loaded": Calls(
        "ragged_k", ("scaled wide gated",), tuple(ENDS.values())
    ),
    "gathered rows": Calls("ragged_m", ("gather",), tiles=GATHERING),
    "gathered rows, zeros in what is left over": Calls(
        "ragged_m", ("gather zero_tail",), LEFT_OVER, tiles=GATHERING
    ),
    "gathered rows with all else": Calls(
        "ragged_m", ("gather gated aux", "gather scatter aux"), THREE_ENDS, tiles=GATHERING
    ),
}


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize(
    ("name", "tile"), [(name, tile) for name, calls in CALLS.items() for tile in calls.tiles]
)
def test_every_group_gets_its_product_in_every_timing(name: str, tile: str, timing: int) -> None:
    for case, seed in CALLS[name].cases(tile, timing):
        runs_clean(case, seed)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("ends", TURNING, ids=str)
@pytest.mark.parametrize("words", ["", "residual", "gated aux"])
def test_clusters_turn_in_every_timing(ends: Ends, words: str, timing: int) -> None:
    """Upright and turned clusters fill the same stages one after the other."""
    runs_clean(turning_case(ends, words), (timing + TURNING.index(ends) + len(words)) % 3)


def test_gathered_rows_walk_k_as_their_weights_do() -> None:
    """In both directions, which change after eight columns of tiles."""
    case = case_of(OWN, "ragged_m", (70, 400), "gather")

    runs_clean(replace(case, N=10 * OWN.tile_n), seed=1)


SOME, EMPTY = (70, 130, 400), ENDS["empty groups"]
LOADS = "load A", "load B", "wgmma", "store", "wake"
COPIES = "copy", "load B", "wgmma", "store", "wake", "global read"
DELAYS = {  # calls, and what takes a thousand times as long as all else
    "rows": (case_of(OWN, "ragged_m", SOME), LOADS),
    "terms": (case_of(OWN, "ragged_k", SOME), LOADS),
    "rows, gated": (
        case_of(FEW_STAGES, "ragged_m", SOME, "gated residual aux"),
        (*LOADS, "load residual"),
    ),
    "terms, gated": (
        case_of(FEW_STAGES, "ragged_k", SOME, "gated residual aux"),
        (*LOADS, "load residual"),
    ),
    "scattered": (case_of(FEW_STAGES, "ragged_m", SOME, "scatter aux"), LOADS),
    "masked": (case_of(FEW_STAGES, "masked", (70, 0, 130, 192), "residual"), LOADS),
    "scales of rows": (case_of(FEW_STAGES, "ragged_m", EMPTY, "scaled residual"), (*LOADS, "copy")),
    "scales of terms": (
        case_of(FEW_STAGES, "ragged_k", EMPTY, "scaled residual"),
        (*LOADS, "copy"),
    ),
    "scales, loaded": (
        case_of(FEW_STAGES, "ragged_m", (1, 131, 131, 400), "scaled wide residual"),
        (*LOADS, "load scales"),
    ),
    "gathered": (case_of(FEW_STAGES, "ragged_m", SOME, "gather"), COPIES),
    "gathered, multicast": (case_of(TILES["B multicast"], "ragged_m", SOME, "gather"), COPIES),
    "turning": (turning_case((128, 512, 897)), LOADS),
}


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize(
    ("name", "slow"), [(name, slow) for name, (_, kinds) in DELAYS.items() for slow in kinds]
)
def test_one_kind_of_delay_a_thousand_times_as_long_as_the_others(
    name: str, slow: str, timing: int
) -> None:
    runs_clean(DELAYS[name][0], 1 + timing, slow={slow: 100_000.0})


# The cluster's barrier is arrived at without releasing what was written.
UNORDERED = Change(
    "gemm.kernel",
    "            if cutlass.const_expr(self.tiles.writes_schedule):\n"
    "                cute.arch.sync_threads()\n",
    "",
)
EMPTY_GROUPS = ENDS["empty groups"]
# Calls, with few stages those of two rounds of a subtile each for a tile.
FAULT_CASES = {
    "rows": case_of(OWN, "ragged_m", EMPTY_GROUPS),
    "terms": case_of(OWN, "ragged_k", EMPTY_GROUPS),
    "turning": case_of(TILES["B multicast"], "ragged_m", EMPTY_GROUPS),
    "turning terms": case_of(TILES["B multicast"], "ragged_k", EMPTY_GROUPS),
    "scaled rows": case_of(FEW_STAGES, "ragged_m", EMPTY_GROUPS, "scaled residual"),
    **{
        words: case_of(FEW_STAGES, "ragged_m", EMPTY_GROUPS, words)
        for words in ("gather", "scatter", "gated")
    },
}
FAULTS = (
    Fault(
        "nobody waits until all terms are cleared",
        "terms",
        "gemm.term_mask",
        "        cute.arch.barrier(barrier_id=int(NamedBarrier.ALL_CONSUMERS), "
        "number_of_threads=threads)\n",
        "",
    ),
    Fault(
        "zeros are not fenced",
        "terms",
        "gemm.term_mask",
        '        cute.arch.fence_proxy("async.shared", space="cta")\n',
        "",
    ),
    Fault(
        "terms of B are not cleared",
        "terms",
        "gemm.term_mask",
        "        clear_terms(cta.operands.sB, state.index, terms, thread, threads)\n",
        "",
    ),
    Fault(
        "a stage is cleared before it is full",
        "terms",
        "gemm.term_mask",
        "    pipeline.consumer_wait(state)\n    if terms",
        "    if terms",
    ),
    Fault(
        "tiles are looked up before the schedule is written",
        "rows",
        "gemm.kernel",
        "        schedule = self.tiles.begin_schedule(smem, schedule, context)\n"
        "        self.cluster_sync()\n",
        "        self.cluster_sync()\n"
        "        schedule = self.tiles.begin_schedule(smem, schedule, context)\n",
    ),
    Fault(
        "a tile in which a group ends is stored by TMA",
        "rows",
        "gemm.epilogue_store",
        "config.tile_m > work.end_row:",
        "config.tile_m > work.end_row + config.tile_m:",
    ),
    Fault(
        "consumers multiply rows that they have not fenced",
        "gather",
        "gemm.gather",
        '        cute.arch.fence_proxy("async.shared", space="cta")\n',
        "",
    ),
    Fault(
        "consumers fence before they wait",
        "gather",
        "gemm.gather",
        "        GroupPipeline.consumer_wait(self, state)\n"
        '        cute.arch.fence_proxy("async.shared", space="cta")\n',
        '        cute.arch.fence_proxy("async.shared", space="cta")\n'
        "        GroupPipeline.consumer_wait(self, state)\n",
    ),
    Fault(
        "a stage is full without its gathered rows",
        "gather",
        "gemm.gather",
        '{"full": counts["full"] + THREADS}',
        '{"full": counts["full"]}',
    ),
    Fault(
        "rows are gathered over a stage that is still read",
        "gather",
        "gemm.gather",
        "            pipeline.producer_acquire(state)\n",
        "",
    ),
    Fault(
        "a stage waits for the bytes of rows that are gathered",
        "gather",
        "gemm.group_kernel",
        "if self.traits.gathers:  # TMA",
        "if False:  # TMA",
    ),
    Fault(
        "buffers are overwritten while others copy rows from them",
        "scatter",
        "gemm.epilogue_store",
        "    await_stores(consumer)\n    sync_consumer(consumer.index)\n",
        "    await_stores(consumer)\n",
    ),
    Fault(
        "rows are copied before all of a buffer is written",
        "scatter",
        "gemm.epilogue_store",
        "        sync_consumer(tile.consumer.index)\n"
        "        store_round(tile, stores, first, last)\n",
        "        store_round(tile, stores, first, last)\n",
    ),
    Fault(
        "both halves of a stage have the gate",
        "gated",
        "gemm.tma_load",
        "*((part,) * (parts - 1))",
        "*((0,) * (parts - 1))",
    ),
    Fault(
        "every group has the scales of the first one's columns",
        "scaled rows",
        "gemm.group_scheduler",
        "b = b[None, None, work.matrix]",
        "b = b[None, None, 0]",
    ),
    Fault(
        "a turned cluster loads what an upright one does",
        "turning",
        "gemm.group_kernel",
        "load_of(turned_cta(cta, self.traits), work)",
        "load_of(cta, work)",
    ),
    Fault("a schedule of rows is written that a cluster does not order", "turning", *UNORDERED),
    Fault(
        "a schedule of terms is written that a cluster does not order", "turning terms", *UNORDERED
    ),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_planted_fault_of_groups_is_found(fault: Fault) -> None:
    case = FAULT_CASES[fault.schedule]
    for seed in range(12):
        try:
            simulate_grouped(case, seed, patches=fault.changes)
        except ProtocolFault:
            runs_clean(case, seed)
            return
    pytest.fail(f"12 timings of {case} are clean")
