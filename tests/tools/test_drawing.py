"""How charts of the pages show series: colours, marks, and names that do not collide."""

from itertools import pairwise

import pytest

from outblas.bench import plotting
from tools.pages import drawing


# ---- colours
def test_a_provider_has_its_colour_whatever_stands_beside_it() -> None:
    alone = drawing.styles(["outblas"])
    beside = drawing.styles(["cublaslt-best", "portable", "outblas", "cublas"])

    assert alone["outblas"] == beside["outblas"]
    assert beside["cublas"][0] == plotting.BASE_COLOUR
    assert len({colour for colour, _ in beside.values()}) == 4


def test_eight_series_have_eight_colours_and_marks_and_nine_are_refused() -> None:
    names = ["cublas", *"abcdefg"]

    styles = drawing.styles(names)
    assert len({colour for colour, _ in styles.values()}) == 8
    assert len({styles[name][1] for name in "abcdefg"}) == 7
    with pytest.raises(ValueError, match="a chart has 9 series, expected at most 8"):
        drawing.styles([*names, "h"])


# ---- labels
@pytest.mark.parametrize(
    ("wanted", "places"),
    [
        pytest.param([1.0, 5.0], [1.0, 5.0], id="far apart"),
        pytest.param([5.0, 1.0], [5.0, 1.0], id="in any order"),
        pytest.param([1.0, 1.0], [0.0, 2.0], id="at one place"),
        pytest.param([1.0, 2.0, 3.0], [0.0, 2.0, 4.0], id="three that are close"),
        pytest.param([], [], id="none"),
    ],
)
def test_places_are_spread_no_farther_than_needed(wanted: list[float], places: list[float]) -> None:
    assert drawing.spread(wanted, 2.0) == pytest.approx(places)


def test_names_at_the_ends_of_close_lines_do_not_collide() -> None:
    figure, (axis,) = plotting.grid(4.0, [(3.0, (1,))])
    ends = [(1.0, y, f"line {y}", plotting.INK) for y in (0.5, 0.51, 0.52, 0.9)]

    drawing.label_ends(axis, ends)

    figure.draw_without_rendering()
    heights = sorted(tuple(text.get_window_extent().intervaly) for text in axis.texts)
    assert [text.get_text() for text in axis.texts] == [name for *_, name, _ in ends]
    assert all(below[1] <= above[0] for below, above in pairwise(heights))
