"""The ladder report: every rung in order of the climb, the seed's figure beside ours, and the gain on its parent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import text
from .measured import find, profiled
from .profiles import Profile, Profiles
from .results import Measurement, Measurements, environments
from .rungs import DTYPES, Rung, climb
from .seeds import Figure

COLUMNS = (
    "rung", "seed: TFLOP/s,\n× its cuBLAS", "N", "TFLOP/s", "× cuBLAS", "× parent", "registers", "slots", "L2 hits",
    "check",
)  # fmt: skip
NOTE = (
    "Burst: idle, one warm call, 8 timed; the ratio is cuBLAS's time over the kernel's in the same rounds, with its "
    "10th and 90th percentile. Registers, slots and the share of requests that L2 serves: ncu."
)
UNBUILT = "not built yet"
GPUS = ("H100", "GH200", "T4")
SIZES = {"simt": (4096,), "turing": (2048, 4096)}  # where the seeds measured; elsewhere DEFAULT_SIZES
DEFAULT_SIZES = (4096, 8192)
_BASELINES = {"hopper": ("simt.warptile", "001 kernel 1")}  # ladder → the rung of another it starts from, its source


@dataclass(frozen=True)
class At:
    """A rung at the product of edge `n`: our measurement, None without one, and `gain`, our ratio over the parent's."""

    n: int
    ours: Measurement | None
    gain: float | None

    def record(self) -> dict[str, Any]:
        """For JSON."""
        ours = None if self.ours is None else {"gpu": self.ours.device, **self.ours.record()}
        return {"n": self.n, "ours": ours, "gain": self.gain}


@dataclass(frozen=True)
class Row:
    """One rung: the seed's figure at one of the sizes if it has one (else its first), ours at each, and ncu's counters
    at the first size that was profiled."""

    rung: Rung
    figure: Figure | None
    at: tuple[At, ...]
    profile: Profile | None

    @property
    def measured(self) -> tuple[Measurement, ...]:
        """Ours, by size."""
        return tuple(at.ours for at in self.at if at.ours is not None)

    def record(self) -> dict[str, Any]:
        """For JSON."""
        rung, figure, profile = self.rung, self.figure, self.profile
        return {
            "rung": rung.name,
            "idea": rung.idea,
            "parent": rung.parent,
            "built": rung.built,
            "seed": figure.record() if figure else None,
            "sizes": [at.record() for at in self.at],
            "profile": None
            if profile is None
            else {
                "shape": profile.shape,
                "gpu": profile.device,
                "registers": profile.registers,
                "slots": _slots(profile),
                "l2_hit_rate": profile.l2_hit_rate,
            },
        }

    def cells(self) -> tuple[str, ...]:
        """In the order of COLUMNS, a line for each size."""
        shown = [at for at in self.at if at.ours is not None]
        seed = _seed(self.figure, self.at[0].n)
        if not shown:
            state = "not measured" if self.rung.built else UNBUILT
            return (self.rung.name, seed, text.NONE, text.NONE, state, *[text.NONE] * 5)
        profile = self.profile
        rate = profile.l2_hit_rate if profile else None
        return (
            self.rung.name,
            seed,
            _lines(str(at.n) for at in shown),
            _lines(text.number(m.tflops) for m in self.measured),
            _lines(text.ratio(m) + ("" if m.gpu == GPUS[0] else f", {m.gpu}") for m in self.measured),
            _lines(text.NONE if at.gain is None else f"{at.gain:.3f}" for at in shown),
            f"{profile.registers:.0f}" if profile and profile.registers else text.NONE,
            _slots(profile) or text.NONE,
            text.NONE if rate is None else f"{rate:.0%}",
            ", ".join(dict.fromkeys(m.check for m in self.measured)),
        )


def rows(measurements: Measurements, ladder: str | None, sizes: Sequence[int], profiles: Profiles = ()) -> list[Row]:
    """All rungs, or those of one ladder, at products of these edges; above Hopper's, the CUDA-core kernel that its
    climb starts from. Raises ValueError for no ladder."""
    compared = [(rung, DTYPES[rung.ladder]) for rung in climb(ladder)]  # first, for it checks the name
    compared = [(rung, rung.figures[0].dtype) for rung in _baseline(ladder)] + compared
    ours: dict[tuple[str, int], Measurement | None] = {}
    for n in sizes:
        ours |= _at(measurements, compared, n)
    return [_row(rung, dtype, sizes, ours, profiles) for rung, dtype in compared]


