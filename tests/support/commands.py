"""The command line, as tests run it."""

import functools
from typing import cast

import click
from click.testing import CliRunner, Result
from typer.main import get_command

from outblas.cli import app


@functools.cache
def _command() -> click.Command:
    """Every command of `outblas`. Typer makes them anew for each call, which takes ten times as
    long as most calls do.
    """
    return cast(click.Command, get_command(app))


def invoke(*arguments: object, code: int | None = None) -> Result:
    """With this exit code, if one is given."""
    done = CliRunner().invoke(_command(), list(map(str, arguments)), env={"COLUMNS": "200"})
    assert code is None or done.exit_code == code, f"{done.output}{done.exception!r}"
    return done


def refuses(message: str, *arguments: object, code: int = 2) -> Result:
    """By default as an error of usage, however the box breaks the message."""
    done = invoke(*arguments, code=code)
    assert squeezed(message) in squeezed(done.stderr.replace("│", ""))
    assert "Traceback" not in done.stderr
    return done


def squeezed(text: str) -> str:
    """A text without white space, however a terminal breaks it."""
    return "".join(text.split())
