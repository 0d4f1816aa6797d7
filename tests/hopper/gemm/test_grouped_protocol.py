"""hopper.grouped on the model of the Hopper kernels' protocols (`protocol`): its own source under
random and adversarial delays, and the faults that the model has to find.
"""

from dataclasses import replace
from typing import NamedTuple

import pytest
from protocol.fault import ProtocolFault
from protocol.faults import Change
from protocol.grouped import GroupedCase, simulate_grouped
from protocol.schedules import TIMINGS

from outblas.hopper.gemm import rule_tiles
from outblas.hopper.gemm.kernel import Config
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
LEFT_OVER = ((100, 100, 333),)
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
    """Calls of a form, with each of `words` and of `ends`. `in_turn`: a timing has a third of the
    ends, so that each runs in one of three; others run in each.
    """

    form: str
    words: tuple[str, ...] = ("",)
    ends: tuple[Ends, ...] = tuple(ENDS.values())
    in_turn: bool = False
    tiles: tuple[str, ...] = tuple(TILES)
    order: str = OWN.order

    def cases(self, tile: str, timing: int) -> list[tuple[GroupedCase, int]]:
        """What runs of a tile, with the seeds of its delays."""
        config = replace(SCALED_TILES[tile], order=self.order)
        place, cases = timing + self.tiles.index(tile), []
        for number, words in enumerate(self.words):
            for index, ends in enumerate(self.ends):
                seed = (index if self.in_turn else place + number + index) % 3
                if not self.in_turn or seed == (place + number) % 3:
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
    "an epilogue of rows": Calls("ragged_m", EPILOGUES, THREE_ENDS, True),
    "an epilogue of terms": Calls("ragged_k", EPILOGUES, THREE_ENDS, True),
    "registers to the rows of a group, as ragged columns": Calls(
        "ragged_m", ("unstaged",), THREE_ENDS
    ),
    "scattered rows": Calls(
        "ragged_m", ("scatter", "scatter aux", "scatter gated aux"), THREE_ENDS, True
    ),
    "masked groups": Calls("masked", ends=ROOMS),
    "an epilogue of masked groups": Calls("masked", (*EPILOGUES, "unstaged"), ROOMS, True),
    "scales of rows": Calls("ragged_m", ("scaled",), tiles=ALL_TILES),
    "scales of terms": Calls("ragged_k", ("scaled",), tiles=ALL_TILES),
    # Stages with a residual have no scales, and a group without terms has a residual alone.
    "scales of rows beside an epilogue": Calls(
        "ragged_m", ("scaled residual", "scaled gated residual"), THREE_ENDS, True
    ),
    "scales of terms beside an epilogue": Calls(
        "ragged_k", ("scaled residual", "scaled gated residual"), THREE_ENDS, True
    ),
    "scales of masked groups": Calls(
        "masked", ("scaled residual", "scaled residual wide"), ROOMS, True, ALL_TILES
    ),
    "scales of rows that begin anywhere, loaded from a granule on": Calls(
        "ragged_m", WIDE, (*ENDS.values(), (1, 131, 262, 391, 512)), True, ALL_TILES
    ),
    "scales of terms, loaded": Calls("ragged_k", WIDE, tuple(ENDS.values()), True, ALL_TILES),
    "scales of terms of gated pairs, loaded": Calls(
        "ragged_k", ("scaled wide gated",), tuple(ENDS.values()), True
    ),
    "gathered rows": Calls("ragged_m", ("gather",), tiles=GATHERING),
    "gathered rows, zeros in what is left over": Calls(
        "ragged_m", ("gather zero_tail",), LEFT_OVER, tiles=GATHERING
    ),
    "gathered rows with all else": Calls(
        "ragged_m", ("gather gated aux", "gather scatter aux"), ((1, 200),), tiles=GATHERING
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


CLEAR_B = "        clear_terms(cta.operands.sB, state.index, terms, thread, threads)\n"
BARRIER = (
    "        cute.arch.barrier(barrier_id=int(NamedBarrier.ALL_CONSUMERS), "
    "number_of_threads=threads)\n"
)
FAULTS = {
    "nobody waits until all terms are cleared": (
        "ragged_k",
        Change("gemm.term_mask", BARRIER, ""),
        {"early read", "wrong result", "overwritten"},
    ),
    "zeros are not fenced": (
        "ragged_k",
        Change(
            "gemm.term_mask", '        cute.arch.fence_proxy("async.shared", space="cta")\n', ""
        ),
        {"early read"},
    ),
    "terms of B are not cleared": (
        "ragged_k",
        Change("gemm.term_mask", CLEAR_B, ""),
        {"wrong result"},
    ),
    "a stage is cleared before it is full": (
        "ragged_k",
        Change("gemm.term_mask", "    pipeline.consumer_wait(state)\n    if terms", "    if terms"),
        {"early read", "wrong result", "overwritten"},
    ),
    "the k tile in which a group ends comes last": (
        "ragged_k",
        Change(
            "gemm.group_scheduler",
            "begin, terms, Int32(1), straight",
            "begin, terms, Int32(0), straight",
        ),
        {"wrong result"},
    ),
    "an empty group multiplies the terms of the next one": (
        "ragged_k",
        Change(
            "gemm.group_scheduler",
            "        begin, terms = params.extent, Int32(config.tile_k)\n",
            "        terms = Int32(config.tile_k)\n",
        ),
        {"wrong result"},
    ),
    "tiles are looked up before the schedule is written": (
        "ragged_m",
        Change(
            "gemm.kernel",
            "        schedule = self.tiles.begin_schedule(smem, schedule, context)\n"
            "        self.cluster_sync()\n",
            "        self.cluster_sync()\n"
            "        schedule = self.tiles.begin_schedule(smem, schedule, context)\n",
        ),
        {"early read", "wrong result", "deadlock"},
    ),
    "a tile in which a group ends is stored by TMA": (
        "ragged_m",
        Change(
            "gemm.epilogue_store",
            "config.tile_m > work.end_row:",
            "config.tile_m > work.end_row + config.tile_m:",
        ),
        {"wrong result"},
    ),
}


EPILOGUE_FAULTS = {
    "consumers multiply rows that they have not fenced": (
        "gather",
        Change("gemm.gather", '        cute.arch.fence_proxy("async.shared", space="cta")\n', ""),
        {"early read"},
    ),
    "consumers fence before they wait": (
        "gather",
        Change(
            "gemm.gather",
            "        GroupPipeline.consumer_wait(self, state)\n"
            '        cute.arch.fence_proxy("async.shared", space="cta")\n',
            '        cute.arch.fence_proxy("async.shared", space="cta")\n'
            "        GroupPipeline.consumer_wait(self, state)\n",
        ),
        {"early read"},
    ),
    "a stage is full without its gathered rows": (
        "gather",
        Change("gemm.gather", '{"full": counts["full"] + THREADS}', '{"full": counts["full"]}'),
        {"arrivals", "early read", "wrong result", "overwritten"},
    ),
    "rows are gathered over a stage that is still read": (
        "gather",
        Change("gemm.gather", "            pipeline.producer_acquire(state)\n", ""),
        {"overwritten", "arrivals", "early read", "wrong result", "deadlock"},
    ),
    "a stage waits for the bytes of rows that are gathered": (
        "gather",
        Change("gemm.group_kernel", "if self.traits.gathers:  # TMA", "if False:  # TMA"),
        {"deadlock"},
    ),
    "x of a tile in which a group ends is stored by TMA": (
        "aux",
        Change(
            "gemm.epilogue_store",
            "    elif cutlass.const_expr(work.end_row is not None):\n",
            "    elif cutlass.const_expr(work.end_row is not None and not stores.aux):\n",
        ),
        {"wrong result"},
    ),
    "scattered rows are stored by TMA": (
        "scatter",
        Change(
            "gemm.epilogue_store",
            "    if cutlass.const_expr(row_stores.scatters(tile, stores)):\n",
            "    if cutlass.const_expr(False):\n",
        ),
        {"wrong result"},
    ),
    "buffers are overwritten while others copy rows from them": (
        "scatter",
        Change(
            "gemm.epilogue_store",
            "    await_stores(consumer)\n    sync_consumer(consumer.index)\n",
            "    await_stores(consumer)\n",
        ),
        {"wrong result", "early read", "overwritten"},
    ),
    "rows are copied before all of a buffer is written": (
        "scatter",
        Change(
            "gemm.epilogue_store",
            "        sync_consumer(tile.consumer.index)\n"
            "        store_round(tile, stores, first, last)\n",
            "        store_round(tile, stores, first, last)\n",
        ),
        {"wrong result", "early read", "overwritten"},
    ),
    "registers are stored over the rows of the next group": (
        "unstaged",
        Change("gemm.consumer", "        extents = (work.end_row, extents[1])\n", "        pass\n"),
        {"wrong result"},
    ),
    "gated tiles are as far apart as those of B": (
        "gated",
        Change(
            "gemm.group_scheduler",
            "config.tile_n // (2 if scheduler.traits.gated else 1)",
            "config.tile_n",
        ),
        {"wrong result"},
    ),
    "both halves of a stage have the gate": (
        "gated",
        Change("gemm.tma_load", "*((part,) * (parts - 1))", "*((0,) * (parts - 1))"),
        {"wrong result"},
    ),
    "the residual is that of the first columns": (
        "residual",
        Change("gemm.epilogue_load", "work.column + start", "start"),
        {"wrong result"},
    ),
}


MASKED_FAULTS = {
    "a masked group begins where the one before ends": Change(
        "gemm.group_scheduler",
        "        begin = group * params.group_rows\n",
        "        if group > 0:\n            begin = params.offs[group - 1]\n",
    ),
    "all rows of a place are computed": Change(
        "gemm.group_scheduler",
        "cutlass.min(cutlass.max(params.offs[group], 0), params.group_rows)",
        "params.group_rows",
    ),
}


# The form, the change, and the kinds of faults that show it.
SCALED_FAULTS = {
    "scales are copied into a stage that is still read": (
        "ragged_m",
        Change(
            "gemm.scale_loads",
            "            pipeline.producer_acquire(state)\n            k_tile",
            "            k_tile",
        ),
        {"overwritten", "wrong result", "arrivals", "early read"},
    ),
    "stages with a residual wait for scales in vain": (
        "ragged_m",
        Change("gemm.scale_loads", "in cutlass.range_constexpr(cta.source_stages):", "in ():"),
        {"deadlock", "wrong result", "arrivals", "early read", "overwritten"},
    ),
    "nobody waits for scales": (
        "ragged_m",
        Change("gemm.scale_loads", 'counts["full"] + LANES', 'counts["full"]'),
        {"early read", "arrivals", "wrong result"},
    ),
    "scales come in another order than terms": (
        "ragged_k",
        Change(
            "gemm.scale_loads",
            "k_tile = begin + i + backwards * (count - 1 - 2 * i)",
            "k_tile = begin + i",
        ),
        {"wrong result"},
    ),
    "a stage is released before its scales of columns are read": (
        "ragged_k",
        Change(
            "gemm.promotion",
            "    add(cta, row, groups[-1], state, factors, boundaries)\n"
            "    if cutlass.const_expr(cta.traits.block_b == 1):  # its",
            "    if cutlass.const_expr(cta.traits.block_b == 1):\n"
            "        pipeline.consumer_release(state.index)\n"
            "    add(cta, row, groups[-1], state, factors, boundaries)\n"
            "    if cutlass.const_expr(False):  # its",
        ),
        {"overwritten", "wrong result", "early read"},
    ),
    "every group has the scales of the first one's columns": (
        "ragged_m",
        Change("gemm.group_scheduler", "b = b[None, None, work.matrix]", "b = b[None, None, 0]"),
        {"wrong result"},
    ),
    "a group of terms has the scales of the first one": (
        "ragged_k",
        Change("gemm.group_scheduler", "first = work.first_term // BLOCK_WORDS", "first = 0"),
        {"wrong result"},
    ),
    "a group of terms has the first scales of K": (
        "ragged_k",
        Change(
            "gemm.group_scheduler",
            "begin, terms = begin // BLOCK * config.tile_k, Int32(config.tile_k)",
            "begin, terms = Int32(0), Int32(config.tile_k)",
        ),
        {"wrong result"},
    ),
}


MASKED_SCALED_FAULTS = {
    "a place has the scales of the first one": Change(
        "gemm.group_scheduler", "scale[None, None, group])", "scale[None, None, 0])"
    ),
    "rows of a place are numbered from the beginning of the call": Change(
        "gemm.group_scheduler",
        "own = cute.domain_offset((-group * rows, 0), scale[None, None, group])",
        "own = scale[None, None, group]",
    ),
    "a work tile has the scales of the whole call": Change(
        "gemm.scale_loads",
        "own, config, traits = of_work(cta, work), cta.config",
        "own, config, traits = cta, cta.config",
    ),
}


def is_found(case: GroupedCase, change: Change) -> str:
    """Returns the kind of fault that the model finds in some timing."""

    def in_some_timing() -> None:
        for seed in range(12):
            simulate_grouped(case, seed, patches=(change,))

    with pytest.raises(ProtocolFault) as found:
        in_some_timing()
    return found.value.kind


@pytest.mark.parametrize("form", ["ragged_m", "ragged_k"])
def test_the_model_finds_a_schedule_that_a_cluster_does_not_order(form: str) -> None:
    """The cluster's barrier is arrived at without releasing what was written."""
    change = Change(
        "gemm.kernel",
        "            if cutlass.const_expr(self.tiles.writes_schedule):\n"
        "                cute.arch.sync_threads()\n",
        "",
    )

    case = case_of(TILES["B multicast"], form, ENDS["empty groups"])

    assert is_found(case, change) == "early read"


@pytest.mark.parametrize("name", FAULTS)
def test_the_model_finds(name: str) -> None:
    form, change, kinds = FAULTS[name]

    assert is_found(case_of(OWN, form, ENDS["empty groups"]), change) in kinds


@pytest.mark.parametrize("name", EPILOGUE_FAULTS)
def test_the_model_finds_in_an_epilogue(name: str) -> None:
    epilogue, change, kinds = EPILOGUE_FAULTS[name]
    # Two rounds of a subtile each for a tile.
    case = case_of(TILES["few stages"], "ragged_m", ENDS["empty groups"], epilogue)

    assert is_found(case, change) in kinds


TURNING_FAULTS = {
    "a turned cluster loads what an upright one does": Change(
        "gemm.group_kernel", "load_of(turned_cta(cta, self.traits), work)", "load_of(cta, work)"
    ),
    "the CTAs of a turned cluster load the same part of A": Change(
        "gemm.group_kernel", "coord=kernel.cluster_coord(cta.context)", "coord=cta.coord"
    ),
    "no cluster turns": Change(
        "gemm.tma_load", "        elif load.turned == 1:\n", "        elif load.turned == 2:\n"
    ),
    "both CTAs of a turned cluster compute the same columns": Change(
        "gemm.group_scheduler", "(n + rank * turned)", "(n + rank * 0)"
    ),
    "a CTA of a turned cluster computes the rows below": Change(
        "gemm.group_scheduler", "(m + rank * (1 - turned))", "(m + rank)"
    ),
    "the row left over is that of the first pair": Change(
        "gemm.group_scheduler",
        "m, turned = pairs - above, Int32(1)",
        "m, turned = Int32(0), Int32(1)",
    ),
}


@pytest.mark.parametrize("name", TURNING_FAULTS)
def test_the_model_finds_in_clusters_that_turn(name: str) -> None:
    """An operand that both CTAs load for each other arrives twice, or half of it does not."""
    case = case_of(TILES["B multicast"], "ragged_m", ENDS["empty groups"])

    assert is_found(case, TURNING_FAULTS[name]) in {
        "wrong result",
        "deadlock",
        "overwritten",
        "early read",
        "arrivals",
    }


@pytest.mark.parametrize("name", MASKED_FAULTS)
def test_the_model_finds_in_groups_of_a_fixed_capacity(name: str) -> None:
    case = case_of(OWN, "masked", COUNTS["decoding"])

    assert is_found(case, MASKED_FAULTS[name]) == "wrong result"


@pytest.mark.parametrize("name", MASKED_SCALED_FAULTS)
def test_the_model_finds_in_scales_of_groups_of_a_fixed_capacity(name: str) -> None:
    case = case_of(OWN, "masked", COUNTS["whole tiles"], "scaled residual wide")

    assert is_found(case, MASKED_SCALED_FAULTS[name]) in {"wrong result", "deadlock"}


@pytest.mark.parametrize("name", SCALED_FAULTS)
def test_the_model_finds_in_scales(name: str) -> None:
    form, change, kinds = SCALED_FAULTS[name]
    case = case_of(TILES["few stages"], form, ENDS["empty groups"], "scaled residual")

    assert is_found(case, change) in kinds
