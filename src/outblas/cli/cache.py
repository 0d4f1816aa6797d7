"""`outblas cache`: what sweeps found, and compiled kernels."""

from __future__ import annotations

import contextlib
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outblas.base import cache, configs, registry
from outblas.base.shapes import LAYOUTS, NAMED
from outblas.cli.common import (
    NONE,
    SHAPES_HELP,
    JsonOption,
    check_length,
    check_one_of,
    check_writable,
    figure,
    give,
    note,
    number_of,
    parse_shapes,
    say,
    split,
    table,
    usage_errors,
)

if TYPE_CHECKING:
    from outblas.autotune.store.records import BestConfig, Trial
    from outblas.autotune.store.store import Store, Summary

app = typer.Typer(
    help="Shows and moves tuning results, and removes old ones and compiled kernels.",
    no_args_is_help=True,
)

SHOWN = 100  # trials that `show` has a table of, unless another number is given
RATIO = (
    "Ratio: the time of cuBLAS, or with an epilogue of torch's own calls, over the config's. There "
    "is none on a CPU."
)
COLUMNS = (
    "kernel",
    "workload",
    "trials",
    "failed",
    "screening µs",
    "finals µs",
    "ratio",
    "winner",
    "date",
)
DAYS = {"h": 1 / 24, "d": 1.0, "w": 7.0}

StoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store", help="The file with the results. Default: tuning.sqlite in the cache directory."
    ),
]


LimitOption = Annotated[
    int | None,
    typer.Option(min=1, help=f"How many rows to show. Default: {SHOWN}, or all with --json."),
]


@app.command("ls")
def list_results(
    store: StoreOption = None, limit: LimitOption = None, json: JsonOption = False
) -> None:
    """Lists what was tuned: one row for each GPU, kernel and workload.

    A row has the number of trials, the best time of screening, and the winner of the finals with
    its time and its ratio.
    """
    with _opened(store) as opened:
        summaries = opened.summaries()
    rows, compiled = summaries[: limit or (None if json else SHOWN)], _compiled()
    size = sum(file.stat().st_size for file in compiled)

    def show() -> None:
        for gpu in dict.fromkeys(row.gpu for row in rows):
            table(gpu, COLUMNS, [_cells(row) for row in rows if row.gpu == gpu])
        count = number_of(len(summaries), "row") if rows else "no results"
        if rows:
            note(f"{RATIO} It is measured in the finals.")
        if len(rows) < len(summaries):
            count = f"{len(rows)} of {len(summaries)} rows; --limit shows more"
        note(f"{opened.path}: {count}", None)
        note(f"Compiled kernels: {len(compiled)}, {size / 2**20:.1f} MiB", None)

    value = {
        "store": str(opened.path),
        "rows": [_json(row) for row in rows],
        "compiled": {"objects": len(compiled), "bytes": size},
    }
    give(value, show, json=json)


