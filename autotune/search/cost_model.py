"""A small analytic model: how long a config takes, from waves, bytes between L2 and the SMs, and
pipeline depth.

It ranks configs before anything is compiled. Its constants are fitted to an H100; what matters is
the order in which it puts configs, and `rank.spearman` says how good that is.
"""

import math
from dataclasses import dataclass

from ...core.machines import Machine
from ...core.space import Footprint
from ...device import clusters
from ..store.records import Workload

LATENCY = 600.0  # cycles from asking for operands until they are there, L2 at work
# cycles a step in which a group that keeps nothing in flight waits for its products to end
DRAIN = 140.0
SHARPNESS = (
    2.5  # of the maximum of what bounds a step: they disturb each other where they are close
)
SLOT = 20.0  # cycles a step for barriers and descriptors
L2_SHARE = 1.35  # of L2's peak that many SMs get: requests for the same lines merge on their way
# where L2 holds all that a call touches: 66 bytes a cycle and SM at 1024, tiles as they come
L2_SHARE_HELD = 1.7
HELD = 0.8  # of L2; an estimate
# by how much bytes of the larger operand cost more than those of the smaller, of which there are
# few
LARGER = 0.55
DRAM_SHARE = 0.82  # of DRAM's peak
DRAM_SHARPNESS = 5.0  # loads from DRAM and what SMs do overlap over a whole call
L2_PORT = 128.0  # bytes a cycle into one SM
GATHERED = 100.0  # of them in a call of one wave, where SMs of a GPC ask for the same lines
# bytes of lines that each of all SMs gets a cycle at most, where rows begin inside of them: none
# merge
LINES = 60.0
CLOCK_SHARE = 1.0  # of the boost clock, under load
LAUNCH_US = 2.0
PROLOGUE = 1500.0  # cycles before a CTA's first product: barriers, descriptors, first loads
BETWEEN = 450.0  # cycles of a tile beside its products and stores
STORE = {
    "registers": 6.0,
    "wide": 31.0,
    "staged": 42.0,
}  # bytes a cycle in which a CTA's outputs leave
BEHIND = 0.4  # of a store, what pingpong does not hide
CUT = 0.4  # of a wave that stream_k costs beside its sums
COMBINE = 5000.0  # cycles until partial sums are written, counted, and read by whoever is last
SUMS = 20.0  # bytes a cycle in which one SM writes or reads them
MMA_SHARE = 0.62  # of wgmma's rate that mma.sync reaches on sm_90


