"""`outblas bench-host`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..core import progress
from ..report.text import number
from . import progress_line
from .common import (
    NONE,
    JsonOption,
    check_writable,
    give,
    save_json,
    say,
    table,
    usage_errors,
)

if TYPE_CHECKING:
    from ..bench.host import Comparison, Record

IN_PYTHON, IN_CPP = Path("results") / "host.json", Path("results") / "host_native.json"
FAILED = 2


def bench_host(
    recorded: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Compare with this file, which an earlier run wrote with --save. Default: "
                f"{IN_PYTHON}, or {IN_CPP} where warm calls run in C++."
            )
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            help="Compare with another checkout of outblas, measured in turns with this one."
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Exit with code 1 if a ratio rose by more than its spread."),
    ] = False,
    seconds: Annotated[
        float,
        typer.Option(min=0, help="Time limit for each tree, in seconds. At least 3 rounds run."),
    ] = 75.0,
    rounds: Annotated[
        int | None, typer.Option(min=2, help="Run this many rounds, however long they take.")
    ] = None,
    json: JsonOption = False,
    save: Annotated[Path | None, typer.Option(help="Write the figures to a JSON file.")] = None,
) -> None:
    """Measures the CPU time that outblas costs; needs no GPU.

    It times the import, calls, lookups of tuned configs and the start of commands. Each figure is a
    ratio of CPU times that were measured in turns: to torch's own call, or to the start of Python.
    """
    from ..bench import host, host_turns

    with usage_errors():
        check_writable(save)
        with host_turns.trees(against) as measured, progress_line.shown():
            try:
                found = host_turns.measure(
                    measured, seconds * len(measured), rounds=rounds, progress=progress.say
                )
            except host_turns.ProbeError as error:
                say(error, err=True)
                raise typer.Exit(FAILED) from None
    now = host.Record(host_turns.environment(), found[0].figures())
    report = host.to_json(now)
    if save is not None:
        save_json(save, report)
    if against is None:
        ours = IN_CPP if now.environment.get("native") else IN_PYTHON
        rows, remark = _beside_recorded(now, recorded or ours)
        other = "recorded"
    else:
        rows = host.beside_tree(found[0].timings, found[1].timings, host_turns.FOREIGN)
        other, remark = "this tree / the other", "\n".join(found[1].lacking) or None

    compared = {"compared": [asdict(row) for row in rows], "remark": remark}
    give(report | compared, lambda: _show(now, rows, other), json=json)
    if remark is not None:
        say(remark, err=True)
    worse = [row for row in rows if row.verdict in host.WORSE]
    for row in worse:
        say(f"{row.name} {row.verdict}: {_spread(row.other, row.low, row.high)} {other}", err=True)
    raise typer.Exit(1 if check and worse else 0)


def _beside_recorded(now: Record, path: Path) -> tuple[list[Comparison], str | None]:
    """The figures beside those of a file; none, and why, where they cannot be compared."""
    from ..bench import host, host_turns

    try:
        recorded = host.read(path)
    except ValueError as error:
        return [], f"There is nothing to compare with: {error}"
    if reason := host.incomparable(now, recorded):
        return [], f"The figures were not compared with {path}: {reason}"
    return host.beside_record(now, recorded, host_turns.FOREIGN), None


def _show(now: Record, rows: list[Comparison], other: str) -> None:
    compared = {row.name: row for row in rows}
    cells = []
    for name, each in now.figures.items():
        row = compared.get(name)
        cells.append(
            (
                name,
                _time(each.us),
                f"{each.reference}, {_time(each.reference_us)}",
                _spread(each.ratio, each.low, each.high),
                *((_spread(row.other, row.low, row.high), row.verdict) if row else (NONE, NONE)),
            )
        )
    place = f"{now.environment['cpu']}, torch {now.environment['torch']}"
    columns = "figure", "CPU time", "beside", "ratio (10%–90%)", other, "verdict"
    table(f"{place}; load {now.environment['load']}", columns, cells)


def _time(us: float) -> str:
    """Microseconds in a unit that suits them."""
    for size, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.3g} µs"


def _spread(median: float | None, low: float | None, high: float | None) -> str:
    if median is None or low is None or high is None:
        return NONE
    return f"{number(median)} ({number(low)}–{number(high)})"
