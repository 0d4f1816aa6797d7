"""Which problems the rungs of the Hopper ladder take, and how they write C."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from support.hopper_problems import MEMORY, RUNGS, load, matrix, problem, strided

from outblas.call import problem as operands
from outblas.call.problem import Problem
from outblas.hopper.parts import host
from outblas.hopper.parts.config import HopperConfig


class Refused(NamedTuple):
    """A problem, what its refusal says, and whether the production kernel takes it: that copies
    what TMA cannot stride over, and has batches and addends.
    """

    problem: Problem
    message: str
    gemm_takes_it: bool = True


MATRICES = MEMORY[:512].view(2, 16, 16)
REFUSED = {
    "K no multiple of 8": Refused(problem(K=63), "a has strides (63, 1) for 64x63"),
    "no unit stride": Refused(problem(a=strided((64, 64), (512, 2))), "TMA needs one stride of 1"),
    "odd address": Refused(problem(a=matrix(start=1)), "a's is a multiple of only 2"),
    "b's stride": Refused(problem(N=60, b=matrix(64, 60)), "b has strides (60, 1)"),
    "batches": Refused(
        operands.problem(MATRICES, MATRICES, MATRICES), "was given batches of shape (2,)"
    ),
    "addend": Refused(replace(problem(), c=(64, 1), scaled=True), "was given an addend or a scale"),
    "extent": Refused(
        replace(problem(), M=1 << 31), "extents up to 2147481600", gemm_takes_it=False
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("rung", RUNGS)
def test_a_refusal_says_what_is_needed_and_given(rung: str, case: Refused) -> None:
    reason = load(rung).unsupported(case.problem)

    if rung == "gemm" and case.gemm_takes_it:
        assert reason is None
    else:
        assert case.message in str(reason)


@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_refuses_a_config_that_cannot_be_built(rung: str) -> None:
    reason = load(rung).unsupported(problem(), HopperConfig(tile_n=7))

    assert "config: tile_n is 7" in str(reason)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(problem(), id="64x64x64"),
        pytest.param(problem(63, 65, 8), id="odd M and N"),
        pytest.param(problem(1, 1, 1), id="one element"),
        pytest.param(problem(1, 63, 63, b=matrix(63, 63, 64).t()), id="a row of A"),
        pytest.param(problem(N=1), id="a column of B"),
        pytest.param(problem(N=1, b=MEMORY[:64]), id="a vector B"),
        pytest.param(problem(a=matrix(stride=8)), id="rows of A that overlap"),
        pytest.param(problem(a=matrix(stride=0)), id="one row of A for all"),
        pytest.param(problem(out=matrix(start=1)), id="C at an odd address"),
        pytest.param(problem(out=strided((64, 64), (200, 3))), id="C without a unit stride"),
    ],
)
def test_whatever_tma_can_stride_over_is_taken(given: Problem) -> None:
    assert load("hilbert").unsupported(given) is None


@pytest.mark.parametrize(
    ("out", "width"),
    [
        pytest.param(matrix(), 8, id="bf16"),
        pytest.param(torch.empty(64, 64), 4, id="fp32"),
        pytest.param(matrix(stride=72), 8, id="rows of 64 in rows of 72"),
        pytest.param(
            matrix(64, 66, 72), 2, id="rows of 66 in rows of 72, which TMA would write up to 72"
        ),
        pytest.param(torch.empty(64, 68)[:, :66], 2, id="fp32, rows of 66 in rows of 68"),
        pytest.param(matrix(64, 66), 2, id="rows of 66"),
        pytest.param(matrix(64, 65), 1, id="rows of 65"),
        pytest.param(matrix(start=1), 1, id="an address of 2 bytes"),
        pytest.param(matrix(start=2), 2, id="an address of 4 bytes"),
        pytest.param(matrix(1), 8, id="a row"),
        pytest.param(matrix(1, 63), 1, id="a row of 63"),
        pytest.param(strided((64, 64), (512, 2)), 1, id="no unit stride"),
    ],
)
def test_c_is_written_in_the_widest_vectors_that_it_allows(out: torch.Tensor, width: int) -> None:
    M, N = out.shape

    made = host._variant("hopper.hilbert", problem(M, N, out=out), load("hilbert").Config())

    assert made.width == width
    assert made.row_major == (out.stride(1) == 1)
