"""Chooses which config is measured next: one whose compile has finished, while others compile."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Protocol

from outblas.autotune.measure.compile_pool import Compiled
from outblas.autotune.search.candidates import Candidate
from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store.records import Workload

Built = Future[Compiled]
AHEAD = 3  # finished compiles per process that may wait for their measurement


class Pool(Protocol):
    """What compiles ahead: `Compilers`, here or on a node of a cluster."""

    @property
    def workers(self) -> int: ...
    def submit(
        self, target: TuneTarget, workload: Workload, config: str, arch: int
    ) -> Future[Compiled]: ...
    def await_one(self, target: TuneTarget, seconds: float) -> None: ...


class Ahead:
    """Candidates in the order in which their compiles finish; only a limited number is compiled
    ahead of measurement.

    Configs that share a compile are yielded together. Without compilers nothing is compiled ahead.
    After `until`, on the clock of `time.monotonic`, no more are yielded, except the first if it is
    compiled by then.
    """

    def __init__(
        self,
        candidates: Iterable[Candidate],
        compilers: Pool | None,
        workload: Workload,
        arch: int,
        until: float | None = None,
    ) -> None:
        groups: dict[tuple[str, str], list[Candidate]] = {}
        for candidate in candidates:
            groups.setdefault((candidate.target.name, candidate.compile_key), []).append(candidate)
        self._begun = False
        self._waiting = deque(groups.values())
        self._running: dict[Built, list[Candidate]] = {}
        self._ready: deque[tuple[Candidate, Built | None]] = deque()
        self._compilers, self._workload, self._arch, self._until = compilers, workload, arch, until

    @property
    def compiling(self) -> int:
        """The number of configs whose compile has not finished, including those that have not
        started.
        """
        return sum(map(len, self._waiting)) + sum(map(len, self._running.values()))

    @property
    def ready(self) -> int:
        return len(self._ready)

    def _drop(self) -> None:
        for future in self._running:
            future.cancel()
        self._waiting.clear()
        self._running.clear()
        self._ready.clear()

    def __iter__(self) -> Ahead:
        return self

    def __next__(self) -> tuple[Candidate, Built | None]:
        self._feed()
        while self._running and not self._ready:
            left = None if self._until is None else max(0.0, self._until - time.monotonic())
            wait(self._running, timeout=left, return_when=FIRST_COMPLETED)
            self._collect()
            if self._late():
                break
        if self._late() and (self._begun or not self._ready):
            self._drop()
        if not self._ready:
            raise StopIteration
        self._begun = True
        return self._ready.popleft()

    def _late(self) -> bool:
        return self._until is not None and time.monotonic() > self._until

    def _feed(self) -> None:
        if self._compilers is None:
            while self._waiting:
                self._ready += [(candidate, None) for candidate in self._waiting.popleft()]
            return
        self._collect()
        room = AHEAD * self._compilers.workers - len(self._running) - len(self._ready)
        while self._waiting and room > 0:
            group = self._waiting.popleft()
            first = group[0]
            future = self._compilers.submit(first.target, self._workload, first.text, self._arch)
            self._running[future] = group
            room -= 1

    def _collect(self) -> None:
        for future in [future for future in self._running if future.done()]:
            self._ready += [(candidate, future) for candidate in self._running.pop(future)]
