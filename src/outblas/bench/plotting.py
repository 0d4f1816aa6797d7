"""The style that every chart shares, and how charts are written to files.

A chart is a matplotlib figure with a title, a text alternative and colours that colour-blind
readers tell apart. `save` writes it; as SVG it carries the title and the alternative for screen
readers, and follows the reader's light or dark mode. Its background is opaque, so that it reads on
any page.
"""

from __future__ import annotations

import hashlib
import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
WIDTH = 9.0  # inches: 864 CSS pixels, the width of a README

# Colours as matplotlib draws them, on a light background. Text and lines have names for what they
# do; white that must stay white in the dark is `ON_COLOUR`.
INK, QUIET, RULE, PAPER = "#1f2328", "#59636e", "#dfe3e8", "#ffffff"
ON_COLOUR = "#fefefe"
BASE_COLOUR = "#8c8a92"  # cuBLAS
PALETTE = ("#19539a", "#b14000", "#5b955e", "#2198ff", "#d28303", "#7d3868", "#1e154e")
# What stands for each of these colours on a dark background.
DARK: Mapping[str, str] = MappingProxyType(
    {
        INK: "#e6e8ea",
        QUIET: "#a3acb5",
        RULE: "#363d45",
        PAPER: "#16191d",
        BASE_COLOUR: "#85868a",
        "#19539a": "#5c8fcb",
        "#b14000": "#dd7509",
        "#5b955e": "#43d888",
        "#2198ff": "#abefff",
        "#d28303": "#ffef83",
        "#7d3868": "#ff9bbf",
        "#1e154e": "#8d74ff",
    }
)
SMALL, TEXT, HEADING = 8.5, 9.5, 12.0  # points
_NOTE_WIDTH = 16.0  # characters of the note beneath a chart for each inch of its width
_STYLE: dict[Any, Any] = {
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.labelsize": TEXT,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlepad": 8.0,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.wspace": 0.03,
    "figure.constrained_layout.hspace": 0.03,
    "figure.labelsize": 8.0,
    "figure.titlesize": HEADING,
    "figure.titleweight": "bold",
    "font.size": TEXT,
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": SMALL,
    "legend.labelcolor": INK,
    "savefig.dpi": 144,
    "text.color": INK,
    "xtick.color": QUIET,
    "xtick.labelcolor": INK,
    "xtick.labelsize": SMALL,
    "ytick.color": QUIET,
    "ytick.labelcolor": INK,
    "ytick.labelsize": SMALL,
    # Text stays text, and the ids inside a file follow from what it shows.
    "svg.fonttype": "none",
    "svg.hashsalt": "outblas",
}


def check_chart(path: Path | None, option: str = "--chart") -> None:
    """Raises ValueError for a chart that could not be drawn once the work is done: a file of an
    unknown format, or matplotlib missing.
    """
    if path is None:
        return
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(
            f"{option} is {str(path)!r}, expected a file ending in {', '.join(SUFFIXES)}"
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(
            f"{option} needs matplotlib, which is not installed: pip install 'outblas[chart]'"
        ) from None


def grid(
    width: float, rows: Sequence[tuple[float, Sequence[int]]], extra: float = 0.0
) -> tuple[Figure, list[Any]]:
    """A figure of axes in rows. A row is its height in inches and the relative width of each of its
    axes; `extra` is the height of title and note together.
    """
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(_STYLE)
    heights = [height for height, _ in rows]
    figure = Figure(figsize=(width, sum(heights) + extra))
    # A figure within the figure for each row, so that long names in one row leave others alone.
    parts = figure.subfigures(len(rows), 1, squeeze=False, height_ratios=heights)
    units = max(sum(spans) for _, spans in rows)
    axes = []
    for part, (_, spans) in zip(parts.flat, rows, strict=True):
        places, start = part.add_gridspec(1, units), 0
        for span in spans:
            axes.append(part.add_subplot(places[0, start : start + span]))
            start += span
    return figure, axes


def entitle(figure: Figure, title: str, note: str = "") -> None:
    """Gives a figure its title, and a note beneath: how and where its data were measured."""
    figure.suptitle(title, x=0.008, ha="left")
    if note:
        width = int(_NOTE_WIDTH * figure.get_figwidth())
        text = textwrap.fill(note, width, break_long_words=False)
        figure.supxlabel(text, x=0.008, ha="left", color=QUIET)


def describe(figure: Figure, text: str) -> None:
    """Gives a figure its text alternative: what it shows, for a reader who does not see it."""
    figure.set_label(text)  # matplotlib draws no label of a figure


def legend_above(axis: Any, title: str, columns: int) -> None:
    """Gives an axis its title, and between the two its legend in rows of `columns`."""
    handles, _ = axis.get_legend_handles_labels()
    rows = -(-len(handles) // columns)
    axis.set_title(title, pad=6 + 12.5 * rows)
    axis.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=columns,
        handlelength=1.2,
        handletextpad=0.4,
        columnspacing=1.2,
        labelspacing=0.25,
        borderaxespad=0.1,
        borderpad=0.2,
    )


def save(figure: Figure, path: Path, note: str = "") -> None:
    """Writes the file; its format follows the suffix. An .svg has `note` in its metadata, and no
    date: the same figure makes the same file.
    """
    if path.suffix.lower() == ".svg":
        path.write_text(svg(figure, note), encoding="utf-8")
    else:
        figure.savefig(path)


def svg(figure: Figure, note: str = "") -> str:
    """A figure as an SVG document with its title and text alternative, and colours that follow the
    reader's light or dark mode. `note` stands in its metadata.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Description": note or None})
    text, key = _with_own_ids(file.getvalue())
    start = text.index("<svg")
    end = text.index(">", start)
    title, alternative = figure.get_suptitle().replace("\n", " "), str(figure.get_label())
    head = (
        f'{text[:end]} role="img" aria-labelledby="title-{key} desc-{key}">\n'
        f' <title id="title-{key}">{escape(title)}</title>\n'
        f' <desc id="desc-{key}">{escape(alternative)}</desc>\n'
        f" <style>\n{_dark_rules()} </style>"
    )
    return head + text[end + 1 :]


def _with_own_ids(text: str) -> tuple[str, str]:
    """The document with ids of clip paths that no other chart on a page has, and the part that all
    of these have in common.

    matplotlib makes these ids of coordinates to their last bit, in which the layout is not the same
    every time.
    """
    clips = dict.fromkeys(re.findall(r'<clipPath id="(\w+)"', text))
    numbers = {name: str(number) for number, name in enumerate(clips)}
    plain = re.sub(r"\bp[0-9a-f]{10}\b", lambda clip: f"clip-{numbers[clip[0]]}", text)
    key = hashlib.sha256(plain.encode()).hexdigest()[:8]
    return re.sub(r"\bclip-(?=\d)", f"clip-{key}-", plain), key


def _dark_rules() -> str:
    """CSS that repaints a chart where the reader prefers dark colours. matplotlib writes a colour
    into an element's own style, which only an important rule overrides.
    """
    rules = [
        f'  [style*="{part}: {light}"] {{ {part}: {dark} !important }}\n'
        for light, dark in DARK.items()
        for part in ("fill", "stroke")
    ]
    return f"@media (prefers-color-scheme: dark) {{\n{''.join(rules)}}}\n"
