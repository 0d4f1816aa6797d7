"""What the chart of a campaign shows: series of ratios and lines against N, from its results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from ..core.shapes import to_text
from . import plotting

Result = dict[str, Any]
Lines = dict[str, list[tuple[int, float]]]  # (N, figure) by provider
BASE, BEST = "cublas", "cublaslt-best"
MEAN = "geometric mean"
_MODES = {
    "burst": "Burst: short runs of calls",
    "cold": "Cold: weights not in L2",
    "sustained": "Sustained: calls without pause",
}


@dataclass(frozen=True)
class Ratio:
    """A speedup, with its 10th and 90th percentile of rounds where these were recorded."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """Ratios by the name of their row. `heading` stands above their column of figures."""

    name: str
    heading: str
    colour: str
    marker: str
    ratios: Mapping[str, Ratio]


@dataclass(frozen=True)
class Condition:
    """The results of one layout in one mode, under a title."""

    title: str
    results: Sequence[Result]

    @property
    def labels(self) -> list[str]:
        """The providers, in the order of the report."""
        return list(dict.fromkeys(label(r) for r in self.results))

    @property
    def own(self) -> list[str]:
        """The providers but the base."""
        return [name for name in self.labels if name != BASE]

    @property
    def is_crowded(self) -> bool:
        """Whether there are more providers than one panel has colours for."""
        return len({BASE, *self.labels}) > plotting.MOST_SERIES

    def series(self) -> tuple[list[Series], list[str]]:
        """The series of ratios, and the names of their rows."""
        if not self.own:
            return [], []
        found = self._by_provider() if self.is_crowded else self._by_shape()
        names = list(dict.fromkeys(name for series in found for name in series.ratios))
        if self.is_crowded or len(names) == 1:
            return found, names
        found = [_with_mean(series, names) for series in found]
        means = any(MEAN in series.ratios for series in found)
        return found, [*names, MEAN] if means else names

    def against_n(self, key: str) -> Lines:
        """A figure of square products by N, for each provider; {} unless there are several N."""
        found: Lines = {}
        for r in self.results:
            M, N, K = r["shape"]
            if M == N == K and r.get(key) is not None and not r.get("product"):
                found.setdefault(label(r), []).append((N, r[key]))
        sizes = {n for points in found.values() for n, _ in points}
        return {name: sorted(points) for name, points in found.items()} if len(sizes) > 1 else {}

    def _by_shape(self) -> list[Series]:
        """A series for each provider, over rows of shapes. Where one provider stands beside cuBLAS
        and the best of cuBLASLt's algorithms, it has a series for each of these bases.
        """
        mine = [name for name in self.own if name != BEST]
        if len(mine) == 1 and BEST in self.own:
            first, second = plotting.PALETTE[:2]
            return [
                Series(
                    f"{mine[0]} over torch.mm", "over\ntorch.mm", first, "o", self._ratios(mine[0])
                ),
                Series(
                    f"{mine[0]} over {BEST}", f"over\n{BEST}", second, "D", self._to_best(mine[0])
                ),
            ]
        colours, markers = plotting.colours(self.labels), plotting.markers(self.labels)
        alone = len(self.own) == 1
        return [
            Series(
                f"{name} over {BASE}",
                "speedup" if alone else name,
                colours[name],
                markers[name],
                self._ratios(name),
            )
            for name in self.own
        ]

    def _by_provider(self) -> list[Series]:
        """One series over rows of providers at each shape."""
        shapes = list(dict.fromkeys(_row_of(r) for r in self.results if label(r) != BASE))
        rows = {
            label(r) if len(shapes) == 1 else f"{shape}: {label(r)}": _ratio(r)
            for shape in shapes
            for r in self.results
            if _row_of(r) == shape and label(r) != BASE
        }
        at = f" at {shapes[0]}" if len(shapes) == 1 else ""
        return [Series(f"each over cublas{at}", "speedup", plotting.PALETTE[0], "o", rows)]

    def _ratios(self, name: str) -> dict[str, Ratio]:
        return {_row_of(r): _ratio(r) for r in self.results if label(r) == name}

    def _to_best(self, name: str) -> dict[str, Ratio]:
        return {
            _row_of(r): Ratio(r["ratio_best"])
            for r in self.results
            if label(r) == name and r.get("ratio_best") is not None
        }


def conditions(results: Iterable[Result]) -> list[Condition]:
    """The results that have figures, by layout and mode."""
    found: dict[tuple[str, str], list[Result]] = {}
    for r in results:
        if r.get("ratio") is not None:
            found.setdefault((r["layout"], r["mode"]), []).append(r)
    several = len({layout for layout, _ in found}) > 1
    return [
        Condition(_MODES.get(mode, mode) + (f", {layout}" if several else ""), of)
        for (layout, mode), of in found.items()
    ]


def label(result: Result) -> str:
    """The provider, with the config that it ran in where that is not its own."""
    return (
        f"{result['provider']}[{result['config']}]" if result["config"] else str(result["provider"])
    )


def _row_of(result: Result) -> str:
    return f"{to_text(tuple(result['shape']))} {result.get('product') or ''}".strip()


def _ratio(result: Result) -> Ratio:
    return Ratio(result["ratio"], result.get("ratio_low"), result.get("ratio_high"))


def _with_mean(series: Series, names: Sequence[str]) -> Series:
    """The series with its geometric mean, if it has a ratio in every row."""
    values = [series.ratios[name].value for name in names if name in series.ratios]
    if len(values) != len(names):
        return series
    ratios = {**series.ratios, MEAN: Ratio(geometric_mean(values))}
    return Series(series.name, series.heading, series.colour, series.marker, ratios)
