"""`hopper.grouped` as the tuner sees a kernel: its configs, and how one is compiled and launched.

Problems are those of `core.grouped`. A launch takes A, B, the result and `offs`.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from outblas.base.machines import Machine
from outblas.base.space import Footprint, Space
from outblas.call.grouped import GroupedProblem
from outblas.hopper.gemm import group_host as host
from outblas.hopper.gemm import heuristic, packed, rule_tiles, term_mask
from outblas.hopper.gemm.config import Config as Config
from outblas.hopper.gemm.config import grouped_reason
from outblas.hopper.gemm.group_variant import variant_of
from outblas.hopper.gemm.traits import CAPACITIES
from outblas.hopper.parts.config import SHARED_MEMORY, WARPGROUP, HopperConfig, compile_key
from outblas.hopper.parts.search_space import footprint_of

GROUPED = True  # that it takes problems of groups
# tile_m, consumers
_TILES = ((64, 1), (128, 2), (192, 3), (256, 2))
# Whole epilogue subtiles of 64 columns. With other widths the last one overlaps its neighbour, and
# the model of grouped products in tests/protocol does not allow that, so they are not proved.
_WIDTHS = (64, 128, 192, 256)
_CLUSTERS = ((1, 1), (2, 1), (1, 2))
_SCHEDULE_BYTES = 4 * CAPACITIES[-1]  # of the schedule that lies beside the stages


def space(problem: GroupedProblem, machine: Machine) -> Space[HopperConfig]:
    """Returns the configs for a problem; the default is the rule's. As many stages as fit are used,
    or one less, which leaves L2 some room.
    """
    own = host.config_for(problem, heuristic.rates(machine))
    return Space(
        own=own,
        axes={},
        also=_configs(own, problem),
        invalid_reason=partial(_invalid_reason, problem, own),
        footprint=_footprint,
        compile_key=_compile_key,
    )


def unsupported(problem: GroupedProblem, config: HopperConfig) -> str | None:
    """Returns why the kernel cannot compute a product with a config; None if it can."""
    reason = host.unsupported(problem) or _unbuildable_reason(config)
    if reason is None and problem.form == "ragged_k":
        return _undivided_reason(config)
    return reason


def plan(problem: GroupedProblem, config: HopperConfig) -> Callable[..., None]:
    """Returns the function that launches the kernel. It takes A, B, the result and `offs`."""
    launch: Callable[..., None] = host.launch(problem, config)
    return launch


def precompile(problem: GroupedProblem, config: HopperConfig, arch: int) -> None:
    """Compiles a config into the cache, with or without a GPU. Raises ValueError for a GPU that the
    kernel does not run on.
    """
    if arch != 90:
        raise ValueError(f"arch is {arch}, expected 90")
    packed.keep(variant_of(problem, config))


def _compile_key(config: HopperConfig) -> HopperConfig:
    """Returns the config whose compiled kernel also serves this one. Tiles in the order of rows are
    a variant of their own here.
    """
    kept = compile_key(config)
    return replace(kept, order="row") if config.order == "row" else kept


def _configs(own: HopperConfig, problem: GroupedProblem) -> Iterator[HopperConfig]:
    """Yields configs that differ from the rule's in the tile, the clusters and the stages, and in
    the order of tiles where results are written that few terms make.
    """
    yield from _shapes(own)
    if problem.writes_more_than_it_reads:
        order = Config().order if own.order == "row" else "row"
        yield from _shapes(replace(own, order=order))


def _shapes(own: HopperConfig) -> Iterator[HopperConfig]:
    """Yields configs that differ from the rule's in the tile, the clusters and the stages."""
    for tile_m, consumers in _TILES:
        for cluster_m, cluster_n in _CLUSTERS:
            shaped = rule_tiles.shaped(own, tile_m, consumers, cluster_m, cluster_n)
            for tile_n in _WIDTHS:
                most = _beside_schedule(rule_tiles.filled(replace(shaped, tile_n=tile_n)))
                yield most
                if most.stages > 3:
                    yield replace(most, stages=most.stages - 1)


def _beside_schedule(config: HopperConfig) -> HopperConfig:
    """Returns the config with a stage less where the schedule needs its room."""
    fits = config.shared_memory_bytes + _SCHEDULE_BYTES <= SHARED_MEMORY
    return config if fits or config.stages < 2 else replace(config, stages=config.stages - 1)


def _unbuildable_reason(config: HopperConfig) -> str | None:
    if config.shared_memory_bytes + _SCHEDULE_BYTES > SHARED_MEMORY:
        return (
            f"the tiles and the schedule need {config.shared_memory_bytes + _SCHEDULE_BYTES} bytes "
            f"of shared memory, expected at most {SHARED_MEMORY}"
        )
    return grouped_reason(config)


def _undivided_reason(config: HopperConfig) -> str | None:
    """Returns why the consumers cannot clear terms of another group from a stage; None if they
    can.
    """
    threads = config.consumers * WARPGROUP
    for name, columns in (("tile_m", config.tile_m), ("tile_n", config.tile_n)):
        if not term_mask.divides(columns, config.tile_k, threads):
            return f"{name} is {columns}, expected one that {threads} threads divide evenly"
    return None


def _invalid_reason(problem: GroupedProblem, own: HopperConfig, config: HopperConfig) -> str | None:
    if reason := unsupported(problem, config):
        return reason
    if config == own:
        return None
    if config.tile_n > max(_WIDTHS[0], problem.N):
        return f"tile_n is {config.tile_n}, expected at most {problem.N}, the columns of a group"
    if config.cluster_n > 1 and config.tile_n * config.cluster_n > problem.N:
        return (
            f"a cluster has {config.tile_n * config.cluster_n} columns, expected at most "
            f"{problem.N}"
        )
    return None


def _footprint(config: Any) -> Footprint:
    return footprint_of(config, config.consumers + 1, persistent=True)
