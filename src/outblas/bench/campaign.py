"""A campaign: every provider at every shape is checked first, then timed by one protocol, and gives
one record.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, Protocol

import torch

from outblas.base import progress
from outblas.base.shapes import Shape, backward, to_text
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
    bytes_moved,
    energy,
    figures,
)
from outblas.bench.statistics import BURST_TOLERANCE, SUSTAINED_TOLERANCE, ratio
from outblas.verify.cases import Case
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
Found = dict[str, dict[str, Any]]  # the figures of each
Operands = tuple[torch.Tensor, ...]


class Task(Protocol):
    """What a campaign times at a time: one product, or the products of all groups."""

    @property
    def shape(self) -> Shape:
        """The sizes (M, N, K) that its FLOP come from."""

    def operands(self, operation: Operation) -> Operands:
        """Returns what calls are prepared with, on the current GPU. The weights are the second."""

    def case(self, operation: Operation) -> Any:
        """Returns what providers are checked with."""

    def bytes_moved(self, operation: Operation) -> int:
        """Returns the bytes of the operands that are read and of the result."""

    def is_memory_bound(self, operation: Operation, l2_bytes: int) -> bool:
        """Returns whether it is also timed with cold weights."""

    def facts(self) -> dict[str, Any]:
        """Returns the fields of a record that say what was timed."""


@dataclass(frozen=True)
class GemmTask:
    """One product to time. `product` is "", or "dA" or "dB" for a gradient."""

    shape: Shape
    layout: str
    product: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (to_text(self.shape), self.layout, self.product) if part)

    def operands(self, operation: Operation) -> Operands:
        return operation.operands(self.shape, self.layout)

    def case(self, operation: Operation) -> Case:
        return Case(
            *self.shape,
            operation.out_dtype,
            layout=self.layout,
            tf32=operation.dtype == "tf32",
        )

    def bytes_moved(self, operation: Operation) -> int:
        return bytes_moved(self.shape, *operation.operand_bytes)

    def is_memory_bound(self, operation: Operation, l2_bytes: int) -> bool:
        return cold.is_memory_bound(self.shape, operation.operand_bytes, l2_bytes)

    def facts(self) -> dict[str, Any]:
        return {"shape": self.shape, "layout": self.layout, "product": self.product}


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

    def run(
        self,
        shapes: Sequence[Shape],
        layouts: Sequence[str],
        modes: Sequence[str],
        *,
        backward: bool = False,
    ) -> Iterator[Record]:
        """Yields records as they become available: all providers of one shape and layout, mode by
        mode. With `backward`, yields those of the two products of each backward pass instead.
        """
        return self.run_tasks(tasks(shapes, layouts, backward), modes)

    def run_tasks(self, chosen: Sequence[Task], modes: Sequence[str]) -> Iterator[Record]:
        """Yields records as they become available: all providers of one task, mode by mode."""
        before = torch.get_float32_matmul_precision()
        precision = "high" if self.operation.dtype == "tf32" else "highest"
        torch.set_float32_matmul_precision(precision)
        try:
            for task in progress.counted(chosen):
                yield from self._task(task, modes)
        finally:
            torch.set_float32_matmul_precision(before)

    def _task(self, task: Task, modes: Sequence[str]) -> Iterator[Record]:
        modes = [mode for mode in modes if mode != "cold" or self._is_memory_bound(task)]
        try:
            operands = task.operands(self.operation)
        except torch.OutOfMemoryError:
            for provider, mode in product(self.providers, modes):
                yield self._record(provider, task, mode, OUT_OF_MEMORY)
            return
        checks: list[tuple[Provider, str]] = []
        entrants: Entrants = {}
        for provider in progress.counted(self.providers, lambda each: f"{each.label}: checking"):
            check, entrant = self._enter(provider, task, operands)
            checks.append((provider, check))
            if entrant is not None:
                entrants[provider.label] = entrant
        for mode in modes:
            has_base = self.base in entrants
            timed = self._timed(mode, task, entrants, operands[1]) if has_base else {}
            for provider, check in checks:
                yield self._record(provider, task, mode, check, **timed.get(provider.label, {}))

    def _timed(self, mode: str, task: Task, entrants: Entrants, weights: torch.Tensor) -> Found:
        match mode:
            case "burst":
                return self._burst(task, entrants)
            case "cold":
                return self._cold(task, entrants, weights)
            case _:
                return self._sustained(task, entrants)

    def _is_memory_bound(self, task: Task) -> bool:
        return task.is_memory_bound(self.operation, self._device.l2_bytes)

    def _record(
        self, provider: Provider, task: Task, mode: str, check: str, **found: Any
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
            **found,
        )

    def _enter(self, provider: Provider, task: Task, operands: Any) -> tuple[str, _Entrant | None]:
        """Returns the oracle's result, and the call on this task's operands if it passed.

        An exception of a provider only skips this task for that provider, unless the device is
        lost.
        """
        case = task.case(self.operation)
        try:
            with watchdog(CHECK_SECONDS, f"{provider.label} {case}"):
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

    def _figures(
        self, task: Task, label: str, samples: Mapping[str, burst.Samples]
    ) -> dict[str, Any]:
        """Returns the figures of one provider, from its times and those of the base in the same
        rounds.
        """
        us, mhz = samples[label].us, samples[label].mhz
        spread = ratio(samples[self.base].us, us)
        best = ratio(samples[BEST].us, us).median if BEST in samples else None
        moved = task.bytes_moved(self.operation)
        return {
            **figures(task.shape, us, mhz, spread, self._device, moved),
            "verdict": spread.verdict(BURST_TOLERANCE),
            "ratio_best": best,
            "rounds": len(us),
        }

    def _burst(self, task: Task, entrants: Entrants) -> Found:
        rounds = schedule.whole_rounds(len(entrants), self.rounds["burst"])
        short = _short(entrants)
        calls = {
            label: turn.graph_calls(e.us) if short else turn.CALLS for label, e in entrants.items()
        }
        batches = {
            label: (e.call, turn.graph(e.call, calls[label]) if short else turn.eager(e.call))
            for label, e in entrants.items()
        }
        say = _counter("burst", rounds)
        samples = burst.run(batches, self._clock, rounds=rounds, progress=say)
        apart = self._apart(task, entrants, min(calls.values())) if short else {}
        return {
            label: {
                **self._figures(task, label, samples),
                **apart.get(label, {}),
                "calls": calls[label],
                "graph": short,
                "host_us": e.host_us,
            }
            for label, e in entrants.items()
        }

    def _cold(self, task: Task, entrants: Entrants, b: torch.Tensor) -> Found:
        """Times bursts over copies of the weights."""
        short = _short(entrants)
        progress.say("cold: copying the weights")
        try:
            weights = cold.copies(b, self._device.l2_bytes)
            batches = {
                # The warm call takes the last copy of a batch, not its first.
                label: (
                    partial(e.call, weights[-1]),
                    cold.batch(e.call, weights, e.us, short=short),
                )
                for label, e in entrants.items()
            }
        except torch.OutOfMemoryError:
            return {}
        rounds = schedule.whole_rounds(len(entrants), self.rounds["cold"])
        say = _counter("cold", rounds)
        samples = burst.run(batches, self._clock, rounds=rounds, progress=say)
        found = {}
        for label in entrants:
            of_label = self._figures(task, label, samples)
            of_label["bandwidth_share"] = of_label["gbs"] / self.copy_gbs
            of_label["calls"], of_label["graph"] = batches[label][1].calls, short
            found[label] = of_label
        return found

    def _apart(self, task: Task, entrants: Entrants, calls: int) -> dict[str, dict[str, float]]:
        """Times short calls once more, with a foreign kernel before each; its own time is
        subtracted round by round.
        """
        alone = turn.graph_apart(None, calls)
        batches = {
            label: (e.call, turn.graph_apart(e.call, calls)) for label, e in entrants.items()
        }
        batches[""] = (alone.run, alone)
        rounds = schedule.whole_rounds(len(batches), self.rounds["burst"])
        say = _counter("burst, apart", rounds)
        samples = burst.run(batches, self._clock, rounds=rounds, progress=say)
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

    def _sustained(self, task: Task, entrants: Entrants) -> Found:
        passes, short = self.rounds["sustained"], _short(entrants)
        batches = {}
        for label, e in entrants.items():
            one = turn.graph(e.call, turn.graph_calls(e.us)) if short else turn.eager(e.call, 1)
            repeats = max(1, round(sustained.BATCH_US / (e.us * one.calls)))
            batches[label] = turn.Batch(turn.eager(one.run, repeats).run, one.calls * repeats)
        turns_of_all = len(schedule.turns(self.base, [*batches][1:], passes))
        say = _counter("sustained", turns_of_all)
        done = sustained.run(
            batches, self.base, self._clock, self._meter, passes=passes, progress=say
        )
        paired = sustained.pair(done, self.base)
        best = _median_us(paired[BEST][0]) if BEST in paired else None
        found: Found = {}
        for label, (turns, base) in paired.items():
            us, mhz, watts = ([getattr(t, name) for t in turns] for name in ("us", "mhz", "watts"))
            spread = ratio(base, us)
            found[label] = {
                **figures(
                    task.shape, us, mhz, spread, self._device, task.bytes_moved(self.operation)
                ),
                **energy(task.shape, us, watts),
                "verdict": spread.verdict(SUSTAINED_TOLERANCE),
                "ratio_best": best / statistics.median(us) if best else None,
                "rounds": len(turns),
                "calls": batches[label].calls,
                "graph": short,
            }
        return found


def tasks(shapes: Sequence[Shape], layouts: Sequence[str], of_backward: bool) -> list[GemmTask]:
    """Returns the products of a campaign, or those of their backward passes, without duplicates."""
    forward = [GemmTask(shape, layout) for layout in layouts for shape in shapes]
    if not of_backward:
        return forward
    pairs = [backward(task.shape, task.layout) for task in forward]
    return [GemmTask(shape, layout, name) for pair in pairs for name, shape, layout in pair]


def _counter(text: str, total: int) -> Callable[[], None]:
    """Returns a function to call after each round."""
    done = 0

    def say() -> None:
        nonlocal done
        done += 1
        progress.say(f"{text}, round {done} of {total}")

    return say


def _median_us(turns: Sequence[sustained.Turn]) -> float:
    return statistics.median(each.us for each in turns)


def _short(entrants: Entrants) -> bool:
    """Returns whether calls belong inside CUDA graphs: one of them is short, or takes the host
    about as long as the device, which would then wait for the host.
    """
    return any(e.us < turn.SHORT_US or e.host_us > HOST_SHARE * e.us for e in entrants.values())


def distinct(providers: Sequence[Provider]) -> list[Provider]:
    """Gives providers different names: `cublas` listed twice is timed twice, against itself."""
    found: dict[str, Provider] = {}
    for provider in providers:
        count = sum(
            other.name.partition(" ")[0] == provider.name and other.config == provider.config
            for other in found.values()
        )
        renamed = replace(provider, name=f"{provider.name} ({count + 1})") if count else provider
        found[renamed.label] = renamed
    return list(found.values())
