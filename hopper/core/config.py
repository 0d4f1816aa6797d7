"""The configuration of every Hopper rung, and formulas for its resources."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ...core.configs import RenamedFields
from ...core.fp8 import BLOCK
from ...device.raster import ORDERS

SHARED_MEMORY = 232448  # bytes that one CTA may use on sm_90
BARRIER_BYTES = 1024  # mbarriers, padded so that the first tile starts at a swizzle boundary
WARPGROUP = 128
REGISTERS = 65536  # per SM
MAX_STAGES = BARRIER_BYTES // 16  # a stage has two mbarriers of 8 bytes
# Registers per thread that may hold accumulators: 255 minus those of addresses and loop state.
ACCUMULATOR_LIMIT = 208
MAX_SPLIT_K = 64
STAGGERS = ("never", "rule", "always")
SUBTILE_N = 64  # columns of an epilogue subtile, 64 rows of one consumer (32 columns of fp32)
SUBTILE_BYTES = 64 * 128


@dataclass(frozen=True)
class HopperConfig(metaclass=RenamedFields):
    """The config of a Hopper kernel: its tile, its pipeline, its schedule and how it stores.

    Each rung's own `Config` is this class with the defaults of that rung. Sizes are in elements.
    `invalid_reason` in this module says which combinations cannot be built.

    Attributes:
        tile_m: Rows of C in the tile of a CTA: 64, 128, 192, 256 or 320.
        tile_n: Columns of C in the tile of a CTA: a multiple of 16, or of 8 with
            `variable_tile_n`.
        tile_k: Terms of K in a stage: 16, 32, 64 or 128.
        mma_n: Columns of one wgmma instruction; 0 for `tile_n`.
        stages: Stages of shared memory, each with a k-block of A and one of B.
        consumers: MMA warpgroups of a CTA: 1, 2 or 3. Each computes tile_m / consumers rows, or a
            tile of its own with `pingpong`.
        in_flight: wgmma groups that may still run while a consumer waits for the next stage: 0 or
            1.
        producer_registers: Registers of a producer thread (setmaxnreg); 0 for as compiled.
        consumer_registers: Registers of a consumer thread (setmaxnreg); 0 for as compiled.
        order: The order in which CTAs take tiles: "row", "column", "consecutive", "grouped",
            "serpentine" or "hilbert".
        group_m: Rows of tiles in a super-group of that order.
        group_n: Columns of tiles in a super-group of that order.
        sms: Persistent CTAs that share the tiles; 0 for one per SM.
        gpc_local: Whether the SMs of a GPC compute neighbouring tiles where each CTA has one whole
            tile, whatever `order` says.
        cluster_m: CTAs of a cluster along M, which load parts of B for each other by multicast: 1,
            2 or 4.
        cluster_n: CTAs of a cluster along N, which load parts of A for each other by multicast: 1,
            2 or 4.
        reorder_stores: Whether the lanes of a quad exchange values, so that each writes 16 bytes
            of a row.
        write_through: Whether stores bypass the L1 cache.
        accumulate_flag: Whether the first wgmma of a tile overwrites the accumulator, instead of
            adding to zeroed registers.
        epilogue_stages: Epilogue subtiles (64x64 of C) that a consumer stages in shared memory for
            TMA stores; 0 to store from registers.
        swap_ab: Whether C^T = B^T A^T is computed instead. Few rows of C become columns of the
            tile, which come in steps of 8.
        variable_tile_n: Whether tiles are tile_n or tile_n - 8 columns wide, so that columns of
            tiles cover N without a remainder.
        pingpong: Whether two consumers compute a tile each in turn, instead of halves of the same
            tile.
        stagger: When consumers that share a tile multiply its last k tiles one after the other, so
            that one stores while the next multiplies: "never"; "rule", where it hides an epilogue
            or the end of a call of one wave; or "always" where it is possible.
        stagger_k_tiles: How many k tiles are multiplied so, if the stages hold as many; 0 for 3.
        k_serpentine: Whether every other tile of a CTA walks K backwards, while its last k tiles
            are still in L2.
        split_k: Partitions of K; the CTA that ends last adds them in order.
        stream_k: Whether tiles that fill no whole wave are split along K over all clusters.
        cluster_k: CTAs of a cluster that have a partition of K each, and add their sums through
            shared memory.
        pdl: Whether a call may start before the previous one has ended (programmatic dependent
            launch).
        weights_ready: With `pdl`, whether B is loaded before the previous call has ended. The
            caller promises that no kernel still running writes B, as holds for weights in
            inference. Everything else waits for the previous call.
        jitter: For debugging: every role sleeps a random time at each barrier.
        phases: For debugging: counts the cycles of each role.

    Example:
        >>> from dataclasses import replace
        >>> from outblas.hopper.config import HopperConfig
        >>> config = HopperConfig(tile_m=128, tile_n=256, stages=3, consumers=2)
        >>> config.shared_memory_bytes  # of 232448 that a CTA may use
        148480
        >>> replace(config, stages=4).stages
        4
    """

    ALIASES: ClassVar[Mapping[str, str]] = {
        "slots": "stages",
        "swap": "swap_ab",
        "store_buffers": "epilogue_stages",
        "elastic": "variable_tile_n",
        "gpc": "gpc_local",
    }

    tile_m: int = 64
    tile_n: int = 64
    tile_k: int = 64
    mma_n: int = 0
    stages: int = 1
    consumers: int = 1
    in_flight: int = 0
    producer_registers: int = 0
    consumer_registers: int = 0
    order: str = "column"
    group_m: int = 16
    group_n: int = 8
    sms: int = 0
    gpc_local: bool = False
    cluster_m: int = 1
    cluster_n: int = 1
    reorder_stores: bool = False
    write_through: bool = False
    accumulate_flag: bool = False
    epilogue_stages: int = 0
    swap_ab: bool = False
    variable_tile_n: bool = False
    pingpong: bool = False
    stagger: str = "never"
    stagger_k_tiles: int = 0
    k_serpentine: bool = False
    split_k: int = 1
    stream_k: bool = False
    cluster_k: int = 1
    pdl: bool = False
    weights_ready: bool = False
    jitter: bool = False
    phases: bool = False

    if not TYPE_CHECKING:

        def __getattr__(self, name: str):
            """Returns a field by its old name, for programs that use names from before they
            changed.
            """
            if name in self.ALIASES:
                return getattr(self, self.ALIASES[name])
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    @functools.cached_property
    def multicast_size(self) -> int:
        """CTAs of a cluster that load for each other by multicast."""
        return self.cluster_m * self.cluster_n

    @functools.cached_property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.multicast_size * self.cluster_k

    @property
    def instruction_n(self) -> int:
        """Columns of one wgmma."""
        return self.mma_n or self.tile_n

    @property
    def warpgroups_per_tile(self) -> int:
        """MMA warpgroups per tile: the consumers that share one."""
        return 1 if self.pingpong else self.consumers

    @property
    def split(self) -> bool:
        """Whether several CTAs may share a tile, a partition of K each, and add through memory."""
        return self.split_k > 1 or self.stream_k

    @property
    def tile_widths(self) -> tuple[int, ...]:
        """The numbers of columns that tiles may have."""
        return (self.tile_n, self.tile_n - 8) if self.variable_tile_n else (self.tile_n,)

    @functools.cached_property
    def stage_n(self) -> int:
        """Columns of B in a stage: those of a tile, rounded up to whole swizzles for each CTA that
        loads a part of it.
        """
        part = 16 * self.cluster_m
        return -(-self.tile_n // part) * part if self.variable_tile_n else self.tile_n

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: a k-block of A and one of B, of 16-bit elements."""
        return (self.tile_m + self.stage_n) * self.tile_k * 2

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory of a CTA, each epilogue subtile beside the stages."""
        subtiles = self.consumers * self.epilogue_stages * SUBTILE_BYTES
        return BARRIER_BYTES + self.stages * self.stage_bytes + subtiles + self.exchange_bytes

    @property
    def exchange_bytes(self) -> int:
        """Shared memory for the partial sums of other CTAs of the cluster, fp32."""
        return self.tile_m * self.tile_n * 4 // self.cluster_k * (self.cluster_k - 1)

    @property
    def staggered_k_tiles(self) -> int:
        """The k tiles at a tile's end that consumers multiply one after the other: at most one less
        than there are stages.
        """
        return min(self.stagger_k_tiles or 3, self.stages - 1)

    @functools.cached_property
    def accumulator_registers(self) -> int:
        """Registers that a thread of a consumer holds for its part of the fp32 tile."""
        return self.tile_m * self.tile_n // (self.warpgroups_per_tile * WARPGROUP)

    def epilogue_config(self, gated: bool) -> "HopperConfig":
        """Make the config of the part of C that a CTA stores.

        CTAs that share a tile along K store a part of its columns each. A gated activation makes
        one column of C of two columns of B.

        Args:
            gated: Whether the activation is a gated one.

        Returns:
            A config with a `tile_n` of that width, and no partitions of K in a cluster.
        """
        parts = self.cluster_k * (2 if gated else 1)
        return replace(self, tile_n=self.tile_n // parts, cluster_k=1) if parts > 1 else self

    @property
    def epilogue_subtiles(self) -> int:
        """The number of epilogue subtiles of C that one consumer stores."""
        return (
            self.tile_m
            // (64 * self.warpgroups_per_tile)
            * -(-self.tile_n // (SUBTILE_N * self.cluster_k))
        )


@functools.lru_cache(maxsize=1024)
def compile_key(config: HopperConfig) -> HopperConfig:
    """Returns the config whose compiled kernel also serves this one.

    Fields that the compiled code does not depend on get their defaults: the order of tiles is a
    table that the host makes, the host swaps operands, kernel traits say whether consumers are
    staggered, and the number of partitions of K is an argument.
    """
    plain = HopperConfig
    split_k = 2 if config.split_k > 1 else 1
    return replace(
        config,
        order=plain.order,
        group_m=plain.group_m,
        group_n=plain.group_n,
        sms=plain.sms,
        gpc_local=plain.gpc_local,
        stagger=plain.stagger,
        swap_ab=plain.swap_ab,
        split_k=split_k,
    )


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


def stage_scales(c: HopperConfig, block_b: int) -> int:
    """Returns the number of fp32 scales that a stage of this config has in shared memory, where
    scales vary along K: one for each row of A and, unless 128 share one, each column of B.
    """
    return c.tile_m + (c.stage_n if block_b == 1 else 0)


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