def _at(
    measurements: Measurements, compared: Sequence[tuple[Rung, str]], n: int
) -> dict[tuple[str, int], Measurement | None]:
    """Ours by rung at the product of edge n: from the campaign that has most of the rungs, else the newest."""

    def among(of: Measurements) -> dict[tuple[str, int], Measurement]:
        found = {}
        for rung, dtype in compared:
            timed = (find(of, rung.name, (n, n, n), dtype, gpu) for gpu in gpus_in_order(of))
            if (first := next(filter(None, timed), None)) is not None:
                found[rung.name, n] = first
        return found

    campaigns = [among(tuple(m for m in measurements if m.environment == each)) for each in environments(measurements)]
    gpus = gpus_in_order(measurements)
    largest = max(campaigns, key=lambda found: _standing(found, gpus), default={})
    return {(rung.name, n): None for rung, _ in compared} | among(measurements) | largest


def _standing(found: dict[tuple[str, int], Measurement], gpus: list[str]) -> tuple[int, int, str]:
    """A campaign's: by the order of GPUs, by rungs, by date."""
    if not found:
        return -len(gpus), 0, ""
    m = next(iter(found.values()))
    return -gpus.index(m.gpu), len(found), str(m.environment.get("date", ""))


def title(rows: Sequence[Row]) -> str:
    """What the figures of a table have in common."""
    gpus = ", ".join(dict.fromkeys(m.device for row in rows for m in row.measured)) or "not measured"
    usual = rows[0].at[0].n
    return f"Rungs in burst, {gpus}; a seed's figure is an H100's at {usual} where it does not say"


def default_sizes(ladder: str | None) -> tuple[int, ...]:
    return SIZES.get(ladder or "", DEFAULT_SIZES)


def gpus_in_order(measurements: Measurements) -> list[str]:
    """GPUs in the order in which a table takes figures from them: those of the seeds first, the H100 before all."""
    found = sorted({m.gpu for m in measurements})
    return sorted(found, key=lambda gpu: GPUS.index(gpu) if gpu in GPUS else len(GPUS))


def _baseline(ladder: str | None) -> list[Rung]:
    """The rung of another ladder that this one starts from, with the one figure that its documents have on it."""
    if ladder not in _BASELINES:
        return []
    name, source = _BASELINES[ladder]
    (rung,) = (rung for rung in climb(name.partition(".")[0]) if rung.name == name)
    return [replace(rung, figures=tuple(figure for figure in rung.figures if figure.source == source))]


def _row(
    rung: Rung,
    dtype: str,
    sizes: Sequence[int],
    ours: dict[tuple[str, int], Measurement | None],
    profiles: Profiles,
) -> Row:
    own = {n: ours[rung.name, n] for n in sizes}
    at = tuple(At(n, m, _gain(m, ours.get((rung.parent or "", n)))) for n, m in own.items())
    gpu = next((m.gpu for m in own.values() if m), GPUS[0])
    counted = (profiled(profiles, rung.name, (n, n, n), dtype, gpu) for n in sizes)
    return Row(rung, _figure(rung, sizes), at, next(filter(None, counted), None))


def _figure(rung: Rung, sizes: Sequence[int]) -> Figure | None:
    return next((f for f in rung.figures if f.n in sizes), rung.figures[0] if rung.figures else None)


def _gain(own: Measurement | None, parent: Measurement | None) -> float | None:
    """Of ratios, and only between measurements of one campaign."""
    if own is None or parent is None or own.ratio is None or parent.ratio is None:
        return None
    return own.ratio / parent.ratio if own.environment == parent.environment else None


def _seed(figure: Figure | None, usual: int) -> str:
    """The figure, then where it comes from; the GPU and the size where they are not an H100 and the usual one."""
    if figure is None:
        return text.NONE
    source = figure.source.partition(",")[0]
    gpu = f", {figure.gpu}" if figure.gpu != GPUS[0] else ""
    size = f", at {figure.n}" if figure.n not in (usual, None) else ""
    return f"{text.span(figure.tflops, text.number)}, {text.span(figure.ratio, text.share)}\n{source}{gpu}{size}"


def _slots(profile: Profile | None) -> str | None:
    return profile.settings.get("slots") if profile else None


def _lines(parts: Iterable[str]) -> str:
    return "\n".join(parts)
