"""What every chart shares: a canvas without a window system, colours that stay with a name, and
files.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
PALETTE = (
    "#3b6fb6",
    "#d1642c",
    "#2f8f5b",
    "#8b5bb0",
    "#c2407a",
    "#8a7a2f",
    "#4aa3a3",
    "#b04a3b",
    "#5c6f7f",
    "#a68a4f",
)
BASE_COLOUR = "#6f6f6f"


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


def colours(names: list[str]) -> dict[str, str]:
    """A colour for each name; cuBLAS is grey."""
    others = [name for name in names if name != "cublas"]
    return {"cublas": BASE_COLOUR} | {
        name: PALETTE[i % len(PALETTE)] for i, name in enumerate(others)
    }


def canvas(panels: int, size: tuple[float, float], columns: int = 1) -> tuple[Figure, list[Any]]:
    """A figure of `panels` axes in rows of `columns`, `size` in inches. Agg draws it, which needs
    no display.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Text stays text, and the ids inside a file follow from what it shows.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "outblas"})
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(-(-panels // columns), columns, squeeze=False).flat
    axes, unused = places[:panels], places[panels:]
    for axis in unused:
        axis.remove()
    for axis in axes:
        axis.grid(True, axis="y", color="#e3e3e3", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def save(figure: Figure, path: Path, note: str = "") -> None:
    """Writes the file; its format follows the suffix. An .svg has `note` as its description, and no
    date: the same figure makes the same file.
    """
    metadata = (
        {"Date": None, "Description": note or None} if path.suffix.lower() == ".svg" else None
    )
    figure.savefig(path, dpi=120, metadata=metadata)
