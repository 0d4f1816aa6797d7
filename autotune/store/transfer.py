"""Trials, winners and shipped tables as JSON files: replaced at once, believed only once every
field was checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import compact, exports, validation
from .records import Gpu, Trial, Winner, Workload, age, latest_date, now
from .validation import Fields, shown

if TYPE_CHECKING:
    from .listing import Selection
    from .store import Store

EXPORT, TABLE = "outblas-tuning", "outblas-table"  # the formats
VERSIONS = {
    EXPORT: 1,
    TABLE: 2,
}  # of what is one JSON object; exports are lines since their version 2
# Significant digits of shipped figures; more of the ratio, which ranks kernels and is rounded again
# in reports.
DIGITS = {"us": 5, "ratio": 7, "ratio_low": 5, "ratio_high": 5, "confidence": 4}
SIZE_LIMIT = (
    1 << 30
)  # bytes of a file that is read as one JSON object, which takes some ten times that in memory
TABLES = Path(__file__).parents[1] / "tables"  # where shipped tables lie


def export(trials: Iterable[Trial], winners: Iterable[Winner], path: Path) -> None:
    """Writes all to one file, at once. Raises ValueError for a record that `read` would refuse, and
    OSError.
    """
    exports.write(path, trials, winners)


def export_store(store: Store, path: Path, wanted: Selection | None = None) -> tuple[int, int]:
    """Writes what a store has to one file, at once, a record at a time; how many trials and
    winners. Raises OSError.
    """
    failed: list[OSError] = []

    def consume(trials: Iterable[Trial], winners: Iterable[Winner]) -> tuple[int, int]:
        failed.clear()
        try:
            return exports.write(path, trials, winners, checked=True)
        except OSError as error:  # which is not the store's
            failed.append(error)
            return 0, 0

    counts = store.stream(consume, wanted)
    if failed:
        raise failed[0]
    return counts


def read(path: Path) -> tuple[list[Trial], list[Winner]]:
    """What `export` wrote, now or in its first version. Raises ValueError that names the place of
    the first thing amiss.
    """
    if not _is_lines(path):
        return _read_first_version(path)
    records = list(_checked(path, exports.read(path)))
    trials = [record for record in records if isinstance(record, Trial)]
    return trials, [record for record in records if isinstance(record, Winner)]


def check(path: Path) -> None:
    """Reads a file as `read` does, and keeps nothing of it. Raises as `read`."""
    if not _is_lines(path):
        _read_first_version(path)
    else:
        for _ in _checked(path, exports.read(path)):
            pass


def import_into(store: Store, path: Path) -> tuple[int, int]:
    """Merges a file into the store; returns how many trials and winners are new.

    Raises ValueError, with nothing stored, where anything in the file is amiss, and StoreError
    where not all of it reaches the store's file: what did reach it is known when the import is
    repeated.
    """
    if not _is_lines(path):
        return store.merge(*_read_first_version(path))
    from .sqlite import StoreError

    new = [0, 0]
    persistent = store.persistent

    def put(batch: exports.Batch) -> None:
        trials = [record for record in batch if isinstance(record, Trial)]
        counts = store.merge(trials, [record for record in batch if isinstance(record, Winner)])
        new[:] = [old + more for old, more in zip(new, counts, strict=True)]
        if persistent and not store.persistent:
            raise StoreError(store.warning)

    with _errors(path):
        exports.merge(path, put)
    return new[0], new[1]


def _is_lines(path: Path) -> bool:
    with _errors(path):
        if not path.is_file():
            raise ValueError(f"{path} is no file")
        return exports.is_lines(path)


def _checked(path: Path, records: Iterable[Trial | Winner]) -> Iterator[Trial | Winner]:
    with _errors(path):
        yield from records


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    """What the system says of a file that is read, as a ValueError."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None


