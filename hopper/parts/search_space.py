"""The search space of the Hopper rungs: the axes that a rung understands, and the pruning of
configs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outblas.base.machines import Machine
from outblas.base.space import Axes, Footprint, Space
from outblas.call.problem import Problem
from outblas.hopper.parts.config import (
    ACCUMULATOR_LIMIT,
    MAX_STAGES,
    SHARED_MEMORY,
    WARPGROUP,
    HopperConfig,
    compile_key,
)

if TYPE_CHECKING:
    from outblas.hopper.parts.base import HopperGemm

Unsupported = Callable[[Problem], str | None]

_STAGES = (2, 3, 4, 5, 6, 8)
_SINGLE = ((64, 1, 0, 0), (128, 1, 0, 0))
_MULTIPLE = ((128, 2, 24, 240), (192, 3, 32, 160), (256, 2, 24, 240))
_AXES: Axes = {
    ("tile_m", "consumers", "producer_registers", "consumer_registers"): _SINGLE + _MULTIPLE,
    "tile_n": (64, 128, 192, 256),
    "stages": _STAGES,
    "in_flight": (0, 1),
    ("cluster_m", "cluster_n"): ((1, 1), (2, 1), (1, 2)),
    "sms": (0, 128),
    "epilogue_stages": (1, 2, 4),
}


def space(
    gemm: type[HopperGemm],
    own: HopperConfig,
    unsupported: Unsupported,
    problem: Problem,
    machine: Machine,
) -> Space[HopperConfig]:
    """Returns the configs of a rung for a problem. The limits of the GPU are those of sm_90, in
    `invalid_reason`.
    """
    understood = gemm.understood()
    axes: dict[str | tuple[str, ...], tuple[Any, ...]] = {}
    for axis, values in _AXES.items():
        fields = (axis,) if isinstance(axis, str) else axis
        kept = [i for i, field in enumerate(fields) if field in understood]
        tuples = [(value,) if isinstance(axis, str) else value for value in values]
        if kept:
            axes[tuple(fields[i] for i in kept)] = tuple(
                dict.fromkeys(tuple(t[i] for i in kept) for t in tuples)
            )

    unsupported_reason = unsupported(problem)

    def invalid_reason(config: HopperConfig) -> str | None:
        reason = unsupported_reason or gemm.invalid_reason(config)
        if reason or config == own:
            return reason
        return pruned_reason(config, "stages" in understood, machine, problem)

    def describe(config: HopperConfig) -> Footprint:
        return footprint_of(config, gemm(config, width=1).warpgroups, gemm.persistent)

    return Space(
        own=own,
        axes=axes,
        invalid_reason=invalid_reason,
        footprint=describe,
        compile_key=compile_key,
    )


def pruned_reason(
    c: HopperConfig, pipelined: bool, machine: Machine, problem: Problem
) -> str | None:
    """Returns why a config that can be built cannot be the fastest, or is equivalent to another
    config; else None.
    """
    if c.accumulator_registers > ACCUMULATOR_LIMIT:
        return (
            f"{c.accumulator_registers} accumulators per thread spill, expected at most "
            f"{ACCUMULATOR_LIMIT}"
        )
    if pipelined and c.stages not in (
        deep := [stages for stages in _STAGES if stages <= _most_stages(c)][-2:]
    ):
        return (
            f"stages is {c.stages}, expected {' or '.join(map(str, deep))}: they fit, and "
            "depth costs nothing but shared memory"
        )
    if c.epilogue_stages == 1 < c.epilogue_subtiles:
        return (
            f"epilogue_stages is {c.epilogue_stages} of {c.epilogue_subtiles} epilogue subtiles, "
            "expected 2: each would wait for the previous one"
        )
    if c.sms and c.sms >= machine.sms:
        return f"sms is {c.sms}, expected fewer than the {machine.sms} of the GPU: 0 uses them all"
    if c.cluster_m > 1 and c.tile_m >= problem.M:
        return f"cluster_m is {c.cluster_m}, expected 1: one tile covers all {problem.M} rows"
    if c.cluster_n > 1 and c.tile_n >= problem.N:
        return f"cluster_n is {c.cluster_n}, expected 1: one tile covers all {problem.N} columns"
    return None


def _most_stages(c: HopperConfig) -> int:
    """Returns the largest number of stages that fits besides the epilogue stages."""
    fixed = replace(c, stages=0).shared_memory_bytes
    return min(MAX_STAGES, (SHARED_MEMORY - fixed) // c.stage_bytes)


def footprint_of(c: HopperConfig, warpgroups: int, persistent: bool) -> Footprint:
    """Describes the resources that a config uses on a GPU, in CTAs of `warpgroups` warpgroups."""
    return Footprint(
        math="wgmma",
        tile_m=c.tile_m,
        tile_n=c.tile_n,
        tile_k=c.tile_k,
        stages=c.stages,
        threads=WARPGROUP * warpgroups,
        registers=c.accumulator_registers + 40,
        shared_memory=c.shared_memory_bytes,
        groups=c.consumers,
        in_flight=c.in_flight > 0,
        cluster_m=c.cluster_m,
        cluster_n=c.cluster_n,
        persistent=persistent,
        sms=c.sms,
        order=c.order,
        group_m=c.group_m,
        group_n=c.group_n,
        store="staged" if c.epilogue_stages else "wide" if c.reorder_stores else "registers",
    )
