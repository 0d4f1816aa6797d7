"""`outblas cache`: what sweeps found, and compiled kernels."""

from __future__ import annotations

import contextlib
import re
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outblas.base import cache, registry
from outblas.base.shapes import NAMED
from outblas.cli.common import (
    NONE,
    JsonOption,
    StoreOption,
    check_length,
    check_writable,
    figure,
    give,
    note,
    number_of,
    parse_shapes,
    say,
    table,
    usage_errors,
)

if TYPE_CHECKING:
    from outblas.autotune.store.records import BestConfig, Trial
    from outblas.autotune.store.store import Store

app = typer.Typer(
    help="Shows and moves tuning results, and removes old ones and compiled kernels.",
    no_args_is_help=True,
)

SHOWN = 100  # trials that `show` has a table of, unless another number is given
RATIO = (
    "Ratio: the time of cuBLAS, or with an epilogue of torch's own calls, over the config's. There "
    "is none on a CPU."
)
WINNER = ("config", "us", "ratio", "ratio_low", "ratio_high")  # of a winner in a listing
DAYS = {"h": 1 / 24, "d": 1.0, "w": 7.0}


@app.command("ls")
def list_results(store: StoreOption = None, json: JsonOption = False) -> None:
    """Lists what was tuned: one row for each GPU, kernel and workload.

    A row has the number of trials, the best time of screening, and the winner of the finals with
    its time and its ratio.
    """
    with _opened(store) as opened:
        rows = _rows(opened.trials(), opened.winners())
    compiled = _compiled()
    size = sum(file.stat().st_size for file in compiled)

    def show() -> None:
        columns = ("kernel", "workload", "trials", "failed", "screening µs", "finals µs", "ratio")
        for gpu in dict.fromkeys(row["gpu"] for row in rows):
            cells = [_cells(row) for row in rows if row["gpu"] == gpu]
            table(gpu, (*columns, "winner", "date"), cells)
        if rows:
            note(f"{RATIO} It is measured in the finals.")
        count = number_of(len(rows), "row") if rows else "no results"
        note(f"{opened.path}: {count}", None)
        note(f"Compiled kernels: {len(compiled)}, {size / 2**20:.1f} MiB", None)

    value = {
        "store": str(opened.path),
        "rows": rows,
        "compiled": {"objects": len(compiled), "bytes": size},
    }
    give(value, show, json=json)


