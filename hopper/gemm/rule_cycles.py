"""The model of the rule: how many cycles a config of `hopper.gemm` takes for a call."""

import functools
import math
from typing import NamedTuple

import torch

from outblas.base import machines
from outblas.base.machines import Machine
from outblas.call.problem import Problem
from outblas.device import clusters
from outblas.hopper.gemm import operand_copies
from outblas.hopper.parts import tile_order
from outblas.hopper.parts.config import HopperConfig, compile_key

# The model's constants. Those for the start of a call and for GPC-local loads come from time stamps
# and times of short calls (WORKLOG.md); the others are estimates.
CALL_CYCLES = 3500.0  # of a call besides its tiles: the first load 2000, the last store 1500
TILE_CYCLES = 600.0  # between two tiles of a CTA
REDUCE_CYCLES = 6000.0  # of partial sums that go through memory, besides their bytes
REDUCE_BYTES = 20.0  # bytes of partial sums per cycle
# Bytes of operands that reach an SM per cycle:
GPC_LOCAL_BYTES = 90.0  # in a call of one wave where the SMs of a GPC compute neighbouring tiles
SPLIT_BYTES = 60.0  # in a call of one wave whose CTAs compute partitions of K
STEADY_BYTES = 40.0  # in a longer call
STREAMED_BYTES = 60.0  # of weights that come from DRAM, in a call of few rows
LINE_BYTES = 60.0  # of cache lines that are requested more than once, each request counted
REACHED = 0.97  # the fraction of that rate that a tile reaches
FEW_STAGES = 1.05  # factor for tiles that fewer than four stages feed
# Where fp8 sums are promoted, fitted to 20 tiles at 12 shapes and 26 at 18 (WORKLOG.md):
PROMOTED_STAGE_CYCLES = 200.0  # of a stage besides its products: waiting, and additions not hidden
PROMOTED_BYTES = 48.0  # bytes of operands that reach an SM per cycle
PROMOTED_STEADY_BYTES = 36.0  # the same in several waves of many rows and columns
PROMOTED_TILE_CYCLES = 300.0  # between two tiles of a CTA, besides those of its sums:
PROMOTED_SUM_CYCLES = 0.036  # for each of them, and twice that with one epilogue stage for several
# Where sums are promoted and few rows or columns meet weights, which come from DRAM in a model that
# decodes; fitted to 729 times of 48 products on an H200 (WORKLOG.md):
PROMOTED_FEW = 128  # up to this many rows or columns
FEW_CALL_CYCLES = 6000.0  # of a call besides its tiles
FEW_STAGE_CYCLES = 200.0  # of a stage besides its products
FEW_BYTES = 41.0  # bytes of weights that reach an SM per cycle
FEW_SHARE = 0.25  # the part of the bytes of the few that counts: they come from L2
FEW_SUM_CYCLES = 0.3  # for each sum of a tile, and twice that where an epilogue stage is waited for
DRAM_REACHED = 0.79  # of the data sheet's bandwidth, beside the cycles of a call
# Of a pass that quantizes C, besides its bytes, which are estimates: a launch, and waiting for it.
QUANTIZE_CYCLES = 3500.0
THREE_CONSUMERS = 1.03  # factor for tiles of three consumers
SHORT_REQUESTS = 1.01  # factor for weights from DRAM whose rows are requested 128 bytes at a time
HELD = 0.8  # the fraction of L2 that operands may fill and still be held from call to call
FEW = 64  # this few rows or columns may be faster as columns of the tile
ONE_TILE = 256  # up to this many, all of them fit in one tile, so that each weight is loaded once


class Rates(NamedTuple):
    """What the model knows of a GPU; the defaults are those of an H100.

    Attributes:
        sms: its SMs.
        flops_per_clock: FLOP of one SM per cycle on 16-bit operands; an H20 has a quarter.
        dram_bytes_per_clock: bytes from DRAM per cycle at the boost clock.
        l2_bytes: the size of L2.
    """

    sms: int = 132
    flops_per_clock: int = 4096
    dram_bytes_per_clock: float = 1832.0
    l2_bytes: int = 50 * 2**20


def rates(machine: Machine) -> Rates:
    """Returns the rates of a GPU of the list of machines."""
    return Rates(
        machine.sms,
        machine.flops_per_sm_clock["bfloat16"],
        1e3 * machine.dram_gbs / machine.boost_mhz,
        machine.l2_bytes,
    )


@functools.cache
def device_rates(device: torch.device) -> Rates:
    """Returns the rates of a device: those of an H100, with the device's own SMs, where no table
    lists it, or there is no device.
    """
    name = torch.cuda.get_device_properties(device).name if torch.cuda.is_available() else ""
    machine = machines.of_device(name)
    listed = rates(machine) if machine else Rates()
    return listed._replace(sms=tile_order.clusters(device, 0, 1))


