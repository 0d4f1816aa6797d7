"""Oracles see every result that is not finite where it should be, or finite where it should not."""

import math
from collections.abc import Callable

import pytest
import torch
from support import broken

from outblas.verify import oracle
from outblas.verify.call import Run
from outblas.verify.cases import Case

CASE = Case(33, 40, 24, torch.float32)


def spoilt(spoil: Callable[[torch.Tensor], None]) -> Run:
    """A kernel that computes the right product, of which `spoil` then changes a part."""

    def run(
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor | None,
        out: torch.Tensor,
        alpha: float,
        beta: float,
    ) -> None:
        broken.right(a, b, c, out, alpha, beta)
        spoil(out)

    return run


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["exact", "bounded", "chained"])
def test_a_finite_result_that_is_not_is_wrong(name: str, value: float) -> None:
    def spoil(out: torch.Tensor) -> None:
        out[5, 7] = value

    result = oracle.ORACLES[name](spoilt(spoil), CASE, "cpu")

    assert not result.ok
    assert "wrong: 1 of 1320 elements, first at [5, 7]" in result.message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_result_that_should_not_be_finite_and_is_is_wrong(value: float) -> None:
    def spoil(out: torch.Tensor) -> None:
        out[out.isnan() if math.isnan(value) else out == value] = 1.0

    result = oracle.nonfinite(spoilt(spoil), CASE)

    assert not result.ok, f"{value} became 1"


@pytest.mark.parametrize("name", ["exact", "bounded", "nonfinite"])
def test_a_result_that_is_as_it_should_be_is_right(name: str) -> None:
    result = oracle.ORACLES[name](spoilt(lambda out: None), CASE, "cpu")

    assert result.ok, result.message
