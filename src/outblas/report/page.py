"""One self-contained HTML page: nothing is fetched, charts are inline SVG, all text is escaped."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

from outblas.base.terminal import printable
from outblas.bench import plotting
from outblas.report import chart, tables
from outblas.report.model import TuneReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_RANGE = re.compile(r"\(\d+\.\d+–\d+\.\d+\)")  # which a browser would break after the dash
_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 2rem 1.2rem 4rem; }
p.quiet { opacity: .7; margin: .2rem 0; }
figure svg { max-width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .35rem .7rem; }
th, td { border-bottom: 1px solid #8886; white-space: pre-line; }
th { white-space: pre; }
tbody tr:nth-child(even) { background: #8882; }
"""


def html(report: TuneReport) -> str:
    """The page: the chart if there is anything to draw, then the tables."""
    title, quiet = _escaped(f"outblas: {report.title}"), ""
    for note in tables.notes(report):
        quiet += f'<p class="quiet">{_escaped(note)}</p>'
    parts = [_svg(chart.draw(report))] if report.predictions else []
    parts += map(_table, tables.tables(report))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n"
        f"<body><main><h1>{title}</h1>{quiet}\n" + "\n".join(parts) + "\n</main></body></html>\n"
    )


def _table(table: tables.TextTable) -> str:
    """A table that scrolls on small screens, with each range in brackets on one line."""
    head = "".join(f"<th>{_escaped(column)}</th>" for column in table.columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{_escaped(cell)}</td>" for cell in row) + "</tr>\n"
        for row in table.rows
    )
    body = _RANGE.sub(r'<span style="white-space: nowrap">\g<0></span>', body)
    return (
        f'<h2>{_escaped(table.heading)}</h2><div class="scroll"><table><thead><tr>{head}</tr>'
        f"</thead>\n<tbody>{body}</tbody></table></div>"
    )


def _svg(figure: Figure) -> str:
    """A figure as inline SVG, without the XML prologue that HTML does not take."""
    document = plotting.svg(figure)
    without_prologue = document[document.index("<svg") :]
    without_metadata = re.sub(r"<metadata>.*?</metadata>", "", without_prologue, flags=re.DOTALL)
    return f"<figure>{without_metadata}</figure>"


def _escaped(text: str) -> str:
    """The text for HTML. Control characters, which would change how other text is shown, are made
    visible.
    """
    return escape(printable(text, keep="\n"))
