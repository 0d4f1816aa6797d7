"""Kernel configs as text, `tile_m=128,stages=4`: the form that the command line, operator arguments
and tuning stores use.
"""

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

ConfigT = TypeVar("ConfigT")


def to_text(config: Any) -> str:
    """Returns every field of a frozen config as `name=value`, joined by commas. Raises TypeError
    for a value of the wrong type.
    """
    if reason := mistyped(config):
        raise TypeError(f"config {reason}")
    return ",".join(
        f"{field.name}={getattr(config, field.name)}" for field in dataclasses.fields(config)
    )


def mistyped(config: Any) -> str | None:
    """Returns a message about the first value that has the wrong type, or None if there is none."""
    for field in dataclasses.fields(config):
        value, kind = getattr(config, field.name), type(field.default)
        if type(value) is not kind:
            return f"{field.name} is {value!r} ({type(value).__name__}), expected {kind.__name__}"
    return None


def brief(config: Any) -> str:
    """Returns the same text as `to_text`, with only the fields that differ from their defaults."""
    values = [
        (field.name, getattr(config, field.name), field.default)
        for field in dataclasses.fields(config)
    ]
    return ",".join(f"{name}={value}" for name, value, default in values if value != default)


def items(text: str) -> list[tuple[str, str]]:
    """Splits a config's text into names and values; the value is empty where "=" is missing."""
    return [
        (name, value)
        for name, _, value in (item.partition("=") for item in text.split(",") if item)
    ]


def from_text(kind: type[ConfigT], text: str) -> ConfigT:
    """Parses a config of type `kind`. Fields that `text` does not name keep their defaults. Raises
    ValueError for an unknown field, and for a value of the wrong type.
    """
    hashable: Any = kind  # which mypy does not see of a frozen dataclass
    config: ConfigT = _parsed(hashable, text)
    return config


@lru_cache(maxsize=1024)
def _parsed(kind: Any, text: str) -> Any:
    fields = {f.name: f for f in dataclasses.fields(kind)}
    values: dict[str, int | bool | str] = {}
    for item in filter(None, text.split(",")):
        name, separator, value = item.partition("=")
        if not separator or name not in fields:
            raise ValueError(
                f"config has {item!r}, expected name=value with a name from: {', '.join(fields)}"
            )
        values[name] = _parse(name, value, type(fields[name].default))
    return kind(**values)


def _parse(name: str, value: str, kind: type) -> int | bool | str:
    if kind is bool:
        if value.lower() not in ("true", "false", "1", "0"):
            raise ValueError(f"config {name} is {value!r}, expected True or False")
        return value.lower() in ("true", "1")
    try:
        return int(value) if kind is int else value
    except ValueError:
        raise ValueError(f"config {name} is {value!r}, expected an integer") from None


def unread_reason(config: Any, own: Any, kernel: str, unread: Sequence[str]) -> str | None:
    """Returns a message if a field in `unread`, which the kernel ignores, differs from its value in
    `own`; else None.
    """
    for name in unread:
        value, only = getattr(config, name), getattr(own, name)
        if value != only:
            return f"{name} is {value}, expected {only}: {kernel} has no other"
    return None
