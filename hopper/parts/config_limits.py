"""Which combinations of the fields of a `HopperConfig` can be built, and for which products."""

from outblas.call.fp8 import BLOCK
from outblas.device.grid import REGISTERS
from outblas.device.raster import ORDERS
from outblas.hopper.parts.config import (
    ACCUMULATOR_LIMIT,
    MAX_STAGES,
    SHARED_MEMORY,
    STAGGERS,
    WARPGROUP,
    HopperConfig,
    stage_scales,
)

MAX_SPLIT_K = 64


def invalid_reason(config: HopperConfig) -> str | None:
    """Returns why no kernel can be built from this config, or None."""
    return (
        _tile_reason(config)
        or _pipeline_reason(config)
        or _schedule_reason(config)
        or _production_reason(config)
        or _store_reason(config)
        or _budget_reason(config)
    )


def gated_reason(c: HopperConfig, in_halves: bool = False) -> str | None:
    """Returns why tiles of this config cannot hold gated pairs, or None.

    A stage must hold equally many columns of both halves of B, every CTA that loads it must load a
    part of each half, and a thread must hold both values of a pair. `in_halves`: the promoted sums
    of each half may be computed by wgmmas of their own.
    """
    if c.swap_ab or c.variable_tile_n or c.cluster_k > 1 or (c.mma_n and not in_halves):
        return "gated pairs need swap_ab and variable_tile_n False, cluster_k 1 and mma_n 0"
    if c.mma_n and 2 * c.mma_n != c.tile_n:
        return f"mma_n is {c.mma_n}, expected 0 or {c.tile_n // 2}, one half, for gated pairs"
    if c.tile_n % (32 * c.cluster_m):
        return f"tile_n is {c.tile_n}, expected a multiple of {32 * c.cluster_m} for gated pairs"
    return None


def promoted_reason(c: HopperConfig, gated: bool = False) -> str | None:
    """Returns why this config cannot promote fp8 sums, or None. The sums of 128 products of 64 rows
    need accumulators of their own besides those of the tile, those of one half where wgmmas compute
    one half of `gated` pairs; and a consumer waits for the next stage before it releases one.
    """
    if c.stages == 1:
        return "stages is 1, expected at least 2 for promoted sums"
    if c.tile_k > 64:
        return f"tile_k is {c.tile_k}, expected at most 64 (128 of fp8) for promoted sums"
    groups = c.tile_m // (64 * c.warpgroups_per_tile)
    groups *= 2 if gated and c.mma_n else 1
    needed = c.accumulator_registers + c.accumulator_registers // groups
    limit = 128 if c.consumers == 3 else ACCUMULATOR_LIMIT
    if needed > limit:
        return (
            f"tile {c.tile_m}x{c.tile_n} needs {needed} registers for its sums and those of a "
            f"stage, expected at most {limit}"
        )
    return None


def block_scaled_reason(c: HopperConfig, block_b: int) -> str | None:
    """Returns why this config cannot take scales that vary along K, or None."""
    if c.tile_k != 64:
        return f"tile_k is {c.tile_k}, expected 64: a stage has the 128 terms that share a scale"
    needed = c.shared_memory_bytes + 4 * c.stages * stage_scales(c, block_b)
    if needed > SHARED_MEMORY:
        return (
            f"the tiles and their scales need {needed} bytes of shared memory, expected at most "
            f"{SHARED_MEMORY}"
        )
    return None


def quantized_reason(c: HopperConfig, gated: bool) -> str | None:
    """Returns why this config cannot store C in fp8 with a scale for 128 columns of a row, or None.

    A consumer must hold these 128 columns, complete sums of rows of C, and subtiles of them are
    stored by TMA.
    """
    if c.swap_ab or c.variable_tile_n or c.split:
        return "a C in fp8 needs swap_ab, variable_tile_n and stream_k False, and split_k 1"
    if c.epilogue_stages == 0:
        return "epilogue_stages is 0, expected at least 1 for a C in fp8"
    stored = c.epilogue_config(gated).tile_n
    if stored % BLOCK:
        return (
            f"a CTA stores {stored} columns, expected a multiple of {BLOCK}, which share a scale"
            " of a C in fp8"
        )
    return None


