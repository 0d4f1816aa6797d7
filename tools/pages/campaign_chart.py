"""The chart of a campaign: ratios to cuBLAS by shape in each mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from matplotlib.figure import Figure

from outblas.base.shapes import to_text
from outblas.bench import plotting
from outblas.bench.record import BEST
from tools.pages import drawing
from tools.pages.results import Measurement, Results
from tools.pages.tables import devices, operands

OURS = "outblas"
MEAN = "geometric mean"
MODES = {
    "burst": "Burst: short runs of calls",
    "cold": "Cold: weights not in L2",
    "sustained": "Sustained: calls without pause",
}
_ROW, _AROUND = 0.25, 1.3  # inches: a row, and what is around rows
_STEP = 0.26  # between the marks of two series in a row, where rows are 1 apart


@dataclass(frozen=True)
class _Series:
    """Ratios, their 10th and their 90th percentile by shape; the last two may be the first."""

    name: str
    heading: str
    colour: str
    marker: str
    ratios: Mapping[str, tuple[float, float, float]]


def link(results: Results, file: str) -> str:
    """The picture of a campaign. The argument is its file."""
    gpus = devices(results.measurements)
    return f"![Speed relative to cuBLAS by shape, on an {gpus}]({file})\n"


def draw(results: Results, _: str) -> Figure:
    """A panel of ratios for each mode."""
    timed = [m for m in results.measurements if m.ratio is not None]
    campaigns = {mode: [m for m in timed if m.mode == mode] for mode in MODES}
    campaigns = {mode: records for mode, records in campaigns.items() if records}
    heights = [_AROUND + len(_names(records)) * _ROW for records in campaigns.values()]
    figure, axes = plotting.grid(plotting.WIDTH, [(height, (1,)) for height in heights], extra=0.75)
    environment = timed[0].environment
    versions = "".join(
        f", {name} {environment[key]}"
        for name, key in (("torch", "torch"), ("CUDA", "cuda"), ("driver", "driver"))
        if environment.get(key)
    )
    note = f"A line through a mark: 10th to 90th percentile of rounds. {operands(timed)}{versions}."
    plotting.entitle(figure, f"{OURS} beside cuBLAS on an {environment['gpu']}", note)
    panels = zip(axes, campaigns.items(), strict=True)
    words = [_draw_ratios(axis, records, MODES[mode]) for axis, (mode, records) in panels]
    plotting.describe(figure, " ".join(words))
    return figure


def _names(records: Sequence[Measurement]) -> list[str]:
    return [*dict.fromkeys(to_text(m.shape) for m in records if m.label == OURS), MEAN]


def _series(records: Sequence[Measurement]) -> list[_Series]:
    ours = [m for m in records if m.label == OURS]
    over_mm, over_best = {}, {}
    for m in ours:
        over_mm[to_text(m.shape)] = (m.ratio or 0.0, m.ratio_low or 0.0, m.ratio_high or 0.0)
        best = m.ratio_best or 0.0
        over_best[to_text(m.shape)] = (best, best, best)
    for ratios in (over_mm, over_best):
        mean = geometric_mean(value for value, *_ in ratios.values())
        ratios[MEAN] = (mean, mean, mean)
    first, second = plotting.PALETTE[:2]
    return [
        _Series(f"{OURS} over torch.mm", "over\ntorch.mm", first, "o", over_mm),
        _Series(f"{OURS} over {BEST}", f"over\n{BEST}", second, "D", over_best),
    ]


def _draw_ratios(axis: Any, records: Sequence[Measurement], title: str) -> str:
    """Draws a row for each shape, with a mark for each series; cuBLAS is the line at 1. Returns the
    text alternative.
    """
    names, series = _names(records), _series(records)
    drawing.horizontal(axis, names)
    for i, line in enumerate(series):
        places = [row + (i - (len(series) - 1) / 2) * _STEP for row in range(len(names))]
        for place, name in zip(places, names, strict=True):
            _, low, high = line.ratios[name]
            if low != high:
                axis.plot([low, high], [place] * 2, color=line.colour, linewidth=1.4)
        axis.plot(
            [line.ratios[name][0] for name in names],
            places,
            line.marker,
            color=line.colour,
            markersize=5.5,
            label=line.name,
        )
    ends = [1.0, *(end for line in series for ratio in line.ratios.values() for end in ratio)]
    margin = 0.06 * max(max(ends) - min(ends), 0.1)
    axis.set_xlim(min(ends) - margin, max(ends) + margin)
    axis.axvline(1.0, color=plotting.BASE_COLOUR, linewidth=1.4, zorder=1)
    axis.axhline(len(names) - 1.5, color=plotting.RULE, linewidth=1.0)
    axis.get_yticklabels()[-1].set_fontweight("bold")
    axis.set_xlabel("speedup (above 1: faster)")
    axis.set_ylabel("shape (M×N×K, or N)")
    plotting.legend_above(axis, title, columns=1)
    cells = [[drawing.ratio(line.ratios[name][0]) for name in names] for line in series]
    drawing.columns(
        axis,
        [drawing.Column(s.heading, c, s.colour) for s, c in zip(series, cells, strict=True)],
    )
    return " ".join(
        f"{title}, speedup of {line.name}: "
        f"{', '.join(f'{name} {cell}' for name, cell in zip(names, column, strict=True))}."
        for line, column in zip(series, cells, strict=True)
    )
