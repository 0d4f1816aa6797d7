"""A strategy that proposes what a test says, and spaces of configs to search, pruned once."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from outblas.autotune import Strategy
from outblas.autotune.search import gpu
from outblas.autotune.search.candidates import Candidate
from outblas.autotune.search.prune import PrunedSpace, prune
from outblas.autotune.search.strategy import Search
from outblas.autotune.search.target import of
from outblas.autotune.store.records import Workload


class Proposing(Strategy):
    """Proposes what a function of the search says."""

    def __init__(self, propose: Callable[[Search], Any]) -> None:
        self._propose = propose

    def propose(self, search: Search) -> Any:
        return self._propose(search)


def numbers(candidates: Iterable[Candidate]) -> list[int]:
    """What tells apart the configs of tests/support/faulty_kernel.py."""
    return [candidate.config.number for candidate in candidates]


@functools.cache
def pruned(kernels: str, workload: Workload, machine: str = "h100") -> PrunedSpace:
    """The spaces of kernels, which are named with a comma between them, on a machine."""
    targets = [of(name) for name in kernels.split(",")]
    return prune(targets, workload, gpu.imagined(machine))
