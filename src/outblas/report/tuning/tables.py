"""A sweep's report as tables and notes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...autotune.store.records import BestConfig, Gpu, Trial
from ..table import Table
from ..text import NONE, confidence
from .model import TuneReport, split


def tables(report: TuneReport) -> list[Table]:
    """The tables that have rows, in the order in which a report shows them."""
    found = [_winner(report), _top(report), _tiles(report), _stages(report), _failures(report)]
    return [table for table in found if table.rows]


def notes(report: TuneReport) -> list[str]:
    """Sentences on where the figures come from, the counts, and how well the model predicted."""
    sentences = [_gpu(gpu) + _days(t for t in report.trials if t.gpu == gpu) for gpu in report.gpus]
    failed = len(report.trials) - report.right
    sentences.append(f"{len(report.trials)} configs tried: {report.right} right, {failed} failed.")
    if report.left_out:
        sentences.append(
            f"Left out: {report.left_out} older trials, of the same configs or of another source "
            "of the kernel."
        )
    if report.timed:
        sentences.append(
            "× cuBLAS is its time over the config's. Figures are of the screen except where they "
            "are of the finals, which have the 10th and 90th percentile."
        )
    if report.timed and not report.winner:
        sentences.append("There were no finals: the order of the best is the screen's.")
    if report.agreement:
        rho = (
            ""
            if report.agreement.rho is None
            else f" Spearman's rho of the two orders is {report.agreement.rho:.2f}."
        )
        sentences.append(f"The analytic model: {report.agreement}.{rho}")
    if report.common:
        sentences.append(f"Common to the {len(report.top)} best: {report.common}.")
    return sentences


def _winner(report: TuneReport) -> Table:
    w = report.winner
    if w is None:
        return Table("Winner", (), ())
    rows = [
        ("config", w.config),
        ("× cuBLAS", f"{_ratio(w.ratio, w.ratio_low, w.ratio_high)}, median of {w.rounds} rounds"),
        ("µs", f"{_us(w.us)}, cuBLAS {_us(w.cublas_us)}"),
    ]
    if w.lead is not None:
        resolved = "" if w.separated else ", not separated"
        rows += [
            ("lead", f"{_ratio(w.lead, w.lead_low, w.lead_high, 4)} over the runner-up{resolved}"),
            ("confidence", _confidence(w)),
            ("runner-up", _beside(w.runner_up, w.config)),
        ]
    if w.valid:
        rows.append(("screened", f"{w.screened} of {w.valid} valid configs"))
    return Table("Winner", ("", report.kernel), rows)


def _top(report: TuneReport) -> Table:
    predicted = any(entry.predicted is not None for entry in report.top)
    limits = any(entry.limits is not None for entry in report.top)
    configs = (
        split([entry.config for entry in report.top])[1]
        if report.common
        else [e.config for e in report.top]
    )
    rows = [
        (
            str(place),
            config,
            _us(entry.us),
            _ratio(entry.ratio, entry.ratio_low, entry.ratio_high)
            if entry.final
            else _ratio(entry.ratio),
            "finals" if entry.final else "screen",
            *([_place(entry.predicted)] if predicted else []),
            *([entry.limits or NONE] if limits else []),
        )
        for place, (entry, config) in enumerate(zip(report.top, configs, strict=True), 1)
    ]
    extra = [*(["predicted\nrank"] if predicted else []), *(["limits"] if limits else [])]
    columns = ("rank", "config", "µs", "× cuBLAS", "from", *extra)
    return Table(f"The {len(rows)} best" if len(rows) > 1 else "The best", columns, rows)


def _tiles(report: TuneReport) -> Table:
    across = sorted({n for _, n in report.tiles})
    rows = [
        (str(m), *(_best(report.tiles.get((m, n), ())) for n in across))
        for m in sorted({m for m, _ in report.tiles})
    ]
    columns = "M", *map(str, across)
    heading = "Best × cuBLAS by tile, M down and N across"
    return Table(heading, columns, rows if report.timed else ())


def _stages(report: TuneReport) -> Table:
    counts = sorted({count for line in report.stages.values() for count in line})
    rows = [
        (name, *(_ratio(line.get(count)) for count in counts))
        for name, line in report.stages.items()
    ]
    return Table(f"Best × cuBLAS by {report.stage_field}", ("tile", *map(str, counts)), rows)


def _failures(report: TuneReport) -> Table:
    rows = [
        (status, str(len(t)), " ".join(t[0].reason.split()) or NONE)
        for status, t in report.failures.items()
    ]
    return Table("Failures", ("status", "trials", "an example"), rows)


def _best(trials: Sequence[Trial]) -> str:
    """The best ratio of a tile; "failed" where no config was right, a dash where none was tried."""
    if not trials:
        return NONE
    return _ratio(trials[0].ratio) if trials[0].ok else "failed"


def _ratio(
    value: float | None, low: float | None = None, high: float | None = None, digits: int = 3
) -> str:
    if value is None:
        return NONE
    spread = "" if low is None or high is None else f" ({low:.{digits}f}–{high:.{digits}f})"
    return f"{value:.{digits}f}{spread}"


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


def _place(places: tuple[int, int] | None) -> str:
    return NONE if places is None else "–".join(map(str, dict.fromkeys(places)))


def _beside(config: str, other: str) -> str:
    """The fields in which a config differs from another."""
    return split([config, other])[1][0]


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
    known = "".join(f", {name} {value}" for name, value in versions if value)
    return f"{gpu.name}: {gpu.sms} SMs{power}{known}"
