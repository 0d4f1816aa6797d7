"""The ladder report: every rung in order of the climb, the document's figure beside ours, and the
gain on its parent.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.registry import dtype_of, layout_of
from . import text
from .lookup import find, profiled
from .profiles import Profile, Profiles
from .results import Measurement, Measurements, environments
from .rungs import MIXED, OLDER, Rung, climb
from .seed_figures import Figure

NOTE = (
    "Burst: idle, one warm call, 8 timed; the ratio is cuBLAS's time over the kernel's in the same "
    "rounds, with its 10th and 90th percentile. A line “mixed” has bfloat16 operands in place of "
    "float32, and the share of the rung's own float32 TFLOP/s. A line “sm_75” is code compiled for "
    "that architecture and loaded as PTX. Registers and what stands right of them: ncu."
)
GPUS = ("H100", "GH200", "T4")  # of the documents, in the order in which tables prefer them
# The edges of square products at which the documents measured a ladder; DEFAULT_SIZES for others.
SIZES = {"simt": (2048, 4096), "turing": (2048, 4096)}
DEFAULT_SIZES = (4096, 8192)


@dataclass(frozen=True)
class Baseline:
    """The rung of another ladder from which a climb starts.

    `source` is the document's kernel whose figure stands beside it, `dtype` the operands on which
    the two ladders are compared.
    """

    rung: str
    source: str
    dtype: str


_BASELINES = {
    "turing": Baseline("simt.vectorized", "003 v05", "float16"),
    "hopper": Baseline("simt.warptile", "001 kernel 1", "bfloat16"),
}
# Two columns of ncu's counters, right of registers.
_COUNTERS = ("stages", "L2 hits")
_COUNTERS_CUDA_CORES = ("occupancy", "FMA pipe,\nIPC")
_COUNTERS_TENSOR_CORES = ("occupancy", "tensor pipe,\nIPC")


def columns(ladder: str | None) -> tuple[str, ...]:
    """The headings of the table of one ladder. Of all ladders (None) they name what the rows of
    either kind show.
    """
    of_ladder = {"simt": _COUNTERS_CUDA_CORES, "turing": _COUNTERS_TENSOR_CORES}
    counters = of_ladder.get(ladder or "", _COUNTERS)
    if ladder is None:
        counters = f"{_COUNTERS[0]} or\n{_COUNTERS_CUDA_CORES[0]}", f"{_COUNTERS[1]} or\npipe, IPC"
    left = (
        "rung",
        "seed: TFLOP/s,\n× its cuBLAS",
        "N",
        "TFLOP/s",
        "× cuBLAS",
        "× parent",
        "registers",
    )
    return (*left, *counters, "check")


COLUMNS = columns(None)


# The variants in which a rung is measured: its own, with mixed operands, and, under the name of an
# older GPU, code that was compiled for that GPU.
OWN, MIXED_OPERANDS = "", "mixed"
Timed = dict[str, Measurement]  # by rung, in one variant at one size


@dataclass(frozen=True)
class AtSize:
    """A rung at the square product of edge `n`, by variant: the timing, and its ratio to cuBLAS
    over its parent's.
    """

    n: int
    timed: dict[str, Measurement]
    gains: dict[str, float]

    @property
    def ours(self) -> Measurement | None:
        """The timing on the operands of the rung's own ladder, with code for the GPU at hand."""
        return self.timed.get(OWN)

    @property
    def gain(self) -> float | None:
        """The gain on the parent, on the operands of the rung's own ladder."""
        return self.gains.get(OWN)

    @property
    def mixed_share(self) -> float | None:
        """TFLOP/s with mixed operands over TFLOP/s without. The ratio to cuBLAS would compare with
        cuBLAS's tensor cores.
        """
        own, mixed = self.timed.get(OWN), self.timed.get(MIXED_OPERANDS)
        if own is None or mixed is None or not own.tflops or not mixed.tflops:
            return None
        return mixed.tflops / own.tflops

    def record(self) -> dict[str, Any]:
        """The row's part for this size as a JSON object."""
        found: dict[str, Any] = {
            "n": self.n,
            "ours": None,
            "mixed": None,
            "mixed_share": self.mixed_share,
        }
        for variant, m in self.timed.items():
            found[variant or "ours"] = {"gpu": m.device, **m.record()}
        found["gain"] = self.gain
        for variant in self.timed:
            if variant not in (OWN, MIXED_OPERANDS):
                found[f"{variant}_gain"] = self.gains.get(variant)
        return found

    def lines(self) -> list[tuple[str, str, str, str]]:
        """N, TFLOP/s, ratio and gain of each variant that was measured."""
        return [
            (
                variant or str(self.n),
                text.number(m.tflops),
                self._ratio(variant, m),
                f"{self.gains[variant]:.3f}" if variant in self.gains else text.NONE,
            )
            for variant, m in self.timed.items()
        ]

    def _ratio(self, variant: str, m: Measurement) -> str:
        if variant == MIXED_OPERANDS:
            share = self.mixed_share
            return text.NONE if share is None else f"{share:.0%} of float32's"
        gpu = "" if m.gpu == GPUS[0] else f", {m.gpu}"
        return f"{text.ratio(m)}{gpu}"


