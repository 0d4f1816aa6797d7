"""A campaign: every provider at every shape is checked first, then timed by one protocol, and gives
one record.
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch

from outblas.base import compiling, progress
from outblas.bench import burst, cold, schedule, sustained, turn
from outblas.bench.clock import Clock
from outblas.bench.operation import Operation
from outblas.bench.power import EnergyMeter
from outblas.bench.providers import PLAIN, Call, Provider
from outblas.bench.record import (
    BEST,
    BOUNDED,
    EXACT,
    REFUSED,
    UNCHECKED,
    Device,
    Record,
    energy,
    figures,
)
from outblas.bench.statistics import BURST_TOLERANCE, SUSTAINED_TOLERANCE, ratio
from outblas.bench.tasks import Operands, Task
from outblas.verify.kernels import Refused
from outblas.verify.watchdog import watchdog

CHECK_SECONDS = 300
OUT_OF_MEMORY = f"{REFUSED}the GPU has too little free memory"
# fraction of a call's device time; if the host takes longer, the device may wait for it
HOST_SHARE = 0.7
ROUNDS = {"burst": 15, "cold": 15, "sustained": 3}


@dataclass
class _Entrant:
    """A provider's call at one shape that passed its check, with rough times in µs on the device
    and, for an eager call, on the host.
    """

    call: Call
    us: float
    host_us: float


Entrants = dict[str, _Entrant]  # by label, the base first
Figures = dict[str, dict[str, Any]]  # fields of a record, by label
Batches = dict[str, tuple[turn.Call, turn.Batch]]  # warm calls and batches, by label


class Campaign:
    """Times providers against a base, such as `torch.mm`, on the current CUDA device.

    The first provider is the base. `operation` is what is computed, the same as that of the
    providers. `rounds`: the minimum by mode. Progress is reported to the listener of
    `base.progress`.
    """

    def __init__(
        self,
        providers: Sequence[Provider],
        operation: Operation = PLAIN,
        rounds: Mapping[str, int] = ROUNDS,
    ) -> None:
        self.providers = distinct(providers)
        self.base = self.providers[0].label
        self.operation = operation
        self.rounds = rounds
        self._clock = Clock()
        try:
            self._meter: EnergyMeter | None = EnergyMeter()
        except RuntimeError:
            self._meter = None
        self._device = Device.current(operation.dtype)

    @cached_property
    def copy_gbs(self) -> float:
        """The GB/s of a large copy on this device, measured on first use."""
        progress.say("measuring the bandwidth of a copy")
        return cold.copy_gbs()

    def run(self, tasks: Sequence[Task], modes: Sequence[str]) -> Iterator[Record]:
        """Yields records as they become available: all providers of one task, mode by mode."""
        before = torch.get_float32_matmul_precision()
        precision = "high" if self.operation.dtype == "tf32" else "highest"
        torch.set_float32_matmul_precision(precision)
        try:
            for task in progress.counted(tasks):
                yield from self._task(task, modes)
        finally:
            torch.set_float32_matmul_precision(before)

    def _task(self, task: Task, modes: Sequence[str]) -> Iterator[Record]:
        is_memory_bound = task.is_memory_bound(self.operation, self._device.l2_bytes)
        modes = [mode for mode in modes if mode != "cold" or is_memory_bound]
        try:
            operands = task.operands(self.operation)
        except torch.OutOfMemoryError:
            for provider, mode in product(self.providers, modes):
                yield self._record(provider, task, mode, OUT_OF_MEMORY)
            return
        checks: list[tuple[Provider, str]] = []
        entrants: Entrants = {}
        for provider in progress.counted(
            self.providers, lambda provider: f"{provider.label}: checking"
        ):
            check, entrant = self._enter(provider, task, operands)
            checks.append((provider, check))
            if entrant is not None:
                entrants[provider.label] = entrant
        for mode in modes:
            timed = self._timed(mode, task, entrants, operands[1]) if self.base in entrants else {}
            for provider, check in checks:
                yield self._record(provider, task, mode, check, **timed.get(provider.label, {}))

    def _record(
        self, provider: Provider, task: Task, mode: str, check: str, **figures: Any
    ) -> Record:
        return Record(
            provider=provider.name,
            config=provider.config,
            dtype=self.operation.dtype,
            mode=mode,
            check=check,
            epilogue=str(provider.operation.steps),
            batch_invariant=self.operation.batch_invariant,
            **task.facts(),
            **figures,
        )

    def _enter(
        self, provider: Provider, task: Task, operands: Operands
    ) -> tuple[str, _Entrant | None]:
        """Returns the oracle's result, and the call on this task's operands if it passed.

        An exception of a provider only skips this task for that provider, unless the device is
        lost.
        """
        case = task.case(self.operation)
        try:
            with compiling.waiting(), watchdog(CHECK_SECONDS, f"{provider.label} {case}"):
                # Prepared before the check: a provider that chooses among algorithms must choose
                # for these operands and their addresses.
                call = provider.prepare(*operands)
                fault = provider.fault(case)
                if fault is not None:
                    return fault, None
                us = turn.rough_us(call)
                entrant = _Entrant(call, us, turn.host_us(call, us))
        except (Refused, ImportError) as refusal:
            return f"{REFUSED}{refusal}", None
        except torch.OutOfMemoryError:
            return OUT_OF_MEMORY, None
        except Exception as error:
            torch.cuda.synchronize()  # raises again if the device is lost
            return f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}", None
        if provider.trusted:
            return UNCHECKED, entrant
        return EXACT if provider.is_checked_exactly else BOUNDED, entrant

    def _timed(self, mode: str, task: Task, entrants: Entrants, weights: torch.Tensor) -> Figures:
        """Returns the figures of a mode; none where its batches take too much memory."""
        if mode == "sustained":
            return self._sustained(task, entrants)
        short, copies = _short(entrants), [weights]
        try:
            if mode == "cold":
                progress.say("cold: copying the weights")
                copies = cold.copies(weights, self._device.l2_bytes)
            # The warm call takes the last copy of a batch, not its first.
            batches: Batches = {
                label: (partial(e.call, copies[-1]), cold.batch(e.call, copies, e.us, short=short))
                for label, e in entrants.items()
            }
        except torch.OutOfMemoryError:
            return {}
        samples = self._burst(batches, mode)
        by_label: Figures = {}
        for label, (_, batch) in batches.items():
            us, mhz = samples[label].us, samples[label].mhz
            best = ratio(samples[BEST].us, us).median if BEST in samples else None
            by_label[label] = {
                **self._figures(task, us, mhz, samples[self.base].us, BURST_TOLERANCE),
                "ratio_best": best,
                "calls": batch.calls,
                "graph": short,
            }
        if mode == "cold":
            for fields in by_label.values():
                fields["bandwidth_share"] = fields["gbs"] / self.copy_gbs
            return by_label
        apart = self._apart(entrants, min(b.calls for _, b in batches.values())) if short else {}
        for label, entrant in entrants.items():
            by_label[label] |= {**apart.get(label, {}), "host_us": entrant.host_us}
        return by_label

    def _burst(self, batches: Batches, mode: str, name: str = "") -> dict[str, burst.Samples]:
        rounds = schedule.whole_rounds(len(batches), self.rounds[mode])
        return burst.run(batches, self._clock, rounds=rounds, name=name or mode)

    def _figures(
        self,
        task: Task,
        us: Sequence[float],
        mhz: Sequence[float],
        base_us: Sequence[float],
        tolerance: float,
    ) -> dict[str, Any]:
        """Returns the figures of one provider, from its times and those of the base beside them."""
        spread, moved = ratio(base_us, us), task.bytes_moved(self.operation)
        timed = figures(task.shape, us, mhz, spread, self._device, moved)
        return {**timed, "verdict": spread.verdict(tolerance)}

    def _apart(self, entrants: Entrants, calls: int) -> Figures:
        """Times short calls once more, with a foreign kernel before each; its own time is
        subtracted round by round.
        """
        alone = turn.graph_apart(None, calls)
        batches = {
            label: (e.call, turn.graph_apart(e.call, calls)) for label, e in entrants.items()
        }
        batches[""] = (alone.run, alone)
        samples = self._burst(batches, "burst", "burst, apart")
        foreign = samples.pop("").us
        times = {
            label: [us - other for us, other in zip(sample.us, foreign, strict=True)]
            for label, sample in samples.items()
        }
        # For calls whose time is below the scatter of the foreign kernel's, no difference can be
        # reported.
        return {
            label: {
                "us_apart": statistics.median(us),
                "ratio_apart": ratio(times[self.base], us).median,
            }
            for label, us in times.items()
            if min(*us, *times[self.base]) > 0
        }

    def _sustained(self, task: Task, entrants: Entrants) -> Figures:
        passes, short = self.rounds["sustained"], _short(entrants)
        batches = {}
        for label, e in entrants.items():
            one = turn.graph([e.call] * turn.graph_calls(e.us)) if short else turn.eager([e.call])
            repeats = max(1, round(sustained.BATCH_US / (e.us * one.calls)))
            batches[label] = turn.Batch(turn.eager([one.run] * repeats).run, one.calls * repeats)
        done = sustained.run(batches, self.base, self._clock, self._meter, passes=passes)
        by_label: Figures = {}
        for label, (turns, base_us) in sustained.pair(done, self.base).items():
            us, mhz, watts = zip(*((t.us, t.mhz, t.watts) for t in turns), strict=True)
            by_label[label] = {
                **self._figures(task, us, mhz, base_us, SUSTAINED_TOLERANCE),
                **energy(task.shape, us, watts),
                "calls": batches[label].calls,
                "graph": short,
            }
        if BEST in by_label:
            for fields in by_label.values():
                fields["ratio_best"] = by_label[BEST]["us"] / fields["us"]
        return by_label


def _short(entrants: Entrants) -> bool:
    """Returns whether calls belong inside CUDA graphs: one of them is short, or takes the host
    about as long as the device, which would then wait for the host.
    """
    return any(e.us < turn.SHORT_US or e.host_us > HOST_SHARE * e.us for e in entrants.values())


def distinct(providers: Sequence[Provider]) -> list[Provider]:
    """Gives providers different names: `cublas` listed twice is timed twice, against itself."""
    counts: Counter[str] = Counter()
    renamed = []
    for provider in providers:
        counts[provider.label] += 1
        name, count = provider.name, counts[provider.label]
        renamed.append(replace(provider, name=f"{name} ({count})") if count > 1 else provider)
    return renamed
