"""The oracles let a right kernel pass and catch kernels broken on purpose, by what their messages
say.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import broken

from outblas.verify import cases
from outblas.verify.call import Run, prepare
from outblas.verify.cases import Case
from outblas.verify.oracle import (
    ORACLES,
    Result,
    bounded,
    chained,
    determinism,
    exact,
    integer_ranges,
    nonfinite,
    ulp,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SQUARE = Case(48, 48, 48, BF16)
RAGGED = Case(45, 51, 37, BF16, layout="nt")
Oracle = Callable[[Run, Case], Result]


def normal(t: torch.Tensor, generator: torch.Generator) -> None:
    """Fills an operand with normal data."""
    t.normal_(generator=generator)


@pytest.mark.parametrize("oracle", ORACLES.values(), ids=list(ORACLES))
@each_dtype
def test_a_right_kernel_passes(oracle: Oracle, dtype: torch.dtype) -> None:
    results = [oracle(broken.right, case) for case in cases.quick(dtype)]

    assert not [result for result in results if not result.ok]


PLACE = r"first at offset {} \(row {}, column {} at a leading stride of {}\)"
WIDE = Case(4, 700, 16, BF16)
EVERY = (exact, bounded, nonfinite, determinism)
CAUGHT = [
    (
        broken.one_unit_off,
        [exact],
        RAGGED,
        r"wrong: 1 of 2295 elements, first at \[44, 50\], all of rows 44-44",
    ),
    (broken.one_unit_off, [exact], replace(RAGGED, out_dtype=FP32), r"expected (-?\d+), got -?\d+"),
    (
        broken.one_unit_off,
        [exact],
        replace(RAGGED, batch_a=(3,)),
        r"wrong: 3 of .* of 3 of 3 matrices",
    ),
    (
        broken.one_unit_off,
        [bounded],
        Case(32, 32, 1, BF16),
        r"wrong: 1 of 1024",
    ),  # nothing is summed: half a unit
    (
        broken.unwritten_tile,
        EVERY,
        RAGGED,
        r"^unwritten: 256 of 2295 .* at \[16, 0\], all of rows 16-31, columns 0-15$",
    ),
    (
        broken.row_above,
        [exact],
        RAGGED,
        r"^out: elements overwritten 51 before it; " + PLACE.format(-51, -1, 0, 51),
    ),
    (
        broken.row_below,
        EVERY,
        RAGGED,
        r"^out: elements overwritten 51 after it; " + PLACE.format(45 * 51, 45, 0, 51),
    ),
    (broken.row_above, [exact], WIDE, r"^out: elements overwritten 700 before it"),
    (broken.row_below, [exact], WIDE, r"^out: elements overwritten 700 after it"),
    (broken.nan_row_below, [exact], RAGGED, r"^out: elements overwritten 51 after it; "),
    (
        broken.into_gap,
        [exact],
        replace(RAGGED, pad=4),
        r"^out: .* 2 in its gaps; " + PLACE.format(216, 3, 51, 55),
    ),
    (broken.lost_k_tail, [exact, bounded, chained], RAGGED, r"wrong: \d{4} of 2295"),
    (broken.lost_k_tail, [exact], Case(48, 48, 1025, BF16), r"wrong: \d+ of 2304"),
    (
        broken.truncated_sum,
        [chained],
        Case(32, 32, 256, FP32),
        r"relative Frobenius error .*, the chain's .*, allowed",
    ),
    (
        broken.wrong_batch_stride,
        [exact],
        replace(RAGGED, batch_b=(3,), pad=1),
        r"wrong: .* of 2 of 3 matrices",
    ),
    (
        broken.no_batch_stride,
        [exact],
        replace(RAGGED, batch_b=(3,)),
        r"wrong: .* at \[1, 0, 0\].* of 2 of 3 matrices",
    ),
    (broken.bf16_accumulator, [exact], SQUARE, r"wrong: \d{3} of 2304"),
    (broken.bf16_accumulator, [exact], replace(SQUARE, K=4096), r"wrong: \d{4} of 2304"),
    (broken.bf16_accumulator, [bounded], replace(SQUARE, out_dtype=FP32), r"wrong: \d{4} of 2304"),
    (broken.tf32, [exact, bounded], Case(48, 48, 2, FP32), r"wrong: "),
    (broken.tf32, [exact, bounded], Case(48, 48, 64, FP32), r"wrong: "),
    (
        broken.tf32,
        [bounded],
        Case(48, 48, 2048, FP32),
        r"relative Frobenius error .*, torch's .*, allowed",
    ),
    (
        broken.swapped_ldmatrix,
        [exact],
        SQUARE,
        r"wrong: 2\d{3} of 2304 elements, first at \[0, 0\], within rows 0-47",
    ),
    (broken.swapped_ldmatrix, [bounded], replace(SQUARE, dtype=FP16), r"wrong: 2\d{3} of 2304"),
    (
        broken.swapped_ldmatrix_of_one_warp,
        [exact],
        replace(SQUARE, dtype=FP16),
        r"^wrong: 25\d of 2304 elements, .*rows 16-31, columns 32-47; expected",
    ),
    (
        broken.transposed_operand,
        [exact],
        SQUARE,
        r"wrong: 2\d{3} of 2304 elements, first at \[0, 0\]",
    ),
    (broken.transposed_result, [exact], SQUARE, r"wrong: 2\d{3} of 2304"),
    (
        broken.reads_past_k,
        [exact],
        Case(45, 51, 37, BF16),
        r"wrong: 51 of .*all of rows 44-44.*; 51 are NaN \(",
    ),
    (broken.reads_past_k, [exact], Case(45, 51, 37, BF16, pad=1), r"; 2295 are NaN \(read outside"),
    (
        broken.overwrites_input,
        [exact, nonfinite],
        RAGGED,
        r"^b: elements overwritten 1 inside it; first at offset 113 \(column 3, row 2 at",
    ),
    (
        broken.overwrites_input_first,
        [exact],
        SQUARE,
        r"^wrong: .*b: elements overwritten \d{4} inside it",
    ),
    (
        broken.reads_c_at_beta_0,
        [exact],
        replace(SQUARE, addend="matrix", alpha=0.5),
        r"wrong: 2304 of.*2304 are NaN",
    ),
    (
        broken.scales_addend_by_alpha,
        [exact],
        replace(SQUARE, addend="out", alpha=2.0, beta=1.0),
        r"wrong: \d{3} of 2304",
    ),
    (
        broken.scales_addend_by_alpha,
        [bounded],
        replace(SQUARE, addend="row", alpha=2.0, beta=1.0),
        r"wrong: \d{4} of",
    ),
    (
        broken.skips_zeros,
        [nonfinite],
        SQUARE,
        r"wrong: 1 of .*first at \[47, 0\], .*expected nan, got",
    ),
    (broken.clamps, [nonfinite], SQUARE, r"wrong: .*expected -?inf, got -?9984; largest error inf"),
    (
        broken.Wavering(),
        [determinism],
        SQUARE,
        r"^5 of 9 repeats differ from the first call in 1 of .*first at \[1, 2\]",
    ),
]


@pytest.mark.parametrize(
    ("kernel", "oracle", "case", "message"),
    [
        (kernel, oracle, case, message)
        for kernel, oracles, case, message in CAUGHT
        for oracle in oracles
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_kernel_is_caught(kernel: Run, oracle: Oracle, case: Case, message: str) -> None:
    result = oracle(kernel, case)

    assert not result.ok
    assert re.search(message, result.message), result.message
    assert json.loads(json.dumps(result.record()))["case"] == str(case)


@pytest.mark.parametrize(
    ("oracle", "case"),
    dict.fromkeys((oracle, case) for _, oracles, case, _ in CAUGHT for oracle in oracles),
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_a_right_kernel_passes_where_a_broken_one_is_caught(oracle: Oracle, case: Case) -> None:
    assert oracle(broken.right, case).ok


@pytest.mark.parametrize(
    ("kernel", "K", "dtype"), [(broken.one_unit_off, 64, BF16), (broken.tf32, 16, FP32)]
)
def test_allclose_misses_what_exact_catches(kernel: Run, K: int, dtype: torch.dtype) -> None:
    """The check that the exact oracle replaces: normal data, bf16's usual tolerances."""
    case = Case(64, 64, K, dtype)
    call = prepare(case, "cpu", normal, normal, normal)

    call.run(kernel)

    actual, expected = call.out.view.float(), call.torch_product().float()
    assert torch.allclose(actual, expected, rtol=1.6e-2, atol=1e-2)
    assert not exact(kernel, case).ok


