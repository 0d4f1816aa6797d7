"""Records as JSON objects, which stores and files hold, and the check that each one passes: when it
comes from a file, and before it is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import math
import re
import reprlib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from outblas.autotune.store.records import BestConfig, Finalist, Gpu, Trial, Workload
from outblas.base import ownership

T = TypeVar("T")
Fields = dict[str, Any]

SIZE_LIMIT = 1 << 30  # bytes of a file that is read
TEXT_LIMIT = 4096  # characters of a text
MOST = 1e15  # of any number
_PATTERNS = {
    "kernel": ("a kernel's name, of a-z, 0-9, _ and .", re.compile(r"[a-z0-9_.]+")),
    "config": ("name=value,...", re.compile(r"(\w+=[\w.-]*(,\w+=[\w.-]*)*)?", re.ASCII)),
}
_POSITIVE = ("us", "cublas_us", "ratio", "ratio_low", "ratio_high")


def to_fields(record: Any) -> Fields:
    """Returns a record as a JSON object. Raises ValueError for one that could not be read again."""
    fields: Fields = _plain(record)
    checked(type(record), fields, type(record).__name__)
    return fields


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {name: _plain(part) for name, part in vars(value).items()}
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


def from_fields(kind: type[T], fields: Fields) -> T:
    """Returns the trial or winner of a JSON object that was checked before it was stored.

    Raises ValueError, TypeError or KeyError for one that is damaged.
    """
    values = fields | {"gpu": Gpu(**fields["gpu"]), "workload": Workload(**fields["workload"])}
    if "finalists" in fields:
        values["finalists"] = tuple(Finalist(**finalist) for finalist in fields["finalists"])
    return kind(**values)


def checked(kind: type[T], fields: object, place: str) -> T:
    """Returns the record of a dataclass that a JSON object describes with exactly its fields.

    Raises ValueError that names the field, what was expected and what there is.
    """
    if type(fields) is not dict:
        raise ValueError(f"{place} is {shown(fields)}, expected an object")
    types_of = _types(kind)  # type: ignore[arg-type]
    check_names(fields, types_of, place)
    values = {
        name: _checked_value(annotation, fields[name], f"{place}.{name}")
        for name, annotation in types_of.items()
    }
    for name, value in values.items():
        _check_range(name, value, f"{place}.{name}")
    try:
        record = kind(**values)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    if isinstance(record, Trial) and record.ok != (record.us is not None):
        expected = "a number" if record.ok else "null"
        raise ValueError(
            f"{place}.us is {record.us}, expected {expected} where status is {record.status!r}"
        )
    if isinstance(record, Trial | BestConfig):
        _check_date(record.when, f"{place}.when")
    return record


@functools.cache
def _types(kind: type) -> Mapping[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _checked_value(annotation: Any, value: Any, place: str) -> Any:
    """Returns a value in the form that a field of this type has."""
    origin, choices = typing.get_origin(annotation), typing.get_args(annotation)
    if dataclasses.is_dataclass(annotation):
        return checked(typing.cast(type, annotation), value, place)
    if origin is types.UnionType:  # a type or None
        return None if value is None else _checked_value(choices[0], value, place)
    if origin is Literal:
        valid, expected = value in choices, f"one of {', '.join(choices)}"
    elif origin is tuple:
        if type(value) is list:
            parts = enumerate(value)
            return tuple(checked(Finalist, part, f"{place}[{i}]") for i, part in parts)
        valid, expected = False, "a list"
    elif annotation is float:
        valid = type(value) in (int, float) and math.isfinite(value)
        expected = "a finite number"
    else:
        valid, expected = type(value) is annotation, f"a value of type {annotation.__name__}"
    if not valid:
        raise ValueError(f"{place} is {shown(value)}, expected {expected}")
    return value


def _check_range(name: str, value: Any, place: str) -> None:
    if isinstance(value, str):
        expected, pattern = _PATTERNS.get(name, ("", None))
        if len(value) > TEXT_LIMIT:
            raise ValueError(f"{place} has {len(value)} characters, expected {TEXT_LIMIT} at most")
        if pattern is not None and not pattern.fullmatch(value):
            raise ValueError(f"{place} is {shown(value)}, expected {expected}")
    elif isinstance(value, int | float) and not (
        0 < value <= MOST or (value == 0 and name not in _POSITIVE)
    ):
        least = "above 0" if name in _POSITIVE else "of at least 0"
        raise ValueError(f"{place} is {value}, expected a number {least}, at most {MOST:.0e}")


def _check_date(when: str, place: str) -> None:
    with contextlib.suppress(ValueError):
        if datetime.datetime.fromisoformat(when).utcoffset() is not None:
            return
    raise ValueError(f"{place} is {shown(when)}, expected a time such as 2026-01-31T12:00:00+00:00")


def check_names(fields: Fields, names: Iterable[str], place: str) -> None:
    """Raises ValueError unless exactly these fields are present."""
    for name in names:
        if name not in fields:
            raise ValueError(f"{place} has no {name}")
    for name in fields.keys() - set(names):
        raise ValueError(f"{place} has {shown(name)}, expected only {', '.join(names)}")


def parsed(text: str | bytes, place: str) -> Any:
    """Parses JSON. Raises ValueError that names the place."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {error}") from None


def text_of(path: Path) -> str:
    """Returns the contents of a file. Raises ValueError that names the file and the reason."""
    try:
        return ownership.read_regular(path, SIZE_LIMIT).decode()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None


def shown(value: object) -> str:
    """Formats a value for messages, always short."""
    return reprlib.repr(value)
