"""Exports and imports trials and winners, to move them between machines.

A file is replaced atomically, and nothing that is read is used before every field has been checked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from . import exports, signed_json, validation
from .listing import Selection
from .records import BestConfig, Gpu, Trial
from .sqlite import StoreError
from .store import Store
from .validation import shown

EXPORT = "outblas-tuning"  # the format of exports that are one JSON object, of version 1


def export(trials: Iterable[Trial], winners: Iterable[BestConfig], path: Path) -> None:
    """Writes all records to one file, atomically. Raises ValueError for a record that `read` would
    refuse, and OSError.
    """
    exports.write(path, trials, winners)


def export_store(store: Store, path: Path, wanted: Selection | None = None) -> tuple[int, int]:
    """Writes the contents of a store to one file, atomically, one record at a time; returns the
    numbers of trials and winners. Raises OSError.
    """
    failed: list[OSError] = []

    def consume(trials: Iterable[Trial], winners: Iterable[BestConfig]) -> tuple[int, int]:
        failed.clear()
        try:
            return exports.write(path, trials, winners, checked=True)
        except OSError as error:  # this is not an error of the store
            failed.append(error)
            return 0, 0

    counts = store.stream(consume, wanted)
    if failed:
        raise failed[0]
    return counts


def read(path: Path) -> tuple[list[Trial], list[BestConfig]]:
    """Reads a file that `export` wrote, of the current or the first version. Raises ValueError that
    names the place of the first error.
    """
    if not _is_lines(path):
        return _read_first_version(path)
    records = list(_checked(path, exports.read(path)))
    trials = [record for record in records if isinstance(record, Trial)]
    return trials, [record for record in records if isinstance(record, BestConfig)]


def check(path: Path) -> None:
    """Reads a file as `read` does, to check it only. Raises the errors of `read`."""
    if not _is_lines(path):
        _read_first_version(path)
    else:
        for _ in _checked(path, exports.read(path)):
            pass


def import_into(store: Store, path: Path) -> tuple[int, int]:
    """Merges a file into the store; returns how many trials and winners are new.

    Raises ValueError, with nothing stored, where anything in the file is invalid, and StoreError
    where not all of it reached the store's file; a repeated import skips the part that did.
    """
    if not _is_lines(path):
        return store.merge(*_read_first_version(path))
    new = [0, 0]
    persistent = store.persistent

    def put(batch: exports.Batch) -> None:
        trials = [record for record in batch if isinstance(record, Trial)]
        counts = store.merge(trials, [record for record in batch if isinstance(record, BestConfig)])
        new[:] = [old + more for old, more in zip(new, counts, strict=True)]
        if persistent and not store.persistent:
            raise StoreError(store.warning)

    with _errors(path):
        exports.merge(path, put)
    return new[0], new[1]


def _is_lines(path: Path) -> bool:
    with _errors(path):
        return exports.is_lines(path)


def _checked(path: Path, records: Iterable[Trial | BestConfig]) -> Iterator[Trial | BestConfig]:
    with _errors(path):
        yield from records


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Turns system errors of reading a file into ValueError."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None


def _read_first_version(path: Path) -> tuple[list[Trial], list[BestConfig]]:
    """Reads a file that is one JSON object, the first version of exports."""
    content = signed_json.parse(
        signed_json.text_of(path), EXPORT, {1: ("gpus", "trials", "winners")}
    )
    for name, kind in (("gpus", dict), ("trials", list), ("winners", list)):
        if type(content[name]) is not kind:
            raise ValueError(f"{name} is {shown(content[name])}, expected a JSON {kind.__name__}")
    gpus: dict[str, Gpu] = {}
    for key, facts in content["gpus"].items():
        gpus[key] = validation.gpu_of(facts, f"gpus[{shown(key)}]")
        if gpus[key].key != key:
            raise ValueError(
                f"gpus[{shown(key)}] is the key of another GPU, expected {gpus[key].key!r}"
            )
    trials = [
        validation.trial_of(fields, f"trials[{i}]", gpus)
        for i, fields in enumerate(content["trials"])
    ]
    return trials, [
        validation.best_config_of(fields, f"winners[{i}]", gpus)
        for i, fields in enumerate(content["winners"])
    ]
