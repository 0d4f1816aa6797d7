"""Kernel configs as text, `tile_m=128,stages=4`: the form that the command line, operator arguments
and tuning stores use.

A config that was written with an old name of a field stays readable. The config class lists old
names in

    ALIASES: ClassVar[Mapping[str, str]] = {"old_name": "new_name"}

`from_text` accepts both names; `to_text` and `brief` write the new one only, so that each config
has one canonical text, that of `to_text`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
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


class RenamedFields(type):
    """The metaclass of configs whose constructor also accepts old field names.

    If ALIASES maps "slots" to "stages", `Config(slots=4)` equals `Config(stages=4)`. An old name
    takes precedence over the new name of the same field: `dataclasses.replace(config, slots=4)`
    passes all other fields, `stages` included, by their new names.
    """

    def __call__(cls, *values: Any, **named: Any) -> Any:
        renamed = aliases(cls)
        if not renamed.keys().isdisjoint(named):
            old = {renamed[name]: value for name, value in named.items() if name in renamed}
            named = {name: named[name] for name in named if name not in renamed} | old
        return super().__call__(*values, **named)


def aliases(kind: type) -> Mapping[str, str]:
    """Returns the old names of renamed fields of a config class, mapped to their current names."""
    found: Mapping[str, str] = getattr(kind, "ALIASES", {})
    return found


def with_current_names(text: str, renamed: Mapping[str, str]) -> str:
    """Returns the config's text with each old name of `renamed` replaced by the current name.

    Values and order are kept. A field that appears under both names with one value is written once.
    Raises ValueError where the two values differ.
    """
    values: dict[str, str] = {}
    given_as: dict[str, str] = {}  # current field name -> name in the text
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
    """Parses a config of type `kind`. Fields that `text` does not name keep their defaults; old
    names of renamed fields (`ALIASES` of the class) are accepted.

    Raises ValueError for an unknown field, a value of the wrong type, and a field that appears
    under its old and its new name with different values.
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
    """Returns a message if a field in `unread`, which the kernel ignores, differs from its value in
    `own`; else None.
    """
    for name in unread:
        value, only = getattr(config, name), getattr(own, name)
        if value != only:
            return f"{name} is {value}, expected {only}: {kernel} has no other"
    return None
