"""The tables of a ladder on a page: a row for each rung and size, then what ncu counted of each
rung, then every figure of the documents beside ours.
"""

from collections.abc import Callable, Iterator, Sequence

from . import markdown, text
from .ladder import GPUS, MIXED_OPERANDS, OWN, AtSize, Row, stages
from .profiles import Profile
from .results import Measurement

_SPEED = ("rung", "N", "TFLOP/s", "× cuBLAS", "spread", "× parent", "check")
_MIXED = ("rung", "N", "TFLOP/s", "× its own float32", "check")
_DOCUMENTS = ("rung", "document", "GPU", "N", "TFLOP/s", "× its cuBLAS", "ours × cuBLAS")
_Counter = tuple[str, Callable[[Profile], str]]
_OCCUPANCY: _Counter = ("occupancy", lambda p: text.percent(p.occupancy))
_IPC: _Counter = ("IPC", lambda p: text.number(p.ipc))
# What ncu's table has beside registers, by ladder.
_COUNTERS: dict[str, tuple[_Counter, ...]] = {
    "simt": (_OCCUPANCY, ("FMA pipe", lambda p: text.percent(p.fma_active)), _IPC),
    "turing": (_OCCUPANCY, ("tensor pipe", lambda p: text.percent(p.tensor_active)), _IPC),
}
_OTHER_COUNTERS: tuple[_Counter, ...] = (
    ("stages", lambda p: stages(p) or text.NONE),
    ("L2 hits", lambda p: text.percent(p.l2_hit_rate)),
)


def lines(ladder: str, rows: Sequence[Row]) -> list[str]:
    """The tables of one ladder, each after the first with a sentence above it."""
    found = _speeds(rows, OWN, _SPEED)
    for variant in dict.fromkeys(v for row in rows for at in row.at for v in at.timed if v):
        if variant == MIXED_OPERANDS:
            found += ["", "The same rungs with bfloat16 operands and float32 sums:", ""]
            found += _speeds(rows, variant, _MIXED)
        else:
            found += ["", f"The same rungs compiled for {variant} and loaded as PTX:", ""]
            found += _speeds(rows, variant, _SPEED)
    if counted := [row for row in rows if row.profile]:
        found += ["", "Counted by ncu:", "", *_counted(ladder, counted)]
    if documented := [row for row in rows if row.figures]:
        found += ["", "The documents' figures beside ours:", "", *_documents(documented)]
    return found


def _speeds(rows: Sequence[Row], variant: str, columns: Sequence[str]) -> list[str]:
    """A row for each rung and size at which a variant was timed. A rung that was not timed at all
    has one row in the table of the ladder's own variant.
    """
    cells = []
    for row in rows:
        timed = [(at, at.timed[variant]) for at in row.at if variant in at.timed]
        cells += [_speed(row, at, variant, m) for at, m in timed]
        if not timed and variant == OWN:
            unknown = [text.NONE] * (len(columns) - 4)
            cells.append((row.rung.name, text.NONE, text.NONE, "not measured", *unknown))
    checks = {cell[-1] for cell in cells}
    if len(checks) == 1:
        columns, cells = columns[:-1], [cell[:-1] for cell in cells]
    return markdown.table(columns, cells)


def _speed(row: Row, at: AtSize, variant: str, m: Measurement) -> tuple[str, ...]:
    left = (row.rung.name, str(at.n), text.number(m.tflops))
    if variant == MIXED_OPERANDS:
        return (*left, text.percent(at.mixed_share), m.check)
    gpu = "" if m.gpu == GPUS[0] else f", {m.gpu}"
    gain = text.figure(at.gains.get(variant), ".3f")
    return (*left, f"{text.figure(m.ratio, '.3f')}{gpu}", text.spread(m), gain, m.check)


def _counted(ladder: str, rows: Sequence[Row]) -> list[str]:
    counters = _COUNTERS.get(ladder, _OTHER_COUNTERS)
    columns = ("rung", "N", "registers", *(heading for heading, _ in counters))
    cells = [
        (
            row.rung.name,
            str(row.profile.shape[0]),
            text.figure(row.profile.registers, ".0f"),
            *(show(row.profile) for _, show in counters),
        )
        for row in rows
        if row.profile
    ]
    return markdown.table(columns, cells)


def _documents(rows: Sequence[Row]) -> list[str]:
    return markdown.table(_DOCUMENTS, [cells for row in rows for cells in _figures(row)])


def _figures(row: Row) -> Iterator[tuple[str, ...]]:
    """The cells of each figure that the documents have on a rung, with our ratio at its size."""
    ours = {at.n: at.ours.ratio for at in row.at if at.ours}
    for figure in row.figures:
        yield (
            row.rung.name,
            figure.source.partition(",")[0],
            figure.gpu,
            str(figure.n) if figure.n else "not stated",
            text.span(figure.tflops, text.number),
            text.span(figure.ratio, text.share),
            text.figure(ours.get(figure.n or 0), ".3f"),
        )