def run_torch(a: Any, b: Any, c: Any, out: torch.Tensor, alpha: float, beta: float) -> None:
    out.copy_(a @ b if c is None else torch.addmm(c, a, b, alpha=alpha, beta=beta))


@each_dtype
@torch.backends.mkldnn.flags(enabled=False)  # which pads K of bf16 with what lies behind a row
def test_torch_matmul_has_the_masks_of_nonfinite(dtype: torch.dtype) -> None:
    for case in cases.quick(dtype):
        if case.result_dtype == dtype:
            assert nonfinite(run_torch, case).ok, case


@each_dtype
@torch.backends.mkldnn.flags(enabled=False)
def test_nonfinite_says_how_many_values_it_compared(dtype: torch.dtype) -> None:
    result = nonfinite(run_torch, replace(SQUARE, dtype=dtype))

    assert result.message == "142 NaN or Inf in the right places"


@given(
    K=st.integers(0, 1 << 20),
    dtype=st.sampled_from(DTYPES),
    tf32=st.booleans(),
    scale=st.sampled_from([(1.0, 0.0), (2.0, -0.5), (0.25, 3.0), (-1.0, 1.0), (0.0, 1.0)]),
)
def test_integer_ranges_keep_every_sum_exact(
    K: int, dtype: torch.dtype, tf32: bool, scale: tuple[float, float]
) -> None:
    alpha, beta = scale
    case = Case(
        8, 8, K, dtype, addend="matrix", alpha=alpha, beta=beta, tf32=tf32 and dtype == FP32
    )

    ranges = integer_ranges(case)

    range_a, range_b, range_c = ranges
    fraction_bits = next(
        n for n in range(3) if (alpha * 2**n).is_integer() and (beta * 2**n).is_integer()
    )
    largest_sum = K * range_a * range_b
    assert largest_sum < 2**24
    assert (abs(alpha) * largest_sum + abs(beta) * range_c) * 2**fraction_bits < 2**24
    assert min(ranges) >= 1
    assert [float(torch.tensor(float(n)).to(dtype)) for n in ranges] == list(ranges)


