"""ncu's counters of one call: which to collect, how to read ncu's CSV, and how to combine the
launches of a call.

Everything here works on text and numbers, and needs neither torch nor ncu.
"""

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TIME = "gpu__time_duration.sum"
REGISTERS = "launch__registers_per_thread"
ACTIVE = (
    "sm__cycles_active.avg",
    "sm__cycles_elapsed.max",
)  # the second where the first was not collected

SUMS = {
    "us": TIME,
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "l1_bytes": "l1tex__t_bytes.sum",
    "l2_bytes": "lts__t_bytes.sum",
    "l1_load_bytes": "l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum",
    "l2_to_sm_bytes": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "ffma": "sm__sass_thread_inst_executed_op_ffma_pred_on.sum",
    "global_load_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "global_load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "global_store_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "global_store_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
}
# Each rate with its denominator, which weights it when a call has several launches.
RATES = {
    "l2_hit_rate": ("lts__t_sector_hit_rate.pct", ("lts__t_sectors.sum",)),
    "l1_hit_rate": ("l1tex__t_sector_hit_rate.pct", ("l1tex__t_sectors.sum",)),
    "tensor_active": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", ACTIVE),
    "fma_active": ("sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active", ACTIVE),
    "ipc": ("sm__inst_executed.avg.per_cycle_active", ACTIVE),
    "occupancy": ("sm__warps_active.avg.pct_of_peak_sustained_active", ACTIVE),
}
STALLS = (
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "drain",
    "gmma",
    "imc_miss",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "misc",
    "no_instruction",
    "not_selected",
    "short_scoreboard",
    "sleeping",
    "tex_throttle",
    "wait",
)
ISSUES = ("smsp__issue_active.sum", "sm__cycles_elapsed.max")
SHARED = ("ld", "st", "gmma")

_MICROSECONDS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
_MICROSECONDS |= {"s": 1e6, "second": 1e6}
_BYTES = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}
_FRACTIONS = {"%": 0.01}


def metrics(arch: int) -> tuple[str, ...]:
    """Returns the metrics to collect on sm_`arch`. Warpgroup MMA and its counters exist only on
    sm_90.
    """
    names = {REGISTERS: None, **dict.fromkeys(SUMS.values()), **dict.fromkeys((*ACTIVE, *ISSUES))}
    for rate, weights in RATES.values():
        names |= dict.fromkeys((rate, *weights))
    names |= dict.fromkeys(stall(reason) for reason in STALLS if arch == 90 or reason != "gmma")
    for op in SHARED:
        if arch == 90 or op != "gmma":
            names |= dict.fromkeys((wavefronts(op), conflicts(op)))
    return tuple(names)


def stall(reason: str) -> str:
    """Returns the metric for warps that stall for this reason, per cycle in which the scheduler
    issues.
    """
    return f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"


def wavefronts(op: str) -> str:
    """Returns the metric for passes through shared memory by instructions of one kind."""
    return f"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{op}.sum"


def conflicts(op: str) -> str:
    """Returns the metric for those passes that bank conflicts added."""
    return f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{op}.sum"


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `ranges` are the NVTX ranges around it. `values` holds metrics by name,
    None where ncu has no value: times in µs, sizes in bytes, percentages as fractions, everything
    else in ncu's own unit.
    """

    ranges: tuple[str, ...]
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    values: Mapping[str, float | None]


def parse(text: str) -> list[Launch]:
    """Reads the output of `ncu --csv --page raw --nvtx`, possibly with other lines in it; returns
    [] if it contains no launch.

    A missing column is missing from `values`. Raises ValueError for an unknown unit.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), len(lines))
    rows = list(csv.reader(line for line in lines[start:] if line.startswith('"')))
    if len(rows) < 3:
        return []
    header, units, *records = rows
    wanted = [(i, name) for i, name in enumerate(header) if name in metrics(90)]
    scales = {name: _scale(name, units[i]) for i, name in wanted}
    ranges = next(
        (i for i, name in enumerate(header) if name.startswith("thread Domain:Push/Pop_Range")),
        None,
    )
    kernel, grid, block = (
        header.index(name) for name in ("Kernel Name", "Grid Size", "Block Size")
    )
    return [
        Launch(
            ranges=()
            if ranges is None
            else tuple(re.findall(r'<default domain>:([^:"]*)', row[ranges])),
            kernel=row[kernel],
            grid=_sizes(row[grid]),
            block=_sizes(row[block]),
            values={name: _number(row[i], scales[name]) for i, name in wanted},
        )
        for row in records
        if len(row) == len(header)
    ]


def _scale(metric: str, unit: str) -> float:
    if metric == TIME:
        known = _MICROSECONDS
    elif "_bytes" in metric:
        known = _BYTES
    elif ".pct" in metric:
        known = _FRACTIONS
    else:
        return 1.0
    if unit not in known:
        raise ValueError(f"the unit of {metric} is {unit!r}, expected one of {', '.join(known)}")
    return known[unit]


def _number(cell: str, scale: float) -> float | None:
    try:
        value = float(cell.replace(",", ""))
    except ValueError:
        return None  # "n/a", "no data"
    return value * scale if math.isfinite(value) else None


def _sizes(cell: str) -> tuple[int, ...]:
    return tuple(int(size) for size in cell.strip("()").split(", "))


def in_range(launches: Sequence[Launch], name: str) -> list[Launch]:
    """Returns the launches inside the NVTX range called `name`."""
    return [launch for launch in launches if name in launch.ranges]


