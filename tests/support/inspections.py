"""What an inspection's record has, and what the assembler says of a kernel."""

import re

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


def said_by_the_assembler(log: str) -> tuple[int, ...]:
    """Registers, bytes of stack, of spill stores and of spill loads, as ptxas -v says them."""
    used = re.search(r"Used (\d+) registers", log)
    frame = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    )
    assert used, log
    assert frame, log
    return tuple(map(int, (used[1], *frame.groups())))
