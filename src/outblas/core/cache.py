"""Files that outlive the process: compiled kernels.

Everything lies below `OUTBLAS_CACHE_DIR`, or else the user's cache directory. A kernel is two files
in the folder `objects`, named by the digest of what it depends on: the code (`.o`) and a record
(`.json`) of those facts with the code's checksum.

Kernels are native code: whoever can write one runs code as whoever loads it. So

1. the folder must be this user's own, and nobody else may be able to write in it or replace it
(`ownership`); 2. each file is judged by itself, once it is open: a folder that is closed to others
now may have been open before; 3. the record must be that of the kernel asked for, and the code what
the record's checksum says; 4. what is loaded is a private copy of the bytes that were checked, and
not the file, which may be another by then.

What fails any of these is never loaded. The kernel is compiled again and takes its place; where the
folder is unusable, the disk is full or anything else goes wrong, the cache costs speed only. Each
reason is told once.
"""

import contextlib
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
from typing import Any, TypeVar

from . import ownership
from .filesystems import network_filesystem as network_filesystem
from .ownership import Refused, shown

T = TypeVar("T")

SIZE_LIMIT = 1 << 30  # bytes of compiled kernels kept; the least recently written go first
LOCK_TIMEOUT = 300.0  # seconds to wait for another process that compiles the same kernel
LEFTOVER_SECONDS = 3600.0  # the age from which what a killed process left behind is removed
LONGEST_PATH = 4000  # bytes of the cache directory; Linux takes 4095, with the names of files in it
LONGEST_NAME = 255  # bytes of each of its parts

_SCRATCH = ".new-"  # begins the names of folders in which objects are written
_OWNER = "owner.lock"  # in such a folder, and locked by the process that writes there


def directory() -> Path:
    """Where the cache lies, whether or not it exists. Raises ValueError for a place that no system
    has.
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
    if folder.startswith("~"):  # which stays where there is no such user, or no home
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
    """Why `path` cannot hold native code, or None. Creates it, and parents that are missing, with
    mode 0700.
    """
    try:
        _usable(path)
    except OSError as error:
        return str(error)
    return None


def objects_folder() -> Path:
    """The folder of compiled kernels, by its real path. Raises OSError, with the reason, where
    there can be none.
    """
    try:
        folder = directory()
    except ValueError as error:
        raise OSError(str(error)) from None
    return _usable(_usable(folder) / "objects")


def _usable(path: Path) -> Path:
    """The real path of a folder that can hold native code, made where it is missing. Raises OSError
    with the reason.
    """
    try:
        return ownership.own_folder(path)
    except ownership.RefusedFolder as refusal:
        raise OSError(f"{refusal}: {_advice(path, refusal.part)}") from None
    except (OSError, ValueError) as error:
        raise OSError(f"{shown(path)}: {getattr(error, 'strerror', None) or error}") from None


def _advice(path: Path, part: Path) -> str:
    """What to do where a folder on the path of the cache cannot be trusted.

    It is not to change the mode alone: what others have put there would stay. Nor is it to remove
    what may be more than a cache: a folder of the system, a home, or a parent.
    """
    elsewhere = "set OUTBLAS_CACHE_DIR to a folder of your own"
    try:
        status, home = part.lstat(), Path.home().resolve()
    except (OSError, RuntimeError):  # without a home
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


def digest(facts: dict[str, object]) -> str:
    """A file name for what `facts` determine."""
    return hashlib.sha256(_text(facts).encode()).hexdigest()[:32]


def _text(facts: dict[str, object]) -> str:
    return json.dumps(facts, sort_keys=True, default=str)


def fetch(
    facts: dict[str, object],
    *,
    build: Callable[[], T],
    save: Callable[[T, Path], None],
    load: Callable[[Path], T],
) -> T:
    """The object that `facts` determine: loaded from disk, or built, saved and returned.

    Of several processes that want one object at once, one builds it while the others wait.
    `save(object, path)` writes `path`; `load(path)` reads it, and is given a copy that is gone
    afterwards. A file that is damaged or not to be trusted is built anew.
    """
    try:
        path = objects_folder() / f"{digest(facts)}.o"
    except OSError as error:
        _warn_once(str(error))
        return build()
    found = _loaded(path, facts, load)
    if found is not None:
        return found
    with locked(path.with_suffix(".lock"), remove=True):
        found = _loaded(path, facts, load)
        if found is not None:
            return found
        built = build()
        try:
            _write(path, facts, lambda target: save(built, target))
            prune(path.parent, keep=path)
        except Exception as error:  # whatever the disk or the exporter says: the kernel is at hand
            _warn_once(f"{shown(path.parent)}: {error}")
            return built
        saved = _loaded(path, facts, load)
        return built if saved is None else saved


def warm(
    facts: dict[str, object], *, build: Callable[[], T], save: Callable[[T, Path], None]
) -> None:
    """Sees to it that `fetch` will find the object on disk, and loads nothing. Raises OSError where
    it cannot be kept.

    Of several processes that want one object at once, one builds it while the others wait.
    """
    path = objects_folder() / f"{digest(facts)}.o"
    if _checked(path, facts) is not None:
        return
    with locked(path.with_suffix(".lock"), remove=True):
        if _checked(path, facts) is None:
            built = build()
            _write(path, facts, lambda target: save(built, target))
            prune(path.parent, keep=path)


class Damaged(Exception):
    """An object whose files are not what was written."""


def object_problem(path: Path) -> str | None:
    """What is wrong with the object at `path`, a `.o` file: why nothing would load it. None where
    it is sound.
    """
    try:
        _verified(path)
    except (Damaged, Refused, OSError) as error:
        return str(error)
    return None


def _loaded(path: Path, facts: dict[str, object], load: Callable[[Path], T]) -> T | None:
    """The object at `path`; None when it is absent, damaged, not to be trusted, or cannot be loaded
    here.
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
    """The code at `path` if it is what `facts` ask for. None where it is absent or damaged, or,
    with a warning, where it is not to be trusted.
    """
    try:
        return _verified(path, facts)
    except Refused as refusal:
        _warn_of_refusal(str(refusal))
    except (Damaged, OSError):  # a write that was cut off, or another process that evicts
        pass
    return None


