"""One kernel over square products: time, speed and ratio to cuBLAS at each size, beside the ratio
that its document gives there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.registry import dtype_of
from ..core.shapes import SQUARES
from . import text
from .ladder import gpus_in_order
from .lookup import find
from .results import Measurement, Measurements
from .rungs import Rung, climb
from .seed_figures import Figure

COLUMNS = (
    "N",
    "µs",
    "TFLOP/s",
    "× cuBLAS",
    "µs apart",
    "× cuBLAS apart",
    "seed × its cuBLAS",
    "check",
)
FEWEST = 3  # sizes that make a sweep


@dataclass(frozen=True)
class Row:
    """The kernel at the square product of edge `n`, and the document's figure there.

    The columns "apart" are timed with a foreign kernel between calls; only short calls are.
    """

    n: int
    ours: Measurement
    figure: Figure | None

    def record(self) -> dict[str, Any]:
        """The row as a JSON object."""
        seed = self.figure.record() if self.figure else None
        return {"n": self.n, "ours": {"gpu": self.ours.device, **self.ours.record()}, "seed": seed}

    def cells(self) -> tuple[str, ...]:
        """The cells of the row, in the order of COLUMNS."""
        m = self.ours
        return (
            str(self.n),
            text.number(m.us),
            text.number(m.tflops),
            text.ratio(m),
            text.number(m.us_apart),
            text.NONE if m.ratio_apart is None else f"{m.ratio_apart:.3f}",
            self.seed(),
            m.check,
        )

    def seed(self) -> str:
        """The document's ratio to its own cuBLAS; a dash where it has none at this size."""
        return text.span(self.figure.ratio if self.figure else None, lambda ratio: f"{ratio:.4g}")


def rows(measurements: Measurements, kernel: str) -> list[Row]:
    """A row for each square product at which the kernel was timed, all on one GPU. Raises
    ValueError for a kernel of no ladder.
    """
    rung = next((rung for rung in climb() if rung.name == kernel), None)
    if rung is None:
        raise ValueError(
            f"kernel is {kernel!r}, expected one of: {', '.join(rung.name for rung in climb())}"
        )
    for gpu in gpus_in_order(measurements):
        at = {n: find(measurements, kernel, (n, n, n), dtype_of(rung.ladder), gpu) for n in SQUARES}
        if any(at.values()):
            return [
                Row(n, ours, _figure(rung, n, ours)) for n, ours in at.items() if ours is not None
            ]
    return []


def title(kernel: str, rows: Sequence[Row]) -> str:
    """The heading of the table, with the GPU."""
    gpu = rows[0].ours.device if rows else "not measured"
    return f"{kernel} by size in burst, {gpu}"


def last(measurements: Measurements, ladder: str | None) -> str | None:
    """The highest rung of a ladder (None: of all ladders) that was timed at several sizes; None if
    no rung was.
    """
    names = [rung.name for rung in climb(ladder)]
    return next((name for name in reversed(names) if len(rows(measurements, name)) >= FEWEST), None)


def _figure(rung: Rung, n: int, ours: Measurement) -> Figure | None:
    return next(
        (f for f in rung.figures if f.n == n and f.gpu == ours.gpu and f.ratio is not None), None
    )
