"""Functions run as another user: in a forked child that has given up root."""

import contextlib
import ctypes
import os
import pickle
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import children

VICTIM, PLANTER = 54321, 54322  # uids that no account has
PR_SET_DUMPABLE = 4

needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to act as two users"
)


def as_user(uid: int, function: Callable[[], Any], *, seconds: float = 10.0) -> Any:
    """What `function` returns in a child process of user `uid` (its own if it is that already).

    An exception of the child is raised here; so is TimeoutError for one that takes too long, which
    is killed.
    """
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(receiving)
            with open(sending, "wb") as pipe:
                pickle.dump(_outcome(uid, function), pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(sending)
    with open(receiving, "rb") as pipe:
        children.wait(child, seconds)
        ok, value = pickle.load(pipe)
    if not ok:
        raise value
    return value


def _outcome(uid: int, function: Callable[[], Any]) -> tuple[bool, Any]:
    try:
        if os.geteuid() != uid:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            if (
                sys.platform == "linux"
            ):  # as a program that the user has started: /proc/self is its own
                ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        return True, function()
    except BaseException as error:
        return False, error


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder that every user can enter, which pytest's are not."""
    folder = Path(tempfile.mkdtemp(prefix="outblas-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def with_warnings(function: Callable[[], Any]) -> Callable[[], tuple[Any, list[str]]]:
    """The function, which returns what it warned of as well."""

    def run() -> tuple[Any, list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = function()
        return value, [str(warning.message) for warning in caught]

    return run
