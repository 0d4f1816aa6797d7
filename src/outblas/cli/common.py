"""What commands share: options, output, usage errors."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..shapes import parse as parse_shapes

NO_GPU = 3  # exit code of commands that have nothing to measure on

__all__ = [
    "NO_GPU",
    "JsonOption",
    "check_writable",
    "console",
    "make_table",
    "parse_shapes",
    "print_json",
    "said",
    "save_json",
    "split",
    "table",
    "usage_error",
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]

console = Console(width=None if sys.stdout.isatty() else 140)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(_measured(value), indent=2))


def check_writable(path: Path | None, option: str = "--save") -> None:
    """Raises ValueError for a file that could not be written once the work is done."""
    if path is not None and (path.is_dir() or not (path.parent.is_dir() and os.access(path.parent, os.W_OK))):
        raise ValueError(f"{option} is {str(path)!r}, expected a file in a folder that can be written")


def save_json(path: Path, value: Any) -> None:
    """Replaces the file at once: whoever is interrupted leaves the old one or the new one."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(_laid_out(_measured(value)) + "\n")
    scratch.replace(path)


def said(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what is null: readers take a missing figure for null."""
    return {name: value for name, value in record.items() if value is not None}


def _measured(value: Any) -> Any:
    """With fractions of seven digits: no measurement has more. Whole numbers stay, without a point."""
    match value:
        case dict():
            return {name: _measured(item) for name, item in value.items()}
        case list() | tuple():
            return [_measured(item) for item in value]
        case float() if value.is_integer() and abs(value) < 1 << 53:
            return int(value)
        case float() if math.isfinite(value):
            return float(f"{value:.7g}")
    return value


def _laid_out(value: Any, depth: int = 0) -> str:
    """JSON with a line for each field of the whole and each record or row of a list, and no other white space."""
    if isinstance(value, dict) and value and depth == 0:
        lines = [f"{json.dumps(name)}: {_laid_out(item, 1)}" for name, item in value.items()]
        return "{\n" + ",\n".join(lines) + "\n}"
    if isinstance(value, list) and value and depth < 2 and isinstance(value[0], dict | list):
        return "[\n" + ",\n".join(_laid_out(each, 2) for each in value) + "\n]"
    return json.dumps(value, separators=(",", ":"))


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Prints a table; cells are shown as they are, not as markup."""
    console.print(make_table(title, columns, rows))


def make_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    view = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        view.add_column(column, overflow="fold", no_wrap=i == 0)
    for row in rows:
        view.add_row(*(str(cell).replace("[", r"\[") for cell in row))
    return view


def usage_error(error: Exception) -> typer.BadParameter:
    """A bad argument as a usage error: one line, exit code 2."""
    return typer.BadParameter(str(error))


def split(text: str) -> list[str]:
    """A comma-separated option."""
    return [part.strip() for part in text.split(",") if part.strip()]