@pytest.mark.parametrize(
    ("case", "ranges"),
    [
        (Case(1, 1, 64, BF16), (256, 256)),
        (Case(1, 1, 4096, BF16), (63, 63)),
        (Case(1, 1, 1, FP16, out_dtype=FP32), (2048, 2048)),
        (Case(1, 1, 1, FP16), (255, 255)),
        (Case(1, 1, 64, FP32), (4095, 64)),
        (Case(1, 1, 1 << 20, FP32), (3, 3)),
    ],
    ids=str,
)
def test_integer_ranges_are_as_large_as_they_may_be(case: Case, ranges: tuple[int, int]) -> None:
    assert integer_ranges(case)[:2] == ranges


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(1, 1, 1 << 24, BF16), "K is 16777216"),
        (Case(1, 1, 16, BF16, addend="row", alpha=0.1), r"alpha 0\.1"),
    ],
    ids=["K too long", "alpha no binary fraction"],
)
def test_a_case_without_exact_sums_is_refused(case: Case, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        integer_ranges(case)


@pytest.mark.parametrize("K", [1, 16, 257, 8191])
@each_dtype
def test_sums_of_integers_are_finite_and_not_trivial(dtype: torch.dtype, K: int) -> None:
    sums = []

    def run(a: Any, b: Any, c: Any, out: torch.Tensor, alpha: float, beta: float) -> None:
        broken.right(a, b, c, out, alpha, beta)
        sums.append(out.double())

    assert exact(run, Case(40, 40, K, dtype)).ok

    assert sums[-1].isfinite().all()
    assert sums[-1].abs().max() > 2 ** (8 if dtype == BF16 else 11)


@pytest.mark.parametrize("sign", [1, -1])
@each_dtype
def test_ulp_is_the_distance_to_the_next_number(dtype: torch.dtype, sign: int) -> None:
    info = torch.finfo(dtype)
    numbers = [info.smallest_normal, 1.0, 1.5, 2.0, 4096.0, 3.0, info.max / 4]
    x = torch.tensor(numbers, dtype=dtype)
    subnormal = torch.tensor([0.0, info.smallest_normal * info.eps], dtype=dtype)
    x = torch.cat([x, x / 2 if dtype != FP32 else x, subnormal])
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    above = (x.view(bits) + 1).view(dtype)

    distance = ulp(sign * x.double(), dtype)

    assert torch.equal(distance, above.double() - x.double())


@pytest.mark.parametrize("oracle", [exact, bounded, nonfinite], ids=lambda o: o.__name__)
@pytest.mark.parametrize("kernel", [broken.right, broken.lost_k_tail, broken.unwritten_tile])
def test_chunks_of_rows_change_nothing(
    kernel: Run, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product judged a few rows at a time gets the verdict of one judged whole."""
    chosen = [
        RAGGED,
        replace(RAGGED, batch_a=(2, 1), batch_b=(3,)),
        replace(RAGGED, addend="column", beta=2.0),
    ]
    at_once = [oracle(kernel, case) for case in chosen]

    monkeypatch.setattr("outblas.verify.call._CHUNK", 7 * 51)
    in_chunks = [oracle(kernel, case) for case in chosen]

    def verdicts(results: list[Result]) -> list[tuple[bool, str]]:
        return [(result.ok, result.message.split(";")[0]) for result in results]

    assert verdicts(in_chunks) == verdicts(at_once)


def test_swapped_addresses_give_errors_of_the_size_that_document_003_saw() -> None:
    """Its 162 is the largest of 4096² errors of products that have nothing to do with each
    other.
    """
    a, b = torch.rand(256, 1024) * 2 - 1, torch.rand(1024, 256) * 2 - 1

    error = a @ broken.swapped_rows(b) - a @ b

    assert float(error.std()) == pytest.approx((2 * 1024) ** 0.5 / 3, rel=0.05)


@pytest.mark.parametrize("kernel", [broken.plain_sum, broken.truncated_sum])
def test_sums_much_worse_than_torch_s_are_told_apart(kernel: Run) -> None:
    """In-order sums, rounded term by term or truncated every 16: within the bound, but twice
    torch's error and more.
    """
    short = bounded(kernel, Case(32, 32, 4, FP32))
    long = bounded(kernel, Case(32, 32, 4096, FP32))

    assert short.ok, short.message
    assert not long.ok
    assert "relative Frobenius error" in long.message
    assert "wrong" not in long.message
