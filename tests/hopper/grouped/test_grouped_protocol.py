"""hopper.grouped on the model of the Hopper kernels' protocols (`protocol`): its own source under
random and adversarial delays, and the faults that the model has to find.
"""

from dataclasses import replace

import pytest
from protocol.fault import ProtocolFault
from protocol.faults import Change
from protocol.grouped import GroupedCase, simulate_grouped

from outblas.hopper.core.config import HopperConfig
from outblas.hopper.gemm import heuristic
from outblas.hopper.gemm.kernel import Config

OWN = replace(
    Config(), cluster_m=1, tile_n=128, k_serpentine=False, gpc_local=False, stagger="never"
)
TILES = {
    "two consumers": OWN,
    "one consumer": replace(heuristic.shaped(OWN, 64, 1, 1, 1), tile_n=64, epilogue_stages=1),
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


def case_of(
    config: HopperConfig, form: str, ends: tuple[int, ...], zero_tail: bool = False
) -> GroupedCase:
    columns = config.tile_n * config.cluster_n * 2
    if form == "ragged_m":
        return GroupedCase(
            config, form, ends, 512, columns, 3, K=config.tile_k * 6, zero_tail=zero_tail
        )
    return GroupedCase(config, form, ends, 512, columns, 3, M=256)


def runs_clean(case: GroupedCase, seed: int, slow: dict[str, float] | None = None) -> None:
    try:
        simulate_grouped(case, seed, slow=slow)
    except ProtocolFault as fault:
        pytest.fail(f"{fault}\nseed {seed}, {case}")


@pytest.mark.parametrize("ends", [pytest.param(v, id=k) for k, v in ENDS.items()])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("form", ["ragged_m", "ragged_k"])
def test_every_group_gets_its_product_in_every_timing(
    form: str, tile: str, ends: tuple[int, ...]
) -> None:
    for seed in range(3):
        runs_clean(case_of(TILES[tile], form, ends), seed)


@pytest.mark.parametrize("tile", TILES)
def test_what_is_left_over_gets_zeros(tile: str) -> None:
    for seed in range(3):
        runs_clean(case_of(TILES[tile], "ragged_m", (100, 100, 333), zero_tail=True), seed)


@pytest.mark.parametrize("slow", ["load A", "load B", "wgmma", "store", "wake"])
@pytest.mark.parametrize("form", ["ragged_m", "ragged_k"])
def test_one_kind_of_delay_a_thousand_times_as_long_as_the_others(form: str, slow: str) -> None:
    for seed in range(1, 4):
        runs_clean(case_of(OWN, form, (70, 130, 400)), seed, slow={slow: 100_000.0})


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
        Change("grouped.schedule", "begin, terms, Int32(1))", "begin, terms, Int32(0))"),
        {"wrong result"},
    ),
    "an empty group multiplies the terms of the next one": (
        "ragged_k",
        Change(
            "grouped.schedule",
            "        begin, terms = params.extent, Int32(config.tile_k)\n",
            "        terms = Int32(config.tile_k)\n",
        ),
        {"wrong result"},
    ),
    "tiles are looked up before the schedule is written": (
        "ragged_m",
        Change(
            "gemm.kernel",
            "        schedule = self.begin_schedule(smem, schedule, context)\n"
            "        self.cluster_sync()\n",
            "        self.cluster_sync()\n"
            "        schedule = self.begin_schedule(smem, schedule, context)\n",
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


@pytest.mark.parametrize("name", FAULTS)
def test_the_model_finds(name: str) -> None:
    form, change, kinds = FAULTS[name]
    case = case_of(OWN, form, ENDS["empty groups"])

    def in_some_timing() -> None:
        for seed in range(12):
            simulate_grouped(case, seed, patches=(change,))

    with pytest.raises(ProtocolFault) as found:
        in_some_timing()

    assert found.value.kind in kinds
