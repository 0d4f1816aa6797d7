"""Entries of a result file in little space: the names of fields once, text that all share once, and
for each entry a row of its values.

A field that holds objects, or lists of them, is packed alike: {field: names of theirs} stands for
its name then. So is a config's text, "x=1,y=2", where that is shorter: {"field=": names of its
settings}. An object of objects becomes fields of its own: "shared.load.excess". A shape is text,
"4096" or "16x4096x4096".
"""

import json
from collections.abc import Iterable
from typing import Any

from ..core.configs import items
from ..core.shapes import to_text

Row = list[Any]
_TRUTH: dict[str, Any] = {"True": True, "False": False}


def pack(entries: list[dict[str, Any]]) -> tuple[dict[str, str], list[Any], list[Row]]:
    """What all entries say, columns and rows. A field that is null and one that is missing become
    the same.
    """
    entries = [
        entry | {"shape": to_text(entry["shape"])} if _has_shape(entry) else entry
        for entry in entries
    ]
    first = entries[0] if len(entries) > 1 else {}
    same = {
        name: value
        for name, value in first.items()
        if isinstance(value, str) and all(entry.get(name) == value for entry in entries)
    }
    if strange := sorted(
        {name for entry in entries for name in entry if "." in name or name.endswith("=")}
    ):
        raise ValueError(
            f"a field is named {strange[0]!r}, expected no '.' in it and no '=' at its end"
        )
    entries = [
        _flat({name: value for name, value in entry.items() if name not in same})
        for entry in entries
    ]
    columns = _names(entries)
    values = {
        name: [entry[name] for entry in entries if entry.get(name) is not None] for name in columns
    }
    settings = {name: _settings(values[name]) for name in columns}
    inner = {name: _inner(values[name]) for name in columns}
    said = [
        {f"{name}=": settings[name]}
        if settings[name]
        else {name: inner[name]}
        if inner[name]
        else name
        for name in columns
    ]
    packed = (
        {
            name: _packed(_values(value), settings[name])
            if settings[name] and value is not None
            else _packed(value, inner[name])
            for name, value in entry.items()
        }
        for entry in entries
    )
    return same, said, [_row(entry, columns) for entry in packed]


def unpack(columns: Any, rows: Any, same: Any) -> Any:
    """The entries, null where there was none left out; rows that are no list as they are. Raises
    ValueError.
    """
    if not (isinstance(same, dict) and all(isinstance(value, str) for value in same.values())):
        raise ValueError(f"same is {same!r}, expected text by the names of fields")
    if not (isinstance(columns, list) and all(map(_is_column, columns))):
        raise ValueError(f"columns is {columns!r}, expected the names of fields")
    parts = [_name(column).split(".") for column in columns]
    whole = {first for first, *others in parts if not others}
    if any(len(part) not in (1, 3) or (len(part) == 3 and part[0] in whole) for part in parts):
        raise ValueError(
            f"columns is {columns!r}, expected fields, or those of an object's objects, each once"
        )
    if not isinstance(rows, list):
        return rows
    inner = dict(
        (column, []) if isinstance(column, str) else next(iter(column.items()))
        for column in columns
    )
    entries = [_object(row, list(inner), f"results[{i}]") for i, row in enumerate(rows)]
    found = [
        same
        | _nested(
            {
                name.removesuffix("="): _text(_object(value, inner[name], f"results[{i}].{name}"))
                if name.endswith("=")
                else _unpacked(value, inner[name], f"results[{i}].{name}")
                for name, value in entry.items()
            }
        )
        for i, entry in enumerate(entries)
    ]
    return [
        entry | {"shape": _sizes(entry["shape"])} if "shape" in entry else entry for entry in found
    ]


def _has_shape(entry: dict[str, Any]) -> bool:
    shape = entry.get("shape")
    return (
        isinstance(shape, list)
        and len(shape) == 3
        and all(type(size) is int and size > 0 for size in shape)
    )


def _sizes(shape: Any) -> Any:
    """A shape's text as [M, N, K], whatever else there is as it is."""
    sizes = shape.split("x") if isinstance(shape, str) else []
    known = len(sizes) in (1, 3) and all(size.isdecimal() for size in sizes)
    return [int(size) for size in (sizes * 3)[:3]] if known else shape