def _tile_reason(c: HopperConfig) -> str | None:
    if c.tile_m not in (64, 128, 192, 256, 320):
        return f"tile_m is {c.tile_m}, expected 64, 128, 192, 256 or 320 (wgmma has 64 rows)"
    if c.variable_tile_n and (c.tile_n not in range(24, 257, 8) or c.mma_n):
        return (
            f"tile_n is {c.tile_n} and mma_n {c.mma_n}, expected a multiple of 8 from 24 to "
            "256 and 0 when variable_tile_n"
        )
    if not c.variable_tile_n and c.tile_n not in range(16, 513, 16):
        return f"tile_n is {c.tile_n}, expected a multiple of 16 from 16 to 512"
    if c.tile_k not in (16, 32, 64, 128):
        return (
            f"tile_k is {c.tile_k}, expected 16, 32, 64 or 128 (wgmma steps of 16, TMA "
            "boxes of whole swizzles)"
        )
    if c.variable_tile_n:
        return None
    if c.mma_n < 0 or c.instruction_n % 16 or c.tile_n % c.instruction_n:
        return (
            f"mma_n is {c.mma_n}, expected 0 or a multiple of 16 that divides tile_n ({c.tile_n})"
        )
    if c.instruction_n > 256:
        return f"tile_n is {c.tile_n}, expected at most 256 (one wgmma) unless mma_n divides it"
    # The number of columns that are swizzled together if B is row-major.
    swizzle = next(columns for columns in (64, 32, 16) if c.tile_n % columns == 0)
    if swizzle % c.instruction_n and c.instruction_n % swizzle:
        return (
            f"mma_n is {c.mma_n}, expected a divisor or a multiple of {swizzle} columns, which "
            "are swizzled together"
        )
    return None


def _pipeline_reason(c: HopperConfig) -> str | None:
    if c.consumers not in (1, 2, 3) or c.tile_m % (64 * c.warpgroups_per_tile):
        return (
            f"consumers is {c.consumers}, expected 1, 2 or 3 that share tile_m ({c.tile_m}) in "
            "multiples of 64 rows"
        )
    if c.pingpong and (c.consumers != 2 or c.split):
        return (
            f"pingpong with {c.consumers} consumers and partitions of K, expected 2 that take "
            "turns, and whole tiles"
        )
    if not 1 <= c.stages <= MAX_STAGES:
        return f"stages is {c.stages}, expected 1 to {MAX_STAGES}"
    if c.in_flight not in (0, 1) or c.in_flight >= c.stages:
        return (
            f"in_flight is {c.in_flight}, expected 0 or 1 and fewer than stages ({c.stages}), "
            "because it keeps that many stages occupied"
        )
    producer, consumer = c.producer_registers, c.consumer_registers
    if producer == consumer == 0:
        return None
    compiled = REGISTERS // (WARPGROUP * (1 + c.consumers)) // 8 * 8
    if c.consumers == 1:
        return (
            f"consumer_registers is {consumer}, expected 0 with one consumer: two warpgroups have "
            "255 per thread already"
        )
    if producer % 8 or not 24 <= producer <= compiled:
        return (
            f"producer_registers is {producer}, expected a multiple of 8 from 24 to "
            f"{compiled}, or 0 like consumer_registers"
        )
    if consumer % 8 or not compiled <= consumer <= 255:
        return f"consumer_registers is {consumer}, expected a multiple of 8 from {compiled} to 248"
    available = compiled * (1 + c.consumers)
    requested = producer + c.consumers * consumer
    if requested > available:  # the last warpgroup would wait for ever
        return (
            f"setmaxnreg {producer}/{consumer} adds up to {requested} over the warpgroups, "
            f"expected at most {available}"
        )
    return None


