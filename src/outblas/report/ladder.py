"""The ladder report: every rung in order of the climb, the seed's figure beside ours, and the gain
on its parent.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..registry import dtype_of, layout_of
from . import text
from .lookup import find, profiled
from .profiles import Profile, Profiles
from .results import Measurement, Measurements, environments
from .rungs import MIXED, OLDER, Rung, climb
from .seed_figures import Figure

NOTE = (
    "Burst: idle, one warm call, 8 timed; the ratio is cuBLAS's time over the kernel's in the same "
    "rounds, with its "
    "10th and 90th percentile. A line “mixed” has bfloat16 operands in place of float32, and the "
    "share of the rung's "
    "own float32 TFLOP/s. A line “sm_75” is code compiled for that architecture and loaded as PTX. "
    "Registers and what "
    "stands right of them: ncu."
)
GPUS = ("H100", "GH200", "T4")
SIZES = {
    "simt": (2048, 4096),
    "turing": (2048, 4096),
}  # where the seeds measured; elsewhere DEFAULT_SIZES
DEFAULT_SIZES = (4096, 8192)
# Ladder → the rung of another ladder it starts from, the documents' kernel, and the operands that
# it is compared on.
_BASELINES = {
    "turing": ("simt.vectorized", "003 v05", "float16"),
    "hopper": ("simt.warptile", "001 kernel 1", "bfloat16"),
}
_COUNTED = ("slots", "L2 hits")  # what ncu says beside registers, except of the CUDA cores
_COUNTED_CORES = ("occupancy", "FMA pipe,\nIPC")
_COUNTED_TENSOR = ("occupancy", "tensor pipe,\nIPC")


def columns(ladder: str | None) -> tuple[str, ...]:
    """Headings of a table of one ladder; of all (None), they name what the rows of either kind
    show.
    """
    counted = {"simt": _COUNTED_CORES, "turing": _COUNTED_TENSOR}.get(ladder or "", _COUNTED)
    if ladder is None:
        counted = f"{_COUNTED[0]} or\n{_COUNTED_CORES[0]}", f"{_COUNTED[1]} or\npipe, IPC"
    shown = (
        "rung",
        "seed: TFLOP/s,\n× its cuBLAS",
        "N",
        "TFLOP/s",
        "× cuBLAS",
        "× parent",
        "registers",
    )
    return (*shown, *counted, "check")


COLUMNS = columns(None)


OWN, MIXED_WAY = (
    "",
    "mixed",
)  # how a rung was measured, beside them the name of an older GPU that it was compiled for
Timed = dict[str, Measurement]  # by rung, of one way and one size


@dataclass(frozen=True)
class At:
    """A rung at the product of edge `n`: what was measured, and its ratio over the parent's, by
    way.
    """

    n: int
    timed: Timed
    gains: dict[str, float]

    @property
    def ours(self) -> Measurement | None:
        """On the operands of the rung's own ladder, for the GPU at hand."""
        return self.timed.get(OWN)

    @property
    def gain(self) -> float | None:
        return self.gains.get(OWN)

    @property
    def mixed_share(self) -> float | None:
        """TFLOP/s with mixed operands over those without; the ratio to cuBLAS would be one to its
        tensor cores.
        """
        own, mixed = (m.tflops if (m := self.timed.get(way)) else None for way in (OWN, MIXED_WAY))
        return mixed / own if mixed and own else None

    def record(self) -> dict[str, Any]:
        """For JSON."""
        found: dict[str, Any] = {
            "n": self.n,
            "ours": None,
            "mixed": None,
            "mixed_share": self.mixed_share,
        }
        found |= {way or "ours": {"gpu": m.device, **m.record()} for way, m in self.timed.items()}
        gains = {
            f"{way}_gain": self.gains.get(way) for way in self.timed if way not in (OWN, MIXED_WAY)
        }
        return found | {"gain": self.gain} | gains

    def lines(self) -> list[tuple[str, str, str, str]]:
        """N, TFLOP/s, ratio and gain; none of what was not measured."""
        found = []
        for way, m in self.timed.items():
            gpu = "" if m.gpu == GPUS[0] else f", {m.gpu}"
            beside = f"{text.ratio(m)}{gpu}"
            if way == MIXED_WAY:
                beside = (
                    text.NONE
                    if self.mixed_share is None
                    else f"{self.mixed_share:.0%} of float32's"
                )
            times = f"{self.gains[way]:.3f}" if way in self.gains else text.NONE
            found.append((way or str(self.n), text.number(m.tflops), beside, times))
        return found