@dataclass(frozen=True)
class Row:
    """A rung in the table of a `ladder` (None: of all ladders): the documents' figures, ours at
    each size, and ncu's counters at the first size that was profiled.
    """

    rung: Rung
    ladder: str | None
    figures: tuple[Figure, ...]
    at: tuple[AtSize, ...]
    profile: Profile | None

    @property
    def measured(self) -> tuple[Measurement, ...]:
        """Our timings, by size and variant."""
        return tuple(m for at in self.at for m in at.timed.values())

    def record(self) -> dict[str, Any]:
        """The row as a JSON object."""
        return {
            "rung": self.rung.name,
            "idea": self.rung.idea,
            "parent": self.rung.parent,
            "seeds": [figure.record() for figure in self.figures],
            "sizes": [at.record() for at in self.at],
            "profile": _profile_record(self.profile) if self.profile else None,
        }

    def cells(self) -> tuple[str, ...]:
        """The cells of the row in the order of `columns`, with a line for each size and variant."""
        lines = [line for at in self.at for line in at.lines()]
        figures = _lines(_figure_text(figure, self.at[0].n) for figure in self.figures) or text.NONE
        if not lines:
            return (self.rung.name, figures, text.NONE, text.NONE, "not measured", *[text.NONE] * 5)
        registers = self.profile.registers if self.profile else None
        return (
            self.rung.name,
            figures,
            *(_lines(column) for column in zip(*lines, strict=True)),
            f"{registers:.0f}" if registers else text.NONE,
            *self._counters(),
            ", ".join(dict.fromkeys(m.check for m in self.measured)),
        )

    def _counters(self) -> tuple[str, str]:
        """The two columns right of registers."""
        profile = self.profile
        if profile is None:
            return text.NONE, text.NONE
        pipes = {"simt": profile.fma_active, "turing": profile.tensor_active}
        ladder = self.ladder or self.rung.ladder
        if ladder in pipes:
            pipe = _lines((text.percent(pipes[ladder]), text.number(profile.ipc)))
            return text.percent(profile.occupancy), pipe
        return stages(profile) or text.NONE, text.percent(profile.l2_hit_rate)


@dataclass(frozen=True)
class _Entrant:
    """A rung, and the operands and the config on which it is measured ("": the rung's own)."""

    rung: Rung
    dtype: str
    config: str = ""


