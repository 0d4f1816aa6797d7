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
    """Sentences on where the figures come from, what the ratio is, the counts, and
    how well the model predicted.
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
    if report.timed:
        sentences += [_metric(report), _stages_of_times(report)]
    if report.agreement:
        rho = (
            ""
            if report.agreement.rho is None
            else f" Spearman's rho between predicted and measured times is "
            f"{report.agreement.rho:.2f}."
        )
        sentences.append(f"Predictions: {report.agreement}.{rho}")
    if report.common:
        sentences.append(f"The {len(report.top)} best share {report.common}.")
    return sentences


def _metric(report: TuneReport) -> str:
    """What the ratio is, and how it is measured."""
    if not report.base:
        return (
            "The kernel ran on a CPU, and a Triton kernel runs there in the interpreter. The times "
            "say nothing of a GPU and are not compared with cuBLAS: "
            f"{report.metric} is the time of the fastest config over that of the config."
        )
    what = (
        f"the time of {report.base}"
        if report.base == "cuBLAS"
        else "the time of torch's own calls that do the same"
    )
    return (
        f"{report.metric} is {what} over the time of the config, a median of rounds in which both "
        "take turns. Above 1 the config is faster."
    )


def _stages_of_times(report: TuneReport) -> str:
    """From which stage of the sweep a time comes."""
    base = report.base or "torch"
    screening = (
        f"Times of screening are medians of three turns beside {base}, or one turn where a config "
        "took more than 1.5 times as long as the best so far."
    )
    if report.winner is None:
        return f"{screening} There were no finals, so screening decides the order."
    spread = "; brackets have their 10th and 90th percentile" if report.base else ""
    return (
        f"{screening} Times of the finals are medians of up to {report.winner.rounds} rounds, in "
        f"which the fastest configs take turns with each other and {base}{spread}."
    )


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
        rows.append((report.metric, _ratio(w.ratio, w.ratio_low, w.ratio_high)))
    if w.lead is not None:
        resolved = "" if w.separated else "; not separated"
        rows += [
            ("lead", f"the runner-up takes {_lead(w)}{resolved}"),
            ("confidence", _confidence(w)),
            ("runner-up", split([w.runner_up, w.config])[1][0]),
        ]
    if w.valid:
        rows.append(("measured", f"{w.screened} of {w.valid} valid configs"))
    return TextTable("Winner of the finals", ("", report.kernel), rows)


def _top(report: TuneReport) -> TextTable:
    configs = [entry.config.replace(",", ", ") for entry in report.top]
    if report.common:
        configs = split([entry.config for entry in report.top])[1]
    rows = []
    for place, (entry, config) in enumerate(zip(report.top, configs, strict=True), 1):
        spread = (entry.ratio_low, entry.ratio_high) if entry.final else ()
        rows.append(
            [
                str(place),
                config,
                _us(entry.us),
                _ratio(entry.ratio, *spread),
                "finals" if entry.final else "screening",
                NONE if entry.predicted_us is None else _us(entry.predicted_us),
                entry.limits or NONE,
            ]
        )
    columns = ["rank", "config", "µs", report.metric, "stage", "predicted\nµs", "limits"]
    # The last two columns are there where the model says something.
    if not any(entry.limits for entry in report.top):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
        if not any(entry.predicted_us for entry in report.top):
            columns, rows = columns[:-1], [row[:-1] for row in rows]
    return TextTable(f"The {len(rows)} best" if len(rows) > 1 else "The best", columns, rows)


def _tiles(report: TuneReport) -> TextTable:
    across = sorted({n for _, n in report.tiles})
    rows = [
        (str(m), *(_best(report.tiles.get((m, n), ())) for n in across))
        for m in sorted({m for m, _ in report.tiles})
    ]
    columns = "M", *map(str, across)
    heading = f"Best {report.metric} in screening by tile, M down and N across"
    return TextTable(heading, columns, rows if report.timed else ())


def _failures(report: TuneReport) -> TextTable:
    rows = [
        (status, str(len(t)), " ".join(t[0].reason.split()) or NONE)
        for status, t in report.failures.items()
    ]
    return TextTable("Failures", ("status", "trials", "the most frequent reason"), rows)


def _best(trials: Sequence[Trial]) -> str:
    """The best ratio of a tile; "failed" where no config was right, a dash where none was tried."""
    if not trials:
        return NONE
    return _ratio(trials[0].ratio) if trials[0].ok else "failed"


def _ratio(value: float | None, low: float | None = None, high: float | None = None) -> str:
    if value is None:
        return NONE
    spread = "" if low is None or high is None else f" ({low:.3f}–{high:.3f})"
    return f"{value:.3f}{spread}"


def _lead(w: BestConfig) -> str:
    """How much more time the runner-up takes, with the interval that holds it."""
    assert w.lead is not None
    if w.lead_low is None or w.lead_high is None:
        return f"{w.lead - 1:.2%} more time"
    interval = f"{w.lead_low - 1:.2%} to {w.lead_high - 1:.2%}"
    return f"{w.lead - 1:.2%} more time (95% interval {interval})"


def _us(value: float) -> str:
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _confidence(w: BestConfig) -> str:
    # Whether the winner is separated from the runner-up stands beside its lead.
    words = confidence(w.confidence, separated=True)
    if words == NONE:
        return words
    if words == "tie":
        return "a tie: no finalist is surely the fastest"
    return f"{words} that it is the fastest of the finalists"


def _days(trials: Iterable[Trial]) -> str:
    days = sorted(trial.when[:10] for trial in trials if trial.when)
    return f"; measured {' to '.join(dict.fromkeys((days[0], days[-1])))}" if days else ""


def _gpu(gpu: Gpu) -> str:
    versions = (
        ("driver", gpu.driver),
        ("CUDA", gpu.cuda),
        ("torch", gpu.torch),
        ("triton", gpu.triton),
        ("CuTe DSL", gpu.dsl),
    )
    power = f", {gpu.power_limit_w:.0f} W" if gpu.power_limit_w else ""
    described = "".join(f", {name} {value}" for name, value in versions if value)
    sms = f"{gpu.sms} SMs" if gpu.sms else "no GPU"
    return f"{gpu.name}: {sms}{power}{described}"


def confidence(value: float | None, *, separated: bool) -> str:
    """How sure it is that a winner is the fastest of its finalists: "at least 98.1%".

    The value is a bound from below, and 0 is no bound at all: such a winner shares the first place.
    """
    if value is None:
        return NONE
    if value > 0.999:
        words = "over 99.9%"
    elif value > 0:
        words = f"at least {value:.1%}"
    else:
        words = "tie"
    return words if separated else f"{words}, not separated"
