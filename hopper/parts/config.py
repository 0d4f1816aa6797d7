"""The configuration of every Hopper rung, and formulas for its resources."""

import functools
from dataclasses import dataclass, replace

SHARED_MEMORY = 232448  # bytes that one CTA may use on sm_90
BARRIER_BYTES = 1024  # mbarriers, padded so that the first tile starts at a swizzle boundary
WARPGROUP = 128
MAX_STAGES = BARRIER_BYTES // 16  # a stage has two mbarriers of 8 bytes
# Registers per thread that may hold accumulators: 255 minus those of addresses and loop state.
ACCUMULATOR_LIMIT = 208
STAGGERS = ("never", "rule", "always")
SUBTILE_N = 64  # columns of an epilogue subtile, 64 rows of one consumer (32 columns of fp32)
SUBTILE_BYTES = 64 * 128


@dataclass(frozen=True)
class HopperConfig:
    """The config of a Hopper kernel: its tile, its pipeline, its schedule and how it stores.

    Each rung's own `Config` is this class with the defaults of that rung. Sizes are in elements.
    `config_limits.invalid_reason` says which combinations cannot be built.

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


def stage_scales(c: HopperConfig, block_b: int) -> int:
    """Returns the number of fp32 scales that a stage of this config has in shared memory, where
    scales vary along K: one for each row of A and, unless 128 share one, each column of B.
    """
    return c.tile_m + (c.stage_n if block_b == 1 else 0)
