"""Says on standard error what a command is doing: one line on a terminal, else a line at times.

Nothing of it reaches standard output, so that what --json prints there can be piped.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from outblas.base import progress
from outblas.base.terminal import printable

LINES_EVERY = 10.0  # seconds between lines where standard error is no terminal


@contextlib.contextmanager
def shown(doing: str = "") -> Iterator[None]:
    """Shows the steps that are counted within (see `base.progress`), and `doing` before the first.

    A command that is done before the first interval is over prints nothing where there is no
    terminal.
    """
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        with progress.heard(_at_intervals()):
            yield
        return
    text = TextColumn(
        "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")
    )
    line = Progress(
        SpinnerColumn(),
        text,
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        console=console,
        transient=True,
        redirect_stdout=False,
    )
    with line:
        task = line.add_task(printable(doing), total=None)
        with progress.heard(lambda step: line.update(task, description=printable(step))):
            yield


def _at_intervals() -> Callable[[str], None]:
    """Prints plain lines, one every LINES_EVERY seconds at most."""
    last = time.monotonic()

    def hear(text: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LINES_EVERY:
            last = now
            typer.echo(printable(text), err=True)

    return hear
