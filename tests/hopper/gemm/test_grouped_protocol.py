"""hopper.grouped on the model of the Hopper kernels' protocols (`protocol`): its own source under
random and adversarial delays, and the faults that the model has to find.
"""

from dataclasses import replace

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
TILES = {
    "two consumers": OWN,
    "one consumer": replace(rule_tiles.shaped(OWN, 64, 1, 1, 1), tile_n=64, epilogue_stages=1),
    "B multicast": replace(OWN, cluster_m=2),
    "A multicast": replace(OWN, cluster_n=2),
    "few stages": replace(OWN, stages=2, epilogue_stages=1),
}
ENDS = {
    "one group": (400,),
    "empty groups": (0, 130, 130, 400, 400),
    "a row each": (1, 2, 3, 4),
    "whole tiles": (128, 384, 512),
    "nothing": (0, 0),
}
THREE_ENDS = ENDS["empty groups"], ENDS["whole tiles"], (1, 200)  # one for each of three timings


EPILOGUES = ("residual", "aux", "gated", "gated residual aux")


def case_of(
    config: HopperConfig,
    form: str,
    ends: tuple[int, ...],
    zero_tail: bool = False,
    epilogue: str = "",
) -> GroupedCase:
    columns = config.tile_n * config.cluster_n * 2 // (2 if "gated" in epilogue else 1)
    given = GroupedCase(config, form, ends, 512, columns, 3, epilogue=frozenset(epilogue.split()))
    if form == "ragged_m":
        return replace(given, K=config.tile_k * 6, zero_tail=zero_tail)
    return replace(given, M=256)


def runs_clean(case: GroupedCase, seed: int, slow: dict[str, float] | None = None) -> None:
    try:
        simulate_grouped(case, seed, slow=slow)
    except ProtocolFault as fault:
        pytest.fail(f"{fault}\nseed {seed}, {case}")


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("form", ["ragged_m", "ragged_k"])
def test_every_group_gets_its_product_in_every_timing(
    form: str, tile: str, ends: str, timing: int
) -> None:
    seed = (timing + [*TILES].index(tile) + [*ENDS].index(ends)) % 3

    runs_clean(case_of(TILES[tile], form, ENDS[ends]), seed)


@pytest.mark.parametrize("tile", TILES)
def test_tiles_of_terms_may_follow_each_other_along_rows(tile: str) -> None:
    for seed, ends in enumerate((ENDS["empty groups"], ENDS["whole tiles"], ENDS["a row each"])):
        runs_clean(case_of(replace(TILES[tile], order="row"), "ragged_k", ends), seed)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("tile", TILES)
def test_what_is_left_over_gets_zeros(tile: str, timing: int) -> None:
    seed = (timing + [*TILES].index(tile)) % 3

    runs_clean(case_of(TILES[tile], "ragged_m", (100, 100, 333), zero_tail=True), seed)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("form", ["ragged_m", "ragged_k"])
def test_an_epilogue_is_each_groups_own(form: str, tile: str, epilogue: str, timing: int) -> None:
    """Every tile and every epilogue with each of three ends of groups, in one timing together."""
    seed = (timing + [*TILES].index(tile) + EPILOGUES.index(epilogue)) % 3

    runs_clean(case_of(TILES[tile], form, THREE_ENDS[seed], epilogue=epilogue), seed)


@pytest.mark.parametrize("tile", TILES)
def test_registers_are_stored_to_the_rows_of_a_group(tile: str) -> None:
    """Which is how ragged columns are stored."""
    for seed, ends in enumerate(THREE_ENDS):
        runs_clean(case_of(TILES[tile], "ragged_m", ends, epilogue="unstaged"), seed)


