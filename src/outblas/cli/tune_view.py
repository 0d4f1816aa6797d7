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

from ..autotune.measure.progress import Progress
from ..autotune.store.records import Workload
from ..core.terminal import printable
from .common import console

MOST_BLOCKS = 4  # of whole height: with more workloads at a time, each has two lines
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
        return render(list(self._snapshots.values())) if self._snapshots else Group()


def render(snapshots: Sequence[Progress], *, gpu: str = "") -> RenderableType:
    """A heading, a block for each workload that is being tuned, then a line for each that is
    finished.
    """
    by_stage = Counter(p.stage for p in snapshots)
    active = [p for p in snapshots if p.stage in ("preparing", "screening", "finals")]
    finished = [p for p in snapshots if p.stage in ("done", "failed")]
    counts = {
        "tuned now": len(active),
        **{stage: by_stage[stage] for stage in ("done", "failed", "waiting")},
    }
    heading = ", ".join(f"{n} {name}" for name, n in counts.items() if n) or "nothing to tune"
    parts: list[RenderableType] = [Text(f"{gpu}: {heading}" if gpu else heading, style="bold")]
    for progress in active:
        parts += [
            Text(""),
            *(_block(progress) if len(active) <= MOST_BLOCKS else _short(progress, failures=True)),
        ]
    if finished:
        parts += [Text(""), *map(_finished, finished)]
    return Group(*parts)


def line(progress: Progress) -> str:
    """One plain line."""
    p = progress
    best, failures, message = _best(p), _failures(p.failures), _one_line(p.message)
    parts = [f"{p.workload}{_where(p)}: {p.stage}"]
    if p.stage in ("done", "failed"):
        parts += [best, failures, message]
    else:
        parts.append(f"{_done(p)} of {p.valid}" if p.valid else "")
        if p.stage != "waiting":
            parts += [_rounds(p), _queue(p), best, failures, _times(p), message]
    return ", ".join(filter(None, parts))


def _block(p: Progress) -> Iterable[RenderableType]:
    yield from _short(p)
    queue, failures = _queue(p), _failures(p.failures)
    if queue or failures:
        yield Text.assemble(queue, "; " if queue and failures else "", (failures, "red"))
    if p.best:
        yield _cut(Text(f"best: {p.best}"))
    if p.message:
        yield _cut(Text(_one_line(p.message), style="dim"))


def _short(p: Progress, *, failures: bool = False) -> Iterable[RenderableType]:
    """What it is and since when; how far, with the count of `failures`, and the best so far."""
    rounds = f", {_rounds(p)}" if p.rounds else ""
    title = Text.assemble((f"{p.workload}", "bold"), f"  {p.stage}{rounds}{_where(p)}")
    yield _beside(title, Text(_times(p), style="dim"))
    done = min(_done(p), p.valid)
    counts = [f"{p.known} known"] if p.known else []
    if failures and (failed := p.failures.total()):
        counts.append(f"{failed} failed")
    aside = f" ({', '.join(counts)})" if counts else ""
    bar = Table.grid(padding=(0, 2), expand=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    bar.add_column(no_wrap=True, justify="right")
    progress = ProgressBar(total=p.valid or None, completed=done, pulse=not p.valid)
    bar.add_row(
        progress, f"{done}/{p.valid}{aside}" if p.valid else "", Text(_speed(p), style=_style(p))
    )
    yield bar


def _finished(p: Progress) -> RenderableType:
    if p.stage == "done" and p.best:
        left = p.failures["unmeasured"]
        missing = (f", {left} configs not measured" if left else "", "yellow")
        return _cut(
            Text.assemble(
                ("✓ ", "green"), _place(p), (_speed(p), _style(p)), missing, f"  {p.best}"
            )
        )
    why = _one_line(p.message) or ", ".join(
        filter(None, ("no config is right", _failures(p.failures)))
    )
    return _cut(Text.assemble(("✗ ", "red"), _place(p), (why, "red")))


def _place(p: Progress) -> str:
    return f"{p.workload}{_where(p)}  "


def _beside(left: Text, right: Text) -> Table:
    """The left one gives way."""
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    grid.add_column(no_wrap=True, overflow="ellipsis", justify="right")
    grid.add_row(left, right)
    return grid


def _cut(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _done(p: Progress) -> int:
    return p.known + p.screened


def _where(p: Progress) -> str:
    if not p.gpu:
        return ""
    host, colon, device = p.gpu.rpartition(":")
    device = device[:_UUID] if device.startswith(("GPU-", "MIG-")) else device
    return f" on {'GPU ' if p.gpu.isdecimal() else ''}{host}{colon}{device}"


def _rounds(p: Progress) -> str:
    return f"{p.rounds} rounds" if p.rounds else ""


def _queue(p: Progress) -> str:
    if not (p.compiling or p.compiled):
        return ""
    return f"{p.compiling} compiling, {p.compiled} compiled and waiting"


def _speed(p: Progress) -> str:
    """The ratio of the best config, where there is a base, and its time."""
    ratio = f"{p.best_ratio:.3f} × {p.base}" if p.best_ratio is not None and p.base else ""
    us = f"{p.best_us:.1f} µs" if p.best_us is not None else ""
    return ", ".join(filter(None, (ratio, us)))


def _best(p: Progress) -> str:
    return f"best {_speed(p)} by {p.best}" if p.best else ""


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
