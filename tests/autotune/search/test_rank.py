"""How well two orders agree."""

import statistics

import pytest

from outblas.autotune.search.rank import spearman


@pytest.mark.parametrize(
    ("first", "second", "rho"),
    [
        pytest.param(
            [106, 100, 86, 101, 99, 103, 97, 113, 112, 110],
            [7, 27, 2, 50, 28, 29, 20, 12, 6, 17],
            -29 / 165,
            id="the textbook's IQ and hours of television",
        ),
        pytest.param([1, 1, 2, 3], [1, 2, 3, 4], 4.5 / (4.5 * 5) ** 0.5, id="equal values"),
        pytest.param([1, 2, 3, 4], [10, 20, 30, 1000], 1, id="the same order"),
        pytest.param([1, 2, 3, 4], [4, 3, 2, 1], -1, id="the reverse order"),
    ],
)
def test_spearman_compares_two_orders(first: list[float], second: list[float], rho: float) -> None:
    assert spearman(first, second) == pytest.approx(rho)


@pytest.mark.parametrize(
    ("predicted", "measured"),
    [
        pytest.param([1, 2], [1], id="two values beside one"),
        pytest.param([1], [1], id="one value each"),
        pytest.param([1, 2], [3, 3], id="equal values only"),
    ],
)
def test_spearman_of_what_has_no_order_is_an_error(
    predicted: list[float], measured: list[float]
) -> None:
    with pytest.raises(statistics.StatisticsError):
        spearman(predicted, measured)
