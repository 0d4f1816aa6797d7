"""A small analytic model that predicts how long a config takes, from waves, bytes between L2 and
the SMs, and pipeline depth. The products of groups are one call with tiles of each group.

It ranks configs before anything is compiled. Its constants are fitted to an H100. Only the order of
the predictions matters; `report.model.spearman` measures how good it is.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from outblas.autotune.store.records import Workload
from outblas.base.machines import Machine
from outblas.base.space import Footprint
from outblas.device import clusters

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
OF_GROUPS = 1050.0  # more, where a CTA finds the group of a tile first; not fitted to a sweep
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


def predict(f: Footprint, workload: Workload, machine: Machine) -> Prediction:
    """Predicts how long a config takes.

    It checks nothing: configs that cannot run are pruned before.
    """
    model = ConfigModel(f, machine, workload.dtype, workload.out_dtype)
    return model.predict(ModelledCall.of(workload, machine))


class ModelledCall(NamedTuple):
    """What all configs share in a call.

    Attributes:
        M, N, K: its shape, with groups that of all products together.
        fits_l2: whether L2 holds everything that it touches.
        dram_us: how long DRAM needs where L2 does not, else 0.
        lean: how much more a byte of A costs than the mean of both operands, and one of B less.
        rows: the rows of each group; () for one product, and where groups divide K.
        terms: the terms along K of each group; () where they do not divide K.
    """

    M: int
    N: int
    K: int
    fits_l2: bool
    dram_us: float
    lean: float
    rows: tuple[int, ...] = ()
    terms: tuple[int, ...] = ()

    @staticmethod
    def of(workload: Workload, machine: Machine) -> "ModelledCall":
        """Returns the call of a workload on a GPU."""
        M, N, K = workload.M, workload.N, workload.K
        size, out_size = _size(workload.dtype), _size(workload.out_dtype)
        rows: tuple[int, ...] = ()
        terms: tuple[int, ...] = ()
        touched = (M + N) * K * size + M * N * out_size
        if (groups := workload.grouped) is not None:
            if groups.form == "rows":
                rows = groups.sizes
                weights = sum(rows_of_group > 0 for rows_of_group in rows) * N * K
                touched = (M * K + weights) * size + M * N * out_size
            else:
                terms = groups.sizes
                touched = (M + N) * K * size + groups.experts * M * N * out_size
        fits_l2 = touched <= HELD * machine.l2_bytes
        dram = 0.0 if fits_l2 else touched / (DRAM_SHARE * machine.dram_gbs) / 1e3
        return ModelledCall(M, N, K, fits_l2, dram, LARGER * (M / (M + N) - 0.5), rows, terms)

    @property
    def outputs(self) -> int:
        """The outputs of all its products."""
        return self.M * self.N * max(1, len(self.terms))

    def tiles(self, rows: int, columns: int) -> int:
        """Returns the number of cluster tiles of this size; each group begins a tile."""
        down = sum(-(-size // rows) for size in self.rows) if self.rows else -(-self.M // rows)
        return down * -(-self.N // columns) * max(1, len(self.terms))

    def k_tiles(self, tile_k: int) -> float:
        """Returns the number of k tiles of a product, with groups the mean over them."""
        if not self.terms:
            return math.ceil(self.K / tile_k)
        return sum(math.ceil(size / tile_k) for size in self.terms) / len(self.terms)


def _size(dtype: str) -> int:
    return 2 if dtype in ("bfloat16", "float16") else 4


class _Grid(NamedTuple):
    """The grid of tiles on the GPU.

    Attributes:
        tiles: cluster tiles.
        waves: waves of clusters, with split-K partitions counted.
        together: CTAs on an SM that hide each other's latency.
        busy: SMs that have work.
    """

    tiles: int
    waves: float
    together: int
    busy: int


class _KTile(NamedTuple):
    """The cycles of one k tile in a CTA, and those of its limits besides MMAs: L2, waits."""

    cycles: float
    l2: float
    waited: float


class ConfigModel:
    """The model of a config on a GPU. A lookup asks it for the times of a hundred configs at every
    new shape, so the terms that depend on no shape are computed once.

    Attributes:
        rows, columns: the outputs of a cluster tile.
        at_once: clusters that run at the same time.
        products: the cycles of a k tile's MMAs.
        stored: the cycles of an output tile's stores.
        combined: the cycles of combining a tile's partial sums.
    """

    def __init__(self, f: Footprint, machine: Machine, dtype: str, out_dtype: str) -> None:
        self.f, self.machine = f, machine
        self._cluster = cluster = f.cluster_m * f.cluster_n * f.cluster_k
        self.rows, self.columns = f.tile_m * f.cluster_m, f.tile_n * f.cluster_n
        self._sms = min(f.sms or machine.sms, machine.sms)
        self._ctas_per_sm = max(1, resident(f, machine))
        self.at_once = clusters.at_once(self._sms, cluster) * self._ctas_per_sm
        self._places = max(self.at_once, machine.sms / cluster)

        self.products = 2 * f.tile_m * f.tile_n * f.tile_k / (_rate(f, dtype, machine) * f.issue)
        self._drain = 0.0 if f.in_flight else DRAIN / f.groups
        self._waited = (LATENCY + self.products) / max(1.0, f.stages - f.in_flight)
        self._partitions = f.split_k * f.cluster_k
        # Rows of A and columns of B that a CTA loads itself; others of its cluster load the rest.
        self._rows_a, self._rows_b = f.tile_m / f.cluster_n, f.tile_n / f.cluster_m
        row = f.tile_k * _size(dtype)  # bytes of a k tile's row
        self._row = row
        self._gathered = (f.tile_m + f.tile_n) * row / GATHERED
        self._requested = 0.0
        if max(f.cache_lines) > 1:
            lines_a, lines_b = f.cache_lines
            self._requested = (self._rows_a * lines_a + self._rows_b * lines_b) * row

        hidden = BEHIND if f.pingpong else 1.0
        out_size = _size(out_dtype)
        self.stored = f.tile_m * f.tile_n / f.cluster_k * out_size / STORE[f.store] * hidden
        partitions = f.split_k if f.split_k > 1 else 2 if f.stream_k else 0
        sums = f.tile_m * f.tile_n * 4
        self.combined = COMBINE + (1 + partitions) * sums / SUMS if partitions else 0.0
        self._exchanged = clusters.exchange(sums * (1 - 1 / f.cluster_k)) if f.cluster_k > 1 else 0
        self._start = PROLOGUE + (clusters.TOGETHER if cluster > 1 else 0.0)

    def us(self, call: ModelledCall) -> float:
        """Returns the predicted time of a call."""
        grid = self._grid(call)
        return self._us(call, grid, self._tile(call, grid, self._k_tile(call, grid).cycles))

    def predict(self, call: ModelledCall) -> Prediction:
        """Returns the predicted time of a call, and what limits it."""
        grid = self._grid(call)
        k_tile = self._k_tile(call, grid)
        tile = self._tile(call, grid, k_tile.cycles)
        return Prediction(
            us=self._us(call, grid, tile),
            waves=grid.waves,
            wave_efficiency=self.wave_efficiency(call),
            tensor=min(1.0, self.products / k_tile.cycles),
            l2=min(1.0, k_tile.l2 / k_tile.cycles),
            latency=min(1.0, k_tile.waited / k_tile.cycles),
            store=self.stored / grid.together / tile,
        )

    def wave_efficiency(self, call: ModelledCall) -> float:
        """Returns the number of useful outputs divided by the outputs that all SMs could compute in
        as many waves.
        """
        f, grid = self.f, self._grid(call)
        rounds = grid.waves if f.stream_k else math.ceil(grid.waves) / f.split_k
        outputs = self._cluster / f.cluster_k * f.tile_m * f.tile_n
        return call.outputs / (rounds * self._places * outputs)

    def _grid(self, call: ModelledCall) -> _Grid:
        tiles = call.tiles(self.rows, self.columns)
        partitions = tiles * self.f.split_k
        ctas = partitions * self._cluster
        return _Grid(
            tiles,
            waves=partitions / self.at_once,
            together=min(self._ctas_per_sm, -(-ctas // self.machine.sms)),
            busy=min(self._sms, ctas),
        )

    def _k_tile(self, call: ModelledCall, grid: _Grid) -> _KTile:
        products, together = self.products, grid.together
        l2 = self._l2_cycles(call, grid)
        drained = self._drain / together
        if self.f.stages == 1:
            waited = (LATENCY + l2 + products + drained) / together
        else:
            waited = self._waited / together
        cycles = _soft_max(SHARPNESS, products + drained, l2, waited) + BARRIERS
        if self._requested:
            cycles = max(cycles, self._requested / (LINES * self.machine.sms / grid.busy))
        return _KTile(cycles, l2, waited)

    def _l2_cycles(self, call: ModelledCall, grid: _Grid) -> float:
        """Returns the cycles until L2 has sent the operands of a k tile."""
        if self.f.gpc_local and grid.waves <= 1:
            return self._gathered
        share = L2_SHARE_HELD if call.fits_l2 else L2_SHARE
        lean = call.lean
        weighed = ((1 + lean) * self._rows_a + (1 - lean) * self._rows_b) * self._row
        return weighed / min(L2_PORT, share * self.machine.l2_bytes_per_clock / grid.busy)

    def _tile(self, call: ModelledCall, grid: _Grid, k_tile: float) -> float:
        """Returns the cycles of an output tile whose k tiles take so many."""
        f = self.f
        k_tiles = call.k_tiles(f.tile_k)
        if self._partitions > 1:
            k_tiles = math.ceil(k_tiles / self._partitions)
        between = BETWEEN + (OF_GROUPS if call.rows or call.terms else 0.0)
        cycles = k_tiles * k_tile + (self.stored + between) / grid.together
        if f.split_k > 1:
            cycles += self.combined
        return cycles + self._exchanged

    def _us(self, call: ModelledCall, grid: _Grid, tile: float) -> float:
        """Returns the time of a call, which is that of the SM that is busy the longest."""
        f, together = self.f, grid.together
        if f.stream_k:
            rounds = grid.waves + CUT + self.combined / tile
        elif f.persistent or together == 1:
            rounds = math.ceil(grid.waves)
        else:
            rounds = max(1.0, math.ceil(grid.waves * together) / together)
        cycles = rounds * together * tile + self._start * (1 if f.persistent else rounds)
        on_sms = cycles / (CLOCK_SHARE * self.machine.boost_mhz)
        us = _soft_max(DRAM_SHARPNESS, on_sms, call.dram_us) if call.dram_us else on_sms
        us += LAUNCH_US
        return us * STRADDLED_LINES if f.straddles_lines else us


def _soft_max(sharpness: float, *values: float) -> float:
    return float(sum(value**sharpness for value in values) ** (1 / sharpness))


def _rate(f: Footprint, dtype: str, machine: Machine) -> float:
    """Returns the FLOP per cycle of one SM with these instructions."""
    if f.math == "fma":
        return machine.flops_per_sm_clock["float32"]
    peak = machine.flops_per_sm_clock.get(dtype, machine.flops_per_sm_clock["float32"])
    if f.math == "mma":
        return peak * (MMA_SHARE if machine.arch >= 90 else 0.9)
    # m64nNk16 reads A and B from shared memory every time.
    columns = min(f.tile_n, 256)
    return peak * min(1.0, (columns / 2) / (16 + columns / 4))
