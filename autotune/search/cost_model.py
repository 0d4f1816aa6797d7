"""A small analytic model that predicts how long a config takes, from waves, bytes between L2 and
the SMs, and pipeline depth.

It ranks configs before anything is compiled. Its constants are fitted to an H100. Only the order of
the predictions matters; `rank.spearman` measures how good it is.
"""

import math
from dataclasses import dataclass

from ...core.machines import Machine
from ...core.space import Footprint
from ...device import clusters
from ..store.records import Workload

# The main loop, in cycles of one SM.
LATENCY = 600.0  # from requesting operands until they arrive, while L2 is busy
DRAIN = 140.0  # per k tile where a warpgroup keeps no MMA in flight and waits for its own MMAs
BARRIERS = 20.0  # per k tile, for barriers and descriptors
# of the soft maximum over what limits a k tile: limits that are close slow each other down
SHARPNESS = 2.5

# L2, as fractions of its peak and in bytes per cycle.
L2_SHARE = 1.35  # the rate of many SMs; above 1 because requests for the same lines merge
# The rate if L2 holds everything that a call touches: 66 bytes per cycle and SM at 1024, with tiles
# in launch order.
L2_SHARE_HELD = 1.7
HELD = 0.8  # the fraction of L2 that a call may touch and still be held; an estimate
# How much more a byte of the larger operand costs than one of the smaller operand, which has fewer
# distinct bytes.
LARGER = 0.55
L2_PORT = 128.0  # bytes per cycle into one SM
GATHERED = 100.0  # of them, in a call of one wave, where the SMs of a GPC request the same lines
# Maximum bytes of cache lines per SM and cycle, with all SMs busy, where rows begin inside lines,
# so that no requests merge.
LINES = 60.0

# How much longer a call takes where tiles begin inside cache lines. On an H100, 8192 contiguous
# columns took 1.04 to 1.06 times as long in tiles of 248 and 256 columns (WORKLOG.md).
STRADDLED_LINES = 1.05

# DRAM and the clock.
DRAM_SHARE = 0.82  # fraction of DRAM's peak
DRAM_SHARPNESS = 5.0  # over a whole call, loads from DRAM overlap with the work of SMs
CLOCK_SHARE = 1.0  # fraction of the boost clock under load
LAUNCH_US = 2.0

# Per tile and per call, in cycles.
PROLOGUE = 1500.0  # before a CTA's first MMA: barriers, descriptors, first loads
BETWEEN = 450.0  # per tile, besides its MMAs and stores
# Bytes per cycle at which a CTA stores its outputs.
STORE = {"registers": 6.0, "wide": 31.0, "staged": 42.0}
BEHIND = 0.4  # the fraction of a store that pingpong does not hide

# Partial sums.
CUT = 0.4  # of a wave: the cost of stream-K besides its sums
COMBINE = 5000.0  # cycles until partial sums are written, counted, and read by the last CTA
SUMS = 20.0  # bytes per cycle at which one SM writes or reads them

