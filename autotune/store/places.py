"""Where a store's file may be, and where its results go when it cannot be written."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...core.filesystems import network_filesystem
from . import exports
from .records import BestConfig, Trial
from .sqlite import StoreError


def unusable_reason(path: Path, *, create: bool = True) -> str | None:
    """Returns why a store cannot be at `path`, or None. With `create`, makes missing folders with
    mode 0700; without it, a store that does not exist is fine.

    A store contains no native code, and each row is checked when it is read. Members of a group may
    therefore share a store in a folder that all of them can write. Where any user can write, one
    could replace the file.
    """
    folder = Path(os.path.realpath(path.parent))
    try:
        for each in (*reversed(folder.parents), folder):
            if create and not each.exists():
                each.mkdir(mode=0o700, exist_ok=True)
            mode = each.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                return f"{each} can be written by others"
            if not stat.S_ISDIR(mode):
                return f"{each} is not a directory"
        if mode & stat.S_IWOTH and _of_another_user(path):
            return f"{path} belongs to another user, in a folder that can be written by others"
    except OSError as error:
        missing = isinstance(error, FileNotFoundError) and not create
        return None if missing else f"{folder}: {error.strerror}"
    return None


def _of_another_user(path: Path) -> bool:
    try:
        return hasattr(os, "getuid") and path.lstat().st_uid != os.getuid()
    except FileNotFoundError:
        return False


def warn_of_network(path: Path) -> None:
    """Warns once per folder in a process that it is on a network file system."""
    _warn_of_network(path.parent)


@functools.cache
def _warn_of_network(folder: Path) -> None:
    if kind := network_filesystem(folder):
        warnings.warn(
            f"{folder} is on a network file system ({kind}): processes of one machine can share a "
            "store there, processes of several machines cannot, because SQLite's write-ahead log "
            "needs shared memory",
            stacklevel=5,
        )


def emergency_export(records: Sequence[Trial | BestConfig], folder: Path | None) -> Path:
    """Writes records to a fresh file in `folder`, or in the first writable one of several; returns
    its path.

    Raises StoreError that names each folder and why it could not be used.
    """
    trials = [record for record in records if isinstance(record, Trial)]
    winners = [record for record in records if isinstance(record, BestConfig)]
    problems = []
    for place in _folders() if folder is None else iter([folder]):
        try:
            path = _fresh(place)
        except OSError as error:
            problems.append(f"{place}: {error.strerror}")
            continue
        try:
            exports.write(path, trials, winners)
        except OSError as error:
            problems.append(f"{place}: {error.strerror}")
            with contextlib.suppress(OSError):
                path.unlink()
            continue
        return path
    raise StoreError(
        f"{len(records)} results could not be written anywhere ({'; '.join(problems)})"
    )


def _folders() -> Iterator[Path]:
    for find in (Path.cwd, Path.home, lambda: Path(tempfile.gettempdir())):
        # The current folder may have been deleted, and a user may have no home.
        with contextlib.suppress(OSError, RuntimeError):
            yield find()


def _fresh(folder: Path) -> Path:
    """Creates an empty file with a new name. Raises OSError."""
    date = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    for i in range(1000):
        path = (
            folder.absolute() / f"outblas-unsaved-{date}-{os.getpid()}{f'-{i}' if i else ''}.json"
        )
        with contextlib.suppress(FileExistsError):
            path.touch(mode=0o600, exist_ok=False)
            return path
    raise FileExistsError(17, "every name is taken")
