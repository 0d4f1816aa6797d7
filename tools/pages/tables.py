"""How tables write figures, and tables in Markdown with the sentence under them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tools.pages.results import Measurement

NONE = "–"


def figure(value: float | None, form: str, scale: float = 1.0) -> str:
    """The value times `scale` in a format such as ".3f"; a dash where nothing was measured."""
    return NONE if value is None else format(value * scale, form)


def number(value: float | None) -> str:
    """A figure with three digits, and with all digits before the point."""
    return figure(value, ".0f" if value and value >= 100 else ".3g")


def percent(value: float | None) -> str:
    """A share as whole percent."""
    return figure(value, ".0%")


def ratio(m: Measurement) -> str:
    """The ratio to cuBLAS with its 10th and 90th percentile: "0.405 (0.402–0.409)"."""
    return f"{m.ratio:.3f} ({spread(m)})"


def spread(m: Measurement) -> str:
    """The 10th and the 90th percentile of the ratio to cuBLAS: "0.402–0.409"."""
    return f"{m.ratio_low:.3f}–{m.ratio_high:.3f}"


def plain(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    head, *body = (f"| {' | '.join(row)} |" for row in (columns, *rows))
    return [head, "|---" * len(columns) + "|", *body]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table whose first column is code."""
    return plain(columns, [(f"`{first}`", *rest) for first, *rest in rows])


def closed(lines: Sequence[str], measurements: Sequence[Measurement], note: str) -> str:
    """The lines of a part, then its conditions: dtypes, layouts, the way of timing, the GPU and the
    versions.
    """
    where = "; ".join(environments(m.environment for m in measurements))
    return "\n".join([*lines, "", f"{operands(measurements)}, {note}. {where}."]) + "\n"


def operands(measurements: Sequence[Measurement]) -> str:
    """The dtypes and layouts of measurements, each once."""
    dtypes = listed(dict.fromkeys(m.dtype for m in measurements))
    return f"{dtypes}, {listed(dict.fromkeys(m.layout for m in measurements))}"


def listed(words: Iterable[str]) -> str:
    """The words as a sentence lists them: "a, b and c"."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def devices(records: Iterable[Any]) -> str:
    """The GPUs of measurements or profiles, each once."""
    return ", ".join(dict.fromkeys(record.device for record in records))


def environments(records: Iterable[dict[str, Any]]) -> list[str]:
    """The GPU, the versions and the days of measurement, one line for each set of versions."""
    keys = (("driver", "driver"), ("CUDA", "cuda"), ("torch", "torch"), ("triton", "triton"))
    days_of: dict[str, set[str]] = {}
    for record in records:
        versions = ", ".join(f"{name} {record[key]}" for name, key in keys if record.get(key))
        if dsl := record.get("nvidia-cutlass-dsl"):
            versions += f", CuTe DSL {dsl}"
        days = days_of.setdefault(f"{record.get('gpu')}: {versions}", set())
        if date := record.get("date"):
            days.add(date[:10])
    return [
        versions + (f"; measured {', '.join(sorted(days))}" if days else "")
        for versions, days in days_of.items()
    ]