MMA_SHARE = 0.62  # the fraction of wgmma's rate that mma.sync reaches on sm_90


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a call, and what limits it.

    Attributes:
        us: the time of a call.
        waves: waves of tiles over the SMs.
        wave_efficiency: the fraction of the GPU's work that is useful.
        tensor, l2, latency: the fractions of a k tile's time that MMAs, L2 and latency would need
            alone.
        store: the fraction of a tile's time that its stores take.
    """

    us: float
    waves: float
    wave_efficiency: float
    tensor: float
    l2: float
    latency: float
    store: float

    @property
    def limits(self) -> str:
        """What limits the config, for tables."""
        return (
            f"products {self.tensor:.0%}, L2 {self.l2:.0%}, latency {self.latency:.0%}, stores "
            f"{self.store:.0%}, "
            f"{self.waves:.2f} waves"
        )


def resident(f: Footprint, machine: Machine) -> int:
    """Returns how many CTAs of a kernel an SM holds at the same time; 0 where not even one fits."""
    if f.shared_memory > machine.shared_memory_per_cta:
        return 0
    if f.persistent:
        return 1
    memory = machine.shared_memory_per_sm // (f.shared_memory + machine.reserved_shared_memory or 1)
    registers = machine.registers_per_sm // (
        f.threads * min(f.registers, machine.max_registers_per_thread)
    )
    return max(0, min(memory, registers, machine.threads_per_sm // f.threads, machine.ctas_per_sm))


def wave_efficiency(f: Footprint, workload: Workload, machine: Machine) -> float:
    """Returns the number of useful outputs divided by the outputs that all SMs could compute in as
    many waves.
    """
    grid = _grid(f, workload, machine)
    rounds = grid.waves if f.stream_k else math.ceil(grid.waves) / f.split_k
    computed = rounds * grid.places * _cluster(f) / f.cluster_k * f.tile_m * f.tile_n
    return workload.M * workload.N / computed


@dataclass(frozen=True)
class _Grid:
    """The grid of tiles on the GPU.

    Attributes:
        rows, columns: of cluster tiles.
        places: clusters that all SMs could run at a time.
        waves: waves of clusters, with split-K partitions counted.
        together: CTAs on an SM that hide each other's latency.
        busy: SMs that have work.
    """

    rows: int
    columns: int
    places: float
    waves: float
    together: int
    busy: int


def _grid(f: Footprint, workload: Workload, machine: Machine) -> _Grid:
    rows = math.ceil(workload.M / (f.tile_m * f.cluster_m))
    columns = math.ceil(workload.N / (f.tile_n * f.cluster_n))
    sms, cluster = min(f.sms or machine.sms, machine.sms), _cluster(f)
    ctas_per_sm = max(1, resident(f, machine))
    at_once = clusters.at_once(sms, cluster) * ctas_per_sm
    tiles = rows * columns * cluster * f.split_k
    return _Grid(
        rows,
        columns,
        places=max(at_once, machine.sms / cluster),
        waves=rows * columns * f.split_k / at_once,
        together=min(ctas_per_sm, math.ceil(tiles / machine.sms)),
        busy=min(machine.sms, f.sms or machine.sms, tiles),
    )


def _cluster(f: Footprint) -> int:
    """Returns the CTAs of a cluster."""
    return f.cluster_m * f.cluster_n * f.cluster_k


def predict(f: Footprint, workload: Workload, machine: Machine) -> Prediction:
    """Predicts how long a config takes.

    It checks nothing: configs that cannot run are pruned before.
    """
    grid, traffic = _grid(f, workload, machine), _traffic(workload, machine)
    k_tile = _k_tile(f, workload, machine, grid, traffic)
    tile = _tile(f, workload, grid, traffic, k_tile)
    cycles = _cycles(f, grid, tile)
    dram = 0.0 if traffic.fits_l2 else traffic.touched / (DRAM_SHARE * machine.dram_gbs) / 1e3
    us = _soft_max(DRAM_SHARPNESS, cycles / (CLOCK_SHARE * machine.boost_mhz), dram) + LAUNCH_US
    if f.straddles_lines:
        us *= STRADDLED_LINES
    return Prediction(
        us=us,
        waves=grid.waves,
        wave_efficiency=wave_efficiency(f, workload, machine),
        tensor=min(1.0, k_tile.products / k_tile.cycles),
        l2=min(1.0, k_tile.l2 / k_tile.cycles),
        latency=min(1.0, k_tile.waited / k_tile.cycles),
        store=tile.stored / grid.together / tile.cycles,
    )


@dataclass(frozen=True)
class _Traffic:
    """The bytes of a call: per element of A and B, and of C; all bytes that it touches; and whether
    L2 holds them.
    """

    size: int
    out_size: int
    touched: int
    fits_l2: bool


def _traffic(workload: Workload, machine: Machine) -> _Traffic:
    size, out_size = (
        2 if name in ("bfloat16", "float16") else 4 for name in (workload.dtype, workload.out_dtype)
    )
    operands = (workload.M + workload.N) * workload.K * size
    touched = operands + workload.M * workload.N * out_size
    return _Traffic(size, out_size, touched, fits_l2=touched <= HELD * machine.l2_bytes)


@dataclass(frozen=True)
class _KTile:
    """The cycles of one k tile in a CTA, and those of its limits: MMAs, L2, waits."""

    cycles: float
    products: float
    l2: float
    waited: float


def _k_tile(
    f: Footprint, workload: Workload, machine: Machine, grid: _Grid, traffic: _Traffic
) -> _KTile:
    products = 2 * f.tile_m * f.tile_n * f.tile_k / (_rate(f, workload, machine) * f.issue)
    l2 = _l2_cycles(f, workload, machine, grid, traffic)
    drained = 0.0 if f.in_flight else DRAIN / f.groups / grid.together
    if f.stages == 1:
        waited = (LATENCY + l2 + products + drained) / grid.together
    else:
        waited = (LATENCY + products) / max(1.0, f.stages - f.in_flight) / grid.together
    cycles = _soft_max(SHARPNESS, products + drained, l2, waited) + BARRIERS
    if max(f.cache_lines) > 1:
        rows_a, rows_b = _own_rows(f)
        requested = (
            (rows_a * f.cache_lines[0] + rows_b * f.cache_lines[1]) * f.tile_k * traffic.size
        )
        cycles = max(cycles, requested / (LINES * machine.sms / grid.busy))
    return _KTile(cycles, products, l2, waited)


def _l2_cycles(
    f: Footprint, workload: Workload, machine: Machine, grid: _Grid, traffic: _Traffic
) -> float:
    """Returns the cycles until L2 has sent the operands of a k tile."""
    if f.gpc_local and grid.waves <= 1:
        return (f.tile_m + f.tile_n) * f.tile_k * traffic.size / GATHERED
    rows_a, rows_b = _own_rows(f)
    lean = LARGER * (workload.M / (workload.M + workload.N) - 0.5)
    share = L2_SHARE_HELD if traffic.fits_l2 else L2_SHARE
    weighed = ((1 + lean) * rows_a + (1 - lean) * rows_b) * f.tile_k * traffic.size
    return weighed / min(L2_PORT, share * machine.l2_bytes_per_clock / grid.busy)


def _own_rows(f: Footprint) -> tuple[float, float]:
    """Returns the rows of A and columns of B that a CTA loads itself; other CTAs of its cluster
    load the rest.
    """
    return f.tile_m / f.cluster_n, f.tile_n / f.cluster_m


@dataclass(frozen=True)
class _Tile:
    """The cycles of an output tile, of its stores, and of combining its partial sums."""

    cycles: float
    stored: float
    combined: float


def _tile(
    f: Footprint, workload: Workload, grid: _Grid, traffic: _Traffic, k_tile: _KTile
) -> _Tile:
    k_tiles = math.ceil(math.ceil(workload.K / f.tile_k) / (f.split_k * f.cluster_k))
    hidden = BEHIND if f.pingpong else 1.0
    stored = f.tile_m * f.tile_n / f.cluster_k * traffic.out_size / STORE[f.store] * hidden
    cycles = k_tiles * k_tile.cycles + (stored + BETWEEN) / grid.together

    partitions = f.split_k if f.split_k > 1 else 2 if f.stream_k else 0
    combined = COMBINE + (1 + partitions) * f.tile_m * f.tile_n * 4 / SUMS if partitions else 0.0
    if f.split_k > 1:
        cycles += combined
    if f.cluster_k > 1:
        cycles += clusters.exchange(f.tile_m * f.tile_n * 4 * (1 - 1 / f.cluster_k))
    return _Tile(cycles, stored, combined)


def _cycles(f: Footprint, grid: _Grid, tile: _Tile) -> float:
    """Returns the cycles of a call on the SM that is busy the longest."""
    together = grid.together
    if f.stream_k:
        rounds = grid.waves + CUT + tile.combined / tile.cycles
    elif f.persistent or together == 1:
        rounds = math.ceil(grid.waves)
    else:
        rounds = max(1.0, math.ceil(grid.waves * together) / together)
    start = PROLOGUE + (clusters.TOGETHER if _cluster(f) > 1 else 0.0)
    return rounds * together * tile.cycles + start * (1 if f.persistent else rounds)


def _soft_max(sharpness: float, *values: float) -> float:
    return float(sum(value**sharpness for value in values) ** (1 / sharpness))


def _rate(f: Footprint, workload: Workload, machine: Machine) -> float:
    """Returns the FLOP per cycle of one SM with these instructions."""
    if f.math == "fma":
        return machine.flops_per_sm_clock["float32"]
    peak = machine.flops_per_sm_clock.get(workload.dtype, machine.flops_per_sm_clock["float32"])
    if f.math == "mma":
        return peak * (MMA_SHARE if machine.arch >= 90 else 0.9)
    # m64nNk16 reads A and B from shared memory every time.
    columns = min(f.tile_n, 256)
    return peak * min(1.0, (columns / 2) / (16 + columns / 4))