@dataclass(frozen=True)
class Prediction:
    """`us` a call; `waves` of tiles over the SMs; the share of the time that products, L2 and
    latency each would need alone, and the share of the GPU that does useful work
    (`wave_efficiency`).
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
        """What bounds the config, for tables."""
        return (
            f"products {self.tensor:.0%}, L2 {self.l2:.0%}, latency {self.latency:.0%}, stores "
            f"{self.store:.0%}, "
            f"{self.waves:.2f} waves"
        )


def resident(f: Footprint, machine: Machine) -> int:
    """CTAs of a kernel that an SM holds at the same time; 0 where not even one fits."""
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
    """Outputs wanted over outputs that all SMs could compute in as many waves."""
    rows, columns, places, waves = _waves(f, workload, machine)
    del rows, columns
    rounds = waves if f.stream_k else math.ceil(waves) / f.split_k
    computed = rounds * places * _cluster(f) / f.cluster_k * f.tile_m * f.tile_n
    return workload.M * workload.N / computed


def _waves(f: Footprint, workload: Workload, machine: Machine) -> tuple[int, int, float, float]:
    """Rows and columns of cluster tiles, clusters at a time on all SMs, and waves of them."""
    rows = math.ceil(workload.M / (f.tile_m * f.cluster_m))
    columns = math.ceil(workload.N / (f.tile_n * f.cluster_n))
    sms, cluster = min(f.sms or machine.sms, machine.sms), _cluster(f)
    at_once = clusters.at_once(sms, cluster) * max(1, resident(f, machine))
    places = max(at_once, machine.sms / cluster)
    return rows, columns, places, rows * columns * f.split_k / at_once


def _cluster(f: Footprint) -> int:
    """CTAs of a cluster."""
    return f.cluster_m * f.cluster_n * f.cluster_k


def predict(f: Footprint, workload: Workload, machine: Machine) -> Prediction:
    """How long a config takes, by the model. Without bounds on what it takes: whoever asks has
    pruned.
    """
    size, out_size = (
        2 if name in ("bfloat16", "float16") else 4 for name in (workload.dtype, workload.out_dtype)
    )
    rows, columns, _, waves = _waves(f, workload, machine)
    pieces = f.split_k * f.cluster_k
    tiles = rows * columns * _cluster(f) * f.split_k
    together = max(1, resident(f, machine))  # CTAs of an SM that cover each other's waits
    together = min(together, math.ceil(tiles / machine.sms))
    busy = min(machine.sms, f.sms or machine.sms, tiles)

    products = 2 * f.tile_m * f.tile_n * f.tile_k / (_rate(f, workload, machine) * f.issue)
    operands = (workload.M + workload.N) * workload.K * size
    lean = LARGER * (workload.M / (workload.M + workload.N) - 0.5)
    touched = operands + workload.M * workload.N * out_size
    held = touched <= HELD * machine.l2_bytes
    share = L2_SHARE_HELD if held else L2_SHARE
    rows_a, rows_b = f.tile_m / f.cluster_n, f.tile_n / f.cluster_m  # that a CTA loads itself
    l2 = ((1 + lean) * rows_a + (1 - lean) * rows_b) * f.tile_k * size
    l2 /= min(L2_PORT, share * machine.l2_bytes_per_clock / busy)
    if f.gpc_local and waves <= 1:
        l2 = (f.tile_m + f.tile_n) * f.tile_k * size / GATHERED
    drained = 0.0 if f.in_flight else DRAIN / f.groups / together
    if f.stages == 1:
        waited = (LATENCY + l2 + products + drained) / together
    else:
        waited = (LATENCY + products) / max(1.0, f.stages - f.in_flight) / together
    step = _soft_max(SHARPNESS, products + drained, l2, waited) + SLOT
    if max(f.cache_lines) > 1:
        asked = (rows_a * f.cache_lines[0] + rows_b * f.cache_lines[1]) * f.tile_k * size
        step = max(step, asked / (LINES * machine.sms / busy))

    steps = math.ceil(math.ceil(workload.K / f.tile_k) / pieces)
    stored = (
        f.tile_m
        * f.tile_n
        / f.cluster_k
        * out_size
        / STORE[f.store]
        * (BEHIND if f.pingpong else 1.0)
    )
    tile = steps * step + (stored + BETWEEN) / together
    shared = f.split_k if f.split_k > 1 else 2 if f.stream_k else 0
    combined = COMBINE + (1 + shared) * f.tile_m * f.tile_n * 4 / SUMS if shared else 0.0
    if f.split_k > 1:
        tile += combined
    if f.cluster_k > 1:
        tile += clusters.exchange(f.tile_m * f.tile_n * 4 * (1 - 1 / f.cluster_k))
    rounds = (
        math.ceil(waves)
        if f.persistent or together == 1
        else max(1.0, math.ceil(waves * together) / together)
    )
    if f.stream_k:
        rounds = waves + CUT + combined / tile
    start = PROLOGUE + (clusters.TOGETHER if _cluster(f) > 1 else 0.0)
    cycles = rounds * together * tile + start * (1 if f.persistent else rounds)
    dram = 0.0 if held else touched / (DRAM_SHARE * machine.dram_gbs) / 1e3
    us = _soft_max(DRAM_SHARPNESS, cycles / (CLOCK_SHARE * machine.boost_mhz), dram) + LAUNCH_US
    return Prediction(
        us=us,
        waves=waves,
        wave_efficiency=wave_efficiency(f, workload, machine),
        tensor=min(1.0, products / step),
        l2=min(1.0, l2 / step),
        latency=min(1.0, waited / step),
        store=stored / together / tile,
    )


def _soft_max(sharpness: float, *values: float) -> float:
    return float(sum(value**sharpness for value in values) ** (1 / sharpness))


def _rate(f: Footprint, workload: Workload, machine: Machine) -> float:
    """FLOP a cycle of one SM with these instructions."""
    if f.math == "fma":
        return machine.flops_per_sm_clock["float32"]
    peak = machine.flops_per_sm_clock.get(workload.dtype, machine.flops_per_sm_clock["float32"])
    if f.math == "mma":
        return peak * (MMA_SHARE if machine.arch >= 90 else 0.9)
    columns = min(f.tile_n, 256)
    return peak * min(
        1.0, (columns / 2) / (16 + columns / 4)
    )  # m64nNk16 reads A and B from shared memory each time