SCATTERING = "scatter", "scatter aux", "scatter gated aux"


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("epilogue", SCATTERING)
@pytest.mark.parametrize("tile", TILES)
def test_scattered_rows_are_those_of_their_group(tile: str, epilogue: str, timing: int) -> None:
    """x beside them stays in the order of groups."""
    seed = (timing + [*TILES].index(tile) + SCATTERING.index(epilogue)) % 3

    runs_clean(case_of(TILES[tile], "ragged_m", THREE_ENDS[seed], epilogue=epilogue), seed)


COUNTS = {
    "decoding": (3, 0, 1, 64),
    "whole tiles": (128, 192, 0),
    "everything": (130, 130),
    "nothing": (0, 0),
}


def masked_case(config: HopperConfig, counts: tuple[int, ...], epilogue: str = "") -> GroupedCase:
    """Returns a call of groups with room for 192 rows each."""
    given = case_of(config, "ragged_m", counts, epilogue=epilogue)
    return replace(given, extent=192 * len(counts), capacity=192)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("tile", TILES)
def test_groups_of_a_fixed_capacity(tile: str, counts: str, timing: int) -> None:
    """Only rows that are there are stored, by TMA where a tile is full."""
    seed = (timing + [*TILES].index(tile) + [*COUNTS].index(counts)) % 3

    runs_clean(masked_case(TILES[tile], COUNTS[counts]), seed)


MASKED_EPILOGUES = *EPILOGUES, "unstaged"


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("epilogue", MASKED_EPILOGUES)
@pytest.mark.parametrize("tile", TILES)
def test_groups_of_a_fixed_capacity_with_an_epilogue(tile: str, epilogue: str, timing: int) -> None:
    """Groups without any row go with those of the first timing."""
    seed = (timing + [*TILES].index(tile) + MASKED_EPILOGUES.index(epilogue)) % 3
    for counts in [*COUNTS.values()][seed::3]:
        runs_clean(masked_case(TILES[tile], counts, epilogue), seed)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("slow", ["load A", "load B", "wgmma", "store", "wake"])
def test_groups_of_a_fixed_capacity_with_one_kind_of_long_delay(slow: str, timing: int) -> None:
    case = masked_case(TILES["few stages"], (70, 0, 130, 192), "residual")
    runs_clean(case, 1 + timing, slow={slow: 100_000.0})