def rows(
    measurements: Measurements, ladder: str | None, sizes: Sequence[int], profiles: Profiles = ()
) -> list[Row]:
    """A row for each rung of one ladder, or of all (None), at square products of these edges.

    The first row of Turing's and of Hopper's ladder is the CUDA-core kernel from which the climb
    starts. Raises ValueError for an unknown ladder.
    """
    own = [_Entrant(rung, dtype_of(rung.ladder)) for rung in climb(ladder)]
    variants: dict[str, list[_Entrant]] = {OWN: _baseline(ladder) + own}
    for entrant in own:
        rung = entrant.rung
        if rung.ladder in MIXED:
            mixed = variants.setdefault(MIXED_OPERANDS, [])
            mixed.append(_Entrant(rung, MIXED[rung.ladder]))
        if rung.ladder in OLDER:
            gpu, config = OLDER[rung.ladder]
            variants.setdefault(gpu, []).append(_Entrant(rung, entrant.dtype, config))
    timed = {
        (variant, n): _timed(measurements, entrants, n, ladder)
        for variant, entrants in variants.items()
        for n in sizes
    }
    return [_row(entrant, ladder, sizes, timed, profiles) for entrant in variants[OWN]]


def title(rows: Sequence[Row]) -> str:
    """What the figures of a table have in common."""
    gpus = ", ".join(dict.fromkeys(m.device for row in rows for m in row.measured))
    usual = rows[0].at[0].n
    return (
        f"Rungs in burst, {gpus or 'not measured'}; a seed's figure is an H100's at {usual} where "
        "it does not say"
    )


def default_sizes(ladder: str | None) -> tuple[int, ...]:
    """The edges at which a ladder is shown where no others are asked for."""
    return SIZES.get(ladder or "", DEFAULT_SIZES)


def gpus_in_order(measurements: Measurements) -> list[str]:
    """The GPUs in the order in which a table takes figures from them: the H100 first, then the
    documents' other GPUs.
    """
    found = sorted({m.gpu for m in measurements})
    return sorted(found, key=lambda gpu: GPUS.index(gpu) if gpu in GPUS else len(GPUS))


def _layouts(rung: Rung, ladder: str | None) -> tuple[str, ...]:
    """The layouts in which a rung is compared on a ladder: the ladder's first, then its own."""
    return tuple(dict.fromkeys((layout_of(ladder or rung.name), layout_of(rung.name))))


def _timed(
    measurements: Measurements, entrants: Sequence[_Entrant], n: int, ladder: str | None
) -> Timed:
    """The timings at the product of edge n: those of the campaign that has most of the rungs; of
    rungs that it lacks, the newest.
    """
    gpus = gpus_in_order(measurements)
    campaigns = [
        _of_campaign(tuple(m for m in measurements if m.environment == each), entrants, n, ladder)
        for each in environments(measurements)
    ]
    fullest = max(campaigns, key=lambda found: _precedence(found, gpus), default={})
    return _of_campaign(measurements, entrants, n, ladder) | fullest


def _of_campaign(
    measurements: Measurements, entrants: Sequence[_Entrant], n: int, ladder: str | None
) -> Timed:
    """The timing of each rung on the first GPU, in the first layout, that has one."""
    gpus = gpus_in_order(measurements)
    found: Timed = {}
    for entrant in entrants:
        rung, shape = entrant.rung, (n, n, n)
        timings = (
            find(
                measurements,
                rung.name,
                shape,
                entrant.dtype,
                gpu,
                config=entrant.config,
                layout=layout,
            )
            for gpu in gpus
            for layout in _layouts(rung, ladder)
        )
        first = next(filter(None, timings), None)
        if first is not None:
            found[rung.name] = first
    return found


def _precedence(found: Timed, gpus: list[str]) -> tuple[int, int, str]:
    """A key that sorts campaigns by the order of GPUs, then by rungs timed, then by date."""
    if not found:
        return -len(gpus), 0, ""
    m = next(iter(found.values()))
    return -gpus.index(m.gpu), len(found), str(m.environment.get("date", ""))


