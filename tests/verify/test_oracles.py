"""The oracles let a right kernel pass and catch kernels broken on purpose, by what their messages
say.
"""

import itertools
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import broken

from outblas.core.shapes import LAYOUTS
from outblas.verify import cases
from outblas.verify.call import prepare
from outblas.verify.cases import Case
from outblas.verify.guards import Guarded
from outblas.verify.oracle import (
    ORACLES,
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
NORMAL = 3 * [lambda t, generator: t.normal_(generator=generator)]


@pytest.mark.parametrize("oracle", ORACLES.values(), ids=list(ORACLES))
@each_dtype
def test_right_kernel_passes(oracle, dtype) -> None:
    failed = [
        result for case in cases.quick(dtype) if not (result := oracle(broken.right, case)).ok
    ]
    assert not failed


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
def test_broken_kernel_is_caught(kernel, oracle, case, message: str) -> None:
    result = oracle(kernel, case)
    assert not result.ok
    assert re.search(message, result.message), result.message
    assert json.loads(json.dumps(result.record()))["case"] == str(case)
    assert oracle(broken.right, case).ok


@pytest.mark.parametrize(
    ("kernel", "K", "dtype"), [(broken.one_unit_off, 64, BF16), (broken.tf32, 16, FP32)]
)
def test_allclose_misses_what_exact_catches(kernel, K: int, dtype) -> None:
    """The check that the exact oracle replaces: normal data, bf16's usual tolerances."""
    case = Case(64, 64, K, dtype)
    call = prepare(case, "cpu", *NORMAL)
    call.run(kernel)
    assert torch.allclose(
        call.out.view.float(), call.torch_product().float(), rtol=1.6e-2, atol=1e-2
    )
    assert not exact(kernel, case).ok


@each_dtype
@torch.backends.mkldnn.flags(enabled=False)  # which pads K of bf16 with what lies behind a row
def test_torch_matmul_has_the_masks_of_nonfinite(dtype) -> None:
    def run(a, b, c, out, alpha, beta):
        out.copy_(a @ b if c is None else torch.addmm(c, a, b, alpha=alpha, beta=beta))

    for case in cases.quick(dtype):
        if case.result_dtype == dtype:
            assert nonfinite(run, case).ok
    assert (
        nonfinite(run, replace(SQUARE, dtype=dtype)).message == "142 NaN or Inf in the right places"
    )


@given(
    K=st.integers(0, 1 << 20),
    dtype=st.sampled_from(DTYPES),
    tf32=st.booleans(),
    scale=st.sampled_from([(1.0, 0.0), (2.0, -0.5), (0.25, 3.0), (-1.0, 1.0), (0.0, 1.0)]),
)
def test_integer_ranges_keep_every_sum_exact(K: int, dtype, tf32: bool, scale) -> None:
    alpha, beta = scale
    case = Case(
        8, 8, K, dtype, addend="matrix", alpha=alpha, beta=beta, tf32=tf32 and dtype == FP32
    )
    ra, rb, rc = integer_ranges(case)
    bits = next(n for n in range(3) if (alpha * 2**n).is_integer() and (beta * 2**n).is_integer())
    assert K * ra * rb < 2**24
    assert (abs(alpha) * K * ra * rb + abs(beta) * rc) * 2**bits < 2**24
    for r in (ra, rb, rc):
        assert r >= 1
        assert float(torch.tensor(float(r)).to(dtype)) == r


def test_integer_ranges_as_large_as_they_may_be() -> None:
    largest = {
        Case(1, 1, 64, BF16): (256, 256),
        Case(1, 1, 4096, BF16): (63, 63),
        Case(1, 1, 1, FP16, out_dtype=FP32): (2048, 2048),
        Case(1, 1, 1, FP16): (255, 255),
        Case(1, 1, 64, FP32): (4095, 64),
        Case(1, 1, 1 << 20, FP32): (3, 3),
    }
    assert {case: integer_ranges(case)[:2] for case in largest} == largest
    with pytest.raises(ValueError, match="K is 16777216"):
        integer_ranges(Case(1, 1, 1 << 24, BF16))
    with pytest.raises(ValueError, match=r"alpha 0\.1"):
        integer_ranges(Case(1, 1, 16, BF16, addend="row", alpha=0.1))


@each_dtype
def test_fp16_sums_stay_finite_and_none_is_trivial(dtype) -> None:
    sums = []

    def run(a, b, c, out, alpha, beta):
        broken.right(a, b, c, out, alpha, beta)
        sums.append(out.double())

    for K in (1, 16, 257, 8191):
        assert exact(run, Case(40, 40, K, dtype)).ok
        assert sums[-1].isfinite().all()
        assert sums[-1].abs().max() > 2 ** (8 if dtype == BF16 else 11)


@each_dtype
def test_ulp_is_the_distance_to_the_next_number(dtype) -> None:
    info = torch.finfo(dtype)
    x = torch.tensor([info.smallest_normal, 1.0, 1.5, 2.0, 4096.0, 3.0, info.max / 4], dtype=dtype)
    x = torch.cat(
        [
            x,
            x / 2 if dtype != FP32 else x,
            torch.tensor([0.0, info.smallest_normal * info.eps], dtype=dtype),
        ]
    )
    above = (x.view(torch.int16 if dtype.itemsize == 2 else torch.int32) + 1).view(dtype)
    for signed in (x, -x):
        assert torch.equal(ulp(signed.double(), dtype), above.double() - x.double())


@pytest.mark.parametrize("oracle", [exact, bounded, nonfinite], ids=lambda o: o.__name__)
@pytest.mark.parametrize("kernel", [broken.right, broken.lost_k_tail, broken.unwritten_tile])
def test_chunks_of_rows_change_nothing(kernel, oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product judged a few rows at a time gets the verdict of one judged whole."""
    chosen = [
        RAGGED,
        replace(RAGGED, batch_a=(2, 1), batch_b=(3,)),
        replace(RAGGED, addend="column", beta=2.0),
    ]
    whole = [oracle(kernel, case) for case in chosen]
    monkeypatch.setattr("outblas.verify.call._CHUNK", 7 * 51)
    parts = [oracle(kernel, case) for case in chosen]
    for part, one in zip(parts, whole, strict=True):
        assert (part.ok, part.message.split(";")[0]) == (one.ok, one.message.split(";")[0])


def test_swapped_addresses_give_errors_of_the_size_that_document_003_saw() -> None:
    """Its 162 is the largest of 4096² errors of products that have nothing to do with each
    other.
    """
    a, b = (torch.rand(shape) * 2 - 1 for shape in ((256, 1024), (1024, 256)))
    wrong = a @ broken.swapped_rows(b) - a @ b
    assert float(wrong.std()) == pytest.approx((2 * 1024) ** 0.5 / 3, rel=0.05)


@pytest.mark.parametrize("kernel", [broken.plain_sum, broken.truncated_sum])
def test_sums_much_worse_than_torch_s_are_told_apart(kernel) -> None:
    """In-order sums, rounded term by term or truncated every 16: within the bound, but twice
    torch's error and more.
    """
    short, long = (bounded(kernel, Case(32, 32, K, FP32)) for K in (4, 4096))
    assert short.ok, short.message
    assert not long.ok
    assert "relative Frobenius error" in long.message
    assert "wrong" not in long.message


def test_kernels_see_the_case() -> None:
    """Strides, offsets and expansion are those that the case names."""
    case = Case(
        6,
        5,
        7,
        FP16,
        layout="tn",
        batch_a=(2, 1),
        batch_b=(3,),
        offset=3,
        pad=2,
        expand="b",
        out_layout="t",
    )
    call = prepare(case, "cpu", *NORMAL)
    assert call.a.view.stride() == (56, 56, 1, 8)
    assert call.b.view.stride() == (7, 0, 1)
    assert call.out.view.stride() == (120, 40, 1, 8)
    assert call.out.view.shape == (2, 3, 6, 5)
    assert {t.view.data_ptr() % 16 for t in (call.a, call.b, call.out)} == {6}
    assert call.out.view.isnan().all()


def test_case_generators() -> None:
    everything = list(cases.full(BF16, 128, 256, 64))
    small = list(cases.quick(BF16))
    assert 200 < len(everything) < 400
    assert 20 <= len(small) <= 32
    assert max(max(c.M, c.N, c.K) for c in small) <= 130
    for many in (everything, small):
        assert len({str(c) for c in many}) == len(many)
        assert {c.layout for c in many} == set(LAYOUTS)
        assert {c.expand for c in many} == {"", "a", "b"}
        assert {c.addend for c in many} == set(cases.ADDENDS)
    assert {(c.M, c.N, c.K) for c in everything} >= {
        *itertools.product((127, 128, 129), (255, 256, 257), (64,))
    }
    assert all(max(c.M * c.N, c.M * c.K, c.N * c.K) > 2**31 for c in cases.huge(BF16))
    assert [cases.prime_after(n) for n in (0, 1, 2, 7, 256)] == [2, 2, 3, 11, 257]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "nx"}, "layout is 'nx'"),
        ({"pad": -1}, "pad is -1"),
        ({"out_dtype": FP16}, "out_dtype is torch.float16"),
        ({"alpha": 2.0}, "alpha is 2.0"),
        ({"addend": "row", "batch_a": (2,)}, r"with batch \(2,\)"),
        ({"tf32": True}, "tf32 with dtype torch.bfloat16"),
        ({"addend": "out"}, "expected beta other than 0"),
    ],
)
def test_cases_that_mean_nothing_are_refused(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Case(8, 8, 8, BF16, **options)


@st.composite
def guarded_views(draw):
    """A buffer of up to three dimensions in any order of strides, with gaps, and for inputs stride
    0.
    """
    shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    strides, reach = [0] * len(shape), 1
    for dim in draw(st.permutations(range(len(shape)))):
        strides[dim] = reach + draw(st.integers(0, 3))
        reach = strides[dim] * max(1, shape[dim])
    output = draw(st.booleans())
    if not output and draw(st.booleans()):
        strides[0] = 0
    offset, dtype = draw(st.integers(0, 9)), draw(st.sampled_from(DTYPES))
    return Guarded(
        "x",
        shape,
        strides,
        dtype,
        offset=offset,
        guard=draw(st.sampled_from([16, 256])),
        output=output,
    )


@given(guarded_views(), st.data())
@settings(max_examples=200, deadline=None)
def test_guards_find_any_changed_bit_outside_the_view(buffer, data) -> None:
    inside = {
        buffer.start + sum(i * s for i, s in zip(index, buffer.strides, strict=True))
        for index in itertools.product(*map(range, buffer.shape))
    }
    assert buffer.view.storage_offset() == buffer.start
    assert buffer.view.isnan().all()
    assert buffer.unwritten().all()
    buffer.cells.fill_(1.5)
    buffer.arm()
    assert buffer.violation(writable=True) is None
    assert buffer.violation(writable=False) is None

    bits = broken._bits(buffer.storage)
    position = data.draw(st.integers(0, len(bits) - 1))
    bits[position] ^= 1 << data.draw(st.integers(0, 8 * bits.itemsize - 2))
    reported = buffer.violation(writable=True)
    assert (reported is None) == (position in inside)
    everything = buffer.violation(writable=False)
    where = (
        "before it"
        if position < buffer.start
        else "inside it"
        if position in inside
        else "after it"
        if position >= buffer.end
        else "in its gaps"
    )
    assert everything.startswith(
        f"x: elements overwritten 1 {where}; first at offset {position - buffer.start}"
    )
    buffer.reset()
    assert buffer.violation(writable=False) is None


def _python(*arguments, **options):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, **options
    )


def test_watchdog_ends_a_hang_that_holds_the_gil() -> None:
    """The inner watchdog ended in time, and the outer one still bites."""
    code = """
import ctypes, time
from outblas.verify.watchdog import watchdog
def hangs_in_c():
    ctypes.PyDLL(None).sleep(50)
with watchdog(0.1, "quick"):
    pass
time.sleep(0.5)
print("alive", flush=True)
with watchdog(0.5, "outer"):
    with watchdog(40, "inner"):
        pass
    hangs_in_c()
print("not reached")
"""
    ended = _python("-c", code)
    assert (ended.returncode, ended.stdout) == (1, "alive\n")
    assert "in hangs_in_c" in ended.stderr
    assert "quick" not in ended.stderr


def test_watchdog_is_heard_through_pytests_capture(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from outblas.verify.watchdog import real_stderr\ndef pytest_configure(config):\n    "
        "real_stderr()\n"
    )
    (tmp_path / "test_hang.py").write_text(
        "import time\nfrom outblas.verify.watchdog import watchdog\n"
        "def test_hang():\n    with watchdog(0.3, 'my kernel'):\n        time.sleep(50)\n"
    )
    ended = _python("-m", "pytest", "-p", "no:cacheprovider", "-q", str(tmp_path), cwd=tmp_path)
    assert ended.returncode == 1
    assert "watchdog: my kernel: not done after 0.3 s" in ended.stderr
    assert "in test_hang" in ended.stderr
