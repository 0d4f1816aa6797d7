"""Files that outlive the process: compiled kernels now, tuning results later.

Everything lies below `OUTBLAS_CACHE_DIR`, or else the user's cache directory. Kernels are native code, so the directory
must belong to the user and be closed to others' writing; if it is not, or cannot be written, or the disk is full, the
cache costs speed only: callers compile again.
"""

import contextlib
import functools
import hashlib
import json
import os
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

SIZE_LIMIT = 1 << 30  # bytes of compiled kernels kept; the least recently written go first
LOCK_TIMEOUT = 300.0  # seconds to wait for another process that compiles the same kernel


def directory() -> Path:
    """Where the cache lies, whether or not it exists."""
    if chosen := os.environ.get("OUTBLAS_CACHE_DIR"):
        return Path(os.path.expanduser(chosen)).absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("outblas")).absolute()


def unusable_reason(path: Path) -> str | None:
    """Why `path` cannot hold the cache, or None. Creates it, and parents that are missing, with mode 0700."""
    try:
        for folder in (*reversed(path.parents), path):
            if not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
            mode = folder.stat().st_mode
            if mode & (stat.S_IWGRP | stat.S_IWOTH) and not (mode & stat.S_ISVTX and folder != path):
                return f"{folder} can be written by others (chmod 700 it)"
        status = path.stat()
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not stat.S_ISDIR(status.st_mode):
        return f"{path} is no directory"
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        return f"{path} belongs to another user"
    return None


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"outblas keeps no compiled kernels: {reason}", stacklevel=4)


def digest(facts: dict[str, object]) -> str:
    """A file name for what `facts` determine."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def fetch(
    facts: dict[str, object], *, build: Callable[[], T], save: Callable[[T, Path], None], load: Callable[[Path], T]
) -> T:
    """The object that `facts` determine: loaded from disk, or built, saved and returned.

    Of several processes that want one object at once, one builds it while the others wait. `save(object, path)` writes
    `path`; `load(path)` reads it. A file whose checksum does not match is built anew.
    """
    folder = directory() / "objects"
    if reason := unusable_reason(folder.parent) or unusable_reason(folder):
        _warn_once(reason)
        return build()
    path = folder / f"{digest(facts)}.o"
    found = _read(path, load)
    if found is not None:
        return found
    with locked(path.with_suffix(".lock")):
        found = _read(path, load)
        if found is not None:
            return found
        built = build()
        try:
            _write(path, facts, lambda target: save(built, target))
            prune(folder, keep=path)
        except Exception as error:  # whatever the disk or the exporter says: the kernel is at hand
            _warn_once(f"{folder}: {error}")
            return built
        saved = _read(path, load)
        return built if saved is None else saved


def warm(facts: dict[str, object], *, build: Callable[[], T], save: Callable[[T, Path], None]) -> None:
    """Sees to it that `fetch` will find the object on disk, and loads nothing. Raises OSError where it cannot be kept.

    Of several processes that want one object at once, one builds it while the others wait.
    """
    folder = directory() / "objects"
    if reason := unusable_reason(folder.parent) or unusable_reason(folder):
        raise OSError(reason)
    path = folder / f"{digest(facts)}.o"
    if _intact(path):
        return
    with locked(path.with_suffix(".lock")):
        if not _intact(path):
            built = build()
            _write(path, facts, lambda target: save(built, target))
            prune(folder, keep=path)


def _read(path: Path, load: Callable[[Path], T]) -> T | None:
    """The object at `path`, None when it is absent or damaged or cannot be loaded here (it is built anew then)."""
    if not _intact(path):
        return None
    try:
        return load(path)
    except Exception as error:
        _warn_once(f"{path}: {error}")
        return None


def prune(folder: Path, limit: int = SIZE_LIMIT, keep: Path | None = None) -> None:
    """Deletes the oldest objects until what is left takes at most `limit` bytes; `keep` stays."""
    objects = sorted(((p.stat().st_mtime, p.stat().st_size, p) for p in folder.glob("*.o")), reverse=True)
    total = 0
    for _, size, path in objects:
        total += size
        if total > limit and path != keep:
            path.unlink(missing_ok=True)
            path.with_suffix(".json").unlink(missing_ok=True)


def _intact(path: Path) -> bool:
    try:
        record = json.loads(path.with_suffix(".json").read_text())
        return bool(record["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write(path: Path, facts: dict[str, object], save: Callable[[Path], None]) -> None:
    """Writes the object, then its record: a reader that finds the record finds the object it describes."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as scratch:
        target = Path(scratch) / path.name
        save(target)
        record = {"sha256": hashlib.sha256(target.read_bytes()).hexdigest(), **facts}
        note = target.with_suffix(".json")
        note.write_text(json.dumps(record, sort_keys=True, default=str, indent=1))
        os.replace(target, path)
        os.replace(note, path.with_suffix(".json"))


@contextlib.contextmanager
def locked(path: Path, timeout: float = LOCK_TIMEOUT) -> Iterator[None]:
    """Holds a file lock; goes on without one where locks cannot be had or their holder takes too long (seconds)."""
    import filelock

    lock = filelock.FileLock(path, timeout=timeout)
    try:
        lock.acquire()
    except (OSError, filelock.Timeout):
        yield
        return
    try:
        yield
    finally:
        lock.release()
