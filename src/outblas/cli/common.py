"""What commands share: options, output, usage errors."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]

console = Console(width=None if sys.stdout.isatty() else 140)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def check_writable(path: Path | None) -> None:
    """Raises ValueError for a file that could not be written once the work is done."""
    if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise ValueError(f"--save is {str(path)!r}, expected a file in a folder that can be written")


def save_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Prints a table; cells are shown as they are, not as markup."""
    view = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        view.add_column(column, overflow="fold", no_wrap=i == 0)
    for row in rows:
        view.add_row(*(str(cell).replace("[", r"\[") for cell in row))
    console.print(view)


def usage_error(error: Exception) -> typer.BadParameter:
    """A bad argument as a usage error: one line, exit code 2."""
    return typer.BadParameter(str(error))


def split(text: str) -> list[str]:
    """A comma-separated option."""
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_shapes(text: str) -> list[tuple[int, int, int]]:
    """`4096,640x72x96` as (M, N, K). Raises ValueError."""
    found = []
    if not split(text):
        raise ValueError(f"--shapes is {text!r}, expected N or MxNxK, comma-separated")
    for part in split(text):
        sizes = part.lower().split("x")
        if len(sizes) not in (1, 3) or not all(size.isdecimal() for size in sizes):
            raise ValueError(f"--shapes is {part!r}, expected N or MxNxK")
        M, N, K = (int(size) for size in (sizes * 3)[:3])
        found.append((M, N, K))
    return found
