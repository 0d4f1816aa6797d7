"""Checks of who may have written a file or a folder. Native code is loaded only from files that no
other user can write.

A folder is checked by its real path: every part of the path must belong to this user or to root,
and none may be writable by others. A file is checked by its descriptor after it was opened, so that
the checked file is the file that is read. On systems without file owners (Windows) nothing is
refused.
"""

import functools
import os
import stat
from pathlib import Path

from outblas.base.terminal import printable

ROOT = 0
SHOWN = 160  # longest path in a message, in characters
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_FOLLOW_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
    | getattr(os, "O_NONBLOCK", 0)  # without it, opening a FIFO would wait for a writer
)
_OPEN_FLAGS = _FOLLOW_FLAGS | getattr(os, "O_NOFOLLOW", 0)


class Untrusted(Exception):
    """A file that somebody else may have written, or a folder in which others can write."""


def own_folder(path: Path) -> Path:
    """Returns the real path of a folder in which no other user can write, and creates it with mode
    0700 where it is missing.

    Raises Untrusted where others can write in it, or can replace it or a folder on its path;
    OSError where it can neither be found nor created.
    """
    real = Path(os.path.realpath(path))
    for part in (*reversed(real.parents), real):
        if not os.path.lexists(part):
            part.mkdir(mode=0o700, exist_ok=True)
        reason = _folder_problem(os.lstat(part), last=part == real)
        if reason is not None:
            raise Untrusted(f"{shown(part)} {reason}")
    return real


def _folder_problem(status: os.stat_result, *, last: bool) -> str | None:
    """Returns a reason if others may write in a folder (`last`: the end of the path) or replace
    this user's entries in it (its parents); else None.
    """
    if not stat.S_ISDIR(status.st_mode):
        return "is not a folder"
    if not hasattr(os, "geteuid"):
        return None
    owner = status.st_uid
    if owner != os.geteuid() and (last or not (owner == ROOT or _is_unmapped(owner))):
        return f"belongs to another user ({_user(owner)})"
    sticky = status.st_mode & stat.S_ISVTX  # others can add entries, but cannot replace this user's
    if status.st_mode & _OTHERS_WRITE and (last or not sticky):
        return "can be written by others"
    return None


def read(path: Path) -> bytes:
    """Returns the bytes of a regular file that only this user can have written. Raises the errors
    of `open_own`.
    """
    with open(open_own(path), "rb") as file:
        return file.read()


def open_own(path: Path, *, roots: bool = False) -> int:
    """Returns a descriptor of a regular file that only this user can have written, or with `roots`
    only this user or root, such as a file that is part of an image.

    Raises Untrusted, with the reason, for any other file; FileNotFoundError and other kinds of
    OSError as `open` does.
    """
    _check(path, os.lstat(path), roots)  # before opening, because opening a device can do things
    descriptor = os.open(path, _OPEN_FLAGS)
    try:
        _check(path, os.fstat(descriptor), roots)  # the path may name another file by now
    except Untrusted:
        os.close(descriptor)
        raise
    return descriptor


def _check(path: Path, status: os.stat_result, roots: bool) -> None:
    """Raises Untrusted unless the status describes such a file."""
    if not stat.S_ISREG(status.st_mode):
        raise Untrusted(f"{shown(path)} is {kind_of(status.st_mode)}, expected a regular file")
    if not hasattr(os, "geteuid"):
        return
    if status.st_uid not in (os.geteuid(), *([ROOT] if roots else [])):
        raise Untrusted(f"{shown(path)} belongs to another user ({_user(status.st_uid)})")
    if status.st_mode & _OTHERS_WRITE:
        raise Untrusted(
            f"{shown(path)} can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
        )
    if status.st_nlink > 1 and not roots:
        raise Untrusted(f"{shown(path)} has {status.st_nlink} names (hard links), expected one")


def read_regular(path: Path, limit: int, *, cut: bool = False) -> bytes:
    """Returns the bytes of a regular file, whoever wrote it, without ever waiting. A link stands
    for what it leads to. Of a file of more than `limit` bytes, `cut` returns the first ones.

    Raises ValueError, with the reason, for a larger file without `cut` and for what is no regular
    file; FileNotFoundError and other kinds of OSError as `open` does.
    """
    _check_regular(path, os.stat(path))  # before opening, because opening a device can do things
    with open(os.open(path, _FOLLOW_FLAGS), "rb") as file:
        _check_regular(path, os.fstat(file.fileno()))  # the path may name another file by now
        content = file.read(limit if cut else limit + 1) or b""  # None: a file of /proc must wait
    if len(content) > limit:
        raise ValueError(f"{shown(path)} has more than {limit >> 20} MiB, expected fewer")
    return content


def _check_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{shown(path)} is {kind_of(status.st_mode)}, expected a regular file")


def shown(path: object) -> str:
    """Formats a path for a message: control characters are escaped, and the middle of a long path
    is left out.
    """
    text = str(path)
    if len(text) > SHOWN:
        text = f"{text[: SHOWN // 2]}…{text[-SHOWN // 2 :]}"
    return printable(text)


def kind_of(mode: int) -> str:
    """Returns what a file is by its mode, for a message."""
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
    """Formats a user for messages, by name where the uid has one."""
    try:
        import pwd

        return f"{pwd.getpwuid(uid).pw_name}, uid {uid}"
    except (ImportError, KeyError):
        return f"uid {uid}"


def _is_unmapped(uid: int) -> bool:
    """Returns whether a uid stands for host users that a container does not know.

    In a user namespace, such as a container's, the host's root owns folders like /home and appears
    as the overflow uid.
    """
    return uid == _overflow_uid()


@functools.cache
def _overflow_uid() -> int | None:
    """Returns the uid as which unknown users appear; None where that uid is a user of the system,
    or the system has no such uid.
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
