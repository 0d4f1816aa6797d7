"""Who can have written a file or a folder: native code is loaded only from what this user alone can
write.

A folder is judged by its real path: every part of that path must belong to this user or to root,
and none may be writable by others. A file is judged by its descriptor once it is open, so that what
is judged is what is read. Systems without owners of files (Windows) refuse nothing.
"""

import functools
import os
import stat
from pathlib import Path

from .terminal import printable

ROOT = 0
SHOWN = 160  # characters of a path in a message
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OPEN_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)  # a FIFO would wait for a writer
)


class Refused(Exception):
    """A file that somebody else may have written, or a folder in which others can write."""


class RefusedFolder(Refused):
    """A folder that is not this user's alone. `part` is the folder on its path that is at fault."""

    def __init__(self, part: Path, reason: str) -> None:
        super().__init__(f"{shown(part)} {reason}")
        self.part = part


def own_folder(path: Path) -> Path:
    """The real path of a folder in which nobody but this user can write, made with mode 0700 where
    it is missing.

    Raises RefusedFolder where others can write there, or replace the folder or one on its path;
    OSError where it can neither be found nor made.
    """
    real = Path(os.path.realpath(path))
    for part in (*reversed(real.parents), real):
        if not os.path.lexists(part):
            part.mkdir(mode=0o700, exist_ok=True)
        reason = _folder_problem(os.lstat(part), last=part == real)
        if reason is not None:
            raise RefusedFolder(part, reason)
    return real


def _folder_problem(status: os.stat_result, *, last: bool) -> str | None:
    """Why others may write in a folder (the last of a path), or replace what is in it and is ours
    (the others).
    """
    if not stat.S_ISDIR(status.st_mode):
        return "is no folder"
    if not hasattr(os, "geteuid"):
        return None
    owner = status.st_uid
    if owner != os.geteuid() and (last or not (owner == ROOT or _is_unmapped(owner))):
        return f"belongs to another user ({_user(owner)})"
    sticky = status.st_mode & stat.S_ISVTX  # where others can add, but not replace what is ours
    if status.st_mode & _OTHERS_WRITE and (last or not sticky):
        return "can be written by others"
    return None


def read(path: Path) -> bytes:
    """The bytes of a regular file that this user alone can have written.

    Raises Refused, with the reason, for any other file; FileNotFoundError and other kinds of
    OSError as `open` does.
    """
    _check(path, os.lstat(path))  # before it is opened: to open a device may do something
    descriptor = os.open(path, _OPEN_FLAGS)
    with open(descriptor, "rb") as file:
        _check(path, os.fstat(descriptor))  # it may be another by now
        return file.read()


def shown(path: object) -> str:
    """A path in a message: control characters as escapes, and the middle left out where it
    is long.
    """
    text = str(path)
    if len(text) > SHOWN:
        text = f"{text[: SHOWN // 2]}…{text[-SHOWN // 2 :]}"
    return printable(text)


def _check(path: Path, status: os.stat_result) -> None:
    """Raises Refused unless the status is that of a regular file which this user alone can have
    written.
    """
    if not stat.S_ISREG(status.st_mode):
        raise Refused(f"{shown(path)} is {_kind(status.st_mode)}, expected a regular file")
    if not hasattr(os, "geteuid"):
        return
    if status.st_uid != os.geteuid():
        raise Refused(f"{shown(path)} belongs to another user ({_user(status.st_uid)})")
    if status.st_mode & _OTHERS_WRITE:
        raise Refused(
            f"{shown(path)} can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
        )
    if status.st_nlink > 1:
        raise Refused(f"{shown(path)} has {status.st_nlink} names (hard links), expected one")


def _kind(mode: int) -> str:
    names = {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFBLK: "a device",
        stat.S_IFCHR: "a device",
    }
    return names.get(stat.S_IFMT(mode), "of an unknown kind")


def _user(uid: int) -> str:
    """A user for messages: by name where there is one."""
    try:
        import pwd

        return f"{pwd.getpwuid(uid).pw_name}, uid {uid}"
    except (ImportError, KeyError):
        return f"uid {uid}"


def _is_unmapped(uid: int) -> bool:
    """Whether a uid stands for users of the host that a container does not know.

    In a user namespace such as a container's, the host's root owns folders like /home, and shows as
    the overflow uid.
    """
    return uid == _overflow_uid()


@functools.cache
def _overflow_uid() -> int | None:
    """The uid as which unknown users show; None where it is a user of its own, or there is no such
    thing.
    """
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
        ranges = [
            tuple(map(int, line.split()))
            for line in Path("/proc/self/uid_map").read_text().splitlines()
        ]
    except (OSError, ValueError):
        return None
    mapped = any(first <= overflow < first + count for first, _, count in ranges)
    return None if mapped else overflow