@app.command()
def show(
    what: Annotated[
        list[str],
        typer.Argument(metavar="MxNxK|KERNEL...", help="Shapes, names of kernels, or both."),
    ],
    limit: Annotated[
        int | None,
        typer.Option(min=1, help=f"How many rows to show. Default: {SHOWN}, or all with --json."),
    ] = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Shows the trials of a shape or a kernel, the fastest first.

    The winner of the finals is marked. Trials that failed come last, each with the reason.
    """
    with usage_errors(), _opened(store) as opened:
        names = [name for name in what if not name[:1].isdecimal() and name not in NAMED]
        texts = [text for text in what if text not in names]
        shapes = [shape for text in texts for shape in parse_shapes(text, "MxNxK", least=1)]
        trials, winners = opened.trials(), opened.winners()
    stored = {trial.kernel for trial in trials} | {winner.kernel for winner in winners}
    with usage_errors():
        for name in names:
            if name not in stored:
                registry.find(name)
    selected = [
        trial
        for trial in trials
        if (not names or trial.kernel in names) and (not shapes or trial.workload.shape in shapes)
    ]
    selected.sort(key=lambda trial: (trial.gpu.name, trial.workload, trial.us is None, trial.us))
    listed = selected[: limit or (None if json else SHOWN)]
    best = {winner.identity for winner in winners}

    def show_trials() -> None:
        columns = ("workload", "kernel", "config", "status", "µs", "ratio", "reason", "date")
        for gpu in dict.fromkeys(trial.gpu.name for trial in listed):
            rows = [
                _trial_cells(trial, won=trial.identity in best)
                for trial in listed
                if trial.gpu.name == gpu
            ]
            table(gpu, columns, rows)
        if listed:
            note(f"{RATIO} Times and ratios are of screening; winner: the fastest of the finals.")
        more = "; --limit shows more" if limit is None and len(listed) < len(selected) else ""
        note(f"{len(listed)} of {len(selected)} trials{more}", None)

    give([asdict(trial) for trial in listed], show_trials, json=json)


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="The file to write.")], store: StoreOption = None
) -> None:
    """Writes all results to a file that `outblas cache import` reads.

    The file is JSON Lines, for another machine.
    """
    from outblas.autotune.store import transfer

    with usage_errors(OSError):
        check_writable(file, "FILE")
        with _opened(store) as opened:
            trials, winners = opened.trials(), opened.winners()
        transfer.write(file, trials, winners)
    typer.echo(f"{len(trials)} trials, {len(winners)} winners")


@app.command("import")
def import_results(
    file: Annotated[Path, typer.Argument(help="A file that outblas cache export wrote.")],
    store: StoreOption = None,
) -> None:
    """Adds the results of another machine to the store of this one.

    The whole file is checked first: if anything in it is wrong, nothing is added.
    """
    from outblas.autotune.store import transfer

    with usage_errors():
        records = transfer.read(file)
        with _opened(store, writing=True, new=True) as opened:
            trials, winners = opened.merge(*records)
    typer.echo(f"{trials} new trials, {winners} new winners")


@app.command()
def verify(
    file: Annotated[
        Path | None,
        typer.Argument(help="A file that outblas cache export wrote. Default: everything here."),
    ] = None,
    store: StoreOption = None,
) -> None:
    """Checks results, compiled kernels and shipped tables for damage.

    With FILE it checks an export instead. The exit code is 1 if anything is damaged.
    """
    from outblas.autotune.store import transfer
    from outblas.autotune.store.store import StoreError
    from outblas.autotune.store.tables import TABLES, read_table

    if file is not None:
        problems = _problems_of(file, transfer.read)
    else:
        problems = []
        with _opened(store) as opened:
            try:
                opened.verify()
            except StoreError as error:
                problems.append(str(error))
        problems += [reason for path in _compiled() if (reason := cache.object_problem(path))]
        for path in sorted(TABLES.glob("*.json")):
            problems += _problems_of(path, read_table)
    for problem in problems:
        say(problem)
    typer.echo(f"{len(problems)} problems" if problems else "no problems", err=bool(problems))
    raise typer.Exit(1 if problems else 0)


@app.command()
def prune(
    older_than: Annotated[
        str | None, typer.Option(help="Remove results older than this: 12h, 30d, 2w; 0h for all.")
    ] = None,
    kernel: Annotated[str | None, typer.Option(help="Remove results of this kernel.")] = None,
    stale: Annotated[
        bool,
        typer.Option("--stale", help="Remove results of kernels whose source has changed since."),
    ] = False,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compiled",
            help=(
                "Remove compiled kernels as well; alone, remove only these. --older-than applies "
                "to them too."
            ),
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count what would be removed, and remove nothing.")
    ] = False,
    store: StoreOption = None,
) -> None:
    """Removes old results and compiled kernels, without asking first.

    A result is removed when every option that you give applies to it.
    """
    results = older_than is not None or kernel is not None or stale
    removed = 0
    with usage_errors():
        if not (results or compiled):
            raise ValueError("expected at least one of --older-than, --kernel, --stale, --compiled")
        days = None if older_than is None else _days(older_than)
        if results:
            with _opened(store, writing=not dry_run) as opened:
                sources = _fingerprints(opened, kernel) if stale else None
                removed = opened.prune(
                    older_than_days=days, kernel=kernel, sources=sources, dry_run=dry_run
                )
    done = "would be removed" if dry_run else "removed"
    if results:
        typer.echo(f"{removed} trials and winners {done}")
    if compiled:
        count, size = _remove(_compiled(), days or 0.0, dry_run=dry_run)
        typer.echo(f"{number_of(count, 'compiled kernel')} {done}, {size / 2**20:.1f} MiB")


def _fingerprints(store: Store, kernel: str | None) -> dict[str, str]:
    """Fingerprints of kernels' sources as they are now; without kernels that are not here."""
    from outblas.autotune.search.target import of

    names = {trial.kernel for trial in store.trials()} | {won.kernel for won in store.winners()}
    sources = {}
    for name in sorted(names if kernel is None else names & {kernel}):
        try:
            sources[name] = of(name).fingerprint
        except (ValueError, ImportError):
            say(
                f"The source of {name} is not installed here, so its results stay: --stale "
                "cannot compare them",
                err=True,
            )
    return sources


@contextlib.contextmanager
def _opened(path: Path | None, *, writing: bool = False, new: bool = False) -> Iterator[Store]:
    """Opens a store. Raises a usage error for a file that is no store, and for one that cannot be
    read, or written though `writing` asks for it.
    """
    from outblas.autotune.store.store import Store, StoreError

    with usage_errors(StoreError), warnings.catch_warnings(record=True) as caught:
        if path is not None:
            check_length(path)
        if path is not None and not (new or path.exists()):
            raise ValueError(f"--store is {str(path)!r}, expected a file that exists")
        with Store(path, read_only=not writing) as store:
            yield store
    for warning in caught:
        say(warning.message, err=True)


def _rows(trials: Sequence[Trial], winners: Sequence[BestConfig]) -> list[dict[str, Any]]:
    """A row for each model of GPU, kernel and workload, as JSON has it."""
    tried: dict[Any, list[Trial]] = defaultdict(list)
    for trial in trials:
        tried[*trial.gpu.model, trial.kernel, trial.workload].append(trial)
    # The newest winner is the last.
    won = {(*best.gpu.model, best.kernel, best.workload): best for best in winners}
    rows = []
    for place in sorted({*tried, *won}):
        gpu, sms, kernel, workload = place
        here, winner = tried[place], won.get(place)
        ok = sum(trial.ok for trial in here)
        rows.append(
            {
                "gpu": gpu,
                "sms": sms,
                "kernel": kernel,
                "workload": asdict(workload),
                "label": str(workload),
                "trials": len(here),
                "ok": ok,
                "failed": len(here) - ok,
                "best_us": min((trial.us for trial in here if trial.us is not None), default=None),
                "winner": winner and {name: getattr(winner, name) for name in WINNER},
                "when": max([*(trial.when for trial in here), winner.when if winner else ""]),
            }
        )
    return rows


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    winner = row["winner"]
    return (
        row["kernel"],
        row["label"],
        row["trials"],
        row["failed"],
        figure(row["best_us"], ".2f"),
        figure(winner and winner["us"], ".2f"),
        figure(winner["ratio"] if winner and row["sms"] else None, ".3f"),
        _config(row["kernel"], winner["config"]) if winner else NONE,
        _date(row["when"]),
    )


def _trial_cells(trial: Trial, *, won: bool) -> tuple[object, ...]:
    return (
        trial.workload,
        trial.kernel,
        _config(trial.kernel, trial.config),
        "winner" if won else trial.status,
        figure(trial.us, ".2f"),
        figure(trial.ratio if trial.gpu.arch else None, ".3f"),
        " ".join(trial.reason.split()) or NONE,
        _date(trial.when),
    )


def _config(kernel: str, config: str) -> str:
    """The fields that differ from the kernel's own; a table may break the line between two."""
    from outblas.autotune.named_configs import short

    return short(kernel, config).replace(",", ", ") or "default"


def _problems_of(path: Path, read: Callable[[Path], object]) -> list[str]:
    try:
        read(path)
    except ValueError as error:
        return [f"{path}: {error}"]
    return []


def _compiled() -> list[Path]:
    with usage_errors(OSError):
        return sorted(entry.path for entry in cache.objects(cache.directory() / "objects"))


def _remove(files: Iterable[Path], days: float, *, dry_run: bool = False) -> tuple[int, int]:
    """Removes the files that are at least this many days old, or only counts them. Returns their
    number and their size in bytes.
    """
    count = size = 0
    for path in files:
        with contextlib.suppress(FileNotFoundError):  # another process may prune as well
            status = path.stat()
            if status.st_mtime <= time.time() - days * 86400:
                if not dry_run:
                    path.unlink()
                count, size = count + 1, size + status.st_size
    return count, size


def _days(text: str) -> float:
    match = re.fullmatch(r"(\d{1,5}(?:\.\d+)?)([hdw])", text, re.ASCII)
    if not match:
        raise ValueError(f"--older-than is {text!r}, expected a number with h, d or w such as 30d")
    return float(match[1]) * DAYS[match[2]]


def _date(when: str) -> str:
    """A time as text, to the minute, in UTC."""
    return when[:16].replace("T", " ")