def _flat(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry whose objects hold no objects; those of which nothing would be left stay."""
    made = dict[str, Any]()
    for name, value in entry.items():
        if (
            isinstance(value, dict)
            and value
            and all(map(_has_fields, value.values()))
            and "." not in "".join(value)
        ):
            made |= {
                f"{name}.{key}.{field}": item
                for key, each in value.items()
                for field, item in each.items()
            }
        else:
            made[name] = value
    return made


def _has_fields(value: Any) -> bool:
    fields = isinstance(value, dict) and not any(
        "." in name or name.endswith("=") for name in value
    )
    return fields and any(item is not None for item in value.values())


def _nested(entry: dict[str, Any]) -> dict[str, Any]:
    """What `_flat` was given."""
    made = dict[str, Any]()
    for name, value in entry.items():
        first, *others = name.split(".")
        if len(others) == 2:
            made.setdefault(first, {}).setdefault(others[0], {})[others[1]] = value
        else:
            made[name] = value
    return made


def _settings(texts: list[Any]) -> list[str]:
    """Names in the texts of configs, where rows of values make the same texts and are shorter; of
    other values none.
    """
    if not all(isinstance(text, str) and "=" in (text or "=") for text in texts):
        return []
    made = [_values(text) for text in texts]
    names = _names(made)
    rows = [_row(each, names) for each in made]
    same = [_text(_object(row, names, "")) for row in rows] == texts
    return names if same and _size([names, rows]) < _size(texts) else []


def _size(value: Any) -> int:
    return len(json.dumps(value, separators=(",", ":")))


def _values(text: str) -> dict[str, Any]:
    """Settings by name, numbers and truth values as such."""

    def said(value: str) -> Any:
        number = int(value) if value.isdecimal() else None
        return number if str(number) == value else _TRUTH.get(value, value)

    return {name: said(value) for name, value in items(text)}


def _text(settings: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in settings.items())


def _names(entries: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for entry in entries for name in entry))


def _inner(values: list[Any]) -> list[str]:
    """The fields of objects, or of lists of objects, that can be told apart when packed; of other
    values none.
    """
    whole = [value for value in values if isinstance(value, dict)]
    lists = [value for value in values if isinstance(value, list)]
    objects = whole + [each for value in lists for each in value]
    if len(whole) + len(lists) < len(values) or not all(isinstance(each, dict) for each in objects):
        return []
    if not all(each and None not in each.values() for each in objects):
        return []
    if any(
        isinstance(item, list | dict) for each in whole for item in each.values()
    ):  # a row of rows is a list's
        return []
    return _names(objects)


def _packed(value: Any, inner: list[str]) -> Any:
    if not inner or value is None:
        return value
    return _row(value, inner) if isinstance(value, dict) else [_row(each, inner) for each in value]


def _unpacked(value: Any, inner: list[str], where: str) -> Any:
    if not inner:
        return value
    if isinstance(value, list) and all(isinstance(each, list) for each in value):
        return [_object(each, inner, where) for each in value]
    return _object(value, inner, where)


def _row(entry: dict[str, Any], columns: list[str]) -> Row:
    """Values by column, null where there is none, without the nulls at the end."""
    values = [entry.get(name) for name in columns]
    while values and values[-1] is None:
        values.pop()
    return values


def _object(row: Any, columns: list[str], where: str) -> dict[str, Any]:
    if not isinstance(row, list) or len(row) > len(columns):
        raise ValueError(f"{where} is {row!r}, expected a list of up to {len(columns)} values")
    return {name: value for name, value in zip(columns, row, strict=False) if value is not None}


def _name(column: Any) -> str:
    return column if isinstance(column, str) else str(next(iter(column)))


def _is_column(column: Any) -> bool:
    """A name, or a name with those of the fields of what it holds."""
    if isinstance(column, dict) and len(column) == 1:
        (fields,) = column.values()
        return isinstance(fields, list) and all(isinstance(each, str) for each in fields)
    return isinstance(column, str)