@dataclass(frozen=True)
class SharedMemory:
    """Passes through shared memory by one kind of instruction, and the fraction of them that bank
    conflicts added.
    """

    wavefronts: float | None
    excess: float | None


@dataclass(frozen=True)
class Counters:
    """The counters of one call, with all its launches combined. None: not collected, or a rate
    whose denominator is 0.

    `us` is ncu's time in µs. Sizes are in bytes: `l1_bytes` and `l2_bytes` are the sectors that L1
    and L2 looked up for any reason, `l1_load_bytes` the bytes that global load instructions
    requested from L1, `l2_to_sm_bytes` the bytes that the SMs received from L2, TMA included.
    `l1_gbs`, `l2_gbs` and `dram_gbs` are GB/s over `us`: of `l1_bytes`, of `l2_bytes`, and of bytes
    read from and written to DRAM. Loads and stores of global memory (asynchronous copies count as
    loads) are counted in `requests` of warps and in `sectors` of 32 bytes.

    Hit rates, `tensor_active`, `fma_active` (of the pipe's peak while the SM is active) and
    `occupancy` (of the SM's warps) are fractions. `ipc` is warp instructions per SM and cycle,
    `ffma` the fp32 FMAs executed by threads, `ffma_per_mnk` the same divided by M·N·K, `registers`
    the maximum per thread over the launches. `flop_per_dram_byte` and `flop_per_l2_byte` divide
    2·M·N·K by the bytes read from and written to DRAM, and by `l2_to_sm_bytes`. `stalls` maps
    reasons to the warps that stall per cycle in which a scheduler issues. `not_selected_share` is
    that reason's fraction of all of them plus the warp that issues, which is its fraction of the
    cycles between two instructions of a warp.
    """

    us: float | None
    dram_read_bytes: float | None
    dram_write_bytes: float | None
    l1_bytes: float | None
    l2_bytes: float | None
    l1_load_bytes: float | None
    l2_to_sm_bytes: float | None
    ffma: float | None
    global_load_requests: float | None
    global_load_sectors: float | None
    global_store_requests: float | None
    global_store_sectors: float | None
    l2_hit_rate: float | None
    l1_hit_rate: float | None
    tensor_active: float | None
    fma_active: float | None
    ipc: float | None
    occupancy: float | None
    registers: float | None
    l1_gbs: float | None
    l2_gbs: float | None
    dram_gbs: float | None
    ffma_per_mnk: float | None
    flop_per_dram_byte: float | None
    flop_per_l2_byte: float | None
    not_selected_share: float | None
    stalls: dict[str, float | None]
    shared: dict[str, SharedMemory]


def combine(launches: Sequence[Launch], flop: float) -> Counters:
    """Combines the launches of a call (at least one) that takes `flop` operations into its
    counters.

    Times, bytes and counts are added. A rate is weighted by its denominator: hit rates by sectors,
    rates per active cycle by active cycles, stalls by issuing cycles. Active and issuing cycles
    that were not collected are approximated by elapsed cycles.
    """
    sums = {field: _total(launches, metric) for field, metric in SUMS.items()}
    rates = {field: _mean(launches, metric, weights) for field, (metric, weights) in RATES.items()}
    registers = [
        value for launch in launches if (value := launch.values.get(REGISTERS)) is not None
    ]
    read, written = sums["dram_read_bytes"], sums["dram_write_bytes"]
    dram = None if read is None or written is None else read + written
    stalls = {reason: _mean(launches, stall(reason), ISSUES) for reason in STALLS}
    between_issues = 1 + sum(warps for warps in stalls.values() if warps is not None)
    shared = {}
    for op in SHARED:
        passes, added = _total(launches, wavefronts(op)), _total(launches, conflicts(op))
        shared[op] = SharedMemory(passes, _ratio(added, passes))
    return Counters(
        **sums,
        **rates,
        registers=max(registers, default=None),
        l1_gbs=_gbs(sums["l1_bytes"], sums["us"]),
        l2_gbs=_gbs(sums["l2_bytes"], sums["us"]),
        dram_gbs=_gbs(dram, sums["us"]),
        ffma_per_mnk=_ratio(sums["ffma"], flop / 2),
        flop_per_dram_byte=_ratio(flop, dram),
        flop_per_l2_byte=_ratio(flop, sums["l2_to_sm_bytes"]),
        not_selected_share=_ratio(stalls["not_selected"], between_issues),
        stalls=stalls,
        shared=shared,
    )


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _gbs(size: float | None, us: float | None) -> float | None:
    return None if us is None else _ratio(size, 1e3 * us)


def _total(launches: Sequence[Launch], metric: str) -> float | None:
    total = 0.0
    for launch in launches:
        if (value := launch.values.get(metric)) is None:
            return None
        total += value
    return total


def _mean(launches: Sequence[Launch], metric: str, weights: Sequence[str]) -> float | None:
    """Returns the mean, weighted by the first of `weights` that every launch has. Without weights,
    a mean exists only for a single launch.
    """
    weight = next((w for w in weights if _total(launches, w) is not None), None)
    if weight is None:
        return launches[0].values.get(metric) if len(launches) == 1 else None
    total = mean = 0.0
    for launch in launches:
        if share := launch.values[weight]:
            if (value := launch.values.get(metric)) is None:
                return None
            mean += value * share
            total += share
    return mean / total if total else None
