"""The ladder report: every rung in order of the climb, the seed's figure beside ours, and the gain on its parent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import charts
from .measured import find
from .results import Measurement, Measurements
from .rungs import DTYPES, Rung, climb
from .seeds import Figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

COLUMNS = ("rung", "seed", "TFLOP/s", "× its cuBLAS", "ours", "TFLOP/s", "× cuBLAS", "check", "× parent")
UNBUILT = "not built yet"
GPUS = ("H100", "GH200", "T4")


@dataclass(frozen=True)
class Row:
    """One rung: the seed's figure at this size if it has one (else its first), our measurement, None without one, and
    `gain`, our ratio over the parent's."""

    rung: Rung
    figure: Figure | None
    ours: Measurement | None
    gain: float | None

    def record(self) -> dict[str, Any]:
        """For JSON."""
        rung, figure, ours = self.rung, self.figure, self.ours
        return {
            "rung": rung.name,
            "idea": rung.idea,
            "parent": rung.parent,
            "built": rung.built,
            "seed": None
            if figure is None
            else {
                "source": figure.source,
                "gpu": figure.gpu,
                "n": figure.n,
                "dtype": figure.dtype,
                "tflops": figure.tflops,
                "ratio": figure.ratio,
            },
            "ours": None if ours is None else {"gpu": ours.device, **ours.record()},
            "gain": self.gain,
        }

    def cells(self) -> tuple[str, ...]:
        """In the order of COLUMNS."""
        ours = self.ours
        return (
            self.rung.name,
            *_seed_cells(self.figure),
            ours.gpu if ours else ("not measured" if self.rung.built else UNBUILT),
            _number(ours.tflops) if ours else "–",
            f"{ours.ratio:.3f} ({ours.ratio_low:.3f}–{ours.ratio_high:.3f})" if ours else "–",
            ours.check if ours else "–",
            f"{self.gain:.2f}" if self.gain is not None else "–",
        )


def rows(measurements: Measurements, ladder: str | None, n: int) -> list[Row]:
    """All rungs, or those of one ladder, at the product of edge n. Raises ValueError for no ladder."""
    found = climb(ladder)
    ours = {rung.name: _ours(measurements, rung, n, _gpus(measurements)) for rung in found}
    return [Row(rung, _figure(rung, n), ours[rung.name], _gain(rung, ours)) for rung in found]


def _gpus(measurements: Measurements) -> list[str]:
    """GPUs in the order in which the table takes figures from them: those of the seeds first, the H100 before all."""
    found = sorted({m.gpu for m in measurements})
    return sorted(found, key=lambda gpu: GPUS.index(gpu) if gpu in GPUS else len(GPUS))


def _ours(measurements: Measurements, rung: Rung, n: int, gpus: list[str]) -> Measurement | None:
    return next((m for gpu in gpus if (m := find(measurements, rung.name, (n, n, n), DTYPES[rung.ladder], gpu))), None)


def _figure(rung: Rung, n: int) -> Figure | None:
    return next((f for f in rung.figures if f.n == n), rung.figures[0] if rung.figures else None)


def _gain(rung: Rung, ours: dict[str, Measurement | None]) -> float | None:
    """Of ratios, which stand in one run with their cuBLAS each, and only between measurements on the same device."""
    own, parent = ours[rung.name], ours.get(rung.parent or "")
    if own is None or parent is None or own.ratio is None or parent.ratio is None or own.device != parent.device:
        return None
    return own.ratio / parent.ratio


def _seed_cells(figure: Figure | None) -> tuple[str, str, str]:
    if figure is None:
        return "–", "–", "–"
    size = f", {figure.n}" if figure.n else ""
    return f"{figure.source} ({figure.gpu}{size})", _range(figure.tflops, _number), _range(figure.ratio, _share)


def _range(values: tuple[float, float] | None, show: Any) -> str:
    if values is None:
        return "–"
    return show(values[0]) if values[0] == values[1] else f"{show(values[0])}–{show(values[1])}"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _share(value: float) -> str:
    return f"{value:.2f}"


def draw(found: list[Row], n: int) -> Canvas:
    """Bars of the ratio to cuBLAS by rung, ours beside the seed's at the same size.

    Raises ValueError when there is nothing to draw.
    """
    seeds = [row.figure.ratio if row.figure and row.figure.n == n else None for row in found]
    shown = [(row, seed) for row, seed in zip(found, seeds, strict=True) if row.ours is not None or seed is not None]
    if not shown:
        raise ValueError("no rung has a figure to draw")
    figure, (axis,) = charts.canvas(1, (9.0, 1.4 + 0.42 * len(shown)))
    places = range(len(shown))
    theirs = [sum(seed) / 2 if seed else 0.0 for _, seed in shown]
    ours = [row.ours.ratio or 0.0 if row.ours else 0.0 for row, _ in shown]
    axis.barh([p - 0.2 for p in places], theirs, 0.38, color="#c9c9c9", label="the seed, against its own cuBLAS")
    axis.barh([p + 0.2 for p in places], ours, 0.38, color=charts.PALETTE[0], label="ours, against today's")
    for place, (row, _) in zip(places, shown, strict=True):
        if row.ours is not None and row.ours.ratio is not None:
            axis.text(row.ours.ratio + 0.01, place + 0.2, f"{row.ours.ratio:.3f}", va="center", fontsize="small")
    axis.axvline(1.0, color=charts.BASE_COLOUR, linewidth=1.2)
    axis.set_yticks(places, [row.rung.name for row, _ in shown])
    axis.set_ylim(len(shown) - 0.4, -0.6)
    axis.grid(True, axis="x", color="#e3e3e3", linewidth=0.8)
    axis.grid(False, axis="y")
    axis.set_xlabel(f"× cuBLAS at {n}³")
    axis.legend(frameon=False, fontsize="small", ncols=2, loc="lower left", bbox_to_anchor=(0, 1.0))
    return figure
