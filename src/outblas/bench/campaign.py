"""A campaign: every provider at every shape, checked first, then timed by one protocol; one record
each.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from ..core.shapes import Shape, to_text
from ..verify.cases import Case
from ..verify.kernels import Refused
from ..verify.watchdog import watchdog
from . import burst, schedule, sustained, turn
from .clock import Clock
from .operands import normal
from .power import EnergyMeter
from .providers import OPERANDS, Provider
from .record import BASE, REFUSED, UNCHECKED, Device, Record, energy, figures
from .statistics import BURST_TOLERANCE, SUSTAINED_TOLERANCE, ratio

CHECK_SECONDS = 300
OUT_OF_MEMORY = f"{REFUSED}the device has too little free memory"
ROUNDS = {"burst": 15, "sustained": 3}


@dataclass
class _Entrant:
    """The call at one shape of a provider that passed its check, and about how many µs it takes."""

    call: turn.Call
    us: float


Entrants = dict[str, _Entrant]  # by label, the base first


class Campaign:
    """Times providers against `torch.mm` on the current CUDA device.

    The first provider is cuBLAS. `dtype`: bfloat16, float16, float32 (IEEE products) or tf32.
    `rounds`: by mode, at least. `progress` is told what is being done.
    """

    def __init__(
        self,
        providers: Sequence[Provider],
        dtype: str = "bfloat16",
        rounds: Mapping[str, int] = ROUNDS,
        progress: Callable[[str], None] = lambda doing: None,
    ) -> None:
        self.providers = distinct(providers)
        self.dtype = dtype
        self.rounds = rounds
        self.progress = progress
        self._clock = Clock()
        try:
            self._meter: EnergyMeter | None = EnergyMeter()
        except RuntimeError:
            self._meter = None
        self._device = Device.current(dtype)

    def run(
        self, shapes: Sequence[Shape], layouts: Sequence[str], modes: Sequence[str]
    ) -> Iterator[Record]:
        """Records as they come: all providers of one shape and layout, mode by mode."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if self.dtype == "tf32" else "highest")
        try:
            for layout in layouts:
                for shape in shapes:
                    yield from self._shape(shape, layout, modes)
        finally:
            torch.set_float32_matmul_precision(before)

    def _shape(self, shape: Shape, layout: str, modes: Sequence[str]) -> Iterator[Record]:
        try:
            operands = normal(shape, layout, _torch_dtype(self.dtype))
        except torch.OutOfMemoryError:
            for provider, mode in product(self.providers, modes):
                yield self._record(provider, shape, layout, mode, OUT_OF_MEMORY)
            return
        checks: list[tuple[Provider, str]] = []
        entrants: dict[str, _Entrant] = {}
        for provider in self.providers:
            self.progress(f"{to_text(shape)} {layout}: checking {provider.label}")
            case = Case(*shape, operands[0].dtype, layout=layout, tf32=self.dtype == "tf32")
            check, entrant = self._enter(provider, case, operands)
            checks.append((provider, check))
            if entrant is not None:
                entrants[provider.label] = entrant
        for mode in modes if BASE in entrants else ():
            timed = (self._burst if mode == "burst" else self._sustained)(shape, layout, entrants)
            for provider, check in checks:
                yield self._record(
                    provider, shape, layout, mode, check, **timed.get(provider.label, {})
                )

    def _record(
        self, provider: Provider, shape: Shape, layout: str, mode: str, check: str, **found: Any
    ) -> Record:
        name, config = provider.name, provider.config
        return Record(
            provider=name,
            config=config,
            shape=shape,
            dtype=self.dtype,
            layout=layout,
            mode=mode,
            check=check,
            **found,
        )

    def _enter(self, provider: Provider, case: Case, operands: Any) -> tuple[str, _Entrant | None]:
        """What the exact oracle says, and the call on this shape's operands if it passed.

        Whatever a provider raises costs that provider this shape, unless the device is lost with
        it.
        """
        try:
            with watchdog(CHECK_SECONDS, f"{provider.label} {case}"):
                # Before the check: a provider that chooses among algorithms chooses for these
                # operands, where they lie.
                call = provider.prepare(*operands)
                fault = provider.fault(case)
                if fault is not None:
                    return fault, None
                entrant = _Entrant(call, turn.rough_us(call))
        except (Refused, ImportError) as refusal:
            return f"{REFUSED}{refusal}", None
        except torch.OutOfMemoryError:
            return OUT_OF_MEMORY, None
        except Exception as error:
            torch.cuda.synchronize()  # raises again if the device is lost
            return f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}", None
        return UNCHECKED if provider.trusted else "exact", entrant

    def _burst(self, shape: Shape, layout: str, entrants: Entrants) -> dict[str, dict[str, Any]]:
        rounds = schedule.whole_rounds(len(entrants), self.rounds["burst"])
        short = _short(entrants)
        calls = {
            label: turn.graph_calls(e.us) if short else turn.CALLS for label, e in entrants.items()
        }
        batches = {
            label: (e.call, turn.graph(e.call, calls[label]) if short else turn.eager(e.call))
            for label, e in entrants.items()
        }
        say = self._counter(f"{to_text(shape)} {layout} burst", rounds)
        samples = burst.run(batches, self._clock, rounds=rounds, progress=say)
        apart = self._apart(shape, layout, entrants, min(calls.values())) if short else {}
        found = {}
        for label, e in entrants.items():
            us, mhz = samples[label].us, samples[label].mhz
            spread = ratio(samples[BASE].us, us)
            found[label] = {
                **figures(shape, us, mhz, spread, self._device),
                **apart.get(label, {}),
                "verdict": spread.verdict(BURST_TOLERANCE),
                "rounds": rounds,
                "calls": calls[label],
                "graph": short,
                "host_us": turn.host_us(e.call, e.us),
            }
        return found

    def _apart(
        self, shape: Shape, layout: str, entrants: Entrants, calls: int
    ) -> dict[str, dict[str, float]]:
        """Short calls once more, a foreign kernel before each, whose own time is subtracted round
        by round.
        """
        alone = turn.graph_apart(None, calls)
        batches = {
            label: (e.call, turn.graph_apart(e.call, calls)) for label, e in entrants.items()
        }
        batches[""] = (alone.run, alone)
        rounds = schedule.whole_rounds(len(batches), self.rounds["burst"])
        say = self._counter(f"{to_text(shape)} {layout} burst, apart", rounds)
        samples = burst.run(batches, self._clock, rounds=rounds, progress=say)
        foreign = samples.pop("").us
        times = {
            label: [us - other for us, other in zip(sample.us, foreign, strict=True)]
            for label, sample in samples.items()
        }
        # Of calls as short as the foreign kernel's scatter no difference is left to report.
        return {
            label: {"us_apart": statistics.median(us), "ratio_apart": ratio(times[BASE], us).median}
            for label, us in times.items()
            if min(*us, *times[BASE]) > 0
        }

    def _sustained(
        self, shape: Shape, layout: str, entrants: Entrants
    ) -> dict[str, dict[str, Any]]:
        passes, short = self.rounds["sustained"], _short(entrants)
        batches = {}
        for label, e in entrants.items():
            one = turn.graph(e.call, turn.graph_calls(e.us)) if short else turn.eager(e.call, 1)
            repeats = max(1, round(sustained.BATCH_US / (e.us * one.calls)))
            batches[label] = turn.Batch(turn.eager(one.run, repeats).run, one.calls * repeats)
        say = self._counter(
            f"{to_text(shape)} {layout} sustained",
            len(schedule.turns(BASE, [*batches][1:], passes)),
        )
        done = sustained.run(batches, BASE, self._clock, self._meter, passes=passes, progress=say)
        found = {}
        for label, (turns, base) in sustained.pair(done, BASE).items():
            us, mhz, watts = ([getattr(t, name) for t in turns] for name in ("us", "mhz", "watts"))
            spread = ratio(base, us)
            found[label] = {
                **figures(shape, us, mhz, spread, self._device),
                **energy(shape, us, watts),
                "verdict": spread.verdict(SUSTAINED_TOLERANCE),
                "rounds": len(turns),
                "calls": batches[label].calls,
                "graph": short,
            }
        return found

    def _counter(self, text: str, total: int) -> Callable[[], None]:
        done = 0

        def say() -> None:
            nonlocal done
            done += 1
            self.progress(f"{text}: {done} of {total}")

        return say


def _short(entrants: Entrants) -> bool:
    return min(entrant.us for entrant in entrants.values()) < turn.SHORT_US


def distinct(providers: Sequence[Provider]) -> list[Provider]:
    """Providers under different names: `cublas` listed twice is timed twice, against itself."""
    found: dict[str, Provider] = {}
    for provider in providers:
        count = sum(
            other.name.partition(" ")[0] == provider.name and other.config == provider.config
            for other in found.values()
        )
        renamed = replace(provider, name=f"{provider.name} ({count + 1})") if count else provider
        found[renamed.label] = renamed
    return list(found.values())


def _torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, OPERANDS[name])
    return dtype