@app.command()
def show(
    what: Annotated[
        list[str],
        typer.Argument(metavar="MxNxK|KERNEL...", help="Shapes, names of kernels, or both."),
    ],
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16, float32 or tf32.")] = None,
    layout: Annotated[str | None, typer.Option(help="nt, nn, tn or tt.")] = None,
    limit: LimitOption = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Shows the trials of a shape or a kernel, the fastest first.

    The winner of the finals is marked. Trials that failed come last, each with the reason.
    """
    from outblas.autotune.store.records import PRECISIONS
    from outblas.autotune.store.store import Selection

    with usage_errors():
        names = [name for name in what if not name[:1].isdecimal() and name not in NAMED]
        shapes = [
            shape
            for text in what
            if text not in names
            for shape in parse_shapes(text, "MxNxK", least=1)
        ]
        if dtype is not None:
            check_one_of("--dtype", dtype, PRECISIONS)
        if layout is not None:
            check_one_of("--layout", layout, LAYOUTS)
        with _opened(store) as opened:
            _check_kernels(names, opened)
            selection = Selection(names, shapes, dtype, layout)
            chosen, total = opened.select(selection, limit or (None if json else SHOWN))
            winners = {
                (best.gpu.key, best.workload, best.kernel, best.source, best.config)
                for best in opened.select_winners(selection)
            }

    def show_trials() -> None:
        columns = ("workload", "kernel", "config", "status", "µs", "ratio", "reason", "date")
        for gpu in dict.fromkeys(trial.gpu.name for trial in chosen):
            rows = [
                _trial_cells(trial, won=trial.identity in winners)
                for trial in chosen
                if trial.gpu.name == gpu
            ]
            table(gpu, columns, rows)
        if chosen:
            note(f"{RATIO} Times and ratios are of screening; winner: the fastest of the finals.")
        more = "; --limit shows more" if limit is None and len(chosen) < total else ""
        note(f"{len(chosen)} of {total} trials{more}", None)

    give([asdict(trial) for trial in chosen], show_trials, json=json)


@app.command()
def export(
    file: Annotated[
        Path | None, typer.Argument(help="The file to write, or with --ship the folder.")
    ] = None,
    ship: Annotated[
        bool,
        typer.Option(
            "--ship",
            help=(
                "Write the winners into the tables that ship with the package, one file for each "
                "model of GPU. Results of the CPU are refused."
            ),
        ),
    ] = False,
    kernels: Annotated[
        str, typer.Option(help="Kernels by name, comma-separated. Default: all.")
    ] = "",
    shapes: Annotated[str, typer.Option(help=f"{SHAPES_HELP} Default: all.")] = "",
    store: StoreOption = None,
) -> None:
    """Writes results to a file that `outblas cache import` reads on another machine.

    The file is JSON Lines. With --ship the winners go into the tables that ship with the package.
    """
    from outblas.autotune.store import transfer
    from outblas.autotune.store.store import Selection, StoreError
    from outblas.autotune.store.tables import own_tables

    with usage_errors(OSError, StoreError):
        names, sizes = split(kernels), parse_shapes(shapes, least=1) if shapes else []
        if ship:
            file = file or own_tables()
        elif file is None:
            raise ValueError("expected a FILE to write, or --ship")
        else:
            check_writable(file, "FILE")
        with _opened(store) as opened:
            _check_kernels(names, opened)
            selection = Selection(names, sizes)
            if ship:
                _ship(opened.select_winners(selection), file)
            else:
                trials, winners = transfer.export_store(opened, file, selection)
                typer.echo(f"{trials} trials, {winners} winners")


def _ship(winners: Sequence[BestConfig], folder: Path) -> None:
    """Raises ValueError and OSError."""
    from outblas.autotune.store.tables import ship

    measured = [winner for winner in winners if winner.gpu.arch]
    if interpreted := len(winners) - len(measured):
        if not measured:
            raise ValueError(
                f"--ship needs winners that were measured on a GPU, and all {interpreted} were "
                "measured by Triton's interpreter on a CPU, whose times say nothing of a GPU"
            )
        say(
            f"{interpreted} winners are left out: Triton's interpreter measured them on a CPU, and "
            "its times say nothing of a GPU",
            err=True,
        )
    for path in ship(measured, folder):
        say(path)
    typer.echo(f"{len(measured)} winners")


@app.command("import")
def import_results(
    file: Annotated[Path, typer.Argument(help="A file that outblas cache export wrote.")],
    store: StoreOption = None,
) -> None:
    """Adds the results of another machine to the store of this one.

    The whole file is checked first: if anything in it is wrong, nothing is added.
    """
    from outblas.autotune.store import transfer

    with usage_errors(), _opened(store, writing=True, new=True) as opened:
        trials, winners = transfer.import_into(opened, file)
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
        str | None, typer.Option(help="Remove results older than this: 12h, 30d, 2w.")
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
                present = [name for name in opened.kernels() if kernel in (None, name)]
                sources = fingerprints(present) if stale else None
                removed = opened.prune(
                    older_than_days=days, kernel=kernel, sources=sources, dry_run=dry_run
                )
    done = "would be removed" if dry_run else "removed"
    if results:
        typer.echo(f"{removed} trials and winners {done}")
    if compiled:
        gone, size = _remove(_compiled(), days or 0.0, dry_run=dry_run)
        typer.echo(f"{number_of(gone, 'compiled kernel')} {done}, {size / 2**20:.1f} MiB")


@app.command()
def clear(store: StoreOption = None) -> None:
    """Removes all results and all compiled kernels, without asking first."""
    with _opened(store, writing=True) as opened:
        removed = opened.clear()
    gone, size = _remove(_compiled(), 0.0)
    typer.echo(f"{removed} trials and winners removed")
    typer.echo(f"{number_of(gone, 'compiled kernel')} removed, {size / 2**20:.1f} MiB")


def fingerprints(kernels: Iterable[str]) -> dict[str, str]:
    """Fingerprints of kernels' sources as they are now; without kernels that are not here."""
    from outblas.autotune.search.target import of

    sources = {}
    for kernel in kernels:
        try:
            sources[kernel] = of(kernel).fingerprint
        except (ValueError, ImportError):
            say(
                f"The source of {kernel} is not installed here, so its results stay: --stale "
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


def _json(row: Summary) -> dict[str, Any]:
    winner = row.winner
    shown = ("config", "us", "ratio", "ratio_low", "ratio_high")
    return {
        **vars(row),
        "workload": vars(row.workload),
        "failed": row.failed,
        "winner": winner and {name: getattr(winner, name) for name in shown},
        "label": str(row.workload),
    }


def _cells(row: Summary) -> tuple[object, ...]:
    winner = row.winner
    return (
        row.kernel,
        row.workload,
        row.trials,
        row.failed,
        figure(row.best_us, ".2f"),
        figure(winner.us if winner else None, ".2f"),
        figure(winner.ratio if winner and row.sms else None, ".3f"),
        brief(row.kernel, winner.config) if winner else NONE,
        _date(row.when),
    )


def brief(kernel: str, config: str) -> str:
    """The fields of a config that differ from the kernel's own, so that a table may break the line
    between two of them.
    """
    kernel = "hopper.gemm" if kernel == "hopper.grouped" else kernel
    try:
        defaults = registry.defaults(kernel)
    except ValueError:  # of a kernel that there is no longer
        return config.replace(",", ", ")
    pairs = configs.items(config)
    changed = [f"{name}={value}" for name, value in pairs if str(defaults.get(name)) != value]
    return ", ".join(changed) or "default"


def _trial_cells(trial: Trial, *, won: bool) -> tuple[object, ...]:
    return (
        trial.workload,
        trial.kernel,
        brief(trial.kernel, trial.config),
        "winner" if won else trial.status,
        figure(trial.us, ".2f"),
        figure(trial.ratio if trial.gpu.arch else None, ".3f"),
        " ".join(trial.reason.split()) or NONE,
        _date(trial.when),
    )


def _check_kernels(names: Iterable[str], store: Store) -> None:
    """Raises ValueError for a kernel that is neither registered nor in the store."""
    stored = store.kernels()
    for name in names:
        if name not in stored:
            registry.find(name)


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
    """Removes the files that are at least this many days old, each with its record, or only counts
    them. Returns their number and their size in bytes.
    """
    count = size = 0
    for path in files:
        with contextlib.suppress(FileNotFoundError):  # another process may prune as well
            status = path.stat()
            if status.st_mtime <= time.time() - days * 86400:
                if not dry_run:
                    path.unlink()
                    path.with_suffix(".json").unlink(missing_ok=True)
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
