"""Oracles see every result that is not finite where it should be, or finite where it should not."""

import math

import pytest
import torch

from outblas.verify import oracle
from outblas.verify.cases import Case

CASE = Case(33, 40, 24, torch.float32)


def spoilt(spoil):
    """A kernel that computes the right product, of which `spoil` then changes a part."""

    def run(a, b, c, out, alpha, beta) -> None:
        out.copy_((a.double() @ b.double()).to(out.dtype))
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


def test_a_result_that_is_as_it_should_be_is_right() -> None:
    for name in ("exact", "bounded", "nonfinite"):
        result = oracle.ORACLES[name](spoilt(lambda out: None), CASE, "cpu")

        assert result.ok, f"{name}: {result.message}"
