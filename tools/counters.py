"""What NVIDIA's counters say of a GEMM, beside cuBLAS: needs a GPU and ncu (Nsight Compute).

    python -m tools.counters hopper.gemm --shape 4096
    python -m tools.counters simt.naive --shape 2048 --instructions
    python -m tools.counters hopper.hilbert --phases

It prints JSON, which `tools.pages` reads as it does the files of counters in results/; what
--instructions adds is for the reader alone.

ncu watches one call of each provider after two that warm it up: it replays each launch with cold
caches, at whatever clock the GPU has, so that its time is no benchmark. What it counted is read by
NVIDIA's own module `ncu_report`, which comes with ncu. With --phases there is no ncu: a rung of the
Hopper ladder is compiled with clocks in it, which give the mean cycles of each role of warps.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import outblas
from outblas.base import registry
from outblas.base.configs import from_text
from outblas.base.shapes import LAYOUTS, parse
from outblas.bench.environment import environment
from outblas.bench.operands import normal

ROOT = Path(__file__).parents[1]
CUBLAS = "cublas"
WARM_CALLS = 2
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
SCALES = {"ns": 1e-3, "nsecond": 1e-3, "ms": 1e3, "msecond": 1e3, "%": 1e-2}  # to µs, fractions
SECTIONS = ("WarpStateStats", "SourceCounters")

# Fields of a result: those that are added over the launches of a call, in bytes, µs or events, and
# rates.
SUMS = {
    "us": "gpu__time_duration.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "l1_load_bytes": "l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum",
    "l2_to_sm_bytes": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "ffma": "sm__sass_thread_inst_executed_op_ffma_pred_on.sum",
}
RATES = {
    "l2_hit_rate": "lts__t_sector_hit_rate.pct",
    "l1_hit_rate": "l1tex__t_sector_hit_rate.pct",
    "tensor_active": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "fma_active": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "ipc": "sm__inst_executed.avg.per_cycle_active",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
}
# Of each memory instruction; ncu's section SourceCounters has the first three.
BY_INSTRUCTION = {
    "executed": "inst_executed",
    "transactions": "memory_l1_tag_requests_global",
    "sectors": "memory_l2_theoretical_sectors_global",
    "wavefronts": "memory_l1_wavefronts_shared",
    "ideal": "memory_l1_wavefronts_shared_ideal",
}
_MNEMONIC = re.compile(
    r"\s*(?:@!?U?P\w+\s+)?((?:LD|ST|LDGSTS|(?:LD|ST)(?:G|SM?|L)|(?:RED|ATOM)[GS]?)(?:\.\w+)*)\s"
)


class CannotMeasure(RuntimeError):
    """ncu is missing, or cannot measure on this machine."""


# ---- the call
def operands(request: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """A, B, an empty output on the GPU, and the kernel's config."""
    module = None if request["kernel"] == CUBLAS else registry.load(request["kernel"])
    config = from_text(module.Config, request["config"]) if module and request["config"] else None
    shape = request["shape"]
    return *normal(shape, request["layout"], getattr(torch, request["dtype"])), config


def call(request: dict[str, Any]) -> None:
    """What ncu watches: the last of three calls."""
    a, b, out, config = operands(request)

    def once() -> None:
        if request["kernel"] == CUBLAS:
            torch.mm(a, b, out=out)
        else:
            outblas.matmul(a, b, out=out, kernel=request["kernel"], config=config)
        torch.cuda.synchronize()

    for _ in range(WARM_CALLS):
        once()
    torch.cuda.cudart().cudaProfilerStart()
    once()
    torch.cuda.cudart().cudaProfilerStop()


# ---- ncu
def find_ncu() -> tuple[str, Any]:
    """The program, from PATH, and NVIDIA's module `ncu_report`, from PYTHONPATH, otherwise from
    beside the program. Raises CannotMeasure.
    """
    program = shutil.which("ncu")
    if program is None:
        raise CannotMeasure("ncu (Nsight Compute) is not on PATH")
    sys.path.append(str(Path(program).resolve().parent / "extras" / "python"))
    try:
        return program, importlib.import_module("ncu_report")
    except ImportError:
        raise CannotMeasure(
            "ncu_report is not beside ncu: add the folder extras/python of Nsight Compute to "
            "PYTHONPATH"
        ) from None


