"""The cache of compiled kernels on disk, which outlives the process.

The cache lies below `OUTBLAS_CACHE_DIR`, or below the user's cache directory where that is not set.
A kernel is two files in the folder `objects`, named by the digest of the facts that determine it:
the code (`.o`) and a record (`.json`) of those facts with the checksum of the code.

Kernels are native code: a user who can write a cache file can run code as the user who loads it.
Therefore

1. the folder must belong to this user, and no other user may be able to write in it or replace it
   (see `ownership`);
2. each file is checked after it was opened, on its own: a folder that is closed to others now may
   have been open earlier;
3. the record must be the record of the requested kernel, and the code must match its checksum;
4. the process loads a private copy of the bytes that were checked, never the file itself, which may
   have been replaced since.

A file that fails any check is never loaded; the kernel is compiled again and replaces it. Where the
folder is unusable, the disk is full or anything else goes wrong, outblas works without the cache,
only slower. It warns once per reason.
"""

import contextlib
import errno
import functools
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from outblas.base import compiling, ownership, pack
from outblas.base.facts import digest as digest
from outblas.base.facts import text as facts_text
from outblas.base.filesystems import network_filesystem as network_filesystem
from outblas.base.ownership import Refused, shown

if TYPE_CHECKING:
    import filelock

T = TypeVar("T")

SIZE_LIMIT = 1 << 30  # bytes of compiled kernels to keep; the oldest files are deleted first
LOCK_TIMEOUT = 300.0  # seconds to wait for another process that compiles the same kernel
LEFTOVER_SECONDS = 3600.0  # seconds; older files that a killed process left behind are removed
LONGEST_PATH = 4000  # bytes of the directory's path; Linux allows 4095 with the file names
LONGEST_NAME = 255  # bytes of each part of the path

_SCRATCH = ".new-"  # prefix of the folders in which objects are written
_OWNER = "owner.lock"  # in each of those folders, locked by the process that writes there


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
    except ownership.RefusedFolder as refusal:
        raise OSError(f"{refusal}: {_advice(path, refusal.part)}") from None
    except (OSError, ValueError) as error:
        raise OSError(f"{shown(path)}: {getattr(error, 'strerror', None) or error}") from None


def _advice(path: Path, part: Path) -> str:
    """Returns what the user can do about a folder on the cache's path that cannot be trusted.

    The advice is never to change the mode alone, because files that others put there would stay.
    Nor does it advise to remove anything that may be more than a cache: a system folder, a home or
    a parent of one.
    """
    elsewhere = "set OUTBLAS_CACHE_DIR to a folder of your own"
    try:
        status, home = part.lstat(), Path.home().resolve()
    except (OSError, RuntimeError):  # there is no home
        return elsewhere
    ours = (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == getattr(os, "geteuid", lambda: status.st_uid)()
    )
    shared = (
        status.st_mode & stat.S_ISVTX
        or os.path.ismount(part)
        or part == home
        or part in home.parents
    )
    if ours and not shared and part == Path(os.path.realpath(path)):
        return f"remove {shown(path)} with all that others may have put there, or {elsewhere}"
    return elsewhere


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"outblas keeps no compiled kernels: {reason}", stacklevel=4)


@functools.cache
def _warn_of_refusal(reason: str) -> None:
    warnings.warn(
        f"outblas does not load a compiled kernel, and compiles it again: {reason}", stacklevel=5
    )


def fetch(
    facts: dict[str, object],
    *,
    build: Callable[[], T],
    save: Callable[[T, Path], None],
    load: Callable[[Path], T],
) -> T:
    """Returns the object that `facts` determine: loads it from disk, or builds and saves it.

    A pack that has the object comes before the disk. When several processes want one object at the
    same time, one builds it while the others wait. `save(object, path)` writes `path`; `load(path)`
    reads a temporary copy, which is deleted afterwards. A file that is damaged or cannot be trusted
    is built again. Raises CompileForbidden where it would be built, but OUTBLAS_COMPILE forbids it.
    """
    packed = _from_pack(facts, load)
    if packed is not None:
        return packed
    try:
        path = objects_folder() / f"{digest(facts)}.o"
    except OSError as error:
        _warn_once(str(error))
        compiling.check_allowed(facts.get("kernel"))
        return build()
    found = _loaded(path, facts, load)
    if found is not None:
        return found
    compiling.check_allowed(facts.get("kernel"))
    with locked(path.with_suffix(".lock"), remove=True):
        found = _loaded(path, facts, load)
        if found is not None:
            return found
        built = build()
        try:
            _write(path, facts, lambda target: save(built, target))
            prune(path.parent, keep=path)
        except Exception as error:  # disk full, exporter failed, ...: the kernel itself is at hand
            _warn_once(f"{shown(path.parent)}: {error}")
            return built
        saved = _loaded(path, facts, load)
        return built if saved is None else saved