class ModelCall(NamedTuple):
    """A call in the model.

    Attributes:
        problem: the problem with operands that TMA can load.
        M, N: the rows and columns of the product whose output lies by rows.
        matrices: the products of a batch.
        cache_lines: the cache lines that A and B take per 128 bytes of a row (`l2.lines`).
        contiguous_columns: whether the columns of tiles are contiguous in memory, as operands are
            and where they are exchanged.
        gpu: the rates of the GPU.
        streams: whether few rows meet weights that come from DRAM, which bounds the call.
        dram_cycles: the cycles in which the operands come from DRAM, where up to `ONE_TILE` rows,
            more than few, meet such weights; else 0.
    """

    problem: Problem
    M: int
    N: int
    matrices: int
    cache_lines: tuple[int, int]
    contiguous_columns: tuple[bool, bool]
    gpu: Rates
    streams: bool
    dram_cycles: float


class ConfigCycles:
    """A config in the model. Each new shape asks for the cycles of dozens of them, so the terms
    that depend on no call are computed once.
    """

    def __init__(self, config: HopperConfig) -> None:
        self.config = c = config
        self.cluster = c.cluster
        self._rows = c.tile_m * c.cluster_m
        self._loads: dict[object, tuple[float, float]] = {}  # by what `_loads_per_term` depends on
        self._exchange = clusters.exchange(c.exchange_bytes) if c.cluster_k > 1 else 0.0
        self._reduction = 0.0
        if c.split_k > 1:
            self._reduction = REDUCE_CYCLES + c.tile_m * c.tile_n * 4 * c.split_k / REDUCE_BYTES

    @functools.cached_property
    def key(self) -> HopperConfig:
        """The config whose compiled kernel serves this one (`compile_key`)."""
        return compile_key(self.config)

    def cluster_tiles(self, call: ModelCall) -> int:
        """Returns the number of cluster tiles of a call."""
        c = self.config
        M, N = (call.N, call.M) if c.swap_ab else (call.M, call.N)
        columns = tile_order.columns(c, N) if c.variable_tile_n else -(-N // c.tile_n)
        return -(-M // self._rows) * -(-columns // c.cluster_n) * call.matrices

    def cycles(self, call: ModelCall, most: float = math.inf) -> float:
        """Returns the cycles of a call; infinity where they are surely no fewer than `most`.

        Where weights stream from DRAM, these are the cycles that its CTAs would need if DRAM were
        not the limit. The call then takes longer the closer they come to what DRAM needs, so that
        the config with the fewest is still the best.
        """
        c, gpu, K = self.config, call.gpu, call.problem.K
        waves = -(-self.cluster_tiles(call) * c.split_k // clusters.at_once(gpu.sms, self.cluster))
        tile_n = self._mean_tile_n(call) if c.variable_tile_n else c.tile_n
        products = 2 * c.tile_m * max(tile_n, 32) * K / (REACHED * gpu.flops_per_clock)
        partitions = c.cluster_k * c.split_k
        enough = most * partitions / waves
        if products >= enough or (loads := K * self._loads_per_term(call)[waves > 1]) >= enough:
            return math.inf
        # Products and loads overlap: the longer of the two counts, plus a little of the other.
        both: float = (products**3 + loads**3) ** (1 / 3)
        tile = both / partitions + TILE_CYCLES
        exchange = self._exchange
        if not call.dram_cycles:
            tile += exchange
        tile += self._reduction
        if c.stages < 4:
            tile *= FEW_STAGES
        if c.consumers == 3:
            tile *= THREE_CONSUMERS
        if call.streams:
            together = clusters.TOGETHER if c.multicast_size > 1 else 0.0
            return together + waves * tile * (SHORT_REQUESTS if c.tile_k < 128 else 1.0)
        start = CALL_CYCLES + (clusters.TOGETHER if self.cluster > 1 else 0)
        if call.dram_cycles:  # partial sums are exchanged when all loads have ended
            loaded: float = ((waves * tile) ** 4 + call.dram_cycles**4) ** 0.25
            return start + loaded + exchange
        return start + waves * tile

    def _mean_tile_n(self, call: ModelCall) -> float:
        """Returns the mean width of tiles of variable width."""
        N = call.M if self.config.swap_ab else call.N
        return N / tile_order.columns(self.config, N)

    def _loads_per_term(self, call: ModelCall) -> tuple[float, float]:
        """Returns `loads_per_term` in a call of one wave, and in a longer one."""
        key = call.cache_lines, call.contiguous_columns, call.streams
        found = self._loads.get(key)
        if found is None:
            c = self.config
            found = self._loads[key] = loads_per_term(c, call, 1), loads_per_term(c, call, 2)
        return found

    def promoted_cycles(self, call: ModelCall, _most: float = math.inf) -> float:
        """Returns the cycles of a call where sums are promoted."""
        if min(call.M, call.N) <= PROMOTED_FEW:
            return self._promoted_few_cycles(call)
        c, gpu, K = self.config, call.gpu, call.problem.K
        waves = -(-self.cluster_tiles(call) * c.split_k // clusters.at_once(gpu.sms, self.cluster))
        products = 2 * c.tile_m * max(c.tile_n, 16) * c.tile_k / gpu.flops_per_clock
        stage_bytes = (c.tile_m / c.cluster_n + c.tile_n / c.cluster_m) * c.tile_k * 2
        steady = waves > 1 and min(call.M, call.N) > ONE_TILE
        rate = PROMOTED_STEADY_BYTES if steady else PROMOTED_BYTES
        stage = max(products + PROMOTED_STAGE_CYCLES, stage_bytes / rate)
        stages = -(-K // c.tile_k) / (c.cluster_k * c.split_k)
        sums = PROMOTED_SUM_CYCLES * self._sums()
        tile = stages * stage + PROMOTED_TILE_CYCLES + sums + self._exchange + self._reduction
        operands = 2 * K * (call.M + call.N)
        dram = operands / gpu.dram_bytes_per_clock if operands > HELD * gpu.l2_bytes else 0.0
        together: float = ((waves * tile) ** 4 + dram**4) ** 0.25
        return CALL_CYCLES + (clusters.TOGETHER if self.cluster > 1 else 0) + together

    def _promoted_few_cycles(self, call: ModelCall) -> float:
        """Returns `promoted_cycles` where few rows or columns meet weights from DRAM.

        Waves that occupy all SMs share what DRAM gives. In the last one fewer CTAs ask for less, so
        that it may take no longer than DRAM needs for it.
        """
        c, gpu, K = self.config, call.gpu, call.problem.K
        few = min(call.M, call.N)
        if c.swap_ab == (call.M <= call.N):  # the few are the columns of tiles
            of_few, of_weights, along_weights = c.tile_n, c.tile_m, c.cluster_m
        else:
            of_few, of_weights, along_weights = c.tile_m, c.tile_n, c.cluster_n
        products = 2 * c.tile_m * max(c.tile_n, 16) * c.tile_k / gpu.flops_per_clock
        rows = of_weights + FEW_SHARE * min(of_few, few) / along_weights
        stage = max(products + FEW_STAGE_CYCLES, 2 * c.tile_k * rows / FEW_BYTES)
        partitions = c.cluster_k * c.split_k
        stages = -(-K // c.tile_k) / partitions
        tile = stages * stage + FEW_SUM_CYCLES * self._sums() + self._exchange + self._reduction

        bytes_of_one = 2 * K * of_weights * along_weights / c.split_k
        dram = bytes_of_one / (DRAM_REACHED * gpu.dram_bytes_per_clock)
        at_once = clusters.at_once(gpu.sms, self.cluster)
        waves, rest = divmod(self.cluster_tiles(call) * c.split_k, at_once)
        together = waves * (tile**6 + (at_once * dram) ** 6) ** (1 / 6)
        if rest:
            together += (tile**6 + (rest * dram) ** 6) ** (1 / 6)
        return float(FEW_CALL_CYCLES + together)

    def _sums(self) -> float:
        """Returns the sums of a tile, and twice as many where each subtile of the epilogue waits
        until the one before has left.
        """
        c = self.config
        waits = c.epilogue_stages < min(2, c.epilogue_subtiles)
        return c.tile_m * c.tile_n * (2 if waits else 1)


def loads_per_term(c: HopperConfig, call: ModelCall, waves: int) -> float:
    """Returns the cycles in which one term of K of a tile's operands reaches its SM."""
    gpc_local = waves == 1 and not c.split and not call.streams
    multicast_bytes = SPLIT_BYTES if waves == 1 else STEADY_BYTES
    if call.streams:
        multicast_bytes = STREAMED_BYTES
    lines_a, lines_b = call.cache_lines[::-1] if c.swap_ab else call.cache_lines
    if call.contiguous_columns[c.swap_ab]:
        lines_b = max(lines_b, operand_copies.lines_of_columns(c))
    cycles = 0.0
    for rows, multicast, lines_per_row in (
        (c.tile_m, c.cluster_n, lines_a),
        (c.tile_n, c.cluster_m, lines_b),
    ):
        if lines_per_row > 1:
            cycles += rows * lines_per_row / multicast / LINE_BYTES
        elif gpc_local:
            cycles += rows / GPC_LOCAL_BYTES
        else:
            cycles += rows / multicast / multicast_bytes
    return 2 * cycles
