"""How a sweep is shown while it runs: blocks in a terminal, lines elsewhere."""

import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence

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


class LiveView:
    """The live view of a sweep; plain lines now and then where there is no terminal.

    It is a context manager, and a report: call it with each snapshot.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._snapshots: dict[Workload, Progress] = {}
        self._live = Live(
            console=console, refresh_per_second=4, get_renderable=self._render, transient=True
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

    def _render(self) -> RenderableType:
        return render(list(self._snapshots.values()))


def line(p: Progress) -> str:
    """One plain line."""
    running = p.stage not in ("done", "failed", "waiting")
    parts = [f"{p.workload}{_where(p)}: {p.stage}"]
    parts.append(f"{p.known + p.screened} of {p.valid}" if running and p.valid else "")
    parts.append(f"{p.rounds} rounds" if running and p.rounds else "")
    parts.append(_queue(p) if running else "")
    parts.append(f"best {_speed(p)} by {p.best}" if p.best else "")
    parts += [_failures(p.failures), _times(p) if running else "", _one_line(p.message)]
    return ", ".join(filter(None, parts))


def render(snapshots: Sequence[Progress]) -> RenderableType:
    """A heading, a block for each workload that is being tuned, then a line for each that is
    finished.
    """
    stages = Counter(p.stage for p in snapshots)
    active = [p for p in snapshots if p.stage in ("preparing", "screening", "finals")]
    counts = {"tuned now": len(active)}
    counts |= {stage: stages[stage] for stage in ("done", "failed", "waiting")}
    heading = ", ".join(f"{n} {name}" for name, n in counts.items() if n) or "nothing to tune"
    parts: list[RenderableType] = [Text(heading, style="bold")]
    for progress in active:
        parts += [Text(""), *_block(progress)]
    finished = [_finished(p) for p in snapshots if p.stage in ("done", "failed")]
    return Group(*parts, *([Text("")] if finished else []), *finished)


def _block(p: Progress) -> Iterable[RenderableType]:
    """What it is and since when; how far it is; the best so far; what went wrong."""
    rounds = f", {p.rounds} rounds" if p.rounds else ""
    title = Text.assemble((f"{p.workload}", "bold"), f"  {p.stage}{rounds}{_where(p)}")
    yield _row(title, Text(_times(p), style="dim"))
    done = min(p.known + p.screened, p.valid)
    known = f" ({p.known} known)" if p.known else ""
    bar = ProgressBar(total=p.valid or None, completed=done, pulse=not p.valid)
    count = Text(f"{done}/{p.valid}{known}  " if p.valid else "")
    yield _row(bar, Text.assemble(count, (_speed(p), _style(p))))
    parts = [(_queue(p), ""), (_failures(p.failures), "red"), (_one_line(p.message), "dim")]
    if p.best:
        yield _cut(Text(f"best: {p.best}"))
    for text, style in parts:
        if text:
            yield _cut(Text(text, style=style))


def _finished(p: Progress) -> RenderableType:
    place = f"{p.workload}{_where(p)}  "
    if p.stage == "done" and p.best:
        left = p.failures["unmeasured"]
        missing = (f", {left} configs not measured" if left else "", "yellow")
        return _cut(
            Text.assemble(("✓ ", "green"), place, (_speed(p), _style(p)), missing, f"  {p.best}")
        )
    failures = ", ".join(filter(None, ("no config is right", _failures(p.failures))))
    return _cut(Text.assemble(("✗ ", "red"), place, (_one_line(p.message) or failures, "red")))


def _row(left: RenderableType, right: Text) -> Table:
    """The left one gives way."""
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    grid.add_column(no_wrap=True, overflow="ellipsis", justify="right")
    grid.add_row(left, right)
    return grid


def _cut(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _where(p: Progress) -> str:
    if not p.gpu:
        return ""
    host, colon, device = p.gpu.rpartition(":")
    device = device[:_UUID] if device.startswith(("GPU-", "MIG-")) else device
    return f" on {'GPU ' if p.gpu.isdecimal() else ''}{host}{colon}{device}"


def _queue(p: Progress) -> str:
    if not (p.compiling or p.compiled):
        return ""
    return f"{p.compiling} compiling, {p.compiled} compiled and waiting"


def _speed(p: Progress) -> str:
    """The ratio of the best config, where there is a base, and its time."""
    ratio = f"{p.best_ratio:.3f} × {p.base}" if p.best_ratio is not None and p.base else ""
    us = f"{p.best_us:.1f} µs" if p.best_us is not None else ""
    return ", ".join(filter(None, (ratio, us)))


def _style(p: Progress) -> str:
    return "green" if p.base and (p.best_ratio or 0) >= 1 else ""


def _failures(failures: Counter[str]) -> str:
    kinds = ", ".join(f"{n} {status}" for status, n in failures.most_common() if n)
    return f"failures: {kinds}" if kinds else ""


def _times(p: Progress) -> str:
    left = p.left
    return f"{_clock(p.elapsed)} elapsed" + ("" if left is None else f", {_clock(left)} left")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))
