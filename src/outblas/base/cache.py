"""The cache of compiled kernels on disk, which outlives the process.

The cache lies below `OUTBLAS_CACHE_DIR`, or below the user's cache directory where that is not set.
A kernel is a file in the folder `objects`, named by the digest of the facts that determine it: a
line of JSON with these facts and the checksum of the code, and then the code.

Kernels are native code: a user who can write a cache file can run code as the user who loads it.
Therefore

1. the folder must belong to this user, and no other user may be able to write in it or replace it
   (see `ownership`);
2. each file is checked after it was opened, on its own: a folder that is closed to others now may
   have been open earlier;
3. the facts must be those of the requested kernel, and the code must match its checksum;
4. the process loads the bytes that were checked, from memory, never the file itself, which may have
   been replaced since.

A file that fails any check is never loaded; the kernel is compiled again and replaces it. Where the
folder is unusable, the disk is full or anything else goes wrong, outblas works without the cache,
only slower. It warns once per reason.
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from outblas.base import compiling, ownership, pack
from outblas.base.facts import Facts
from outblas.base.facts import digest as digest
from outblas.base.facts import text as facts_text
from outblas.base.filesystems import network_filesystem as network_filesystem
from outblas.base.ownership import Untrusted, shown

if TYPE_CHECKING:
    from outblas.base.compile_worker import CompileKey

T = TypeVar("T")

SIZE_LIMIT = 1 << 30  # bytes of compiled kernels to keep; the oldest files are deleted first
LOCK_TIMEOUT = 300.0  # seconds to wait for another process that compiles the same kernel
LEFTOVER_SECONDS = 3600.0  # seconds; older folders that a killed process left behind are removed
LONGEST_PATH = 4000  # bytes of the directory's path; Linux allows 4095 with the file names
LONGEST_NAME = 255  # bytes of each part of the path

_SCRATCH = ".new-"  # prefix of the folders in which objects are written


def directory() -> Path:
    """Returns the path of the cache, whether or not it exists. Raises ValueError for a path that
    cannot exist on any system.
    """
    if chosen := os.environ.get("OUTBLAS_CACHE_DIR"):
        name, folder = "OUTBLAS_CACHE_DIR", os.path.expanduser(chosen)
    else:
        import platformdirs

        try:
            name, folder = "the user's cache directory", platformdirs.user_cache_dir("outblas")
        except RuntimeError as error:  # no home
            raise ValueError(f"OUTBLAS_CACHE_DIR is not set, and {error}") from None
    said = f"{name} is '{shown(folder)}'"
    if "\0" in folder:
        raise ValueError(f"{said}, expected a path without NUL characters")
    if folder.startswith("~"):  # expanduser leaves it where the user or the home does not exist
        raise ValueError(
            f"{said}, expected the home of a user who exists: set OUTBLAS_CACHE_DIR to a folder"
        )
    path = Path(folder).absolute()
    parts = [len(os.fsencode(part)) for part in path.parts]
    if max(parts) > LONGEST_NAME or len(os.fsencode(path)) > LONGEST_PATH:
        raise ValueError(
            f"{said} ({len(folder)} characters), expected at most {LONGEST_PATH} bytes, "
            f"{LONGEST_NAME} in each part"
        )
    return path


def unusable_reason(path: Path) -> str | None:
    """Returns why `path` cannot hold native code, or None where it can. Creates the folder and
    missing parents with mode 0700.
    """
    try:
        _usable(path)
    except OSError as error:
        return str(error)
    return None


def objects_folder() -> Path:
    """Returns the real path of the folder of compiled kernels. Raises OSError, with the reason,
    where it cannot be used.
    """
    try:
        folder = directory()
    except ValueError as error:
        raise OSError(str(error)) from None
    return _usable(_usable(folder) / "objects")


def _usable(path: Path) -> Path:
    """Returns the real path of a folder that can hold native code, and creates it where it is
    missing. Raises OSError with the reason where it cannot.
    """
    try:
        return ownership.own_folder(path)
    except Untrusted as refusal:
        # A folder that is closed now keeps what others put there, so it is not to be used again.
        raise OSError(f"{refusal}: set OUTBLAS_CACHE_DIR to a folder of your own") from None
    except (OSError, ValueError) as error:
        raise OSError(f"{shown(path)}: {getattr(error, 'strerror', None) or error}") from None


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"outblas keeps no compiled kernels: {reason}", stacklevel=4)


@functools.cache
def _warn_of_refusal(reason: str) -> None:
    warnings.warn(
        f"outblas does not load a compiled kernel, and compiles it again: {reason}", stacklevel=5
    )


def fetch(
    facts: Facts,
    *,
    build: Callable[[], T],
    save: Callable[[T, Path], None],
    load: Callable[[bytes], T],
    key: "CompileKey | None" = None,
) -> T:
    """Returns the object that `facts` determine: loads it from disk, or builds and saves it.

    A pack that has the object comes before the disk. When several processes want one object at the
    same time, one builds it while the others wait. `save(object, path)` writes `path`; `load(code)`
    takes what was written. A file that is damaged or cannot be trusted
    is built again. Raises CompileForbidden where it would be built, but OUTBLAS_COMPILE forbids it,
    and where calls do not wait for it (`compiling.defers`): the worker compiles what `key`
    identifies. Where the disk cannot keep it, they wait.
    """
    packed = _from_pack(facts, load)
    if packed is not None:
        return packed
    try:
        path = _path(facts)
    except OSError as error:
        _warn_once(str(error))
        compiling.check_allowed(facts.get("kernel"))
        return build()
    loaded = _loaded(path, facts, load)
    if loaded is not None:
        return loaded
    compiling.check_allowed(facts.get("kernel"))
    if key is not None and compiling.defers():
        from outblas.base import compile_worker  # imports much, and most processes need none

        compile_worker.request(key, path, ahead=compiling.is_ahead())
    with _locked(path):
        loaded = _loaded(path, facts, load)
        if loaded is not None:
            return loaded
        built = build()
        try:
            _write(path, facts, lambda target: save(built, target))
        except Exception as error:  # disk full, exporter failed, ...: the kernel itself is at hand
            _warn_once(f"{shown(path.parent)}: {error}")
            return built
        loaded = _loaded(path, facts, load)
        return built if loaded is None else loaded


def warm(facts: Facts, *, build: Callable[[], T], save: Callable[[T, Path], None]) -> None:
    """Makes sure that `fetch` will find the object on disk, without loading it. Raises OSError
    where it cannot be saved, and CompileForbidden where OUTBLAS_COMPILE forbids to build it.

    When several processes want one object at the same time, one builds it while the others wait.
    """
    path = _path(facts)
    if _checked(path, facts) is not None:
        return
    compiling.check_allowed(facts.get("kernel"))
    with _locked(path):
        if _checked(path, facts) is None:
            built = build()
            _write(path, facts, lambda target: save(built, target))


class Damaged(Exception):
    """The file of an object differs from what was written."""


def object_problem(path: Path) -> str | None:
    """Returns why the object at `path` (a `.o` file) would not be loaded, or None where it is
    sound.
    """
    try:
        _verified(path)
    except (Damaged, Untrusted, OSError) as error:
        return str(error)
    return None


def _path(facts: Facts) -> Path:
    """Returns where the object of these facts is kept. Raises OSError where the folder cannot be
    used.
    """
    return objects_folder() / f"{digest(facts)}.o"


def _from_pack(facts: Facts, load: Callable[[bytes], T]) -> T | None:
    """Returns an object from a pack, or None where no pack has it, or it cannot be loaded here."""
    code = pack.packed_code(facts)
    if code is None:
        return None
    try:
        return load(code)
    except Exception as error:
        pack.warn_once(f"a pack's kernel cannot be loaded here: {facts.get('kernel')}: {error}")
        return None


def packed_object(facts: Facts) -> bytes:
    """Returns the code of an object that `warm` has made sure of, to be packed. Raises OSError,
    Damaged or Untrusted where it is not there any more.
    """
    return _verified(_path(facts), facts)


def _loaded(path: Path, facts: Facts, load: Callable[[bytes], T]) -> T | None:
    """Returns the object at `path`, or None where it is absent, damaged, not to be trusted, or
    cannot be loaded here.
    """
    code = _checked(path, facts)
    if code is None:
        return None
    try:
        return load(code)
    except Exception as error:
        _warn_once(f"{shown(path)}: {error}")
        return None


def _checked(path: Path, facts: Facts) -> bytes | None:
    """Returns the code at `path` if it is the kernel that `facts` describe, else None. Warns where
    a file is present but cannot be trusted.
    """
    try:
        return _verified(path, facts)
    except Untrusted as refusal:
        _warn_of_refusal(str(refusal))
    except (Damaged, OSError):  # a faulty disk, or another process evicts the object
        pass
    return None


def _verified(path: Path, facts: Facts | None = None) -> bytes:
    """Returns the code at `path` after checking it against its record, and the record against
    `facts` if given.

    Raises Untrusted for files that somebody else may have written, Damaged for files that a faulty
    disk may have left, and OSError for missing ones.
    """
    line, _, code = ownership.read(path).partition(b"\n")
    try:
        record = json.loads(line)
        checksum = record.pop("sha256")
        named = digest(record)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged(f"{shown(path)} does not begin with the record of an object") from None
    if named != path.stem or (facts is not None and record != json.loads(facts_text(facts))):
        raise Untrusted(f"{shown(path)} has the record of another kernel")
    if checksum != hashlib.sha256(code).hexdigest():
        raise Damaged(f"{shown(path)} is not what its checksum says")
    return code


def _write(path: Path, facts: Facts, save: Callable[[Path], None]) -> None:
    """Writes an object, whole or not at all, and makes room for it."""
    scratch = tempfile.TemporaryDirectory(
        dir=path.parent, prefix=_SCRATCH, ignore_cleanup_errors=True
    )
    with scratch as folder:
        target = Path(folder) / path.name
        save(target)
        code = target.read_bytes()
        record = {**facts, "sha256": hashlib.sha256(code).hexdigest()}
        whole = target.with_suffix(".whole")
        whole.write_bytes(facts_text(record).encode() + b"\n" + code)
        whole.chmod(0o600)  # the umask may have given another mode
        os.replace(whole, path)
    prune(path.parent, keep=path)


@dataclass(frozen=True)
class Entry:
    """A file or folder in the folder of compiled kernels, with its size in bytes and its
    modification time in seconds.
    """

    path: Path
    size: int
    written: float


def objects(folder: Path) -> list[Entry]:
    """Returns the compiled kernels in a folder, newest first; an empty list where the folder does
    not exist.
    """
    entries = [entry for entry in _entries(folder) if entry.path.suffix == ".o"]
    return sorted(entries, key=lambda entry: (entry.written, entry.path.name), reverse=True)


def _entries(folder: Path) -> Iterator[Entry]:
    """Lists a folder; skips entries that other processes remove meanwhile."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                yield Entry(path, status.st_size, status.st_mtime)


