"""What befalls a store's files: seeded damage to their bytes, and to what SQLite has in them."""

import contextlib
import os
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path

PAGE = 4096
Damage = Callable[[random.Random, Path], None]


def _bytes(
    change: Callable[[random.Random, bytearray], bytes | bytearray], suffix: str = ""
) -> Damage:
    """Damage to the file's content, or to that of the file beside it with this suffix, if it is
    there.
    """

    def damage(numbers: random.Random, path: Path) -> None:
        target = path.with_name(path.name + suffix)
        if target.exists():
            changed = change(numbers, bytearray(target.read_bytes()))
            with open(
                target, "r+b"
            ) as file:  # in place, as a disk would: whoever has it open sees it
                file.write(changed)
                file.truncate(len(changed))

    return damage


def _flip(least: int, most: int) -> Callable[[random.Random, bytearray], bytearray]:
    def change(numbers: random.Random, data: bytearray) -> bytearray:
        for _ in range(numbers.randint(least, most)):
            if data:
                data[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
        return data

    return change


def _flip_header(numbers: random.Random, data: bytearray) -> bytearray:
    data[numbers.randrange(min(100, len(data)))] ^= numbers.randrange(1, 256)
    return data


def _half_header(numbers: random.Random, data: bytearray) -> bytearray:
    start = numbers.randrange(100)
    data[start:100] = bytes(100 - start)
    return data


def _cut(numbers: random.Random, data: bytearray) -> bytearray:
    return data[: numbers.randrange(len(data) + 1)]


def _cut_pages(numbers: random.Random, data: bytearray) -> bytearray:
    return data[: PAGE * numbers.randrange(1, max(2, len(data) // PAGE))]


def _page(numbers: random.Random, data: bytearray, first: int = 0) -> int:
    """Where a random page begins."""
    return PAGE * numbers.randrange(first, max(first + 1, len(data) // PAGE))


def _zero_page(numbers: random.Random, data: bytearray) -> bytearray:
    start = _page(numbers, data)
    data[start : start + PAGE] = bytes(PAGE)
    return data


def _duplicate_page(numbers: random.Random, data: bytearray) -> bytearray:
    source, target = _page(numbers, data, 1), _page(numbers, data, 1)
    data[target : target + PAGE] = data[source : source + PAGE]
    return data


def _swap_pages(numbers: random.Random, data: bytearray) -> bytearray:
    one, other = _page(numbers, data, 1), _page(numbers, data, 1)
    data[one : one + PAGE], data[other : other + PAGE] = (
        data[other : other + PAGE],
        data[one : one + PAGE],
    )
    return data


def _garbage(numbers: random.Random, data: bytearray) -> bytearray:
    start = numbers.randrange(len(data))
    length = min(len(data) - start, numbers.randrange(1, 4 * PAGE))
    data[start : start + length] = numbers.randbytes(length)
    return data


def _tail(numbers: random.Random, data: bytearray) -> bytearray:
    return data + numbers.randbytes(numbers.randrange(1, 3 * PAGE))


def _nothing_left(numbers: random.Random, data: bytearray) -> bytes:
    return numbers.choice(
        [b"", b"this is no database\n" * 100, bytes(len(data)), numbers.randbytes(len(data))]
    )


def _sql(*statements: str, schema: bool = False) -> Damage:
    """One of these statements, or with `schema` all of them on a schema that may be written."""

    def damage(numbers: random.Random, path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            if schema:
                connection.execute("PRAGMA writable_schema = ON")
            for statement in statements if schema else [numbers.choice(statements)]:
                with contextlib.suppress(
                    sqlite3.OperationalError
                ):  # a table that this version has not
                    connection.execute(statement)

    return damage


def _page_size(numbers: random.Random, path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute(f"PRAGMA page_size = {numbers.choice([512, 1024, 8192, 65536])}")
        connection.execute("VACUUM")


def _without_unique(numbers: random.Random, path: Path) -> None:
    """Tables that look alike and lack their indices."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE other AS SELECT * FROM trials")
        connection.execute("DROP TABLE trials")
        connection.execute("ALTER TABLE other RENAME TO trials")


def _remove(suffix: str) -> Damage:
    return lambda numbers, path: path.with_name(path.name + suffix).unlink(missing_ok=True)


def _foreign_log(numbers: random.Random, path: Path) -> None:
    """The log of another database, with other pages."""
    other = path.with_name("other.sqlite")
    with contextlib.closing(sqlite3.connect(other, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE trials (x, y)")
        connection.execute("INSERT INTO trials VALUES (1, 2)")
        for suffix in ("-wal", "-shm"):
            log = other.with_name(other.name + suffix)
            path.with_name(path.name + suffix).write_bytes(log.read_bytes())
    other.unlink()


def _swap_log_and_index(numbers: random.Random, path: Path) -> None:
    log, index = (path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))
    one, other = (file.read_bytes() if file.exists() else b"" for file in (log, index))
    log.write_bytes(other)
    index.write_bytes(one)


# Damage after which some records may be beyond recovery.
DAMAGES: dict[str, Damage] = {
    "a bit": _bytes(_flip(1, 1)),
    "some bits": _bytes(_flip(2, 64)),
    "a byte of the header": _bytes(_flip_header),
    "half a header": _bytes(_half_header),
    "cut off": _bytes(_cut),
    "pages cut off": _bytes(_cut_pages),
    "a page of zeros": _bytes(_zero_page),
    "a page twice": _bytes(_duplicate_page),
    "pages swapped": _bytes(_swap_pages),
    "garbage": _bytes(_garbage),
    "nothing left": _bytes(_nothing_left),
    "bits of the log": _bytes(_flip(1, 64), "-wal"),
    "log cut off": _bytes(_cut, "-wal"),
    "no log": _remove("-wal"),
    "log of another": _foreign_log,
    "log and index swapped": _swap_log_and_index,
    "a table dropped": _sql("DROP TABLE trials", "DROP TABLE winners", "DROP TABLE gpus"),
    "a column dropped": _sql(
        *(f"ALTER TABLE trials DROP COLUMN {name}" for name in ("status", "us", "reason"))
    ),
    "a table renamed": _sql("ALTER TABLE trials RENAME TO trial", "ALTER TABLE gpus RENAME TO gpu"),
    "rows spoilt": _sql(
        "UPDATE trials SET status = 'great' WHERE id % 3 = 0",
        "UPDATE trials SET us = 'fast' WHERE id % 3 = 0",
        "UPDATE trials SET reason = CAST(x'ff' AS TEXT) WHERE id % 3 = 0",
        "UPDATE winners SET finalists = '[[[[' WHERE id % 2 = 0",
        "UPDATE gpus SET sms = sms + 1",
        "DELETE FROM gpus",
    ),
    "wrong version": _sql(
        "PRAGMA user_version = 0", "PRAGMA user_version = 99", "PRAGMA user_version = -1"
    ),
    "another program's": _sql("PRAGMA application_id = 0", "PRAGMA application_id = 77"),
}
# Changes that take nothing away: every record has to be there afterwards.
HARMLESS: dict[str, Damage] = {
    "garbage after the end": _bytes(_tail),
    "no index of the log": _remove("-shm"),
    "garbage in the log's index": _bytes(_garbage, "-shm"),
    "a column added": _sql(
        "ALTER TABLE trials ADD COLUMN extra", "ALTER TABLE winners ADD COLUMN extra"
    ),
    "a table added": _sql("CREATE TABLE extra (x)"),
    "white space in the schema": _sql(
        "UPDATE sqlite_master SET sql = replace(sql, ', ', ' , ') WHERE type = 'table'", schema=True
    ),
    "another page size": _page_size,
    "no indices": _without_unique,
    "another journal": _sql("PRAGMA journal_mode = DELETE"),
}
ALL = DAMAGES | HARMLESS


def apply(kind: str, seed: str, path: Path) -> None:
    """Damages the store at `path`; the same seed does the same."""
    ALL[kind](random.Random(seed), path)


def header_changed(before: bytes, path: Path) -> bool:
    """Whether the file says another version or program, or is no database: such a file may be
    refused, and is left alone then.
    """
    after = path.read_bytes()[:100] if path.exists() else b""
    return any(before[part] != after[part] for part in (slice(16), slice(60, 64), slice(68, 72)))


def snapshot(folder: Path) -> dict[str, bytes]:
    """The files of a folder, but for what locks need."""
    return {
        name: (folder / name).read_bytes()
        for name in sorted(os.listdir(folder))
        if (folder / name).is_file() and not name.endswith(".lock")
    }
