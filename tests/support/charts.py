"""What a chart shows, as a reader sees it: the texts that are drawn and where they stand."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any
from unittest import mock

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.text import Text
from matplotlib.transforms import Affine2D, Bbox

SLACK = 0.75  # pixels by which a text's box is larger than its glyphs


@dataclass(frozen=True)
class Drawn:
    """A text and the outline of the box that it fills, in pixels."""

    text: str
    outline: Path

    @property
    def corners(self) -> list[tuple[float, float]]:
        """The corners of the box."""
        corners: Any = self.outline.vertices
        return [(float(x), float(y)) for x, y in corners]


def _axes(figure: Any) -> Iterator[Any]:
    yield from figure.axes if not figure.subfigs else ()
    for part in figure.subfigs:
        yield from _axes(part)


@functools.lru_cache(maxsize=4)
def drawn_texts(figure: Figure) -> list[Drawn]:
    """Every text that is drawn; the figure is drawn once, and is not to change afterwards."""
    found: list[Text] = []
    draw = Text.draw

    def recorded(self: Text, *given: Any, **named: Any) -> None:
        if self.get_visible() and self.get_text():
            found.append(self)
        draw(self, *given, **named)

    with mock.patch.object(Text, "draw", recorded):
        FigureCanvasAgg(figure).draw()
    return [Drawn(text.get_text(), _outline(text)) for text in dict.fromkeys(found)]


def _outline(text: Text) -> Path:
    angle = text.get_rotation()
    if angle % 90 == 0:
        return _box(text.get_window_extent())
    text.set_rotation(0)
    box = _box(text.get_window_extent())
    text.set_rotation(angle)
    x, y = text.get_transform().transform(text.get_position())
    return box.transformed(Affine2D().rotate_around(x, y, math.radians(angle)))


def _box(extent: Bbox) -> Path:
    x0, y0, x1, y1 = extent.x0 + SLACK, extent.y0 + SLACK, extent.x1 - SLACK, extent.y1 - SLACK
    return Path([(x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0)], closed=True)


def collisions(figure: Figure) -> list[tuple[str, str]]:
    """The pairs of texts that stand on one another, and texts that a reference line crosses."""
    texts = drawn_texts(figure)
    found = [
        (first.text, second.text)
        for first, second in combinations(texts, 2)
        if first.outline.intersects_path(second.outline, filled=True)
    ]
    for axis in _axes(figure):
        for line in axis.lines:
            if len(line.get_xydata()) != 2:
                continue
            path = line.get_transform().transform_path(line.get_path())
            crossed = [t.text for t in texts if t.outline.intersects_path(path, filled=False)]
            found += [(f"line {line.get_label()}", text) for text in crossed]
    return found


def clipped(figure: Figure) -> list[str]:
    """The texts that run over the edge of the figure."""
    texts = drawn_texts(figure)
    edge = figure.bbox
    return [
        each.text
        for each in texts
        if not all(edge.x0 <= x <= edge.x1 and edge.y0 <= y <= edge.y1 for x, y in each.corners)
    ]