@dataclass(frozen=True)
class Row:
    """One rung in the table of a `ladder` (None: of all): the seeds' figures, ours at each size,
    and ncu's counters at the first size that was profiled.
    """

    rung: Rung
    ladder: str | None
    figures: tuple[Figure, ...]
    at: tuple[At, ...]
    profile: Profile | None

    @property
    def measured(self) -> tuple[Measurement, ...]:
        """Ours, by size."""
        return tuple(m for at in self.at for m in at.timed.values())

    def record(self) -> dict[str, Any]:
        """For JSON."""
        rung, profile = self.rung, self.profile
        found = {"rung": rung.name, "idea": rung.idea, "parent": rung.parent}
        counters = (
            "shape",
            "registers",
            "l2_hit_rate",
            "occupancy",
            "fma_active",
            "tensor_active",
            "ipc",
        )
        return found | {
            "seeds": [figure.record() for figure in self.figures],
            "sizes": [at.record() for at in self.at],
            "profile": profile
            and {"gpu": profile.device, "slots": _slots(profile)}
            | {name: getattr(profile, name) for name in counters},
        }

    def cells(self) -> tuple[str, ...]:
        """In the order of `columns`, a line for each size."""
        shown = [line for at in self.at for line in at.lines()]
        seed = _lines(_seed(figure, self.at[0].n) for figure in self.figures) or text.NONE
        if not shown:
            return (self.rung.name, seed, text.NONE, text.NONE, "not measured", *[text.NONE] * 5)
        profile = self.profile
        return (
            self.rung.name,
            seed,
            *(_lines(column) for column in zip(*shown, strict=True)),
            f"{profile.registers:.0f}" if profile and profile.registers else text.NONE,
            *self._counted(),
            ", ".join(dict.fromkeys(m.check for m in self.measured)),
        )

    def _counted(self) -> tuple[str, str]:
        """What `columns` has right of registers."""
        profile = self.profile
        if profile is None:
            return text.NONE, text.NONE
        active = {"simt": profile.fma_active, "turing": profile.tensor_active}
        if (ladder := self.ladder or self.rung.ladder) in active:
            return text.percent(profile.occupancy), _lines(
                (text.percent(active[ladder]), text.number(profile.ipc))
            )
        return _slots(profile) or text.NONE, text.percent(profile.l2_hit_rate)


def rows(
    measurements: Measurements, ladder: str | None, sizes: Sequence[int], profiles: Profiles = ()
) -> list[Row]:
    """All rungs, or those of one ladder, at products of these edges; above Hopper's, the CUDA-core
    kernel that its climb starts from. Raises ValueError for no ladder.
    """
    own = [
        _Climber(rung, dtype_of(rung.ladder)) for rung in climb(ladder)
    ]  # first, for it checks the name
    ways: dict[str, list[_Climber]] = {OWN: _baseline(ladder) + own}
    for rung, dtype, _ in own:
        if rung.ladder in MIXED:
            ways.setdefault(MIXED_WAY, []).append(_Climber(rung, MIXED[rung.ladder]))
        if rung.ladder in OLDER:
            name, config = OLDER[rung.ladder]
            ways.setdefault(name, []).append(_Climber(rung, dtype, config))
    timed = {
        (way, n): _timed(measurements, climbers, n, ladder)
        for way, climbers in ways.items()
        for n in sizes
    }
    return [_row(climber, ladder, sizes, timed, profiles) for climber in ways[OWN]]


class _Climber(NamedTuple):
    """A rung, and the operands and the config on which it is measured."""

    rung: Rung
    dtype: str
    config: str = ""


def _layouts(rung: Rung, ladder: str | None) -> tuple[str, ...]:
    """In which a rung of this or another ladder is compared: that of the ladder first, then its
    own.
    """
    return tuple(dict.fromkeys((layout_of(ladder or rung.name), layout_of(rung.name))))


def _timed(
    measurements: Measurements, climbers: Sequence[_Climber], n: int, ladder: str | None
) -> Timed:
    """At the product of edge n: from the campaign that has most of the rungs, else the newest."""

    def among(of: Measurements) -> Timed:
        found = {}
        for rung, dtype, config in climbers:
            places = [
                (gpu, layout) for gpu in gpus_in_order(of) for layout in _layouts(rung, ladder)
            ]
            timed = (
                find(of, rung.name, (n,) * 3, dtype, gpu, config=config, layout=way)
                for gpu, way in places
            )
            if (first := next(filter(None, timed), None)) is not None:
                found[rung.name] = first
        return found

    campaigns = [
        among(tuple(m for m in measurements if m.environment == each))
        for each in environments(measurements)
    ]
    gpus = gpus_in_order(measurements)
    return among(measurements) | max(
        campaigns, key=lambda found: _standing(found, gpus), default={}
    )