def _schedule_reason(c: HopperConfig) -> str | None:
    if c.order not in ORDERS:
        return f"order is {c.order!r}, expected one of {', '.join(ORDERS)}"
    for name in ("group_m", "group_n"):
        if getattr(c, name) < 1:
            return f"{name} is {getattr(c, name)}, expected at least 1"
    if c.sms < 0 or 0 < c.sms < c.cluster:
        return f"sms is {c.sms}, expected 0 (all) or at least the {c.cluster} CTAs of a cluster"
    for name, extent, size in (
        ("cluster_m", "tile_n", c.stage_n),
        ("cluster_n", "tile_m", c.tile_m),
    ):
        share = getattr(c, name)
        if share not in (1, 2, 4) or size % (16 * share):
            return (
                f"{name} is {share}, expected 1, 2 or 4 CTAs that load {extent} ({size}) in "
                "multiples of 16"
            )
    if c.cluster > 8:
        parts = f" in {c.cluster_k} partitions of K" if c.cluster_k > 1 else ""
        return (
            f"a cluster of {c.cluster_m}x{c.cluster_n}{parts} has {c.cluster} CTAs, "
            "expected at most 8"
        )
    return None


def _production_reason(c: HopperConfig) -> str | None:
    if c.stagger not in STAGGERS:
        return f"stagger is {c.stagger!r}, expected one of {', '.join(STAGGERS)}"
    if c.stagger_k_tiles < 0:
        return f"stagger_k_tiles is {c.stagger_k_tiles}, expected at least 0"
    if not 1 <= c.split_k <= MAX_SPLIT_K:
        return f"split_k is {c.split_k}, expected 1 to {MAX_SPLIT_K} partitions of K"
    if c.weights_ready and not c.pdl:
        return "weights_ready is True with pdl False, expected pdl True: else no call starts early"
    if c.stream_k and c.split_k > 1:
        return (
            f"split_k is {c.split_k} with stream_k, expected 1: split_k divides every tile, "
            "stream_k those of the last wave"
        )
    if c.cluster_k == 1:
        return None
    if c.cluster_k not in (2, 4, 8) or c.tile_n % (8 * c.cluster_k):
        return (
            f"cluster_k is {c.cluster_k}, expected 1, 2, 4 or 8 CTAs that each store a part "
            f"of tile_n ({c.tile_n}) in multiples of 8"
        )
    if c.split or c.pingpong or c.variable_tile_n or c.mma_n:
        return (
            f"cluster_k is {c.cluster_k}, expected 1 with split_k, stream_k, pingpong, "
            "variable_tile_n or mma_n"
        )
    return None


def _store_reason(c: HopperConfig) -> str | None:
    if not 0 <= c.epilogue_stages <= c.epilogue_subtiles:
        return (
            f"epilogue_stages is {c.epilogue_stages}, expected 0 to {c.epilogue_subtiles}, "
            "the epilogue subtiles of a consumer"
        )
    return None


def _budget_reason(c: HopperConfig) -> str | None:
    # A config with one consumer may spill: document 001 has such a kernel.
    limit = 256 if c.consumers == 1 else ACCUMULATOR_LIMIT
    if c.accumulator_registers > limit:
        return (
            f"tile {c.tile_m}x{c.tile_n} needs {c.accumulator_registers} accumulator registers, "
            f"expected at most {limit} per thread"
        )
    if c.consumers == 3 and c.accumulator_registers > 96:
        return (
            f"three consumers have 128 registers per thread but {c.accumulator_registers} "
            "accumulators, expected 96"
        )
    if c.shared_memory_bytes > SHARED_MEMORY:
        return (
            f"the tiles need {c.shared_memory_bytes} bytes of shared memory, expected at most "
            f"{SHARED_MEMORY}"
        )
    return None
