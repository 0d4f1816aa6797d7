"""How reports write figures: digits, shares, spans, confidence."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .results import Measurement

NONE = "–"


def figure(value: float | None, form: str, scale: float = 1.0) -> str:
    """The value times `scale` in a format such as ".3f"; a dash where nothing was measured."""
    return NONE if value is None else format(value * scale, form)


def number(value: float | None) -> str:
    """A figure with three digits, and with all digits before the point."""
    if value is None:
        return NONE
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def share(value: float) -> str:
    """A ratio with two digits after the point."""
    return f"{value:.2f}"


def percent(value: float | None) -> str:
    """A share as whole percent."""
    return figure(value, ".0%")


def span(values: tuple[float, float] | None, show: Callable[[float], str]) -> str:
    """A range as "900–1200", or one value where both ends are the same."""
    if values is None:
        return NONE
    return show(values[0]) if values[0] == values[1] else f"{show(values[0])}–{show(values[1])}"


def ratio(m: Measurement) -> str:
    """The ratio to cuBLAS with its 10th and 90th percentile: "0.405 (0.402–0.409)"."""
    return f"{m.ratio:.3f} ({m.ratio_low:.3f}–{m.ratio_high:.3f})"


def spread(m: Measurement) -> str:
    """The 10th and the 90th percentile of the ratio to cuBLAS: "0.402–0.409"."""
    return f"{m.ratio_low:.3f}–{m.ratio_high:.3f}"


def confidence(value: float | None, *, separated: bool) -> str:
    """How sure it is that a winner is the fastest of its finalists: "at least 98.1%".

    The value is a bound from below, and 0 is no bound at all: such a winner shares the first place.
    """
    if value is None:
        return NONE
    if value > 0.999:
        words = "over 99.9%"
    elif value > 0:
        words = f"at least {value:.1%}"
    else:
        return "tie" if separated else "tie, not separated"
    return words if separated else f"{words}, not separated"