def _standing(found: Timed, gpus: list[str]) -> tuple[int, int, str]:
    """A campaign's: by the order of GPUs, by rungs, by date."""
    if not found:
        return -len(gpus), 0, ""
    m = next(iter(found.values()))
    return -gpus.index(m.gpu), len(found), str(m.environment.get("date", ""))


def title(rows: Sequence[Row]) -> str:
    """What the figures of a table have in common."""
    gpus = (
        ", ".join(dict.fromkeys(m.device for row in rows for m in row.measured)) or "not measured"
    )
    usual = rows[0].at[0].n
    return f"Rungs in burst, {gpus}; a seed's figure is an H100's at {usual} where it does not say"


def default_sizes(ladder: str | None) -> tuple[int, ...]:
    return SIZES.get(ladder or "", DEFAULT_SIZES)


def gpus_in_order(measurements: Measurements) -> list[str]:
    """GPUs in the order in which a table takes figures from them: those of the seeds first, the
    H100 before all.
    """
    found = sorted({m.gpu for m in measurements})
    return sorted(found, key=lambda gpu: GPUS.index(gpu) if gpu in GPUS else len(GPUS))


def _baseline(ladder: str | None) -> list[_Climber]:
    """The rung of another ladder that this one starts from, with the one figure that its documents
    have on it, and the operands on which it is compared.
    """
    if ladder not in _BASELINES:
        return []
    name, source, dtype = _BASELINES[ladder]
    (rung,) = (rung for rung in climb(name.partition(".")[0]) if rung.name == name)
    (figure,) = (figure for figure in rung.figures if figure.source == source)
    if figure.dtype != dtype:  # of the same document's cuBLAS in the operands of this ladder
        theirs = next(f.cublas for own in climb(ladder) for f in own.figures if f.gpu == figure.gpu)
        figure = replace(figure, dtype=dtype, cublas=theirs, source=f"{source} in {figure.dtype}")
    return [_Climber(replace(rung, figures=(figure,)), dtype)]


def _row(
    climber: _Climber,
    ladder: str | None,
    sizes: Sequence[int],
    timed: dict[tuple[str, int], Timed],
    profiles: Profiles,
) -> Row:
    rung, dtype, _ = climber
    at = []
    for n in sizes:
        here = {
            way: found for (way, size), found in timed.items() if size == n and rung.name in found
        }
        gains = {
            way: _gain(found[rung.name], found.get(rung.parent or ""))
            for way, found in here.items()
        }
        own = {way: found[rung.name] for way, found in here.items()}
        at.append(
            At(
                n,
                own,
                {way: gain for way, gain in gains.items() if gain is not None and way != MIXED_WAY},
            )
        )
    gpu = next((each.ours.gpu for each in at if each.ours), GPUS[0])
    layouts = _layouts(rung, ladder)
    counted = (
        profiled(profiles, rung.name, (n, n, n), dtype, gpu, layout=way)
        for n in sizes
        for way in layouts
    )
    return Row(
        rung, ladder, _figures(rung, dtype, sizes), tuple(at), next(filter(None, counted), None)
    )


def _figures(rung: Rung, dtype: str, sizes: Sequence[int]) -> tuple[Figure, ...]:
    """In this dtype, of each GPU: the first at one of the sizes (of ladders with sizes of their
    own: at each), else the first.
    """
    found: dict[tuple[str, int | None], Figure] = {}
    for figure in sorted(rung.figures, key=lambda f: f.n not in sizes):
        known = any(gpu == figure.gpu for gpu, _ in found)
        each = figure.n in sizes and rung.ladder in SIZES
        if figure.dtype == dtype and (each or not known):
            found.setdefault((figure.gpu, figure.n), figure)
    return tuple(sorted(found.values(), key=rung.figures.index))


def _gain(own: Measurement, parent: Measurement | None) -> float | None:
    """Of ratios, and only between measurements of one campaign."""
    if parent is None or own.ratio is None or parent.ratio is None:
        return None
    return own.ratio / parent.ratio if own.environment == parent.environment else None


def _seed(figure: Figure, usual: int) -> str:
    """The figure, then where it comes from; the GPU and the size where they are not an H100 and the
    usual one.
    """
    source = figure.source.partition(",")[0]
    gpu = f", {figure.gpu}" if figure.gpu != GPUS[0] else ""
    size = "" if figure.n == usual else f", at {figure.n}" if figure.n else ", N unstated"
    return (
        f"{text.span(figure.tflops, text.number)}, "
        f"{text.span(figure.ratio, text.share)}\n{source}{gpu}{size}"
    )


def _slots(profile: Profile | None) -> str | None:
    return profile.settings.get("slots") if profile else None


def _lines(parts: Iterable[str]) -> str:
    return "\n".join(parts)
