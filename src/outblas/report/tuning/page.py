"""A sweep's report as an HTML page."""

import re
from html import escape

from .. import page
from .chart import describe, draw, drawable
from .model import TuneReport
from .tables import notes, tables

_RANGE = re.compile(r"\(\d+\.\d+–\d+\.\d+\)")  # which a browser would break after the dash


def html(report: TuneReport) -> str:
    """One self-contained page: the chart if there is anything to draw, then the tables."""
    parts = [_chart(report)] if drawable(report) else []
    parts += [_whole_ranges(page.table(*table)) for table in tables(report)]
    return page.page(f"outblas: {report.title}", notes(report), parts)


def _chart(report: TuneReport) -> str:
    """The chart as one image to a screen reader, with what it shows in words."""
    words = escape(describe(report))
    return page.chart(draw(report)).replace("<svg", f'<svg role="img" aria-label="{words}"', 1)


def _whole_ranges(table: str) -> str:
    """The table with each range in brackets on one line."""
    return _RANGE.sub(lambda found: f'<span style="white-space: nowrap">{found[0]}</span>', table)
