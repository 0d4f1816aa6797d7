"""The style that charts share: colours, and what an SVG carries."""

import re
import struct
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from outblas.bench import plotting

SVG = "{http://www.w3.org/2000/svg}"


def small_figure() -> Any:
    """A chart of one line, with a title, a note and a text alternative."""
    figure, (axis,) = plotting.grid(4.0, [(3.0, (1,))])
    axis.plot([0, 1], [0, 1 / 3], marker="o", color=plotting.PALETTE[0])
    axis.set_title("a panel")
    axis.text(0.2, 0.2, "a text")
    plotting.entitle(figure, "1.5 × cuBLAS & more", "A note.")
    plotting.describe(figure, "One line < another.")
    return figure


@pytest.fixture
def drawn() -> ElementTree.Element:
    """The same as a document."""
    return ElementTree.fromstring(plotting.svg(small_figure()))


# ---- files
def test_an_svg_is_an_image_with_a_title_and_a_description(drawn: ElementTree.Element) -> None:
    title, description = drawn.find(f"{SVG}title"), drawn.find(f"{SVG}desc")

    assert title is not None
    assert description is not None
    assert title.text == "1.5 × cuBLAS & more"
    assert description.text == "One line < another."
    assert drawn.get("role") == "img"
    assert drawn.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"


def test_a_layout_that_differs_in_its_last_bit_makes_the_same_file() -> None:
    drawn = []
    for jitter in (0.0, 1e-13):
        figure, (axis,) = plotting.grid(4.0, [(3.0, (1,))])
        figure.set_layout_engine("none")
        axis.set_position((0.2, 0.2, 0.7 + jitter, 0.7))
        axis.plot([0, 1], [0, 1])
        drawn.append(plotting.svg(figure))

    assert "clip-path" in drawn[0]
    assert drawn[0] == drawn[1]


def test_every_colour_of_a_chart_has_one_for_the_dark(drawn: ElementTree.Element) -> None:
    styles = [each.get("style") or "" for each in drawn.iter()]
    used = {
        each for style in styles for each in re.findall(r"(fill|stroke): (#[0-9a-f]{6})", style)
    }
    rules = drawn.findtext(f"{SVG}style") or ""

    assert ("fill", plotting.PAPER) in used  # the background is opaque
    assert ("stroke", plotting.PALETTE[0]) in used
    assert "@media (prefers-color-scheme: dark)" in rules
    for part, colour in used:
        dark = f"{part}: {plotting.DARK[colour]} !important"
        assert f'[style*="{part}: {colour}"] {{ {dark} }}' in rules


def test_a_png_is_opaque(tmp_path: Path) -> None:
    from matplotlib.image import imread

    plotting.save(small_figure(), tmp_path / "chart.png")

    header = (tmp_path / "chart.png").read_bytes()[:24]
    assert struct.unpack(">II", header[16:24]) == (4 * 144, 3 * 144)
    assert imread(tmp_path / "chart.png")[..., 3].min() == 1.0
