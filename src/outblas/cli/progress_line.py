"""Says on standard error what a command is doing: one line on a terminal, else a line at times.

Nothing of it reaches standard output, so that what --json prints there can be piped.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from ..core import progress
from ..core.terminal import printable

LINES_EVERY = 10.0  # seconds between lines where standard error is no terminal


@contextlib.contextmanager
def shown(doing: str = "") -> Iterator[None]:
    """Shows the steps that are counted within (see `core.progress`), and `doing` before the first.

    A command that is done before the first interval is over prints nothing where there is no
    terminal.
    """
    console = Console(stderr=True)
    view = _Line(doing) if console.is_terminal and not console.is_dumb_terminal else _Lines()
    live = (
        Live(
            console=console,
            get_renderable=view.render,
            transient=True,
            refresh_per_second=8,
            redirect_stdout=False,
        )
        if isinstance(view, _Line)
        else contextlib.nullcontext()
    )
    with live, progress.heard(view.hear):
        yield


class _Line:
    """One line that changes: a spinner, the step, and the time since the beginning."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._began = time.monotonic()
        self._spinner = Spinner("dots")

    def hear(self, text: str) -> None:
        self._doing = text

    def render(self) -> Table:
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        line = Table.grid(padding=(0, 1))
        line.add_column()
        line.add_column(no_wrap=True, overflow="ellipsis")
        line.add_column(no_wrap=True, style="dim")
        line.add_row(self._spinner, Text(printable(self._doing)), f"{minutes}:{seconds:02d}")
        return line


class _Lines:
    """Plain lines, at intervals."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def hear(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last >= LINES_EVERY:
            self._last = now
            typer.echo(printable(text), err=True)
