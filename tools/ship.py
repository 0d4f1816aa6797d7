"""Writes the winners of sweeps into the tables that ship with the package, a file a model of GPU.

    python -m tools.ship                         the winners of the store here
    python -m tools.ship results.jsonl           those of a file of `outblas cache export`
    python -m tools.ship results.jsonl --to DIR  into a folder instead of autotune/tables

A table keeps its entries of other workloads and kernels. What Triton's interpreter measured is left
out: its times say nothing of a GPU.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from outblas.autotune.store import tables, transfer
from outblas.autotune.store.records import BestConfig, Gpu
from outblas.autotune.store.store import Store
from outblas.autotune.store.tables import TunedTable
from outblas.base.filesystems import replacing


def ship(winners: Iterable[BestConfig], folder: Path) -> list[Path]:
    """Writes a table for each GPU model, and returns their paths. Of several winners at one
    workload with one kernel, it takes the one with the highest ratio.

    Raises ValueError, with nothing written, for an invalid table or winner, and OSError.
    """
    models: dict[tuple[str, int], list[BestConfig]] = {}
    for winner in winners:
        if winner.gpu.arch:
            models.setdefault(winner.gpu.model, []).append(winner)
    shipped: dict[Path, TunedTable] = {}
    for _, group in sorted(models.items()):
        table = tables.best_of(group, lambda winner: (winner.ratio, winner.when))
        path, old = _table_at(folder, table.gpu, shipped)
        entries = {entry.place: entry for entry in (*old, *table.entries)}
        shipped[path] = TunedTable(table.gpu, tuple(entries.values()))
    contents = {path: tables.to_bytes(table) for path, table in shipped.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in contents.items():
        with replacing(path) as file:
            file.write(content)
    return list(shipped)


def _table_at(
    folder: Path, gpu: Gpu, shipped: dict[Path, TunedTable]
) -> tuple[Path, tuple[tables.ShippedConfig, ...]]:
    """Returns the file of a GPU's model and its contents. The name is NAME.json, or includes the
    number of SMs if another model has that file.
    """
    name = re.sub(r"[^A-Za-z0-9._-]", "_", gpu.name).lstrip(".") or "_"
    for stem in (name, f"{name}_{gpu.sms}_SMs"):
        path = folder / f"{stem}.json"
        try:
            table = shipped.get(path) or (tables.read_table(path) if path.exists() else None)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if table is None or table.gpu.model == gpu.model:
            return path, table.entries if table else ()
    raise ValueError(
        f"{path} is of another GPU than {gpu.name!r}, expected none or one of that name"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program, and returns its exit code: 1 where there is nothing to ship."""
    parser = argparse.ArgumentParser(prog="python -m tools.ship", description="Ships winners.")
    parser.add_argument("file", type=Path, nargs="?", help="an export (default: the store here)")
    parser.add_argument("--to", type=Path, default=tables.TABLES, help="the folder of the tables")
    options = parser.parse_args(arguments)
    if options.file is None:
        with Store(read_only=True) as store:
            winners = store.winners()
    else:
        _, winners = transfer.read(options.file)
    paths = ship(winners, options.to)
    print(*paths, sep="\n")
    return 0 if paths else 1


if __name__ == "__main__":
    sys.exit(main())
