"""What `outblas inspect` says of a kernel, and the command itself."""

import functools
import re
from typing import Any

from outblas.inspect import Inspection
from support import commands

# The fields of an inspection's record, in their order.
RECORD_FIELDS = [
    "kernel",
    "arch",
    "config",
    "registers",
    "spill_stores",
    "spill_loads",
    "stack",
    "smem_bytes",
    "stages",
    "threads",
    "ctas_per_sm",
    "warps_per_sm",
    "instructions",
    "ptx",
    "warnings",
    "bank_conflicts",
    "intensity",
    "bound",
    "ffma_share",
    "ffma_reuse",
]

invoke = functools.partial(commands.invoke, "inspect")


def said_by_the_assembler(log: str) -> tuple[int, ...]:
    """Registers, bytes of stack, of spill stores and of spill loads, as ptxas -v says them."""
    used = re.search(r"Used (\d+) registers", log)
    frame = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    )
    assert used, log
    assert frame, log
    return tuple(map(int, (used[1], *frame.groups())))


def imagined(kernel: str, **changes: Any) -> Inspection:
    """An inspection of code that nobody compiled: for an H100, whose tensor cores bound it."""
    intensity: dict[str, float | None] = {"dram": 1365.0, "l2": 85.3, "l1": None, "shared": 60.0}
    known: dict[str, Any] = {
        "kernel": kernel,
        "arch": "sm_90a",
        "config": "",
        "registers": 168,
        "spill_stores": 0,
        "spill_loads": 0,
        "stack": 0,
        "smem_bytes": 200_000,
        "stages": 4,
        "threads": 384,
        "ctas_per_sm": 1,
        "warps_per_sm": 12,
        "instructions": {"HGMMA.64x256x16.F32.BF16": 16},
        "ptx": {"wgmma.mma_async": 16},
        "warnings": [],
        "bank_conflicts": None,
        "intensity": intensity,
        "bound": {"H100": {"tflops": 989.4, "by": "compute", "ceilings": {"compute": 989.4}}},
        "ffma_share": 0.0,
        "ffma_reuse": None,
        "name": "kernel",
        "dtype": "bfloat16",
        "out_dtype": "bfloat16",
        "layout": "nt",
        "unit": "bfloat16",
        "limiter": "registers",
        "sass": "HGMMA",
        "ptx_text": ".version 8.0",
    }
    return Inspection(**{**known, **changes})
