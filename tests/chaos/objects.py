"""The cache of compiled objects: processes fetch, evict, damage and are killed; none gets an
altered object.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import random
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outblas.core import cache

from .episode import Episode, Setting

NAME = "objects"
UNIT = "fetches"
TARGET = 20_000
EPISODE = 10_000
JOBS = 1  # episodes side by side
SECONDS = 12.0  # of an episode
LEAST_SECONDS = 1.5
PROCESSES = 5
KINDS = 24  # objects
LIMIT = 12_000  # bytes of objects that are kept: about half of them
PAUSE = (
    0.002  # seconds between two fetches of a process, so that two cores are not busy all the time
)


def episode(setting: Setting) -> Episode:
    found, numbers = Episode(), setting.random
    folder = setting.folder / "cache"
    seconds = max(LEAST_SECONDS, SECONDS * setting.units / EPISODE)
    given: dict[str, Any] = {"place": str(setting.folder), "seconds": seconds}
    environment = {"OUTBLAS_CACHE_DIR": str(folder)}

    def start() -> Any:
        arguments = given | {"seed": numbers.random()}
        return setting.nursery.start(
            "use_objects", arguments, environment=environment, folder=setting.folder
        )

    children = [start() for _ in range(PROCESSES)]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(numbers.uniform(0.05, 0.6))
        place = numbers.randrange(PROCESSES)
        if children[place].send(signal.SIGKILL):
            found.counts["processes killed"] += 1
        children[place].wait(10)
        children[place] = start()
    for child in children:
        if child.wait(SECONDS + 60) is None:
            found.fail("hangs", "a process that fetches does not end")
            child.send(signal.SIGKILL)
            child.wait(10)
        elif child.poll() != 0:
            found.fail("dies", f"status {child.poll()}: {child.said()[-300:]}")
    _check_left(setting, environment, found)
    tell_counted(setting.folder, found)
    return found


def _check_left(setting: Setting, environment: dict[str, str], found: Episode) -> None:
    """What lies in the cache after one more process has used it undisturbed, two days later."""
    before = time.time() - 2 * 86400
    for path in (setting.folder / "cache").rglob("*"):
        os.utime(path, (before, before), follow_symlinks=False)
    arguments = {"place": str(setting.folder), "seconds": 0.5, "seed": -1}
    setting.nursery.start(
        "use_objects", arguments, environment=environment, folder=setting.folder
    ).wait(60)
    scratch = [
        path
        for path in (setting.folder / "cache").rglob("*")
        if path.name.startswith((".new", ".tmp"))
    ]
    found.counts["scratch folders left"] += sum(path.is_dir() for path in scratch)
    if scratch:
        found.fail("scratch of killed processes is left", "folders of killed writers")


def tell_counted(folder: Path, found: Episode) -> None:
    """What the processes of an episode have fetched, and the problems that they have told."""
    counted = folder / "counted"
    found.units = counted.stat().st_size if counted.exists() else 0
    problems = folder / "problems"
    for line in problems.read_text().splitlines() if problems.exists() else []:
        promise, detail = json.loads(line)
        found.counts[promise] += 1
        found.fail(promise, detail)


# In the processes that are started.


def use_objects(place: str, seed: float, seconds: float) -> int:
    """Fetches random objects for so long, and damages or evicts some."""
    numbers, folder = random.Random(seed), Path(place)
    cache.SIZE_LIMIT = LIMIT
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            kind = numbers.randrange(KINDS)
            try:
                _act(numbers, folder, kind)
            except Exception as error:
                _tell(folder, "raises", f"{type(error).__name__}: {_general(str(error))}")
            for (
                each
            ) in caught:  # of damage a process may warn, and of what others removed it may not
                if "Errno" in str(each.message):
                    _tell(folder, "warns falsely", _general(str(each.message)))
            caught.clear()
            time.sleep(PAUSE * numbers.random())
    return 0


def _act(numbers: random.Random, folder: Path, kind: int) -> None:
    action = numbers.random()
    if action < 0.06:
        with _held(folder, kind, fcntl.LOCK_EX):
            _damage(numbers, kind)
    elif action < 0.1:
        cache.prune(cache.directory() / "objects", numbers.choice([0, LIMIT // 2]))
    else:
        with _held(folder, kind, fcntl.LOCK_SH):  # damage comes before or after, and never within
            found = cache.fetch(
                _facts(kind), build=lambda: _content(kind), save=_save, load=Path.read_bytes
            )
        _append(folder / "counted", b".")
        if found != _content(kind):
            whole = found in map(_content, range(KINDS))
            _tell(
                folder,
                "altered object loaded",
                "that of other facts" if whole else "with other bytes",
            )


def _facts(kind: int) -> dict[str, object]:
    return {"kernel": "chaos", "number": kind}


def _content(kind: int) -> bytes:
    return hashlib.sha256(str(kind).encode()).digest() * (8 + kind)


def _save(built: bytes, path: Path) -> None:
    """In two parts, so that a process can be killed between them."""
    with open(path, "wb", buffering=0) as file:
        file.write(built[: len(built) // 2])
        time.sleep(0.002)
        file.write(built[len(built) // 2 :])


def _damage(numbers: random.Random, kind: int) -> None:
    """Of an object or its record: bits flipped, cut off, removed, or the files of another object in
    place.
    """
    path = cache.directory() / "objects" / f"{cache.digest(_facts(kind))}.o"
    target = numbers.choice([path, path.with_suffix(".json")])
    other = target.with_name(cache.digest(_facts((kind + 1) % KINDS)) + target.suffix)
    with contextlib.suppress(OSError):
        match numbers.randrange(4):
            case 0:
                data = bytearray(target.read_bytes())
                if not data:  # another process cut it off, or writes it now
                    return
                data[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
                target.write_bytes(data)
            case 1:
                os.truncate(target, numbers.randrange(max(1, target.stat().st_size)))
            case 2:
                target.unlink()
            case 3:
                for suffix in (
                    ".o",
                    ".json",
                ):  # both: an object with its own record, under another name
                    target.with_suffix(suffix).write_bytes(other.with_suffix(suffix).read_bytes())


@contextlib.contextmanager
def _held(folder: Path, kind: int, how: int) -> Iterator[None]:
    file = os.open(folder / f"held-{kind}", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, how)
        yield
    finally:
        os.close(file)


def _general(message: str) -> str:
    """Without the names of files, so that equal warnings are counted together."""
    return " ".join("…" if "/" in word else word for word in message.split())


def _tell(folder: Path, promise: str, detail: str) -> None:
    _append(folder / "problems", json.dumps([promise, detail]).encode() + b"\n")


def _append(path: Path, data: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, data)
    finally:
        os.close(file)