def _read_first_version(path: Path) -> tuple[list[Trial], list[Winner]]:
    """A file that is one JSON object, as exports were."""
    content = _opened(_text_of(path), EXPORT, ("gpus", "trials", "winners"))
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
        validation.winner_of(fields, f"winners[{i}]", gpus)
        for i, fields in enumerate(content["winners"])
    ]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The best config of a kernel at a workload, as shipped; figures as in `records.Winner`, `when`
    to the day.
    """

    workload: Workload
    kernel: str
    config: str
    us: float
    ratio: float
    ratio_low: float
    ratio_high: float
    confidence: float | None
    when: str

    @property
    def place(self) -> tuple[Workload, str]:
        """No two entries of a table share it."""
        return self.workload, self.kernel


@dataclass(frozen=True)
class Table:
    """What is shipped for one model of GPU; `gpu` has the software of the newest winner."""

    gpu: Gpu
    entries: tuple[Entry, ...]


def read_table(source: Path | str) -> Table:
    """The table in a file (a Path) or in a text (a str). Raises ValueError that names the place of
    what is amiss.
    """
    text = _text_of(source) if isinstance(source, Path) else source
    content = _opened(text, TABLE, ("gpu", "columns", "kernels"))
    if content["columns"] != list(validation.ENTRY):
        raise ValueError(
            f"columns is {shown(content['columns'])}, expected {', '.join(validation.ENTRY)}"
        )
    if type(content["kernels"]) is not list:
        raise ValueError(f"kernels is {shown(content['kernels'])}, expected a JSON list")
    entries: dict[tuple[Workload, str], Entry] = {}
    for i, fields in enumerate(content["kernels"]):
        kernel = validation.checked(fields, validation.KERNEL, f"kernels[{i}]")
        above = "", ""
        for j, row in enumerate(kernel["entries"]):
            place = f"kernels[{i}].entries[{j}]"
            entry, above = _unpacked(row, kernel, place, above)
            if entry.place in entries:
                raise ValueError(
                    f"{place} is the second of {entry.kernel} at {entry.workload}, expected one"
                )
            entries[entry.place] = entry
    return Table(
        validation.gpu_of(content["gpu"], "gpu"), tuple(sorted(entries.values(), key=_order))
    )


def own_tables() -> Path:
    """The folder of the tables that come with the package, in a checkout. Raises ValueError where
    the package is installed: the next installation would replace what is written there.
    """
    if not (Path(__file__).parents[2] / "pyproject.toml").is_file():
        raise ValueError(
            f"the tables in {TABLES} belong to an installed package, expected a FOLDER to write to"
        )
    return TABLES


def ship(winners: Iterable[Winner], folder: Path) -> list[Path]:
    """Writes a table for each model of GPU: of winners at one workload with one kernel, that of the
    highest ratio.

    A table that is there keeps its entries of other workloads and kernels. Raises ValueError, with
    nothing written, for a table or a winner that is not valid, and OSError.
    """
    models: dict[tuple[str, int], list[Winner]] = {}
    for i, winner in enumerate(winners):
        validation.checked_fields(winner, f"winners[{i}]")
        if winner.gpu.arch == 0:
            raise ValueError(
                f"winners[{i}] is of {winner.gpu.name}, expected one that was measured on a GPU"
            )
        models.setdefault(winner.gpu.model, []).append(winner)
    tables: dict[Path, Table] = {}
    latest = latest_date()
    for _, found in sorted(models.items()):
        gpu = max(found, key=lambda winner: age(winner.when, latest)).gpu
        path, kept = _table_at(folder, gpu, tables)
        best = {
            entry.place: entry
            for entry in map(_entry, sorted(found, key=lambda w: (w.ratio, age(w.when, latest))))
        }
        entries = {entry.place: entry for entry in kept} | best
        tables[path] = Table(gpu, tuple(entries.values()))
    folder.mkdir(parents=True, exist_ok=True)
    for path, table in tables.items():
        _write(path, _packed(table))
    return list(tables)


def _table_at(
    folder: Path, gpu: Gpu, taken: Mapping[Path, Table]
) -> tuple[Path, tuple[Entry, ...]]:
    """The file of a GPU's model and what it holds: NAME.json, with the SMs where another model of
    that name has it.
    """
    name = re.sub(r"[^A-Za-z0-9._-]", "_", gpu.name).lstrip(".") or "_"
    for stem in (name, f"{name}_{gpu.sms}_SMs"):
        path = folder / f"{stem}.json"
        try:
            there = taken.get(path) or (read_table(path) if path.exists() else None)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if there is None or there.gpu.model == gpu.model:
            return path, there.entries if there else ()
    raise ValueError(
        f"{path} is of another GPU than {gpu.name!r}, expected none or one of that name"
    )


def _entry(winner: Winner) -> Entry:
    names = [field.name for field in dataclasses.fields(Entry)]
    return Entry(
        **{name: getattr(winner, name) for name in names} | {"when": (winner.when or now())[:10]}
    )


def _packed(table: Table) -> Fields:
    """As the file has it: each kernel with a base config, and a row an entry. Two forms of config
    make two bases, so do two families. What kind of workload a row has, and its day, it says where
    the row above has others.
    """
    alike: dict[tuple[str, tuple[str, ...]], list[Entry]] = {}
    for entry in sorted(table.entries, key=_order):
        alike.setdefault((entry.kernel, compact.form(entry.config)), []).append(entry)
    kernels = []
    for (kernel, _), entries in sorted(alike.items()):
        for family in compact.families([entry.config for entry in entries]):
            base = compact.common(family)
            own = [entry for entry in entries if entry.config in family]
            rows = [
                _row(entry, base, above) for entry, above in zip(own, [None, *own], strict=False)
            ]
            kernels.append({"kernel": kernel, "base": base, "entries": rows})
    head = {"format": TABLE, "version": VERSIONS[TABLE], "gpu": vars(table.gpu)}
    return {**head, "columns": list(validation.ENTRY), "kernels": kernels}


def _row(entry: Entry, base: str, above: Entry | None) -> list[Any]:
    fields = vars(entry) | {
        "workload": str(entry.workload),
        "changes": compact.difference(entry.config, base),
    }
    if above and above.workload.kind == entry.workload.kind:
        fields["workload"] = fields["workload"].split(" ")[0]
    if above and above.when == entry.when:
        fields["when"] = ""
    return [_rounded(fields[name], DIGITS.get(name)) for name in validation.ENTRY]


def _rounded(value: Any, digits: int | None) -> Any:
    return value if value is None or digits is None else float(f"{value:.{digits}g}")


def _unpacked(
    row: object, kernel: Fields, place: str, above: tuple[str, str]
) -> tuple[Entry, tuple[str, str]]:
    """The entry in a row under a kernel whose fields are those of `checks.KERNEL`, and its kind and
    day: those `above` where it says none. Raises ValueError.
    """
    valid = validation.checked_row(row, validation.ENTRY, place)
    shape, _, kind = valid.pop("workload").partition(" ")
    kind, valid["when"] = above = (kind or above[0], valid["when"] or above[1])
    if not all(above):
        raise ValueError(
            f"{place} is {shown(row)}, expected a kind of workload and a day in the first"
        )
    workload = validation.workload_in(f"{shape} {kind}", f"{place}.workload")
    try:
        config = compact.applied(kernel["base"], valid.pop("changes"))
    except ValueError as error:
        raise ValueError(f"{place}.changes: {error}") from None
    return Entry(workload=workload, kernel=kernel["kernel"], config=config, **valid), above


def _order(entry: Entry) -> tuple[Any, ...]:
    return *entry.workload.kind, *entry.workload.shape, entry.kernel


def _opened(text: str, kind: str, names: tuple[str, ...]) -> Fields:
    """The object in `text`, its format, version, fields and checksum found right; fields not looked
    into.
    """
    try:
        content = json.loads(text, object_pairs_hook=validation.once)
        found = _checksum(content) if type(content) is dict else ""
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the file is no JSON: {error}") from None
    if type(content) is not dict:
        raise ValueError(f"the file is {shown(content)}, expected an object")
    if content.get("format") != kind:
        raise ValueError(f"format is {shown(content.get('format'))}, expected {kind!r}")
    if type(content.get("version")) is not int or content["version"] != VERSIONS[kind]:
        raise ValueError(f"version is {shown(content.get('version'))}, expected {VERSIONS[kind]}")
    validation.check_names(content, ("format", "version", "sha256", *names), "the file")
    if content["sha256"] != found:
        raise ValueError(
            f"sha256 is {shown(content['sha256'])}, expected {found!r}: the file was changed or is "
            "not whole"
        )
    return content


def _checksum(content: Mapping[str, Any]) -> str:
    """Of everything but itself, however the file is laid out."""
    payload = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(
        json.dumps(payload, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def _text_of(path: Path) -> str:
    try:
        if not path.is_file():
            raise ValueError(f"{path} is no file")
        with path.open("rb") as file:
            data = file.read(SIZE_LIMIT + 1)
        if len(data) > SIZE_LIMIT:
            raise ValueError(f"{path} is larger than {SIZE_LIMIT >> 20} MiB")
        return data.decode("utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8: {error}") from None


def _write(path: Path, payload: Fields) -> None:
    """Replaces the file at once; lists have one record a line, for diffs."""
    head = {
        "format": payload["format"],
        "version": payload["version"],
        "sha256": _checksum(payload),
    }
    text = ",\n".join(
        f"{json.dumps(name)}: {_laid_out(value)}" for name, value in (head | payload).items()
    )
    with exports.replacing(path) as file:
        file.write(f"{{\n{text}\n}}\n".encode())


def _laid_out(value: object) -> str:
    if isinstance(value, dict) and "entries" in value:
        return (
            "{"
            + ", ".join(f"{json.dumps(name)}: {_laid_out(each)}" for name, each in value.items())
            + "}"
        )
    if not isinstance(value, list) or not value or not isinstance(value[0], dict | list):
        return json.dumps(value, separators=(",", ":") if isinstance(value, list) else None)
    return "[\n" + ",\n".join(map(_laid_out, value)) + "\n]"
