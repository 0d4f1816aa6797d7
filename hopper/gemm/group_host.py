"""The host side of `hopper.grouped`: what it supports, how it chooses a config, how it launches."""

import functools
import math
from dataclasses import replace
from typing import Any

import torch

from outblas.base import configs
from outblas.base.cuda_graphs import capturing, not_ready
from outblas.core.epilogue import View
from outblas.core.fp8 import BLOCK
from outblas.core.grouped import (
    FEW_ROWS,
    GATHERING_COLUMNS,
    NO_TENSORS,
    GroupedProblem,
    GroupedTensors,
)
from outblas.core.sm_carveout import reserved
from outblas.hopper.gemm import group_layouts as layouts
from outblas.hopper.gemm import rule_cycles, rule_tiles
from outblas.hopper.gemm.compile import compile_variant
from outblas.hopper.gemm.group_variant import (
    are_scales_wide,
    has_whole_halves,
    turns,
    variant_of,
)
from outblas.hopper.gemm.kernel import Config
from outblas.hopper.gemm.rule_cycles import Rates, device_rates
from outblas.hopper.gemm.scale_layout import GRANULE
from outblas.hopper.gemm.traits import CAPACITIES
from outblas.hopper.parts import bounds, compile, tile_order
from outblas.hopper.parts.config import SHARED_MEMORY, HopperConfig, stage_scales
from outblas.runtime import hooks

Tensor = torch.Tensor

MOST_GROUPS = CAPACITIES[-1]  # whose schedule fits beside the stages
_DTYPES = (torch.bfloat16, torch.float16)
# tile_m, consumers, cluster_m, cluster_n, tile_n
_TILES = (
    (128, 2, 2, 1, 256),
    (128, 2, 1, 2, 256),
    (128, 2, 1, 1, 256),
    (128, 2, 2, 1, 192),
    (128, 2, 2, 1, 128),
    (128, 2, 1, 1, 128),
    (64, 1, 1, 1, 128),
    (64, 1, 1, 1, 64),
)
# The same for scales that vary along K. Each consumer adds up 64 rows of a tile at a time.
_SCALED_TILES = (
    (256, 2, 1, 2, 128),
    (256, 2, 1, 1, 128),
    (128, 2, 2, 1, 128),
    (128, 2, 1, 1, 128),
    (64, 1, 1, 1, 128),
    (64, 1, 1, 1, 64),
)
# Of gated pairs whose halves have whole blocks of 128 columns. A stage sums one half after the
# other. 64 rows with as many columns were slower than 128×128, and nobody timed them where groups
# have few rows.
_SCALED_PAIRS = (
    (128, 2, 1, 2, 256),
    (128, 2, 2, 1, 256),
    (128, 2, 1, 1, 256),
)
LOADING_REGISTERS = 56  # of warps that copy
TMA_REGISTERS = 40  # of warps that only start TMA loads
_REGISTERS_OF_THREE = 504  # of a thread each of three warpgroups
# An estimate of the cycles between two tiles of a CTA: finding a group, the first load, the last
# store. The other constants of the model are those of `gemm.rule_cycles`.
_TILE_CYCLES = 1500.0
# The bytes of results that tiles of 64×128 with few terms write, by cycle and SM: a tile every
# 1,270 cycles. That is what the DRAM of an H100 takes, and less than that of an H200 does.
_SMALL_TILES_WRITE = 12.9
_DRAM_TAKES = 0.8  # of its peak, of results