def warm(
    facts: dict[str, object], *, build: Callable[[], T], save: Callable[[T, Path], None]
) -> None:
    """Makes sure that `fetch` will find the object on disk, without loading it. Raises OSError
    where it cannot be saved, and CompileForbidden where OUTBLAS_COMPILE forbids to build it.

    When several processes want one object at the same time, one builds it while the others wait.
    """
    path = objects_folder() / f"{digest(facts)}.o"
    if _checked(path, facts) is not None:
        return
    compiling.check_allowed(facts.get("kernel"))
    with locked(path.with_suffix(".lock"), remove=True):
        if _checked(path, facts) is None:
            built = build()
            _write(path, facts, lambda target: save(built, target))
            prune(path.parent, keep=path)


class Damaged(Exception):
    """The files of an object differ from what was written."""


def object_problem(path: Path) -> str | None:
    """Returns why the object at `path` (a `.o` file) would not be loaded, or None where it is
    sound.
    """
    try:
        _verified(path)
    except (Damaged, Refused, OSError) as error:
        return str(error)
    return None


def _from_pack(facts: dict[str, object], load: Callable[[Path], T]) -> T | None:
    """Returns an object from a pack, or None where no pack has it, or it cannot be loaded here."""
    code = pack.packed_code(facts)
    if code is None:
        return None
    try:
        with _copied(code) as copy:
            return load(copy)
    except Exception as error:
        pack.warn_once(f"a pack's kernel cannot be loaded here: {facts.get('kernel')}: {error}")
        return None


def packed_object(facts: dict[str, object]) -> bytes:
    """Returns the code of an object that `warm` has made sure of, to be packed. Raises OSError,
    Damaged or Refused where it is not there any more.
    """
    return _verified(objects_folder() / f"{digest(facts)}.o", facts)


def _loaded(path: Path, facts: dict[str, object], load: Callable[[Path], T]) -> T | None:
    """Returns the object at `path`, or None where it is absent, damaged, not to be trusted, or
    cannot be loaded here.
    """
    code = _checked(path, facts)
    if code is None:
        return None
    try:
        with _copied(code, path.parent) as copy:
            return load(copy)
    except Exception as error:
        _warn_once(f"{shown(path)}: {error}")
        return None


def _checked(path: Path, facts: dict[str, object]) -> bytes | None:
    """Returns the code at `path` if it is the kernel that `facts` describe, else None. Warns where
    a file is present but cannot be trusted.
    """
    try:
        return _verified(path, facts)
    except Refused as refusal:
        _warn_of_refusal(str(refusal))
    except (Damaged, OSError):  # a write was cut off, or another process evicts the object
        pass
    return None


def _verified(path: Path, facts: dict[str, object] | None = None) -> bytes:
    """Returns the code at `path` after checking it against its record, and the record against
    `facts` if given.

    Raises Refused for files that somebody else may have written, Damaged for files that an
    interrupted write or a faulty disk may have left, and OSError for missing ones.
    """
    try:
        record = json.loads(ownership.read(path.with_suffix(".json")))
        checksum = record.pop("sha256")
        named = digest(record)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged(
            f"{shown(path.with_suffix('.json'))} is not the record of an object"
        ) from None
    if named != path.stem or (facts is not None and record != json.loads(facts_text(facts))):
        raise Refused(f"{shown(path.with_suffix('.json'))} is the record of another kernel")
    code = ownership.read(path)
    if checksum != hashlib.sha256(code).hexdigest():
        raise Damaged(f"{shown(path)} is not what its checksum says")
    return code


@contextlib.contextmanager
def _copied(code: bytes, folder: Path | None = None) -> Iterator[Path]:
    """Yields the path of a file with this content that no other process can reach by name. Where
    the system has no such files, yields a temporary file in `folder`, by default the system's
    folder of temporary files.
    """
    with contextlib.ExitStack() as stack:
        path = None
        # memfd_create may be missing, or not permitted.
        with contextlib.suppress(OSError, AttributeError):
            memory = stack.enter_context(open(os.memfd_create("outblas"), "wb", buffering=0))
            path = Path(f"/proc/self/fd/{memory.fileno()}")
            _write_all(memory.fileno(), code)
        # /proc may be missing, or unreadable after a change of user.
        if path is None or not os.path.exists(path):
            file = stack.enter_context(tempfile.NamedTemporaryFile(dir=folder, prefix=_SCRATCH))
            file.write(code)
            file.flush()
            path = Path(file.name)
        yield path


