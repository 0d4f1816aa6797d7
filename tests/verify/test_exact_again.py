"""The exact oracle for many kernels at one case: each is judged by what it wrote itself."""

import pytest
import torch
from support import broken

from outblas.verify.cases import Case
from outblas.verify.oracle import Exact

UPPER_ROWS = slice(10)


@pytest.fixture
def judge() -> Exact:
    """The oracle, which has just seen a right kernel."""
    exact = Exact(Case(20, 24, 16, torch.float32))
    assert exact(broken.right).ok
    return exact


def half(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None,
    out: torch.Tensor,
    alpha: float,
    beta: float,
) -> None:
    """The upper rows of the product."""
    broken.right(a[UPPER_ROWS], b, c, out[UPPER_ROWS], alpha, beta)


def test_a_kernel_that_writes_nothing_is_wrong_after_a_right_one(judge: Exact) -> None:
    result = judge(lambda *_: None)

    assert not result.ok
    assert "unwritten: 480 of 480" in result.message


def test_rows_that_a_kernel_leaves_out_are_unwritten_after_a_right_one(judge: Exact) -> None:
    result = judge(half)

    assert not result.ok
    assert "unwritten: 240 of 480 elements, first at [10, 0]" in result.message


def test_a_right_kernel_is_right_after_a_wrong_one(judge: Exact) -> None:
    assert not judge(half).ok

    result = judge(broken.right)

    assert result.ok, result.message
