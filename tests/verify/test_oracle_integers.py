"""The integers that the exact oracle multiplies, and the units in which errors are counted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import broken

from outblas.verify.cases import Case
from outblas.verify.oracle import integer_ranges, ulp

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# ---- ranges
EXACT_BELOW = 2**24  # fp32 holds every integer up to it


@st.composite
def scaled_cases(draw: st.DrawFn) -> Case:
    """Products with an addend, of any K that leaves room for exact sums."""
    K, dtype = draw(st.integers(0, 1 << 20)), draw(st.sampled_from(DTYPES))
    scales = [(1.0, 0.0), (2.0, -0.5), (0.25, 3.0), (-1.0, 1.0), (0.0, 1.0)]
    alpha, beta = draw(st.sampled_from(scales))
    tf32 = dtype == FP32 and draw(st.booleans())
    return Case(8, 8, K, dtype, addend="matrix", alpha=alpha, beta=beta, tf32=tf32)


def largest_sum(case: Case) -> int:
    """Of products of the integers that are multiplied."""
    range_a, range_b, _ = integer_ranges(case)
    return case.K * range_a * range_b


@settings(max_examples=40)
@given(scaled_cases())
def test_every_sum_with_an_addend_is_exact(case: Case) -> None:
    """Counted in the units of the smallest fraction that alpha and beta have."""
    alpha, beta = abs(case.alpha), abs(case.beta)
    units = next(2**n for n in range(3) if (alpha * 2**n) % 1 == (beta * 2**n) % 1 == 0)
    _, _, range_c = integer_ranges(case)

    largest = alpha * largest_sum(case) + beta * range_c

    assert largest * units < EXACT_BELOW


@settings(max_examples=40)
@given(scaled_cases())
def test_a_dtype_holds_the_ends_of_its_ranges(case: Case) -> None:
    ranges = integer_ranges(case)

    held = [float(torch.tensor(float(end)).to(case.dtype)) for end in ranges]

    assert held == list(ranges)
    assert min(ranges) >= 1


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


# ---- units
def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers, halves of them in 16 bits, and two subnormal ones."""
    info = torch.finfo(dtype)
    normal = torch.tensor(
        [info.smallest_normal, 1.0, 1.5, 2.0, 4096.0, 3.0, info.max / 4], dtype=dtype
    )
    halves = normal / 2 if dtype != FP32 else normal
    subnormal = torch.tensor([0.0, info.smallest_normal * info.eps], dtype=dtype)
    return torch.cat([normal, halves, subnormal])


@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
@each_dtype
def test_ulp_is_the_distance_to_the_next_number(dtype: torch.dtype, sign: int) -> None:
    x = numbers(dtype)
    above = (broken.bits_of(x) + 1).view(dtype)

    distance = ulp(sign * x.double(), dtype)

    assert torch.equal(distance, above.double() - x.double())
