"""A sweep's report as an HTML page."""

import re

from outblas.report import page
from outblas.report.tuning.chart import draw, drawable
from outblas.report.tuning.model import TuneReport
from outblas.report.tuning.tables import notes, tables

_RANGE = re.compile(r"\(\d+\.\d+–\d+\.\d+\)")  # which a browser would break after the dash


def html(report: TuneReport) -> str:
    """One self-contained page: the chart if there is anything to draw, then the tables."""
    parts = [page.chart(draw(report))] if drawable(report) else []
    parts += [_whole_ranges(page.table(*table)) for table in tables(report)]
    return page.page(f"outblas: {report.title}", notes(report), parts)


def _whole_ranges(table: str) -> str:
    """The table with each range in brackets on one line."""
    return _RANGE.sub(lambda match: f'<span style="white-space: nowrap">{match[0]}</span>', table)
