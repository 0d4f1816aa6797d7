"""Reads shipped tables of version 2, which stored configs as differences from a base.

A table has a list of kernels. Each has the text of a base config, and one row per entry: the
workload, the fields in which its config differs from the base, figures, and the day. A row leaves
out dtypes and layout, or the day, where they equal those of the row above. Nothing writes this
version any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...core.configs import items
from . import validation
from .validation import Fields, shown

NAMES = ("gpu", "columns", "kernels")  # the fields of a table


def entries(content: Fields) -> Iterator[tuple[str, Fields]]:
    """Yields the entries of a table, each with its place in the file for error messages.

    `content` is the table after its format and checksum have been checked. Raises ValueError that
    names the place of the error.
    """
    if content["columns"] != list(validation.ROW_VERSION_2):
        expected = ", ".join(validation.ROW_VERSION_2)
        raise ValueError(f"columns is {shown(content['columns'])}, expected {expected}")
    if type(content["kernels"]) is not list:
        raise ValueError(f"kernels is {shown(content['kernels'])}, expected a JSON list")
    for i, fields in enumerate(content["kernels"]):
        kernel = validation.checked(fields, validation.KERNEL_VERSION_2, f"kernels[{i}]")
        above = "", ""
        for j, row in enumerate(kernel["entries"]):
            place = f"kernels[{i}].entries[{j}]"
            entry, above = _entry(row, kernel, place, above)
            yield place, entry


def _entry(
    row: object, kernel: Fields, place: str, above: tuple[str, str]
) -> tuple[Fields, tuple[str, str]]:
    """Returns the entry in a row, and the dtypes with layout and the day that the next row may
    leave out.

    `above` has those of the row above. Raises ValueError.
    """
    valid = validation.checked_row(row, validation.ROW_VERSION_2, place)
    shape, _, precision = valid.pop("workload").partition(" ")
    precision, day = precision or above[0], valid.pop("when") or above[1]
    if not precision or not day:
        raise ValueError(
            f"{place} is {shown(row)}, expected a kind of workload and a day in the first"
        )
    try:
        config = applied(kernel["base"], valid.pop("changes"))
    except ValueError as error:
        raise ValueError(f"{place}.changes: {error}") from None
    entry: dict[str, Any] = {
        "workload": validation.workload_in(f"{shape} {precision}", f"{place}.workload"),
        "kernel": kernel["kernel"],
        "config": config,
        "when": day,
        **valid,
    }
    return entry, (precision, day)


def applied(base: str, changes: str) -> str:
    """Returns the base config with these fields changed. Raises ValueError for a field that it
    lacks.
    """
    own, changed = items(base), dict(items(changes))
    for name in changed.keys() - {name for name, _ in own}:
        raise ValueError(f"{name!r} is no field of the base")
    return ",".join(f"{name}={changed.get(name, value)}" for name, value in own)
