"""A sweep's report as tables and notes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from outblas.autotune.store.records import BestConfig, Gpu, Trial
from outblas.report.model import NONE, TuneReport, split


class TextTable(NamedTuple):
    """A heading, the columns and the cells of each row, for a terminal or HTML."""

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables(report: TuneReport) -> list[TextTable]:
    """The tables that have rows, in the order in which a report shows them."""
    parts = [_winner(report), _top(report), _tiles(report), _failures(report)]
    return [table for table in parts if table.rows]


def notes(report: TuneReport) -> list[str]:
    """Sentences on where the figures come from, what the ratio is, the counts, and how well the
    model predicted.
    """
    sentences = [_gpu(gpu) + _days(t for t in report.trials if t.gpu == gpu) for gpu in report.gpus]
    failed = len(report.trials) - report.right
    sentences.append(
        f"{len(report.trials)} configs were tried: {report.right} right, {failed} failed."
    )
    if report.left_out:
        sentences.append(
            f"{report.left_out} older trials are left out. They are of the same configs, or of "
            "another source of the kernel."
        )
    if report.timed and report.base:
        calls = "" if report.base == "cuBLAS" else "'s own calls that do the same"
        sentences.append(
            f"{report.metric} is the time of {report.base}{calls} over the time of the config, a "
            "median of rounds in which both take turns; brackets have the 10th and 90th percentile."
        )
    elif report.timed:
        sentences.append("Triton's interpreter ran on a CPU: its times say nothing of a GPU.")
    if report.predictions:
        sentences.append(f"Predictions: {report.agreement}.")
    if report.common:
        sentences.append(f"The {len(report.top)} best share {report.common}.")
    return sentences


def _winner(report: TuneReport) -> TextTable:
    w = report.winner
    if w is None:
        return TextTable("Winner", (), ())
    beside = f"; {report.base} {_us(w.cublas_us)}" if report.base else ""
    rows = [
        ("config", w.config.replace(",", ", ")),
        ("µs", f"{_us(w.us)}, median of {w.rounds} rounds of the finals{beside}"),
    ]
    if report.base:
        rows.append((report.metric, ratio(w.ratio, w.ratio_low, w.ratio_high)))
    if w.lead is not None:
        rows += [
            ("lead", lead(w)),
            ("confidence", confidence(w)),
            ("runner-up", split([w.runner_up, w.config])[1][0]),
        ]
    if w.valid:
        rows.append(("measured", f"{w.screened} of {w.valid} valid configs"))
    return TextTable("Winner of the finals", ("", report.kernel), rows)


def _top(report: TuneReport) -> TextTable:
    configs = [entry.config.replace(",", ", ") for entry in report.top]
    if report.common:
        configs = split([entry.config for entry in report.top])[1]
    columns = {
        "rank": [str(place) for place in range(1, len(configs) + 1)],
        "config": configs,
        "µs": [_us(entry.us) for entry in report.top],
        f"× {report.base}": [
            ratio(e.ratio, *((e.ratio_low, e.ratio_high) if e.final else ())) for e in report.top
        ],
        "stage": ["finals" if entry.final else "screening" for entry in report.top],
        "predicted\nµs": [_us(entry.predicted_us) for entry in report.top],
        "limits": [entry.limits or NONE for entry in report.top],
    }
    # Columns that say nothing are left out, as ratios on a CPU.
    columns = {name: cells for name, cells in columns.items() if set(cells) != {NONE}}
    heading = f"The {len(configs)} best" if len(configs) > 1 else "The best"
    return TextTable(heading, list(columns), list(zip(*columns.values(), strict=True)))


def _tiles(report: TuneReport) -> TextTable:
    across = sorted({n for _, n in report.tiles})
    rows = [
        (str(m), *(_best(report, report.tiles.get((m, n), ())) for n in across))
        for m in sorted({m for m, _ in report.tiles})
    ]
    heading = f"Best {report.metric} in screening by tile, M down and N across"
    return TextTable(heading, ("M", *map(str, across)), rows if report.timed else ())


def _best(report: TuneReport, trials: Sequence[Trial]) -> str:
    """The best figure of a tile; "failed" where no config was right, a dash where none was
    tried.
    """
    if not trials:
        return NONE
    figure = ratio(trials[0].ratio) if report.base else _us(trials[0].us)
    return figure if trials[0].ok else "failed"


def _failures(report: TuneReport) -> TextTable:
    rows = [
        (status, str(len(t)), " ".join(t[0].reason.split()) or NONE)
        for status, t in report.failures.items()
    ]
    return TextTable("Failures", ("status", "trials", "the most frequent reason"), rows)


def ratio(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """A ratio, with its spread where it has one: "1.047 (1.040–1.050)"."""
    if value is None:
        return NONE
    spread = "" if low is None or high is None else f" ({low:.3f}–{high:.3f})"
    return f"{value:.3f}{spread}"


def lead(w: BestConfig) -> str:
    """How much more time the runner-up takes, with the 95% interval."""
    if w.lead is None or w.lead_low is None or w.lead_high is None:
        return NONE
    return f"{w.lead - 1:+.2%} ({w.lead_low - 1:+.2%} to {w.lead_high - 1:+.2%})"


def confidence(w: BestConfig) -> str:
    """How sure it is that a winner is the fastest of its finalists: "at least 98.1%".

    The figure is a bound from below, and 0 is none at all: such a winner shares the first place.
    """
    if w.confidence is None or not w.runner_up:
        return NONE
    words = "over 99.9%" if w.confidence > 0.999 else f"at least {w.confidence:.1%}"
    return words if w.confidence > 0 else "tie"


def _us(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _days(trials: Iterable[Trial]) -> str:
    days = sorted(trial.when[:10] for trial in trials if trial.when)
    return f"; measured {' to '.join(dict.fromkeys((days[0], days[-1])))}" if days else ""


def _gpu(gpu: Gpu) -> str:
    software = {
        "driver": gpu.driver,
        "CUDA": gpu.cuda,
        "torch": gpu.torch,
        "triton": gpu.triton,
        "CuTe DSL": gpu.dsl,
    }
    power = f", {gpu.power_limit_w:.0f} W" if gpu.power_limit_w else ""
    versions = "".join(f", {name} {value}" for name, value in software.items() if value)
    return f"{gpu.name}: {f'{gpu.sms} SMs' if gpu.sms else 'no GPU'}{power}{versions}"
