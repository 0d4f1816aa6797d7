"""Profiles of the CUDA-core kernels' accesses to memory, as `outblas profile --instructions` makes
them.
"""

from typing import Any

from outblas.core import configs, registry
from support.reports import Entry, counted


def profile(provider: str, config: str, memory: list[Entry] | None, **changes: Any) -> Entry:
    """A profile of a kernel in a config; without --instructions where `memory` is None."""
    resolved = configs.to_text(configs.from_text(registry.load(provider).Config, config))
    return counted(provider, config, resolved=resolved, memory=memory) | changes


def in_shared(operation: str, requests: int, wavefronts: int, ideal: int) -> Entry:
    """The total of the loads or the stores of shared memory."""
    counts = {"requests": requests, "wavefronts": wavefronts, "ideal": ideal}
    return {"space": "shared", "operation": operation} | counts


def in_global(operand: str, operation: str, transactions: float, efficiency: float) -> Entry:
    """The total of one operand's accesses to global memory, of so many transactions a request."""
    counts = {"requests": 1000, "transactions": 1000 * transactions, "sectors": 1000 * transactions}
    of = {"operand": operand, "space": "global", "operation": operation}
    return of | {"efficiency": efficiency} | counts