@functools.lru_cache(maxsize=4096)  # as `launch`
def unsupported(problem: GroupedProblem) -> str | None:
    """Returns why the kernel cannot take a product on an sm_90 GPU; None if it can."""
    if problem.scales is not None:
        if reason := layouts.words_reason(problem):
            return reason
        problem = layouts.in_words(problem)
    if problem.dtype not in _DTYPES:
        return f"it supports bfloat16 and float16, but was given {problem.dtype}"
    if problem.capacity and problem.zero_tail:
        return "it sets no rows to zero where groups have places of their own"
    if layouts.has_tail(problem) and _beside_the_product(problem):
        return (
            "it sets rows behind the last group to zero only without an epilogue and a scatter, "
            f"but was given {_beside_the_product(problem)}"
        )
    most = MOST_GROUPS - layouts.has_tail(problem)
    if problem.groups > most:
        return f"it supports {most} groups, but was given {problem.groups}"
    rows = layouts.rows_of_a(problem)
    extents = problem.M, problem.N, problem.K, rows
    if problem.K < 1 or max(extents) > bounds.LARGEST:
        return (
            f"it supports extents of 1 to {bounds.LARGEST}, but was given "
            f"{problem.M}x{problem.N}x{problem.K}"
        )
    if problem.gathers and (rows < 1 or rows * problem.a[0] // 8 >= 2**31):
        return (
            "it gathers from 1 or more rows, which span less than 2**34 elements, but was given "
            f"{rows} rows with strides {problem.a}"
        )
    return _unusable_reason(problem)


def _beside_the_product(problem: GroupedProblem) -> str:
    """Returns what a call asks for besides the products, or ""."""
    scatter = "scatter_index" if problem.scatters else ""
    return ", ".join(text for text in (str(problem.epilogue), scatter) if text)


def _unusable_reason(problem: GroupedProblem) -> str | None:
    """Returns why TMA cannot move an operand or the result; None if it can."""
    operands = (problem.a, problem.alignment[0]), (problem.b, problem.alignment[1])
    found = layouts.matrix_strides(problem)
    for name, (strides, alignment), usable in zip(problem.names, operands, found, strict=True):
        outer_fits = all(stride > 0 and stride % 8 == 0 for stride in strides[:-2])
        if alignment < 16 or usable is None or not outer_fits:
            given = strides[:-2] + strides[:-3:-1] if problem.exchanged else strides
            return (
                "it needs operands at multiples of 16 bytes, contiguous in a dimension that is not "
                "divided among groups, with other strides that are positive multiples of 8, but "
                f"{name} has strides {given} at an address that is a multiple of {alignment}"
            )
    return _unusable_result(problem) or _unusable_halves(problem)


def _unusable_result(problem: GroupedProblem) -> str | None:
    """Returns why rows of the result, or of x, cannot be stored; None if they can. Ragged columns
    are stored element by element, because they begin at any address.
    """
    if problem.exchanged:
        if problem.out[0] == 1:
            return None
        return f"it needs contiguous rows of the result, but was given strides {problem.out[::-1]}"
    stored = {"the result": View(problem.out, problem.alignment[2])}
    if problem.epilogue.aux is not None:
        stored["aux"] = problem.epilogue.aux
    for name, view in stored.items():
        granule = layouts.granule(problem)
        if not layouts.in_granules(problem, view) or problem.columns % granule:
            return (
                f"it needs rows of {name} that begin and end at multiples of 16 bytes, but was "
                f"given {problem.columns} columns with strides {view.strides}"
            )
    return None


def _unusable_halves(problem: GroupedProblem) -> str | None:
    """Returns why TMA cannot read both halves of gated pairs; None if it can."""
    _, strides = layouts.matrix_strides(problem)
    has_contiguous_rows = strides is not None and strides[1] == 1
    if problem.epilogue.gated and has_contiguous_rows and problem.columns % 8:
        return (
            "it needs halves of mat_b that begin at multiples of 16 bytes, but was given "
            f"{problem.N} contiguous columns for an activation that pairs them"
        )
    return None


def config_for(problem: GroupedProblem, rates: Rates) -> HopperConfig:
    """Chooses the tile with the fewest cycles by a simple model, for groups of equal size. fp8
    operands are in words, of which tensor cores multiply as many in a cycle as of 16-bit values.

    Where DRAM bounds the call, small tiles share the work more evenly: groups of few rows wait for
    the weights, sums of few terms for the results to be written. Measured on an H100; the DRAM of
    an H200 takes results faster than small tiles write them (WORKLOG.md).
    """
    problem = replace(problem, M=problem.expected_rows)
    few_rows = problem.form == "ragged_m" and problem.M / problem.groups <= FEW_ROWS
    candidates = _gathering() if problem.gathers else _candidates()
    if problem.scales is not None:
        candidates = _scaling(
            problem.scales.columns,
            problem.epilogue.gated,
            _loading_registers(problem),
            are_scales_wide(problem),
        )
        if has_whole_halves(problem):
            candidates = _pairing() + tuple(c for c in candidates if c.tile_m == 64)
    small = [config for config in candidates if config.tile_m == 64]
    best = min(
        small if few_rows else candidates,
        key=lambda config: _predicted_cycles(config, problem, rates),
    )
    cycles, dram = _cycles(best, problem, rates)
    if problem.form == "ragged_k" and dram > cycles:
        return _writing(problem, small[0], candidates, rates)
    return best


def _writing(
    problem: GroupedProblem,
    small: HopperConfig,
    candidates: tuple[HopperConfig, ...],
    rates: Rates,
) -> HopperConfig:
    """Returns the config for results that wait for DRAM: a small one where that writes them as fast
    as DRAM takes them, else a large one without a cluster, whose tiles follow the rows of the
    result.
    """
    taken = _DRAM_TAKES * rates.dram_bytes_per_clock / rates.sms
    if taken <= _SMALL_TILES_WRITE or problem.scales is not None:
        return small
    large = [config for config in candidates if config.tile_m == 128 and config.cluster == 1]
    best = min(large, key=lambda config: _predicted_cycles(config, problem, rates))
    return replace(best, order="row")


def _predicted_cycles(config: HopperConfig, problem: GroupedProblem, rates: Rates) -> float:
    """Returns the cycles of a call in the model, in which loads from DRAM overlap with products."""
    cycles, dram = _cycles(config, problem, rates)
    return float((cycles**4 + dram**4) ** 0.25)


def _candidates() -> tuple[HopperConfig, ...]:
    return _shaped(_TILES)


@functools.cache
def _shaped(tiles: tuple[tuple[int, int, int, int, int], ...]) -> tuple[HopperConfig, ...]:
    base = replace(Config(), k_serpentine=False, gpc_local=False, stagger="never")
    found = []
    for tile_m, consumers, cluster_m, cluster_n, tile_n in tiles:
        shaped = rule_tiles.shaped(base, tile_m, consumers, cluster_m, cluster_n)
        found.append(rule_tiles.filled(replace(shaped, tile_n=tile_n)))
    return tuple(found)


@functools.cache
def _scaling(
    block_b: int, gated: bool, loading_registers: int = LOADING_REGISTERS, wide: bool = False
) -> tuple[HopperConfig, ...]:
    """Returns the candidates for scales that vary along K, of which `block_b` columns of B share
    one. They leave room for the sums of a stage, and for its scales. The warp that copies scales
    has `loading_registers`, more than those that start TMA loads need. Consumers with 128 rows have
    none left for the scales of both halves of gated pairs, and the warp has none for the addresses
    in a cluster where each column has a scale, unless TMA loads `wide` ones.
    """
    return tuple(
        _with_room_for_scales(_with_registers_to_load(config, loading_registers), block_b)
        for config in _shaped(_SCALED_TILES)
        if config.tile_m <= (128 if gated and block_b > 1 else 256)
        and (wide or not (config.tile_m == 256 and config.cluster > 1 and block_b == 1))
    )


@functools.cache
def _pairing() -> tuple[HopperConfig, ...]:
    """Returns the candidates for gated pairs with halves of whole blocks."""
    return tuple(
        _with_room_for_scales(_with_registers_to_load(replace(config, mma_n=BLOCK)), BLOCK)
        for config in _shaped(_SCALED_PAIRS)
    )


def _loading_registers(problem: GroupedProblem) -> int:
    """Returns how many registers a thread has that copies scales. Where each column has one, the
    addresses of 256 rows and 128 columns need 64, unless an epilogue leaves none for them: measured
    by what ptxas spills.
    """
    epilogue = problem.epilogue
    adds = epilogue.bias is not None or epilogue.residual is not None
    if problem.form != "ragged_k":
        return LOADING_REGISTERS
    if are_scales_wide(problem):
        return TMA_REGISTERS
    frees = adds or (problem.out_dtype.itemsize == 2 and not epilogue.gated)
    return 64 if frees else LOADING_REGISTERS


def _with_registers_to_load(
    config: HopperConfig, registers: int = LOADING_REGISTERS
) -> HopperConfig:
    """Returns the config with registers for warps that copy more than they start TMA loads, of
    which two consumers leave so many.
    """
    if not config.producer_registers:
        return config
    consumer_registers = (_REGISTERS_OF_THREE - registers) // 2 // 8 * 8
    return replace(config, producer_registers=registers, consumer_registers=consumer_registers)


def _with_room_for_scales(config: HopperConfig, block_b: int) -> HopperConfig:
    """Returns the config with as many stages as fit beside their scales and the schedule. Where few
    fit, another stage is worth more than an epilogue stage, as in `rule_tiles.filled`.
    """
    most = SHARED_MEMORY - 4 * MOST_GROUPS
    while True:
        scales = 4 * config.stages * (stage_scales(config, block_b) + GRANULE)
        if config.shared_memory_bytes + scales <= most:
            return config
        if config.stages < 5 and config.epilogue_stages > 1:
            config = replace(config, epilogue_stages=1)
        else:
            config = replace(config, stages=config.stages - 1)


@functools.cache
def _gathering() -> tuple[HopperConfig, ...]:
    """Returns the candidates for gathered rows. Those of a CTA are its own, so no cluster shares
    them, and one that shares B gains nothing (WORKLOG.md). The warps that gather need more
    registers than those that start TMA loads.
    """
    return tuple(_with_registers_to_load(config) for config in _candidates() if config.cluster == 1)


def _cycles(config: HopperConfig, problem: GroupedProblem, rates: Rates) -> tuple[float, float]:
    """Returns the cycles of the SMs, and those of DRAM, for groups of equal size."""
    M, N, K, groups = problem.M, problem.N, problem.K, problem.groups
    epilogue = problem.epilogue
    # The columns of all matrices that lie as the result does.
    results = problem.columns * (1 if epilogue.residual is None else 2)
    results += 0 if epilogue.aux is None else N
    together = 1 if turns(problem, config) else config.cluster_m  # tile rows that are used or not
    rows = config.tile_m * together
    if problem.form == "ragged_m":
        groups = min(groups, max(M, 1))
        # A group ends in the middle of a tile on average.
        mean = M / groups
        tile_rows = groups * (1.0 if mean <= rows else mean / rows + 0.5)
        moved, depth = M * K + groups * K * N + M * results, float(K)
    else:
        tile_rows = groups * math.ceil(M / rows)
        moved, depth = (M + N) * K + groups * M * results, K / groups + config.tile_k / 2
    columns = config.tile_n * config.cluster_n
    tiles = tile_rows * together * math.ceil(N / columns) * config.cluster_n
    products = 2 * config.tile_m * config.tile_n * depth / (rule_cycles.REACHED * 4096)
    own_rows = config.tile_m / config.cluster_n + config.tile_n / config.cluster_m
    loads = 2 * own_rows * depth / rule_cycles.STEADY_BYTES
    tile = (products**3 + loads**3) ** (1 / 3) + _TILE_CYCLES
    dram = 2 * moved / rates.dram_bytes_per_clock
    return math.ceil(tiles / rates.sms) * tile, dram


def run(
    problem: GroupedProblem,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    offs: Tensor,
    tensors: GroupedTensors,
) -> None:
    """Computes a product that `unsupported` does not refuse.

    Raises RuntimeError while a CUDA graph is captured, if a kernel is needed for the first time.
    """
    if 0 in (problem.M, problem.N):
        return
    launched = gathered(problem)
    if launched is not problem:
        a, tensors = _gathered_tensors(launched, a, tensors)
    launch(launched, carveout=reserved())(a, b, out, offs, tensors)


def gathered(problem: GroupedProblem) -> GroupedProblem:
    """Returns the product that is launched: where rows are gathered into memory before the kernel
    multiplies them, one without an index.
    """
    if not problem.gathers or (problem.N <= GATHERING_COLUMNS and problem.scales is None):
        return problem
    vector = 8 if problem.scales is None else 16
    scales = problem.scales
    if scales is not None:  # by columns, as TMA loads them
        scales = replace(scales, a=(0, 1, problem.M), alignment=(16, scales.alignment[1]))
    return replace(
        problem,
        a=(-(-problem.K // vector) * vector, 1),
        gathers=False,
        rows_of_a=problem.M,
        alignment=(16, *problem.alignment[1:]),
        scales=scales,
    )


def _gathered_tensors(
    problem: GroupedProblem, a: Tensor, tensors: GroupedTensors
) -> tuple[Tensor, GroupedTensors]:
    """Returns A and the tensors of a product that `gathered` returns, in memory of their own."""
    assert tensors.a_index is not None
    chosen = tensors.a_index.clamp(0, a.shape[0] - 1)
    values = a if problem.scales is None else a.view(torch.uint8)
    rows = values.new_empty(problem.M, problem.a[0])[:, : problem.K]
    torch.index_select(values, 0, chosen, out=rows)
    tensors = tensors._replace(a_index=None)
    if tensors.scale_a is not None:
        scale_a = tensors.scale_a.t().index_select(1, chosen).t()
        tensors = tensors._replace(scale_a=scale_a)
    return rows.view(a.dtype), tensors


def _tuned(problem: GroupedProblem) -> HopperConfig | None:
    """Returns the config that a sweep found for a product, on this machine or in a table that ships
    with outblas; None where there is none.
    """
    text = hooks.tuner.get().grouped_config(problem)
    return configs.from_text(Config, text) if text else None


# As many shapes as a model with experts has, many times over.
@functools.lru_cache(maxsize=4096)
def launch(problem: GroupedProblem, config: HopperConfig | None = None, carveout: int = 0) -> Any:
    """Returns the function that launches the kernel for a supported product with a config, by
    default one that was tuned for it, else that of `config_for`. A product keeps the config
    that its first launch took. `carveout`: the SMs that are left to other kernels.
    """
    problem = layouts.in_words(problem)
    if config is None:
        config = _tuned(problem) or config_for(problem, device_rates(problem.device))
    if carveout:
        config = tile_order.within(problem.device, config, carveout)
    variant = variant_of(problem, config)
    if capturing(problem.device) and not compile.is_loaded(variant):
        raise not_ready()
    compiled = compile.load(variant, lambda: compile_variant(variant))
    clusters = tile_order.clusters(problem.device, config.sms, config.cluster)
    strides_a, strides_b = layouts.matrix_strides(problem)
    assert strides_a is not None, "`unsupported` refuses other strides"
    assert strides_b is not None, "`unsupported` refuses other strides"
    shape_b, lead = (problem.K, problem.N), problem.b[:-2]
    whole_b = (problem.groups, *shape_b) if lead else shape_b
    of_words = problem.scales is not None

    def launch_kernel(
        a: Tensor, b: Tensor, out: Tensor, offs: Tensor, tensors: GroupedTensors = NO_TENSORS
    ) -> None:
        if of_words:
            a, b = a.view(torch.bfloat16), b.mT.view(torch.bfloat16).mT
        compiled(
            a.as_strided((layouts.rows_of_a(problem), problem.K), strides_a),
            b.as_strided(whole_b, (*lead, *strides_b)),
            out,
            offs,
            None,  # addend
            tensors.bias,
            tensors.residual,
            tensors.aux,
            tensors.scale_a,
            tensors.scale_b,
            None,  # scale_out
            tensors.scatter_index,
            tensors.scatter_weights,
            tensors.a_index,
            None,  # sums, counters
            None,
            1,  # partitions of K
            clusters,
            1.0,  # alpha, beta
            0.0,
        )

    return launch_kernel