def _write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def _write(path: Path, facts: dict[str, object], save: Callable[[Path], None]) -> None:
    """Writes the object before its record, so that a reader who finds the record also finds the
    object that it describes.
    """
    with _scratch(path.parent) as scratch:
        target = scratch / path.name
        save(target)
        record: dict[str, Any] = {
            **facts,
            "sha256": hashlib.sha256(target.read_bytes()).hexdigest(),
        }
        note = target.with_suffix(".json")
        note.write_text(json.dumps(record, sort_keys=True, default=str, indent=1))
        for file in (target, note):
            file.chmod(0o600)  # the umask may have given other modes
        os.replace(target, path)
        os.replace(note, path.with_suffix(".json"))


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Yields a folder that only this process uses, and removes it afterwards. The process holds a
    lock in the folder while it lives, so that others can recognise the folders that killed
    processes left.
    """
    made = tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH, ignore_cleanup_errors=True)
    with made as name, locked(Path(name) / _OWNER):
        yield Path(name)


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
    found = [entry for entry in _entries(folder) if entry.path.suffix == ".o"]
    return sorted(found, key=lambda entry: (entry.written, entry.path.name), reverse=True)


def _entries(folder: Path) -> list[Entry]:
    """Lists a folder; skips entries that other processes remove meanwhile."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                found.append(Entry(path, status.st_size, status.st_mtime))
    return found


def prune(folder: Path, limit: int = SIZE_LIMIT, keep: Path | None = None) -> None:
    """Deletes the oldest objects until the rest takes at most `limit` bytes, then the leftovers of
    killed processes.

    The object `keep` is never deleted. Any number of processes may prune while others read and
    write.
    """
    total = 0
    for entry in objects(folder):
        total += entry.size
        if total > limit and entry.path != keep:
            _remove(entry.path)
            _remove(entry.path.with_suffix(".json"))
    _remove_leftovers(folder)


def _remove_leftovers(folder: Path) -> None:
    """Removes what killed processes left, if it is old: their scratch folders, records without an
    object, and lock files that nobody holds.
    """
    for entry in _entries(folder):
        if abs(time.time() - entry.written) < LEFTOVER_SECONDS:
            continue
        if entry.path.name.startswith(_SCRATCH):
            _remove_scratch(entry.path)
        elif entry.path.suffix == ".lock":
            _remove_lock(entry.path)
        elif entry.path.suffix == ".json" and not os.path.lexists(entry.path.with_suffix(".o")):
            _remove(entry.path)


def _remove_scratch(path: Path) -> None:
    """Removes a scratch folder, unless the process that created it still holds its lock."""
    if path.is_symlink() or not path.is_dir():
        _remove(path)
        return
    if _is_held(path / _OWNER):
        return
    shutil.rmtree(path, ignore_errors=True)


def _remove_lock(path: Path) -> None:
    with contextlib.suppress(OSError), locked(path, 0, remove=True, required=True):
        pass


def _is_held(path: Path) -> bool:
    """Whether a process holds a lock file."""
    try:
        with locked(path, 0, required=True):
            return False
    except TimeoutError:
        return True
    except OSError:  # no locks on this file system: the age alone decides
        return False


def _remove(path: Path) -> None:
    """Removes a file if possible: another process may have removed it already, and somebody may
    have put a folder in its place.
    """
    with contextlib.suppress(OSError):
        path.unlink()


@contextlib.contextmanager
def locked(
    path: Path, timeout: float | None = None, *, remove: bool = False, required: bool = False
) -> Iterator[None]:
    """Holds a file lock. Continues without it where the system has no locks, or where the holder
    takes longer than `timeout` seconds, by default `LOCK_TIMEOUT`. The lock of a process that is
    killed is free at once.

    With `required`, raises instead: TimeoutError for a lock that is held, another OSError where
    there are no locks. With `remove`, deletes the lock file afterwards (use it where there are many
    lock files); a process that waited for the lock then creates a new file.
    """
    import filelock

    lock = filelock.FileLock(path, timeout=LOCK_TIMEOUT if timeout is None else timeout)
    try:
        _acquire(lock, path)
    # Callers may turn filelock's warnings into errors.
    except (OSError, NotImplementedError, Warning) as error:
        if remove and not isinstance(error, TimeoutError):  # nobody can hold it
            _remove(path)
        if required:
            raise error if isinstance(error, OSError) else OSError(str(error)) from None
        yield
        return
    try:
        yield
    finally:
        if remove and not isinstance(lock, filelock.SoftFileLock):  # which removes its own file
            # Removed while held: a process that waits for this file sees that it is gone and
            # makes another.
            _remove(path)
        lock.release()


def _acquire(lock: "filelock.BaseFileLock", path: Path) -> None:
    """Acquires a lock. Raises FileNotFoundError in a folder that takes no files, such as /proc,
    where filelock tries again until its time is over.
    """
    for _ in range(5):
        try:
            lock.acquire(timeout=0)
            return
        except TimeoutError:
            if os.path.lexists(path):  # another process holds it
                lock.acquire()
                return
    raise FileNotFoundError(errno.ENOENT, "no file can be made there", str(path))
