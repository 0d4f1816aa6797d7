"""Exports and imports trials and winners as JSON Lines, to move them between machines.

The first line identifies the file, each following one has a trial or a winner, and the last line
has their numbers, so that a file that was cut off is recognised. A file is replaced atomically, and
nothing that is read is used before every field has been checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from outblas.autotune.store import fields
from outblas.autotune.store.fields import Fields, checked, parsed, shown
from outblas.autotune.store.records import BestConfig, Trial
from outblas.base.filesystems import replacing

HEAD = {"format": "outblas-tuning"}
_KINDS: dict[str, type[Trial] | type[BestConfig]] = {"trial": Trial, "winner": BestConfig}


def write(path: Path, trials: Iterable[Trial], winners: Iterable[BestConfig]) -> None:
    """Writes records to one file. Raises ValueError for one that `read` would refuse, OSError."""
    counts = dict.fromkeys(_KINDS, 0)
    with replacing(path) as file:

        def put(line: Fields) -> None:
            file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

        put(HEAD)
        for kind, records in (("trial", trials), ("winner", winners)):
            for record in records:
                put({kind: fields.to_fields(record)})
                counts[kind] += 1
        put({"end": counts})


def read(path: Path) -> tuple[list[Trial], list[BestConfig]]:
    """Reads a file that an export wrote. Raises ValueError that names the line of the first
    error.
    """
    lines = fields.text_of(path).splitlines()
    if not lines or parsed(lines[0], "line 1") != HEAD:
        raise ValueError(f"line 1 is {shown(lines[:1])}, expected {json.dumps(HEAD)}")
    trials, winners = list[Trial](), list[BestConfig]()
    for number, line in enumerate(lines[1:-1], 2):
        place = f"line {number}"
        content = parsed(line, place)
        if type(content) is not dict or len(content) != 1 or not content.keys() <= _KINDS.keys():
            raise ValueError(f"{place} is {shown(content)}, expected a trial or a winner")
        kind, values = next(iter(content.items()))
        record = checked(_KINDS[kind], values, f"{place}: {kind}")
        trials.append(record) if isinstance(record, Trial) else winners.append(record)
    end = {"end": {"trial": len(trials), "winner": len(winners)}}
    last = parsed(lines[-1], f"line {len(lines)}")
    if last != end:
        raise ValueError(
            f"line {len(lines)} is {shown(last)}, expected {json.dumps(end)}: the file was changed "
            "or is incomplete"
        )
    return trials, winners
