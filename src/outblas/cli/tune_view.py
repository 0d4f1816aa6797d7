"""How a sweep is shown while it runs: a live view in a terminal, lines elsewhere."""

import sys
import time
from collections import Counter
from collections.abc import Sequence

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from outblas.autotune.measure.progress import Progress
from outblas.autotune.store.records import Workload
from outblas.base.terminal import printable
from outblas.cli.common import console

_UUID = 12  # characters of a GPU's UUID that are shown
_LINES_EVERY = 10.0  # seconds between plain lines, where there is no terminal
_MARKS = {"done": ("✓ ", "green"), "failed": ("✗ ", "red")}


class LiveView:
    """The live view of a sweep; plain lines now and then where there is no terminal.

    It is a context manager, and a report: call it with each snapshot.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._snapshots: dict[Workload, Progress] = {}
        self._live = Live(
            console=console,
            refresh_per_second=4,
            get_renderable=lambda: render(list(self._snapshots.values())),
            transient=True,
        )
        self._plain = not sys.stdout.isatty()
        self._last: dict[tuple[Workload, str], float] = {}

    def __enter__(self) -> "LiveView":
        if not self._quiet and not self._plain:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, progress: Progress) -> None:
        self._snapshots[progress.workload] = progress
        if not self._plain or progress.stage == "waiting":
            return
        key, now = (progress.workload, progress.stage), time.monotonic()
        if now - self._last.get(key, 0.0) > _LINES_EVERY:
            self._last[key] = now
            typer.echo(line(progress), err=True)


def line(p: Progress) -> str:
    """One plain line: what is tuned where, how far it is, the best so far, what went wrong."""
    running = p.stage not in ("done", "failed", "waiting")
    parts = [f"{p.workload}{_where(p)}: {p.stage}"]
    if running:
        known = f" ({p.known} known)" if p.known else ""
        parts.append(f"{p.known + p.screened} of {p.valid}{known}" if p.valid else "")
        parts.append(f"{p.rounds} rounds" if p.rounds else "")
        if p.compiling or p.compiled:
            parts.append(f"{p.compiling} compiling, {p.compiled} compiled and waiting")
    parts.append(f"best {_speed(p)} by {p.best}" if p.best else "")
    kinds = ", ".join(f"{n} {status}" for status, n in p.failures.most_common() if n)
    parts.append(f"failures: {kinds}" if kinds else "")
    if running:
        parts.append(f"{_clock(p.elapsed)} elapsed")
        parts.append("" if p.left is None else f"{_clock(p.left)} left")
    parts.append(printable(" ".join(p.message.split())))
    return ", ".join(filter(None, parts))


def render(snapshots: Sequence[Progress]) -> RenderableType:
    """A heading, a line and a bar for each workload that is being tuned, then a line for each that
    is finished.
    """
    stages = Counter(p.stage for p in snapshots)
    active = [p for p in snapshots if p.stage in ("preparing", "screening", "finals")]
    counts = {"tuned now": len(active)}
    counts |= {stage: stages[stage] for stage in ("done", "failed", "waiting")}
    heading = ", ".join(f"{n} {name}" for name, n in counts.items() if n) or "nothing to tune"
    parts: list[RenderableType] = [Text(heading, style="bold")]
    for p in active:
        done = min(p.known + p.screened, p.valid)
        bar = ProgressBar(total=p.valid or None, completed=done, pulse=not p.valid)
        block = Table.grid(expand=True)
        block.add_row(Text(line(p)))
        block.add_row(bar)
        parts += [Text(""), block]
    for p in snapshots:
        if p.stage in _MARKS:
            mark = _MARKS["failed" if not p.best else p.stage]
            text = Text.assemble(mark, line(p))
            text.no_wrap, text.overflow = True, "ellipsis"
            parts.append(text)
    return Group(*parts)


def _where(p: Progress) -> str:
    if not p.gpu:
        return ""
    host, colon, device = p.gpu.rpartition(":")
    device = device[:_UUID] if device.startswith(("GPU-", "MIG-")) else device
    return f" on {'GPU ' if p.gpu.isdecimal() else ''}{host}{colon}{device}"


def _speed(p: Progress) -> str:
    """The ratio of the best config, where there is a base, and its time."""
    ratio = f"{p.best_ratio:.3f} × {p.base}" if p.best_ratio is not None and p.base else ""
    us = f"{p.best_us:.1f} µs" if p.best_us is not None else ""
    return ", ".join(filter(None, (ratio, us)))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