def _baseline(ladder: str | None) -> list[_Entrant]:
    """The rung from which a ladder starts, with the one figure that its documents have on it."""
    if ladder not in _BASELINES:
        return []
    baseline = _BASELINES[ladder]
    (rung,) = (
        rung for rung in climb(baseline.rung.partition(".")[0]) if rung.name == baseline.rung
    )
    (figure,) = (figure for figure in rung.figures if figure.source == baseline.source)
    if figure.dtype != baseline.dtype:
        # Compared with the same document's cuBLAS on the operands of this ladder.
        cublas = next(f.cublas for own in climb(ladder) for f in own.figures if f.gpu == figure.gpu)
        source = f"{baseline.source} in {figure.dtype}"
        figure = replace(figure, dtype=baseline.dtype, cublas=cublas, source=source)
    return [_Entrant(replace(rung, figures=(figure,)), baseline.dtype)]


def _row(
    entrant: _Entrant,
    ladder: str | None,
    sizes: Sequence[int],
    timed: dict[tuple[str, int], Timed],
    profiles: Profiles,
) -> Row:
    rung = entrant.rung
    at = tuple(_at_size(rung, n, timed) for n in sizes)
    gpu = next((each.ours.gpu for each in at if each.ours), GPUS[0])
    found = (
        profiled(profiles, rung.name, (n, n, n), entrant.dtype, gpu, layout=layout)
        for n in sizes
        for layout in _layouts(rung, ladder)
    )
    profile = next(filter(None, found), None)
    return Row(rung, ladder, _figures(rung, entrant.dtype, sizes), at, profile)


def _at_size(rung: Rung, n: int, timed: dict[tuple[str, int], Timed]) -> AtSize:
    own: dict[str, Measurement] = {}
    gains: dict[str, float] = {}
    for (variant, size), found in timed.items():
        if size != n or rung.name not in found:
            continue
        own[variant] = found[rung.name]
        gain = _gain(own[variant], found.get(rung.parent or ""))
        if gain is not None and variant != MIXED_OPERANDS:
            gains[variant] = gain
    return AtSize(n, own, gains)


def _figures(rung: Rung, dtype: str, sizes: Sequence[int]) -> tuple[Figure, ...]:
    """The documents' figures in a dtype, one for each GPU: the first at one of the sizes, else the
    first. Ladders with sizes of their own have one for each GPU and size.
    """
    found: dict[tuple[str, int | None], Figure] = {}
    for figure in sorted(rung.figures, key=lambda f: f.n not in sizes):
        known = any(gpu == figure.gpu for gpu, _ in found)
        each = figure.n in sizes and rung.ladder in SIZES
        if figure.dtype == dtype and (each or not known):
            found.setdefault((figure.gpu, figure.n), figure)
    return tuple(sorted(found.values(), key=rung.figures.index))


def _gain(own: Measurement, parent: Measurement | None) -> float | None:
    """One ratio to cuBLAS over the other; None for timings of two campaigns."""
    if parent is None or own.ratio is None or parent.ratio is None:
        return None
    return own.ratio / parent.ratio if own.environment == parent.environment else None


def _figure_text(figure: Figure, usual: int) -> str:
    """A document's figure, then its source; the GPU and the size where they are not an H100 and the
    usual one.
    """
    source = figure.source.partition(",")[0]
    gpu = f", {figure.gpu}" if figure.gpu != GPUS[0] else ""
    size = "" if figure.n == usual else f", at {figure.n}" if figure.n else ", N unstated"
    return (
        f"{text.span(figure.tflops, text.number)}, "
        f"{text.span(figure.ratio, text.share)}\n{source}{gpu}{size}"
    )


def _profile_record(profile: Profile) -> dict[str, Any]:
    counters = (
        "shape",
        "registers",
        "l2_hit_rate",
        "occupancy",
        "fma_active",
        "tensor_active",
        "ipc",
    )
    # "slots" is the name that this field has had from the first version on.
    record: dict[str, Any] = {"gpu": profile.device, "slots": stages(profile)}
    return record | {name: getattr(profile, name) for name in counters}


def stages(profile: Profile) -> str | None:
    """The pipeline stages of the config that ran; `slots` was the field's name in older files."""
    return profile.settings.get("stages", profile.settings.get("slots"))


def _lines(parts: Iterable[str]) -> str:
    return "\n".join(parts)
