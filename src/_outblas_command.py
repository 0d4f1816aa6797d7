"""Starts the command `outblas`.

Importing `outblas` imports torch, which takes seconds, and many commands need no torch: help, the
version, completion, `list`, `cache`. Where this module was imported first, the package imports
what its API consists of when a name of it is first used (see `outblas/__init__.py`). It is a
module beside the package because nothing inside a package runs before its `__init__`.
"""

import contextlib
import errno
import os
import sys


def main() -> None:
    """Runs the command that `sys.argv` names. Its exit code is 1 where nobody reads the pipe that
    standard output is, or where the disk is full that it goes to.
    """
    _make_ready()
    from outblas.cli import app

    try:
        try:
            app(prog_name="outblas")
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC) or error.filename is not None:
            raise
        # What is left in the buffer must not be tried again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            print(f"outblas: standard output: {error.strerror}", file=sys.stderr)
        sys.exit(1)


def _make_ready() -> None:
    """Replaces streams that are closed, lets characters that standard output cannot encode become
    question marks, and drops a COLUMNS that is no width.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    with contextlib.suppress(AttributeError):  # a program has put another object in its place
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    columns = os.environ.get("COLUMNS", "")
    if not (columns.isdecimal() and len(columns) < 5 and int(columns)):  # help fills its lines
        os.environ.pop("COLUMNS", None)
