"""The oracles let a right kernel pass and catch kernels broken on purpose, by what their messages
say.
"""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from support import broken

from outblas.verify import call, cases
from outblas.verify.call import Run
from outblas.verify.cases import Case
from outblas.verify.oracle import (
    ORACLES,
    Exact,
    Result,
    bounded,
    chained,
    determinism,
    exact,
    nonfinite,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
each_dtype = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
Oracle = Callable[[Run, Case], Result]

SQUARE = Case(48, 48, 48, BF16)
RAGGED = Case(45, 51, 37, BF16, layout="nt")
RAGGED_ROWS = Case(45, 51, 37, BF16)
WIDE = Case(4, 700, 16, BF16)


@pytest.mark.parametrize("oracle", ORACLES.values(), ids=list(ORACLES))
@each_dtype
def test_a_right_kernel_passes(oracle: Oracle, dtype: torch.dtype) -> None:
    results = [oracle(broken.right, case) for case in cases.quick(dtype)]

    assert not [result for result in results if not result.ok]


# ---- broken kernels
class Caught(NamedTuple):
    """A broken kernel, the oracles that catch it on a case, and what their messages have."""

    kernel: Run
    oracles: tuple[Oracle, ...]
    case: Case
    message: str

    @property
    def name(self) -> str:
        """The kernel's name."""
        return getattr(self.kernel, "__name__", type(self.kernel).__name__)


UNWRITTEN = Caught(
    broken.unwritten_tile,
    (exact, bounded, nonfinite, determinism),
    RAGGED,
    r"^unwritten: 256 of 2295 .* at \[16, 0\], all of rows 16-31, columns 0-15$",
)
STRAY_WRITES = [
    Caught(
        broken.row_above,
        (exact,),
        RAGGED,
        r"^out: elements overwritten 51 before it; first at offset -51, strides \[51, 1\]",
    ),
    Caught(
        broken.row_below,
        (exact, bounded, nonfinite, determinism),
        RAGGED,
        r"^out: elements overwritten 51 after it; first at offset 2295, ",
    ),
    Caught(broken.row_above, (exact,), WIDE, r"^out: elements overwritten 700 before it"),
    Caught(broken.row_below, (exact,), WIDE, r"^out: elements overwritten 700 after it"),
    Caught(broken.nan_row_below, (exact,), RAGGED, r"^out: elements overwritten 51 after it; "),
    Caught(
        broken.into_gap,
        (exact,),
        replace(RAGGED, pad=4),
        r"^out: .* 2 in its gaps; first at offset 216, strides \[55, 1\]",
    ),
    Caught(
        broken.overwrites_input,
        (exact, nonfinite),
        RAGGED,
        r"^b: elements overwritten 1 inside it; first at offset 113, strides \[1, 37\]",
    ),
    Caught(
        broken.overwrites_input_first,
        (exact,),
        SQUARE,
        r"^wrong: .*b: elements overwritten \d{4} inside it",
    ),
]
ONE_ELEMENT = [
    Caught(
        broken.one_unit_off,
        (exact,),
        RAGGED,
        r"wrong: 1 of 2295 elements, first at \[44, 50\], all of rows 44-44",
    ),
    Caught(
        broken.one_unit_off,
        (exact,),
        replace(RAGGED, out_dtype=FP32),
        r"expected (-?\d+), got -?\d+",
    ),
    Caught(
        broken.one_unit_off,
        (exact,),
        replace(RAGGED, batch_a=(3,)),
        r"wrong: 3 of .* of 3 of 3 matrices",
    ),
    # Nothing is summed: half a unit is allowed.
    Caught(broken.one_unit_off, (bounded,), Case(32, 32, 1, BF16), r"wrong: 1 of 1024"),
]
WRONG_ADDRESSES = [
    Caught(broken.lost_k_tail, (exact, bounded, chained), RAGGED, r"wrong: \d{4} of 2295"),
    Caught(broken.lost_k_tail, (exact,), Case(48, 48, 1025, BF16), r"wrong: \d+ of 2304"),
    Caught(
        broken.wrong_batch_stride,
        (exact,),
        replace(RAGGED, batch_b=(3,), pad=1),
        r"wrong: .* of 2 of 3 matrices",
    ),
    Caught(
        broken.no_batch_stride,
        (exact,),
        replace(RAGGED, batch_b=(3,)),
        r"wrong: .* at \[1, 0, 0\].* of 2 of 3 matrices",
    ),
    Caught(
        broken.swapped_ldmatrix,
        (exact,),
        SQUARE,
        r"wrong: 2\d{3} of 2304 elements, first at \[0, 0\], within rows 0-47",
    ),
    Caught(
        broken.swapped_ldmatrix, (bounded,), replace(SQUARE, dtype=FP16), r"wrong: 2\d{3} of 2304"
    ),
    Caught(
        broken.swapped_ldmatrix_of_one_warp,
        (exact,),
        replace(SQUARE, dtype=FP16),
        r"^wrong: 25\d of 2304 elements, .*rows 16-31, columns 32-47; expected",
    ),
    Caught(
        broken.transposed_operand,
        (exact,),
        SQUARE,
        r"wrong: 2\d{3} of 2304 elements, first at \[0, 0\]",
    ),
    Caught(broken.transposed_result, (exact,), SQUARE, r"wrong: 2\d{3} of 2304"),
    Caught(
        broken.reads_past_k,
        (exact,),
        RAGGED_ROWS,
        r"wrong: 51 of .*all of rows 44-44.*; 51 are NaN \(",
    ),
    Caught(
        broken.reads_past_k,
        (exact,),
        replace(RAGGED_ROWS, pad=1),
        r"; 2295 are NaN \(read outside",
    ),
]
ROUNDING = [
    Caught(
        broken.truncated_sum,
        (chained,),
        Case(32, 32, 256, FP32),
        r"relative Frobenius error .*, the chain's .*, allowed",
    ),
    Caught(broken.bf16_accumulator, (exact,), SQUARE, r"wrong: \d{3} of 2304"),
    Caught(broken.bf16_accumulator, (exact,), replace(SQUARE, K=4096), r"wrong: \d{4} of 2304"),
    Caught(
        broken.bf16_accumulator,
        (bounded,),
        replace(SQUARE, out_dtype=FP32),
        r"wrong: \d{4} of 2304",
    ),
    Caught(broken.tf32, (exact, bounded), Case(48, 48, 2, FP32), r"wrong: "),
    Caught(broken.tf32, (exact, bounded), Case(48, 48, 64, FP32), r"wrong: "),
    Caught(
        broken.tf32,
        (bounded,),
        Case(48, 48, 2048, FP32),
        r"relative Frobenius error .*, torch's .*, allowed",
    ),
]
ADDENDS = [
    Caught(
        broken.reads_c_at_beta_0,
        (exact,),
        replace(SQUARE, addend="matrix", alpha=0.5),
        r"wrong: 2304 of.*2304 are NaN",
    ),
    Caught(
        broken.scales_addend_by_alpha,
        (exact,),
        replace(SQUARE, addend="out", alpha=2.0, beta=1.0),
        r"wrong: \d{3} of 2304",
    ),
    Caught(
        broken.scales_addend_by_alpha,
        (bounded,),
        replace(SQUARE, addend="row", alpha=2.0, beta=1.0),
        r"wrong: \d{4} of",
    ),
]
SPECIAL_VALUES = [
    Caught(
        broken.skips_zeros,
        (nonfinite,),
        SQUARE,
        r"wrong: 1 of .*first at \[47, 0\], .*expected nan, got",
    ),
    Caught(
        broken.clamps,
        (nonfinite,),
        SQUARE,
        r"wrong: .*expected -?inf, got -?9984",
    ),
]
WAVERING = Caught(
    broken.Wavering(),
    (determinism,),
    SQUARE,
    r"^5 of 9 repeats differ from the first call in 1 of .*first at \[1, 2\]",
)
CAUGHT = [
    UNWRITTEN,
    *STRAY_WRITES,
    *ONE_ELEMENT,
    *WRONG_ADDRESSES,
    *ROUNDING,
    *ADDENDS,
    *SPECIAL_VALUES,
    WAVERING,
]


@pytest.mark.parametrize(
    ("caught", "oracle"),
    [
        pytest.param(caught, oracle, id=f"{caught.name}-{oracle.__name__}-{caught.case}")
        for caught in CAUGHT
        for oracle in caught.oracles
    ],
)
def test_a_broken_kernel_is_caught(caught: Caught, oracle: Oracle) -> None:
    result = oracle(caught.kernel, caught.case)

    assert not result.ok
    assert re.search(caught.message, result.message), result.message


@pytest.mark.parametrize(
    ("oracle", "case"),
    [
        pytest.param(oracle, case, id=f"{oracle.__name__}-{case}")
        for oracle, case in dict.fromkeys(
            (oracle, caught.case) for caught in CAUGHT for oracle in caught.oracles
        )
    ],
)
def test_a_right_kernel_passes_where_a_broken_one_is_caught(oracle: Oracle, case: Case) -> None:
    result = oracle(broken.right, case)

    assert result.ok, result.message


def run_torch(a: Any, b: Any, c: Any, out: torch.Tensor, alpha: float, beta: float) -> None:
    """The product by torch's own kernels for its dtype."""
    out.copy_(a @ b if c is None else torch.addmm(c, a, b, alpha=alpha, beta=beta))


@each_dtype
@torch.backends.mkldnn.flags(enabled=False)  # which pads K of bf16 with what lies behind a row
def test_torch_matmul_has_the_masks_of_nonfinite(dtype: torch.dtype) -> None:
    chosen = [case for case in cases.quick(dtype) if case.result_dtype == dtype]

    wrong = [str(case) for case in chosen if not nonfinite(run_torch, case).ok]

    assert chosen
    assert not wrong


# ---- chunks of rows
def verdict(result: Result) -> tuple[bool, str]:
    """Whether a kernel passes, and of a message what does not depend on chunks."""
    return result.ok, result.message.split(";")[0]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(RAGGED, id="matrices"),
        pytest.param(replace(RAGGED, batch_a=(2, 1), batch_b=(3,)), id="batches"),
        pytest.param(replace(RAGGED, addend="column", beta=2.0), id="addend"),
    ],
)
@pytest.mark.parametrize("oracle", [exact, bounded, nonfinite], ids=lambda o: o.__name__)
@pytest.mark.parametrize("kernel", [broken.right, broken.lost_k_tail, broken.unwritten_tile])
def test_chunks_of_rows_change_nothing(
    kernel: Run, oracle: Oracle, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product judged a few rows at a time gets the verdict of one judged whole."""
    at_once = oracle(kernel, case)

    monkeypatch.setattr(call, "CHUNK", 7 * 51)
    in_chunks = oracle(kernel, case)

    assert verdict(in_chunks) == verdict(at_once)


# ---- values that are not finite, and one oracle for many kernels
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_wrongly_finite_or_not_is_caught(value: float) -> None:
    case = Case(33, 40, 24, FP32)

    def one(a: Any, b: Any, c: Any, out: torch.Tensor, alpha: float, beta: float) -> None:
        broken.right(a, b, c, out, alpha, beta)
        out[5, 7] = value

    def none(a: Any, b: Any, c: Any, out: torch.Tensor, alpha: float, beta: float) -> None:
        broken.right(a, b, c, out, alpha, beta)
        out[out.isnan() if math.isnan(value) else out == value] = 1.0

    for oracle in (exact, bounded, chained):
        assert "wrong: 1 of 1320 elements, first at [5, 7]" in oracle(one, case).message
    assert not nonfinite(none, case).ok


def test_an_oracle_of_many_kernels_judges_each_by_what_it_wrote_itself() -> None:
    judge = Exact(Case(20, 24, 16, FP32))

    def half(a: Any, b: Any, c: Any, out: torch.Tensor, alpha: float, beta: float) -> None:
        broken.right(a[:10], b, c, out[:10], alpha, beta)

    assert judge(broken.right).ok
    assert "unwritten: 480 of 480" in judge(lambda *_: None).message
    assert "unwritten: 240 of 480 elements, first at [10, 0]" in judge(half).message
    assert judge(broken.right).ok
