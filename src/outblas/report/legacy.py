"""Reads result files in the packed form, which `outblas report pack` wrote before version 0.2.

Such a file has, beside `environment`:

- `same`: the fields that every entry shares, with their text;
- `columns`: the names of the other fields;
- `results`: for each entry a list of its values in the order of the columns, without the nulls at
  its end.

A column takes one of three forms. A name stands for a plain value. `{name: fields}` stands for an
object, or a list of objects, of which a cell holds the values alone; where the name ends with "=",
the object is the text of a config, "tile_m=128,tile_n=256". A name with two points,
"shared.load.excess", is a field of an object within an object. A shape is text: "4096", or
"16x4096x4096".

Nothing writes this form any more.
"""

from dataclasses import dataclass
from typing import Any

Entry = dict[str, Any]

CONFIG_MARK = "="  # at the end of a column's name: its cells are settings of a config


@dataclass(frozen=True)
class Column:
    """A column: `fields` are the names of the values in its cells, None where a cell is a value."""

    name: str
    fields: tuple[str, ...] | None = None

    @property
    def path(self) -> list[str]:
        """The names from the entry down to the value: one, or three."""
        return self.name.split(".")

    def read(self, cell: Any, where: str) -> Any:
        """The value that a cell stands for. Raises ValueError that names `where`."""
        if self.fields is None:
            return cell
        if self.name.endswith(CONFIG_MARK):
            settings = _named(cell, self.fields, where)
            return ",".join(f"{name}={value}" for name, value in settings.items())
        if isinstance(cell, list) and all(isinstance(row, list) for row in cell):
            return [_named(row, self.fields, where) for row in cell]
        return _named(cell, self.fields, where)


def is_packed(report: dict[str, Any]) -> bool:
    """Whether a result file's JSON object is in the packed form."""
    return "columns" in report


def unpack(report: dict[str, Any]) -> dict[str, Any]:
    """The report in the plain form, with an object for each entry.

    A null and a field that is missing are the same in the packed form: both are missing here.
    Raises ValueError that names the field which is malformed.
    """
    same = report.get("same", {})
    if not (isinstance(same, dict) and all(isinstance(value, str) for value in same.values())):
        raise ValueError(f"same is {same!r}, expected text by the names of fields")
    columns = _columns(report["columns"])
    rows = report["results"]
    if isinstance(rows, list):
        rows = [_entry(row, columns, same, f"results[{i}]") for i, row in enumerate(rows)]
    plain = {name: value for name, value in report.items() if name not in ("same", "columns")}
    return plain | {"results": rows}


def _columns(given: Any) -> list[Column]:
    if not (isinstance(given, list) and all(map(_is_column, given))):
        raise ValueError(f"columns is {given!r}, expected the names of fields")
    columns = [_column(column) for column in given]
    whole = {column.name for column in columns if len(column.path) == 1}
    misplaced = [
        column
        for column in columns
        if len(column.path) not in (1, 3) or (len(column.path) == 3 and column.path[0] in whole)
    ]
    if misplaced or len({column.name for column in columns}) < len(columns):
        raise ValueError(
            f"columns is {given!r}, expected fields, or those of an object's objects, each once"
        )
    return columns


def _is_column(column: Any) -> bool:
    if isinstance(column, dict) and len(column) == 1:
        ((name, fields),) = column.items()
        return (
            isinstance(name, str)
            and isinstance(fields, list)
            and all(isinstance(field, str) for field in fields)
        )
    return isinstance(column, str)


def _column(given: Any) -> Column:
    if isinstance(given, str):
        return Column(given)
    ((name, fields),) = given.items()
    return Column(name, tuple(fields))


def _entry(row: Any, columns: list[Column], same: dict[str, str], where: str) -> Entry:
    entry: Entry = dict(same)
    for column, cell in _cells(row, columns, where):
        value = column.read(cell, f"{where}.{column.name}")
        name, *inner = column.path
        if inner:
            kind, field = inner
            entry.setdefault(name, {}).setdefault(kind, {})[field] = value
        else:
            entry[name.removesuffix(CONFIG_MARK)] = value
    if "shape" in entry:
        entry["shape"] = _shape(entry["shape"])
    return entry


def _cells(row: Any, columns: list[Column], where: str) -> list[tuple[Column, Any]]:
    """The columns of which a row has a value, each with its cell."""
    _check_row(row, len(columns), where)
    return [(column, cell) for column, cell in zip(columns, row, strict=False) if cell is not None]


def _named(row: Any, fields: tuple[str, ...], where: str) -> Entry:
    """Returns the values of a row by field, without nulls."""
    _check_row(row, len(fields), where)
    return {name: value for name, value in zip(fields, row, strict=False) if value is not None}


def _check_row(row: Any, most: int, where: str) -> None:
    if not isinstance(row, list) or len(row) > most:
        raise ValueError(f"{where} is {row!r}, expected a list of up to {most} values")


def _shape(text: Any) -> Any:
    """Returns [M, N, K] for a shape's text; returns anything else unchanged, so that the readers
    refuse it.
    """
    sizes = text.split("x") if isinstance(text, str) else []
    if len(sizes) not in (1, 3) or not all(size.isdecimal() for size in sizes):
        return text
    return [int(size) for size in (sizes * 3)[:3]]