def scaled_case(
    config: HopperConfig, form: str, ends: tuple[int, ...], epilogue: str = ""
) -> GroupedCase:
    """Returns a call of fp8 operands. Groups of terms have whole blocks of 128."""
    given = case_of(config, form, ends, epilogue=f"scaled {epilogue}")
    if form == "ragged_m":
        return replace(given, K=2 * given.K)
    return replace(given, ends=tuple(end // 32 * 128 for end in ends), extent=16 * 128)


TALL = replace(OWN, tile_m=256, stages=3, epilogue_stages=1)  # two times 64 rows for a consumer


SCALED_TILES = TILES | {"tall": TALL}


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("tile", SCALED_TILES)
@pytest.mark.parametrize("form", ["ragged_m", "ragged_k"])
def test_sums_are_multiplied_by_the_scales_of_their_own_stage(
    form: str, tile: str, ends: str, timing: int
) -> None:
    """Every tile and all ends of groups run in each of three timings, in one of them together."""
    seed = (timing + [*SCALED_TILES].index(tile) + [*ENDS].index(ends)) % 3

    runs_clean(scaled_case(SCALED_TILES[tile], form, ENDS[ends]), seed)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("epilogue", ["residual", "gated residual"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("form", ["ragged_m", "ragged_k"])
def test_scales_beside_an_epilogue(form: str, tile: str, epilogue: str, timing: int) -> None:
    """Stages with a residual have no scales, and a group without terms has a residual alone."""
    seed = (timing + [*TILES].index(tile) + (epilogue == "residual")) % 3

    runs_clean(scaled_case(TILES[tile], form, THREE_ENDS[seed], epilogue), seed)


def scaled_masked_case(
    config: HopperConfig, counts: tuple[int, ...], epilogue: str = ""
) -> GroupedCase:
    """Returns a call of fp8 operands whose groups have room for 192 rows each."""
    given = masked_case(config, counts, f"scaled residual {epilogue}")
    return replace(given, K=2 * given.K)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("wide", ["", "wide"])
@pytest.mark.parametrize("tile", SCALED_TILES)
def test_scales_of_groups_of_a_fixed_capacity(tile: str, wide: str, timing: int) -> None:
    """A warp copies those of rows, or TMA loads them up to the end of a group's place."""
    seed = (timing + [*SCALED_TILES].index(tile) + bool(wide)) % 3
    for counts in [*COUNTS.values()][seed::3]:
        runs_clean(scaled_masked_case(SCALED_TILES[tile], counts, wide), seed)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("tile", SCALED_TILES)
def test_scales_of_rows_that_begin_anywhere_are_loaded_from_a_granule_on(
    tile: str, timing: int
) -> None:
    """With a residual and without; each in each of three timings, in one of them together."""
    every = [*ENDS.values(), (1, 131, 262, 391, 512)]
    for number, ends in enumerate(every):
        seed = (timing + [*SCALED_TILES].index(tile) + number) % 3
        words = "wide residual" if number % 2 else "wide"
        runs_clean(scaled_case(SCALED_TILES[tile], "ragged_m", ends, words), seed)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("tile", SCALED_TILES)
def test_scales_of_rows_and_columns_of_a_group_of_terms_are_loaded(tile: str, timing: int) -> None:
    """With an epilogue and without; each in each of three timings, in one of them together."""
    epilogues = "wide", "wide residual", "wide gated"
    for number, ends in enumerate(ENDS.values()):
        place = timing + [*SCALED_TILES].index(tile) + number
        words = epilogues[number % (2 if tile == "tall" else 3)]
        runs_clean(scaled_case(SCALED_TILES[tile], "ragged_k", ends, words), place % 3)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("slow", ["load A", "load B", "load scales", "wgmma", "store", "wake"])
def test_scales_from_a_granule_on_with_one_kind_of_long_delay(slow: str, timing: int) -> None:
    case = scaled_case(TILES["few stages"], "ragged_m", (1, 131, 131, 400), "wide residual")
    runs_clean(case, 1 + timing, slow={slow: 100_000.0})


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("slow", ["load A", "load B", "copy", "wgmma", "store", "wake"])
@pytest.mark.parametrize("form", ["ragged_m", "ragged_k"])
def test_scales_with_one_kind_of_long_delay(form: str, slow: str, timing: int) -> None:
    case = scaled_case(TILES["few stages"], form, ENDS["empty groups"], "residual")
    runs_clean(case, 1 + timing, slow={slow: 100_000.0})


GATHERING = {name: config for name, config in TILES.items() if config.cluster_n == 1}


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("tile", GATHERING)
def test_gathered_rows_are_those_of_their_group(tile: str, ends: str, timing: int) -> None:
    seed = (timing + [*GATHERING].index(tile) + [*ENDS].index(ends)) % 3

    runs_clean(case_of(GATHERING[tile], "ragged_m", ENDS[ends], epilogue="gather"), seed)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("tile", GATHERING)
def test_gathered_rows_with_all_else(tile: str, timing: int) -> None:
    seed = (timing + [*GATHERING].index(tile)) % 3
    case = case_of(GATHERING[tile], "ragged_m", (100, 100, 333), True, "gather")
    runs_clean(case, seed)
    for other in ("gated aux", "scatter aux"):
        case = case_of(GATHERING[tile], "ragged_m", (1, 200), epilogue=f"gather {other}")
        runs_clean(case, seed)


def test_gathered_rows_walk_k_as_their_weights_do() -> None:
    """In both directions, which change after eight columns of tiles."""
    case = case_of(OWN, "ragged_m", (70, 400), epilogue="gather")

    runs_clean(replace(case, N=10 * OWN.tile_n), seed=1)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("slow", ["copy", "load B", "wgmma", "store", "wake", "global read"])
@pytest.mark.parametrize("tile", ["B multicast", "few stages"])
def test_gathered_rows_with_one_kind_of_long_delay(tile: str, slow: str, timing: int) -> None:
    case = case_of(GATHERING[tile], "ragged_m", (70, 130, 400), epilogue="gather")
    runs_clean(case, 1 + timing, slow={slow: 100_000.0})


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("slow", ["load A", "load B", "wgmma", "store", "wake"])
@pytest.mark.parametrize("form", ["ragged_m", "ragged_k"])
def test_one_kind_of_delay_a_thousand_times_as_long_as_the_others(
    form: str, slow: str, timing: int
) -> None:
    runs_clean(case_of(OWN, form, (70, 130, 400)), 1 + timing, slow={slow: 100_000.0})


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("slow", ["load A", "load B", "load residual", "wgmma", "store", "wake"])
@pytest.mark.parametrize(
    ("form", "epilogue"),
    [
        ("ragged_m", "gated residual aux"),
        ("ragged_m", "scatter aux"),
        ("ragged_k", "gated residual aux"),
    ],
)
def test_an_epilogue_with_one_kind_of_long_delay(
    form: str, epilogue: str, slow: str, timing: int
) -> None:
    case = case_of(TILES["few stages"], form, (70, 130, 400), epilogue=epilogue)
    runs_clean(case, 1 + timing, slow={slow: 100_000.0})


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
        Change("gemm.group_kernel", "*((half,) * (halves - 1))", "*((0,) * (halves - 1))"),
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
    case = case_of(TILES["few stages"], "ragged_m", ENDS["empty groups"], epilogue=epilogue)

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


TURNING = ENDS | {"a row left over each": (128, 512, 897, 1537), "many rows": (2176 + 129,)}


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("ends", TURNING)
@pytest.mark.parametrize("epilogue", ["", "residual", "gated aux"])
def test_clusters_turn_in_every_timing(ends: str, epilogue: str, timing: int) -> None:
    """Upright and turned clusters fill the same stages one after the other."""
    config, given = replace(TILES["few stages"], cluster_m=2), TURNING[ends]
    columns = 3 * config.tile_n // (2 if epilogue.startswith("gated") else 1)
    case = case_of(config, "ragged_m", given, epilogue=epilogue)
    seed = (timing + [*TURNING].index(ends) + len(epilogue)) % 3

    runs_clean(replace(case, extent=given[-1], N=columns), seed)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("slow", ["load A", "load B", "wgmma", "store", "wake"])
def test_clusters_turn_with_one_kind_of_long_delay(slow: str, timing: int) -> None:
    config = replace(TILES["few stages"], cluster_m=2)
    case = replace(case_of(config, "ragged_m", (128, 512, 897)), extent=897, N=3 * config.tile_n)
    runs_clean(case, 1 + timing, slow={slow: 100_000.0})


@pytest.mark.parametrize("name", MASKED_FAULTS)
def test_the_model_finds_in_groups_of_a_fixed_capacity(name: str) -> None:
    case = masked_case(OWN, COUNTS["decoding"])

    assert is_found(case, MASKED_FAULTS[name]) == "wrong result"


@pytest.mark.parametrize("name", MASKED_SCALED_FAULTS)
def test_the_model_finds_in_scales_of_groups_of_a_fixed_capacity(name: str) -> None:
    case = scaled_masked_case(OWN, COUNTS["whole tiles"], "wide")

    assert is_found(case, MASKED_SCALED_FAULTS[name]) in {"wrong result", "deadlock"}


@pytest.mark.parametrize("name", SCALED_FAULTS)
def test_the_model_finds_in_scales(name: str) -> None:
    form, change, kinds = SCALED_FAULTS[name]
    case = scaled_case(TILES["few stages"], form, ENDS["empty groups"], "residual")

    assert is_found(case, change) in kinds