def _verified(path: Path, facts: dict[str, object] | None = None) -> bytes:
    """The code at `path`: what its record says, and what `facts` ask for if they are given.

    Raises Refused for what somebody else may have put there, Damaged for what a write or a disk may
    have left so, and OSError for what is not there.
    """
    try:
        record = json.loads(ownership.read(path.with_suffix(".json")))
        checksum = record.pop("sha256")
        named = digest(record)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged(f"{shown(path.with_suffix('.json'))} is no record of an object") from None
    if named != path.stem or (facts is not None and record != json.loads(_text(facts))):
        raise Refused(f"{shown(path.with_suffix('.json'))} is the record of another kernel")
    code = ownership.read(path)
    if checksum != hashlib.sha256(code).hexdigest():
        raise Damaged(f"{shown(path)} is not what its checksum says")
    return code


@contextlib.contextmanager
def _copied(code: bytes, folder: Path) -> Iterator[Path]:
    """A file with this content that no other process can reach by name; where there can be none,
    one in `folder`.
    """
    with contextlib.ExitStack() as stack:
        path = None
        with contextlib.suppress(
            OSError, AttributeError
        ):  # not every system has them, or lets them be made
            memory = stack.enter_context(open(os.memfd_create("outblas"), "wb", buffering=0))
            path = Path(f"/proc/self/fd/{memory.fileno()}")
            _write_all(memory.fileno(), code)
        if path is None or not os.path.exists(
            path
        ):  # /proc is not everywhere, nor open to who has changed its user
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
    """Writes the object, then its record: a reader that finds the record finds the object it
    describes.
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
            file.chmod(0o600)  # whatever the umask is
        os.replace(target, path)
        os.replace(note, path.with_suffix(".json"))


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder of this process alone, removed afterwards. While the process lives it holds a lock
    there, so that others can tell what a killed process has left.
    """
    made = tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH, ignore_cleanup_errors=True)
    with made as name, locked(Path(name) / _OWNER):
        yield Path(name)


@dataclass(frozen=True)
class Entry:
    """A file or folder in the folder of compiled kernels: its bytes, and when it was written, in
    seconds.
    """

    path: Path
    size: int
    written: float


def objects(folder: Path) -> list[Entry]:
    """The compiled kernels in a folder, the latest first; none where there is no such folder."""
    found = [entry for entry in _entries(folder) if entry.path.suffix == ".o"]
    return sorted(found, key=lambda entry: (entry.written, entry.path.name), reverse=True)


def _entries(folder: Path) -> list[Entry]:
    """What is in a folder, without what other processes remove meanwhile."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                found.append(Entry(path, status.st_size, status.st_mtime))
    return found


def prune(folder: Path, limit: int = SIZE_LIMIT, keep: Path | None = None) -> None:
    """Deletes the oldest objects until what is left takes at most `limit` bytes, and what killed
    processes left behind.

    `keep` stays. Any number of processes may do this while others read and write.
    """
    total = 0
    for entry in objects(folder):
        total += entry.size
        if total > limit and entry.path != keep:
            _remove(entry.path)
            _remove(entry.path.with_suffix(".json"))
    _remove_leftovers(folder)


def _remove_leftovers(folder: Path) -> None:
    """Removes folders in which processes were killed that wrote there, records without an object,
    and lock files that nobody holds, if they are old.
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
    """Removes what a killed process left; nothing while that process lives, which holds a lock
    there.
    """
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
    except OSError:  # there are no locks here: the age decides
        return False


def _remove(path: Path) -> None:
    """Removes a file, if that can be done: another process may have, and somebody may have put a
    folder there.
    """
    with contextlib.suppress(OSError):
        path.unlink()


@contextlib.contextmanager
def locked(
    path: Path, timeout: float = LOCK_TIMEOUT, *, remove: bool = False, required: bool = False
) -> Iterator[None]:
    """Holds a file lock; goes on without one where locks cannot be had or their holder takes too
    long (seconds).

    With `required` it raises instead: TimeoutError for a lock that is held, other kinds of OSError
    where there are no locks. `remove` removes the file afterwards, for locks of which there are
    many; who waits for it makes another.
    """
    import filelock

    lock = filelock.FileLock(path, timeout=timeout)
    try:
        lock.acquire()
    except (
        OSError,
        NotImplementedError,
        Warning,
    ) as error:  # a warning, where the caller makes errors of them
        if remove and not isinstance(error, TimeoutError):  # nobody can hold it
            _remove(path)
        if required:
            raise error if isinstance(error, OSError) else OSError(str(error)) from None
        yield
        return
    try:
        yield
    finally:
        if remove and not isinstance(lock, filelock.SoftFileLock):  # which removes its own
            _remove(
                path
            )  # while it is held: who has opened it sees that it is gone, and begins anew
        lock.release()