def prune(folder: Path, limit: int = SIZE_LIMIT, keep: Path | None = None) -> None:
    """Deletes the oldest objects until the rest takes at most `limit` bytes, and what killed
    processes left long ago.

    The object `keep` is never deleted. Any number of processes may prune while others read and
    write.
    """
    total = 0
    for entry in objects(folder):
        total += entry.size
        if total > limit and entry.path != keep:
            with contextlib.suppress(OSError):  # another process may have removed it already
                entry.path.unlink()
    for entry in _entries(folder):
        age = abs(time.time() - entry.written)
        if entry.path.name.startswith(_SCRATCH) and age > LEFTOVER_SECONDS:
            shutil.rmtree(entry.path, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of an object. Continues without it where the system has no locks, or where the
    holder takes longer than `LOCK_TIMEOUT`. The lock of a process that is killed is free at once.

    There are 4096 lock files at most, which stay: to remove one while others wait for it would let
    two in.
    """
    import filelock

    lock = filelock.FileLock(path.with_name(f"{path.name[:3]}.lock"), timeout=LOCK_TIMEOUT)
    try:
        lock.acquire()
    # Callers may turn filelock's warnings into errors.
    except (OSError, NotImplementedError, Warning):
        yield
        return
    try:
        yield
    finally:
        lock.release()
