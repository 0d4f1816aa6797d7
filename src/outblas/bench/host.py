"""The cost of outblas's host side relative to torch's: figures, their spread, and whether they
rose.

A time on a busy machine says little. Each figure is therefore a ratio of CPU times that were
measured in turns in one run: the time of outblas divided by that of torch or Python for the same
purpose.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from ..core.ownership import shown
from .statistics import Ratio, ratio

# A ratio that rose by less than this counts as unchanged, however narrow its spread was.
TOLERANCE = 0.05
# The same for two trees that are measured in turns.
TOLERANCE_IN_TURNS = 0.03
# Ratios to torch depend on the machine and on torch: where these differ, nothing is compared.
SAME = ("cpu", "python", "torch", "native")

Verdict = Literal["rose", "fell", "as recorded", "new", "not judged", "slower", "faster", "tied"]
WORSE = ("rose", "slower")


@dataclass(frozen=True)
class Timing:
    """One sample of a figure: microseconds of CPU time of outblas and of the reference."""

    us: float
    reference_us: float


Timings = Mapping[str, Sequence[Timing]]  # by the figure's name


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What a piece of the host side costs, over all samples of a run.

    Attributes:
        name: what is measured.
        reference: what it is divided by.
        us: the median time, and `least_us` the least.
        reference_us: the median time of the reference.
        ratio: the median of the samples' ratios; `low` and `high` are the 10th and 90th percentile,
            `sure_low` and `sure_high` enclose the true median with 95% confidence.
        samples: how many there were.
    """

    name: str
    reference: str
    us: float
    least_us: float
    reference_us: float
    ratio: float
    low: float
    high: float
    sure_low: float
    sure_high: float
    samples: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A figure compared with a recorded one, or with another tree.

    Attributes:
        name: of the figure.
        verdict: whether it changed.
        other: the recorded ratio, or this tree's divided by the other's; None where there is none.
        low: the 10th percentile of that, and `high` the 90th.
    """

    name: str
    verdict: Verdict
    other: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Record:
    """The figures of a run by name, and where they were measured."""

    environment: dict[str, Any]
    figures: dict[str, Figure]


def summarize(name: str, reference: str, samples: Sequence[Timing]) -> Figure:
    """Returns the figure that samples make. Raises ValueError for fewer than two."""
    ours, theirs = [each.us for each in samples], [each.reference_us for each in samples]
    spread = ratio(ours, theirs)
    return Figure(
        name=name,
        reference=reference,
        us=statistics.median(ours),
        least_us=min(ours),
        reference_us=statistics.median(theirs),
        ratio=spread.median,
        low=spread.low,
        high=spread.high,
        sure_low=spread.sure_low,
        sure_high=spread.sure_high,
        samples=len(samples),
    )


def to_json(record: Record) -> dict[str, Any]:
    """Returns the JSON that `read` reads."""
    return {
        "environment": record.environment,
        "figures": [asdict(figure) for figure in record.figures.values()],
    }


def read(path: Path) -> Record:
    """Reads the record in a file. Raises ValueError where there is no readable one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{shown(path)} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{shown(path)} is not JSON: {error}") from None
    try:
        environment = dict(found["environment"])
        figures = [_figure(each) for each in found["figures"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{shown(path)} is not a file that `outblas bench-host --save` wrote: {error!r}"
        ) from None
    return Record(environment, {figure.name: figure for figure in figures})


def _figure(found: Mapping[str, Any]) -> Figure:
    """Parses a figure. Raises KeyError for a missing field, TypeError for a field of another
    type.
    """
    values = {}
    for field in fields(Figure):
        value = values[field.name] = found[field.name]
        expected = str if field.type == "str" else (int, float)
        if not isinstance(value, expected) or isinstance(value, bool):
            raise TypeError(f"{field.name} is {value!r}")
    return Figure(**values)


def incomparable(now: Record, recorded: Record) -> str | None:
    """Returns why the figures of two runs are not comparable, or None."""
    for name in SAME:
        here, there = (_release(name, record.environment) for record in (now, recorded))
        if here != there:
            return f"{name} is {here} here, but was {there} when the figures were recorded"
    return None


def _release(name: str, environment: Mapping[str, Any]) -> str:
    """Returns a version without its last number, which hardly changes ratios; everything else is
    returned unchanged.
    """
    if name == "native":  # older records were made without it
        return str(environment.get(name, False))
    value = str(environment.get(name))
    return value if name == "cpu" else ".".join(value.split(".")[:2])


def beside_record(now: Record, recorded: Record, foreign: Container[str] = ()) -> list[Comparison]:
    """Compares each figure with the recorded one. `foreign` figures are not those of outblas, and
    are not judged.
    """
    rows = []
    for name, figure in now.figures.items():
        before = recorded.figures.get(name)
        found: Verdict = "not judged" if name in foreign else verdict(figure, before)
        if before is None:
            rows.append(Comparison(name=name, verdict=found))
        else:
            rows.append(
                Comparison(
                    name=name, verdict=found, other=before.ratio, low=before.low, high=before.high
                )
            )
    return rows


def verdict(now: Figure, recorded: Figure | None) -> Verdict:
    """Returns whether a ratio left its recorded spread, with 95% confidence and beyond the
    tolerance.
    """
    if recorded is None or recorded.reference != now.reference:
        return "new"
    if now.sure_low > recorded.high and now.ratio > recorded.ratio * (1 + TOLERANCE):
        return "rose"
    if now.sure_high < recorded.low and now.ratio < recorded.ratio / (1 + TOLERANCE):
        return "fell"
    return "as recorded"


def beside_tree(ours: Timings, others: Timings, foreign: Container[str] = ()) -> list[Comparison]:
    """Compares each figure's ratio with that of another tree, sample by sample; the samples were
    taken in turns.

    Raises ValueError unless both have the same number of samples of a figure, at least two.
    """
    rows = []
    for name, timings in ours.items():
        if name not in others:
            rows.append(Comparison(name=name, verdict="new"))
            continue
        spread = ratio(_ratios(timings), _ratios(others[name]))
        found: Verdict = "not judged" if name in foreign else _verdict_in_turns(spread)
        rows.append(
            Comparison(
                name=name, verdict=found, other=spread.median, low=spread.low, high=spread.high
            )
        )
    return rows


def _ratios(timings: Sequence[Timing]) -> list[float]:
    return [each.us / each.reference_us for each in timings]


def _verdict_in_turns(spread: Ratio) -> Verdict:
    if spread.sure_low > 1 and spread.median > 1 + TOLERANCE_IN_TURNS:
        return "slower"
    if spread.sure_high < 1 and spread.median < 1 / (1 + TOLERANCE_IN_TURNS):
        return "faster"
    return "tied"
