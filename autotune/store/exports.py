"""Exports as JSON Lines, written and read one record at a time, so that large files need little
memory.

The first line identifies the file. Each following line has one GPU, trial or winner; a GPU comes
before the records that were measured on it. The last line has the number of trials and winners and
the SHA-256 of all bytes before it, so that a truncated or changed file is detected.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ...core import ownership
from . import validation
from .records import BestConfig, Gpu, Trial
from .validation import Fields, shown

FORMAT, VERSION = "outblas-tuning", 2
LINE_LIMIT = 64 << 20  # maximum bytes of a line that is read
BATCH = 1000  # lines that are read and stored together

Record = Trial | BestConfig
Batch = list[Record]


def write(
    path: Path, trials: Iterable[Trial], winners: Iterable[BestConfig], *, checked: bool = False
) -> tuple[int, int]:
    """Writes all records to one file, which it replaces atomically; returns the numbers of trials
    and winners. With `checked`, the records come from a store and are valid already. Raises
    ValueError for a record that could not be read again, and OSError.
    """
    counts = {"trials": 0, "winners": 0}
    gpus: set[str] = set()
    with replacing(path) as file:
        digest = hashlib.sha256()

        def put(value: Fields) -> None:
            line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
            digest.update(line)
            file.write(line)

        put({"format": FORMAT, "version": VERSION})
        named: tuple[tuple[str, Iterable[Record]], ...] = (("trials", trials), ("winners", winners))
        for name, records in named:
            for i, record in enumerate(records):
                fields = (
                    validation.fields_of(record)
                    if checked
                    else validation.checked_fields(record, f"{name}[{i}]")
                )
                if fields["gpu"] not in gpus:
                    gpus.add(fields["gpu"])
                    put({"gpu": {"key": fields["gpu"], **vars(record.gpu)}})
                put({name[:-1]: fields})
                counts[name] += 1
        put({"end": counts | {"sha256": digest.hexdigest()}})
    return counts["trials"], counts["winners"]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yields a file that replaces `path` once it is written and on disk, unless an exception is
    raised.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise


def is_lines(path: Path) -> bool:
    """Returns whether the file begins like an export in JSON Lines. Raises OSError."""
    with ownership.open_regular(path) as file:
        first = file.readline(4096)
    try:
        head = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return first.endswith(b"\n") and type(head) is dict and set(head) == {"format", "version"}


def read(path: Path) -> Iterator[Record]:
    """Yields the records of a file, each checked. Raises ValueError that names the line of the
    first error; this may be the last line, after all records. Raises OSError.
    """
    for batch, _ in _batches(path):
        yield from batch


def merge(path: Path, store: Callable[[Batch], None]) -> None:
    """Reads the whole file once to check it, and if it is valid a second time to store it in
    batches. What is stored has the checksums of what was checked. Raises the errors of `read`, with
    nothing stored.
    """
    digests = [digest for _, digest in _batches(path)]
    for i, (batch, digest) in enumerate(_batches(path)):
        if i >= len(digests) or digest != digests[i]:
            raise ValueError(f"{path} was changed while it was read")
        store(batch)


@dataclass
class _Reader:
    """The state of reading a file: what its lines have contained so far."""

    gpus: dict[str, Gpu] = field(default_factory=dict)
    trials: int = 0
    winners: int = 0

    def record(self, line: bytes, place: str) -> Record | None:
        """Returns the record in a line, or None for a GPU. Raises ValueError."""
        value = _object(line, place)
        if len(value) != 1 or next(iter(value)) not in ("gpu", "trial", "winner"):
            raise ValueError(
                f"{place} has {shown(list(value))}, expected one of gpu, trial, winner"
            )
        kind, fields = next(iter(value.items()))
        place = f"{place}: {kind}"
        if kind == "trial":
            self.trials += 1
            return validation.trial_of(fields, place, self.gpus)
        if kind == "winner":
            self.winners += 1
            return validation.best_config_of(fields, place, self.gpus)
        if type(fields) is not dict or "key" not in fields:
            raise ValueError(f"{place} is {shown(fields)}, expected an object with a key")
        gpu = validation.gpu_of(
            {name: each for name, each in fields.items() if name != "key"}, place
        )
        if gpu.key != fields["key"]:
            raise ValueError(f"{place}.key is {shown(fields['key'])}, expected {gpu.key!r}")
        self.gpus[gpu.key] = gpu
        return None


def _batches(path: Path) -> Iterator[tuple[Batch, bytes]]:
    """Yields batches of records, with the digest of all bytes up to the end of each batch. Raises
    the errors of `read`.
    """
    reader, digest = _Reader(), hashlib.sha256()
    with ownership.open_regular(path) as file:
        line = _line(file, 1)
        _check_head(_object(line, "line 1"))
        digest.update(line)
        batch: Batch = []
        for number in itertools.count(2):
            line = _line(file, number)
            if not line:
                raise ValueError(
                    f"the file ends at line {number}, expected its checksum there: it is incomplete"
                )
            if line.startswith(b'{"end"'):
                break
            digest.update(line)
            if record := reader.record(line, f"line {number}"):
                batch.append(record)
            if len(batch) == BATCH:
                yield batch, digest.copy().digest()
                batch = []
        _check_end(line, f"line {number}", reader, digest.hexdigest())
        if _line(file, number + 1):
            raise ValueError(f"line {number + 1} follows the last, expected the end of the file")
        yield batch, digest.digest()


def _check_head(head: Fields) -> None:
    if head.get("format") != FORMAT:
        raise ValueError(f"format is {shown(head.get('format'))}, expected {FORMAT!r}")
    if type(head.get("version")) is not int or head["version"] != VERSION:
        raise ValueError(f"version is {shown(head.get('version'))}, expected 1 or {VERSION}")
    validation.check_names(head, ("format", "version"), "line 1")


def _check_end(line: bytes, place: str, reader: _Reader, digest: str) -> None:
    end = _object(line, place)
    validation.check_names(end, ("end",), place)
    if type(end["end"]) is not dict:
        raise ValueError(f"{place}: end is {shown(end['end'])}, expected an object")
    validation.check_names(end["end"], ("trials", "winners", "sha256"), f"{place}: end")
    for name, found in (("sha256", digest), ("trials", reader.trials), ("winners", reader.winners)):
        said = end["end"][name]
        if type(said) is not type(found) or said != found:
            raise ValueError(
                f"{place}: {name} is {shown(said)}, expected {found!r}: the file was changed or is "
                "incomplete"
            )


def _line(file: IO[bytes], number: int) -> bytes:
    line = file.readline(LINE_LIMIT)
    if len(line) == LINE_LIMIT:
        raise ValueError(f"line {number} is longer than {LINE_LIMIT >> 20} MiB")
    return line


def _object(line: bytes, place: str) -> Fields:
    try:
        value = json.loads(line, object_pairs_hook=validation.once)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ValueError(f"{place} is not JSON: {error}") from None
    if type(value) is not dict:
        raise ValueError(f"{place} is {shown(value)}, expected an object")
    found: dict[str, Any] = value
    return found
