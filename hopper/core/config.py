"""The configuration of every Hopper rung, and its budgets as formulas."""

from dataclasses import dataclass, replace

from ...device.raster import ORDERS

SHARED_MEMORY = 232448  # bytes one CTA may use on sm_90
BARRIER_BYTES = 1024  # mbarriers, padded so that the first tile starts at a swizzle boundary
WARPGROUP = 128
REGISTERS = 65536  # of one SM
MOST_SLOTS = BARRIER_BYTES // 16  # two mbarriers each
ACCUMULATOR_LIMIT = (
    208  # registers of one thread that may hold accumulators: 255 less addresses and loop state
)
MOST_PIECES = 64
SLAB = 64  # columns of C that are staged at once, 64 rows of one consumer (32 columns of fp32)
SLAB_BYTES = 64 * 128


@dataclass(frozen=True)
class HopperConfig:
    """What a Hopper kernel is made of; sizes in elements. A rung's own `Config` has the defaults of
    that rung.

    Tile: `tile_m`, `tile_n`, `tile_k` of one CTA. `mma_n`: columns of one wgmma (0: tile_n).
    Pipeline: `slots` of the ring; `consumers`, the warpgroups that multiply, each tile_m /
    consumers rows; `in_flight`, wgmma groups that may run on while the next slot is awaited;
    `producer_registers`, `consumer_registers` for setmaxnreg (0: as compiled).
    Schedule: `order` of the tiles, one of `device.raster.ORDERS`; `group_m` × `group_n` tiles of a
    super-group; `sms`, the CTAs that share the tiles (0: one on each SM); `cluster_m` × `cluster_n`
    CTAs of a cluster that load for each other.
    Store: `reorder_stores` among the lanes of a quad, to write 16 bytes of a row each;
    `write_through` the L1 cache; `accumulate_flag` of wgmma in place of zeroed accumulators;
    `store_buffers`, slabs of 64×64 of C staged in shared memory by each consumer (0: registers
    straight to memory).
    Production (`hopper.gemm`): `swap` computes C^T = B^T A^T, so that few rows of C become columns
    of the tile, which come in steps of 8, and tiles may begin at any column where A's rows lie
    along K; `elastic` tiles are tile_n or tile_n - 8 columns wide, so that whole columns of tiles
    cover N; `pingpong` consumers multiply a tile each in turn, not halves of the same;
    `k_serpentine` walks K backwards in every other tile of a CTA, whose last slices are still in
    L2; `split_k` pieces of K are added in their order by the CTA that ends last; `stream_k` cuts
    the tiles that fill no whole wave into as many pieces as there are clusters; `cluster_k` CTAs of
    a cluster have a part of K each, and add up in each other's shared memory; `gpc`: where each CTA
    has one whole tile, the SMs of a GPC have neighbouring ones, whatever `order` says
    (`placement`); `pdl` lets a call start before the one ahead of it has ended (programmatic
    dependent launch).
    Debugging: `jitter` makes every role sleep a random time at each barrier, to shake out races;
    `phases` counts the cycles of each role. Neither is for speed.
    """

    tile_m: int = 64
    tile_n: int = 64
    tile_k: int = 64
    mma_n: int = 0
    slots: int = 1
    consumers: int = 1
    in_flight: int = 0
    producer_registers: int = 0
    consumer_registers: int = 0
    order: str = "column"
    group_m: int = 16
    group_n: int = 8
    sms: int = 0
    gpc: bool = False
    cluster_m: int = 1
    cluster_n: int = 1
    reorder_stores: bool = False
    write_through: bool = False
    accumulate_flag: bool = False
    store_buffers: int = 0
    swap: bool = False
    elastic: bool = False
    pingpong: bool = False
    k_serpentine: bool = False
    split_k: int = 1
    stream_k: bool = False
    cluster_k: int = 1
    pdl: bool = False
    jitter: bool = False
    phases: bool = False

    @property
    def group(self) -> int:
        """CTAs of a cluster that load for each other."""
        return self.cluster_m * self.cluster_n

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.group * self.cluster_k

    @property
    def instruction_n(self) -> int:
        """Columns of one wgmma."""
        return self.mma_n or self.tile_n

    @property
    def sharing(self) -> int:
        """Consumers that share a tile."""
        return 1 if self.pingpong else self.consumers

    @property
    def split(self) -> bool:
        """Whether a tile may be the work of several CTAs, each of which has a piece of K."""
        return self.split_k > 1 or self.stream_k

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns that tiles may have."""
        return (self.tile_n, self.tile_n - 8) if self.elastic else (self.tile_n,)

    @property
    def slot_n(self) -> int:
        """Columns of B in a slot: those of a tile, in parts of whole swizzles for the CTAs that
        load it together.
        """
        part = 16 * self.cluster_m
        return -(-self.tile_n // part) * part if self.elastic else self.tile_n

    @property
    def slot_bytes(self) -> int:
        """Shared memory of one slice of A and one of B, 16-bit elements."""
        return (self.tile_m + self.slot_n) * self.tile_k * 2

    @property
    def shared_memory_bytes(self) -> int:
        slabs = self.consumers * self.store_buffers * SLAB_BYTES
        return BARRIER_BYTES + self.slots * self.slot_bytes + slabs + self.exchange_bytes

    @property
    def exchange_bytes(self) -> int:
        """Shared memory for the partial sums of other CTAs of the cluster, fp32."""
        return self.tile_m * self.tile_n * 4 // self.cluster_k * (self.cluster_k - 1)

    @property
    def last(self) -> int:
        """Slices that two consumers multiply in turn at a tile's end (`gemm`): slots hold them
        meanwhile, all but one, in which the next thing comes.
        """
        return min(3, self.slots - 1)

    @property
    def accumulator_registers(self) -> int:
        """Registers a thread of a consumer holds for its share of the fp32 tile."""
        return self.tile_m * self.tile_n // (self.sharing * WARPGROUP)

    def stored(self, gated: bool) -> "HopperConfig":
        """The config of what a CTA stores: of a tile that CTAs share along K, each has a part of
        the columns; of gated pairs there is one for two columns of B.
        """
        parts = self.cluster_k * (2 if gated else 1)
        return replace(self, tile_n=self.tile_n // parts, cluster_k=1) if parts > 1 else self

    @property
    def slabs(self) -> int:
        """Slabs of C that one consumer stores."""
        return self.tile_m // (64 * self.sharing) * -(-self.tile_n // (SLAB * self.cluster_k))


def compile_key(config: HopperConfig) -> HopperConfig:
    """The config whose compile serves this one too: the host makes the order of tiles, a table, and
    swaps operands; the number of pieces of K is an argument.
    """
    plain = HopperConfig
    pieces = 2 if config.split_k > 1 else 1
    return replace(
        config,
        order=plain.order,
        group_m=plain.group_m,
        group_n=plain.group_n,
        sms=plain.sms,
        gpc=plain.gpc,
        swap=plain.swap,
        split_k=pieces,
    )


def invalid_reason(config: HopperConfig) -> str | None:
    """Why no kernel can be built from this config, or None."""
    return (
        _tile(config)
        or _pipeline(config)
        or _schedule(config)
        or _production(config)
        or _store(config)
        or _budgets(config)
    )


def gated_reason(c: HopperConfig) -> str | None:
    """Why tiles of this config cannot hold gated pairs: a slot has as many columns of either half
    of B, of which every CTA that loads it has a part, and a thread both values of a pair.
    """
    if c.swap or c.elastic or c.cluster_k > 1 or c.mma_n:
        return "gated pairs need swap and elastic False, cluster_k 1 and mma_n 0"
    if c.tile_n % (32 * c.cluster_m):
        return f"tile_n is {c.tile_n}, expected a multiple of {32 * c.cluster_m} for gated pairs"
    return None


def promoted_reason(c: HopperConfig) -> str | None:
    """Why sums of slots, of 128 products, cannot be added up in registers beside those of this
    config's tiles.
    """
    if c.tile_k > 64:
        return f"tile_k is {c.tile_k}, expected at most 64 (128 of fp8) for promoted sums"
    limit = ACCUMULATOR_LIMIT if c.consumers == 2 else 128
    if 2 * c.accumulator_registers > limit:
        return (
            f"tile {c.tile_m}x{c.tile_n} needs {2 * c.accumulator_registers} registers for "
            "sums "
            "and theirs of slots"
        )
    return None


def _tile(c: HopperConfig) -> str | None:
    if c.tile_m not in (64, 128, 192, 256, 320):
        return f"tile_m is {c.tile_m}, expected 64, 128, 192, 256 or 320 (wgmma has 64 rows)"
    if c.elastic and (c.tile_n not in range(24, 257, 8) or c.mma_n):
        return (
            f"tile_n is {c.tile_n} and mma_n {c.mma_n}, expected a multiple of 8 from 24 to "
            "256 "
            "and 0 when elastic"
        )
    if not c.elastic and c.tile_n not in range(16, 513, 16):
        return f"tile_n is {c.tile_n}, expected a multiple of 16 from 16 to 512"
    if c.tile_k not in (16, 32, 64, 128):
        return (
            f"tile_k is {c.tile_k}, expected 16, 32, 64 or 128 (wgmma steps of 16, TMA "
            "boxes of "
            "whole swizzles)"
        )
    if c.elastic:
        return None
    if c.mma_n < 0 or c.instruction_n % 16 or c.tile_n % c.instruction_n:
        return (
            f"mma_n is {c.mma_n}, expected 0 or a multiple of 16 that divides tile_n ({c.tile_n})"
        )
    if c.instruction_n > 256:
        return f"tile_n is {c.tile_n}, expected at most 256 (one wgmma) unless mma_n divides it"
    swizzle = next(
        columns for columns in (64, 32, 16) if c.tile_n % columns == 0
    )  # of a B stored by rows
    if swizzle % c.instruction_n and c.instruction_n % swizzle:
        return (
            f"mma_n is {c.mma_n}, expected a divisor or a multiple of {swizzle} columns, which "
            "are swizzled together"
        )
    return None


def _pipeline(c: HopperConfig) -> str | None:
    if c.consumers not in (1, 2, 3) or c.tile_m % (64 * c.sharing):
        return (
            f"consumers is {c.consumers}, expected 1, 2 or 3 that share tile_m ({c.tile_m}) in "
            "multiples of 64 rows"
        )
    if c.pingpong and (c.consumers != 2 or c.split):
        return (
            f"pingpong with {c.consumers} consumers and pieces of K, expected 2 that take "
            "turns, and whole tiles"
        )
    if not 1 <= c.slots <= MOST_SLOTS:
        return f"slots is {c.slots}, expected 1 to {MOST_SLOTS}"
    if c.in_flight not in (0, 1) or c.in_flight >= c.slots:
        return (
            f"in_flight is {c.in_flight}, expected 0 or 1 and fewer than slots ({c.slots}), "
            "which it keeps occupied"
        )
    given, taken = c.producer_registers, c.consumer_registers
    if given == taken == 0:
        return None
    compiled = REGISTERS // (WARPGROUP * (1 + c.consumers)) // 8 * 8
    if c.consumers == 1:
        return (
            f"consumer_registers is {taken}, expected 0 with one consumer: two warpgroups have "
            "255 a thread already"
        )
    if given % 8 or not 24 <= given <= compiled:
        return (
            f"producer_registers is {given}, expected a multiple of 8 from 24 to "
            f"{compiled}, or "
            "0 like the other"
        )
    if taken % 8 or not compiled <= taken <= 255:
        return f"consumer_registers is {taken}, expected a multiple of 8 from {compiled} to 248"
    held, wanted = compiled * (1 + c.consumers), given + c.consumers * taken
    if wanted > held:  # the last to ask would wait for ever
        return (
            f"setmaxnreg {given}/{taken} adds up to {wanted} over the warpgroups, expected at "
            f"most {held}"
        )
    return None


def _schedule(c: HopperConfig) -> str | None:
    if c.order not in ORDERS:
        return f"order is {c.order!r}, expected one of {', '.join(ORDERS)}"
    for name in ("group_m", "group_n"):
        if getattr(c, name) < 1:
            return f"{name} is {getattr(c, name)}, expected at least 1"
    if c.sms < 0 or 0 < c.sms < c.cluster:
        return f"sms is {c.sms}, expected 0 (all) or at least the {c.cluster} CTAs of a cluster"
    for name, extent, size in (
        ("cluster_m", "tile_n", c.slot_n),
        ("cluster_n", "tile_m", c.tile_m),
    ):
        share = getattr(c, name)
        if share not in (1, 2, 4) or size % (16 * share):
            return (
                f"{name} is {share}, expected 1, 2 or 4 CTAs that load {extent} ({size}) in "
                "multiples of 16"
            )
    if c.cluster > 8:
        parts = f" in {c.cluster_k} parts of K" if c.cluster_k > 1 else ""
        return (
            f"a cluster of {c.cluster_m}x{c.cluster_n}{parts} has {c.cluster} CTAs, "
            "expected at "
            "most 8"
        )
    return None


def _production(c: HopperConfig) -> str | None:
    if not 1 <= c.split_k <= MOST_PIECES:
        return f"split_k is {c.split_k}, expected 1 to {MOST_PIECES} pieces of K"
    if c.stream_k and c.split_k > 1:
        return (
            f"split_k is {c.split_k} with stream_k, expected 1: either cuts every tile or "
            "those "
            "of the last wave"
        )
    if c.cluster_k == 1:
        return None
    if c.cluster_k not in (2, 4, 8) or c.tile_n % (8 * c.cluster_k):
        return (
            f"cluster_k is {c.cluster_k}, expected 1, 2, 4 or 8 CTAs with a part of tile_n "
            f"({c.tile_n}) each, in eights"
        )
    if c.split or c.pingpong or c.elastic or c.mma_n:
        return (
            f"cluster_k is {c.cluster_k}, expected 1 with split_k, stream_k, pingpong, elastic "
            "or mma_n"
        )
    return None


def _store(c: HopperConfig) -> str | None:
    if not 0 <= c.store_buffers <= c.slabs:
        return (
            f"store_buffers is {c.store_buffers}, expected 0 to {c.slabs}, the slabs of a consumer"
        )
    return None


def _budgets(c: HopperConfig) -> str | None:
    limit = (
        256 if c.consumers == 1 else ACCUMULATOR_LIMIT
    )  # with one consumer 001's spilling kernel can be built
    if c.accumulator_registers > limit:
        return (
            f"tile {c.tile_m}x{c.tile_n} needs {c.accumulator_registers} accumulator registers, "
            f"expected at most {limit} a thread"
        )
    if c.consumers == 3 and c.accumulator_registers > 96:
        return (
            f"three consumers have 128 registers a thread and {c.accumulator_registers} "
            "accumulators, expected 96"
        )
    if c.shared_memory_bytes > SHARED_MEMORY:
        return (
            f"the tiles need {c.shared_memory_bytes} bytes of shared memory, expected at most "
            f"{SHARED_MEMORY}"
        )
    return None