@contextlib.contextmanager
def profile(request: dict[str, Any]) -> Iterator[list[Any]]:
    """The launches of the request's call, as `ncu_report` has them: to be read while their report
    and its file are there. Raises CannotMeasure.
    """
    ncu, reader = find_ncu()
    metrics = [
        *SUMS.values(),
        *RATES.values(),
        BY_INSTRUCTION["wavefronts"],
        BY_INSTRUCTION["ideal"],
    ]
    with tempfile.TemporaryDirectory(prefix="outblas-ncu-") as folder:
        path = f"{folder}/report.ncu-rep"
        command = [ncu, "--clock-control", "none", "--profile-from-start", "off", "-o", path]
        command += [part for section in SECTIONS for part in ("--section", section)]
        command += ["--metrics", ",".join(metrics)]
        command += [sys.executable, "-m", "tools.counters", "--call", json.dumps(request)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode or not Path(path).exists():
            lines = f"{done.stdout}\n{done.stderr}".strip().splitlines()
            raise CannotMeasure("ncu measured nothing: " + " | ".join(lines[-3:]))
        report = reader.load_report(path)
        launches = report.range_by_idx(0)
        yield [launches.action_by_idx(index) for index in range(launches.num_actions())]


# ---- what was counted
def counted(launches: Sequence[Any], flop: float) -> dict[str, Any]:
    """The counters of a call of `flop` operations. Launches are added up; rates and stalls are
    those of the longest. What ncu did not count is left out.
    """
    longest = max(launches, key=lambda launch: _value(launch, SUMS["us"]))
    totals = {
        field: sum(_value(launch, metric) for launch in launches) for field, metric in SUMS.items()
    }
    dram = totals["dram_read_bytes"] + totals["dram_write_bytes"]
    figures = totals | {field: _value(longest, metric) for field, metric in RATES.items()}
    figures |= {
        "dram_gbs": dram / (1e3 * totals["us"]),
        "ffma_per_mnk": totals["ffma"] / (flop / 2),
        "flop_per_dram_byte": flop / (dram or math.nan),
        "flop_per_l2_byte": flop / (totals["l2_to_sm_bytes"] or math.nan),
    }
    stalls = {match[1]: match[0] for match in map(STALL.fullmatch, longest.metric_names()) if match}
    return _numbers(figures) | {
        "stalls": _numbers({reason: _value(longest, name) for reason, name in stalls.items()}),
    }


def _value(launch: Any, metric: str) -> float:
    """A metric in bytes, µs, fractions or events; NaN: not counted."""
    counter = launch.metric_by_name(metric)
    return math.nan if counter is None else counter.as_double() * SCALES.get(counter.unit(), 1.0)


def _numbers(figures: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def memory(launches: Sequence[Any]) -> list[dict[str, Any]]:
    """What the memory instructions did, by mnemonic."""
    rows: dict[str, Counter[str]] = {}
    for launch in launches:
        for field, metric in BY_INSTRUCTION.items():
            counter = launch.metric_by_name(metric)
            if counter is None:
                continue
            addresses = counter.correlation_ids()
            for index in range(counter.num_instances() if addresses else 0):
                if mnemonic := _MNEMONIC.match(launch.sass_by_pc(addresses.as_uint64(index))):
                    rows.setdefault(mnemonic[1], Counter())[field] += counter.as_uint64(index)
    return [{"instruction": name, **dict(events)} for name, events in rows.items()]


# ---- the command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints. Returns 3 where nothing can be measured."""
    parser = argparse.ArgumentParser(prog="python -m tools.counters", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("kernel", nargs="?", default=CUBLAS, help="a kernel, or cublas")
    parser.add_argument("--shape", default="4096", help="N or MxNxK")
    parser.add_argument("--config", default="", help="such as tile_m=128,tile_n=256")
    parser.add_argument("--dtype", help="default: the one that the ladder is measured with")
    parser.add_argument("--layout", choices=LAYOUTS, help="default: as the ladder is measured")
    parser.add_argument("--instructions", action="store_true", help="of each memory instruction")
    parser.add_argument("--phases", action="store_true", help="cycles of each role, without ncu")
    parser.add_argument("--call", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.call:
        call(options.call)
        return 0
    problem = {
        "shape": parse(options.shape)[0],
        "dtype": options.dtype or registry.dtype_of(options.kernel),
        "layout": options.layout or registry.layout_of(options.kernel),
    }
    configs = {} if options.phases else {CUBLAS: ""}
    configs[options.kernel] = options.config
    requests = [{"kernel": name, "config": text, **problem} for name, text in configs.items()]
    try:
        results = [_measure(request, options) for request in requests]
    except CannotMeasure as error:
        print(f"Nothing can be measured here: {error}", file=sys.stderr)
        return 3
    print(json.dumps({"environment": environment(), "results": results}, indent=2))
    return 0


def _measure(request: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The result of one provider, as JSON values. Raises CannotMeasure."""
    if not torch.cuda.is_available():
        raise CannotMeasure("there is no NVIDIA GPU that torch can use")
    result = {"provider": request["kernel"], **request}
    del result["kernel"]
    if options.phases:
        a, b, out, config = operands(request)
        roles = registry.load(request["kernel"]).phases(a, b, out, config)
        return {**result, "phases": [asdict(role) for role in roles]}
    with profile(request) as launches:
        if options.instructions:
            result["memory"] = memory(launches)
        names = [{"kernel": launch.name()} for launch in launches]
        flop = 2.0 * math.prod(request["shape"])
        return {**result, "launches": names, **counted(launches, flop)}


if __name__ == "__main__":
    sys.exit(main())
