"""A sweep's report as an HTML page."""

from .. import page
from .chart import draw, drawable
from .model import TuneReport
from .tables import notes, tables


def html(report: TuneReport) -> str:
    """One self-contained page: the chart if there is anything to draw, then the tables."""
    parts = [page.chart(draw(report))] if drawable(report) else []
    parts += [page.table(*table) for table in tables(report)]
    return page.page(f"outblas: {report.title}", notes(report), parts)
