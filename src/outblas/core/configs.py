"""Kernel configs as text: `tile_m=128,stages=4`, the form of the command line, of operator
arguments and of tuning stores.

A field that was renamed stays readable: its config class lists the old name in

    ALIASES: ClassVar[Mapping[str, str]] = {"old_name": "new_name"}

`from_text` takes either name; `to_text` and `brief` write the new one alone, so that the text of
`to_text` is the canonical one of its config.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

ConfigT = TypeVar("ConfigT")


def to_text(config: Any) -> str:
    """Every field of a frozen config, `name=value` joined by commas. Raises TypeError for a value
    of the wrong type.
    """
    if reason := mistyped(config):
        raise TypeError(f"config {reason}")
    return ",".join(
        f"{field.name}={getattr(config, field.name)}" for field in dataclasses.fields(config)
    )


def mistyped(config: Any) -> str | None:
    """Which value of a config has the wrong type; None if none has."""
    for field in dataclasses.fields(config):
        value, kind = getattr(config, field.name), type(field.default)
        if type(value) is not kind:
            return f"{field.name} is {value!r} ({type(value).__name__}), expected {kind.__name__}"
    return None


def brief(config: Any) -> str:
    """As `to_text`, only the fields that differ from their defaults."""
    values = [
        (field.name, getattr(config, field.name), field.default)
        for field in dataclasses.fields(config)
    ]
    return ",".join(f"{name}={value}" for name, value, default in values if value != default)


def items(text: str) -> list[tuple[str, str]]:
    """Names and values in a config's text; a value is empty where "=" is missing."""
    return [
        (name, value)
        for name, _, value in (item.partition("=") for item in text.split(",") if item)
    ]


class RenamedFields(type):
    """The metaclass of configs whose constructor takes old names of fields, too.

    `Config(slots=4)` is `Config(stages=4)` where ALIASES has slots, and so is
    `dataclasses.replace(config, slots=4)`, which hands over the other fields by their new names: an
    old name counts for more than the new one of the same field.
    """

    def __call__(cls, *values: Any, **named: Any) -> Any:
        renamed = aliases(cls)
        if not renamed.keys().isdisjoint(named):
            old = {renamed[name]: value for name, value in named.items() if name in renamed}
            named = {name: named[name] for name in named if name not in renamed} | old
        return super().__call__(*values, **named)


def aliases(kind: type) -> Mapping[str, str]:
    """The old names of renamed fields of a config class, and the names that they have now."""
    found: Mapping[str, str] = getattr(kind, "ALIASES", {})
    return found


def with_current_names(text: str, renamed: Mapping[str, str]) -> str:
    """The config's text with each old name of `renamed` replaced by the one that the field has now.

    Values and order stay. A field that is given by both names with one value is written once.
    Raises ValueError where the two values differ.
    """
    values: dict[str, str] = {}
    given_as: dict[str, str] = {}  # by the field's name now, the name in the text
    for item in filter(None, text.split(",")):
        given, separator, value = item.partition("=")
        name = renamed.get(given, given) if separator else given
        other = given_as.setdefault(name, given)
        if other != given and values[name] != separator + value:
            raise ValueError(
                f"config has {item!r} and {other + values[name]!r}, expected one of them: "
                f"{given} and {other} are two names of one field"
            )
        values[name] = separator + value
    return ",".join(name + value for name, value in values.items())


@lru_cache(maxsize=1024)
def from_text(kind: type[ConfigT], text: str) -> ConfigT:
    """A config of type `kind`; fields that `text` does not name keep their defaults. Old names of
    renamed fields (`ALIASES` of the class) are taken too.

    Raises ValueError for an unknown field, a value of the wrong type, and a field that is given by
    its old and its new name with different values.
    """
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values: dict[str, int | bool | str] = {}
    for item in filter(None, with_current_names(text, aliases(kind)).split(",")):
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
    """Why a config asks for what a kernel does not do: a field that it does not read differs from
    its own.
    """
    for name in unread:
        value, only = getattr(config, name), getattr(own, name)
        if value != only:
            return f"{name} is {value}, expected {only}: {kernel} has no other"
    return None
