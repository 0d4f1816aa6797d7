"""hopper.gemm on a GPU: NaN, Inf, and what is too large for fp16."""

import itertools
from typing import Any

import pytest
import torch
from support.gemm_levers import LEVERS, config_of, runner
from support.precompiled import Ahead, of_case

from outblas.verify.call import GuardedCall, prepare
from outblas.verify.cases import Case

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.slow, pytest.mark.timeout(1200)]

BF16, F16, FP32 = torch.bfloat16, torch.float16, torch.float32


SPECIAL = (
    Case(300, 264, 1000, BF16, layout="nt"),
    Case(301, 263, 999, F16, layout="nn"),
    Case(300, 264, 1000, BF16, layout="tn", out_dtype=FP32, out_layout="t"),
    Case(300, 264, 1000, BF16, layout="nt", addend="matrix", alpha=2.0, beta=-0.5),
    Case(
        300, 264, 1000, F16, layout="tt", addend="matrix", alpha=0.5
    ),  # C is NaN, and must not be read
    Case(20, 264, 1000, BF16, layout="nt", batch_a=(3,), batch_b=(3,)),
)
OVERFLOW = Case(300, 264, 1024, F16, layout="nt")


@pytest.fixture(scope="module")
def _special(ahead: Ahead) -> None:
    ahead(
        (of_case(case), config_of(way, case))
        for case in (*SPECIAL, OVERFLOW)
        for way in ("rule", *LEVERS)
    )


# Of each operand: where, in halves of its extents or counted from their ends, and what.
PLACED = {
    "a": ((1, 0, "nan"), (2, 0.5, "inf"), (0.5, 0, "inf"), (0.5, -1, "-inf"), (-1, -1, "inf")),
    "b": ((-1, 0.5, "nan"), (0, 2, "inf"), (0.5, 3, "-inf"), (-1, 3, "inf")),
    "c": ((0, 0, "nan"), (-1, -1, "inf"), (0.5, 1, "-inf"), (5, 3, "inf")),
}


def filled(case: Case, places: str) -> GuardedCall:
    """Normal data with NaN and Inf in the operands named. A and B have a 0 each where the other may
    have Inf.
    """

    def fill(name: str) -> Any:
        def fill_one(t: torch.Tensor, generator: torch.Generator) -> None:
            t.normal_(generator=generator)
            if name != "c":
                t[..., 0 if name == "a" else -1, 0] = 0.0
            for row, column, value in PLACED[name] if name in places else ():
                at = [
                    n // 2 if i == 0.5 else int(i)
                    for i, n in zip((row, column), t.shape[-2:], strict=True)
                ]
                t[..., at[0], at[1]] = float(value)

        return fill_one

    return prepare(case, "cuda", fill("a"), fill("b"), fill("c"))


def by_torch(call: GuardedCall) -> torch.Tensor:
    """The result of torch, in fp32."""
    a, b, case = call.a.armed.float(), call.b.armed.float(), call.case
    if call.c is None:
        return a @ b
    return torch.addmm(call.c.armed.float(), a, b, alpha=case.alpha, beta=case.beta)


def kinds(t: torch.Tensor) -> torch.Tensor:
    """0 where a value is finite, else which of NaN, Inf and -Inf it is."""
    return t.isnan() * 1 + t.isposinf() * 2 + t.isneginf() * 3


@pytest.mark.usefixtures("_special")
@pytest.mark.parametrize("way", ["rule", *LEVERS])
def test_nan_and_inf_stand_where_torch_has_them(way: str) -> None:
    for case, places in itertools.product(SPECIAL, ("", "a", "b", "c", "ab", "abc")):
        call = filled(case, places)

        call.run(runner(way, case))

        actual, expected = kinds(call.out.view), kinds(by_torch(call))
        wrong = (actual != expected).nonzero()
        assert not len(wrong), (
            f"{case}: special values in {places or 'nothing'}: {len(wrong)} of "
            f"{expected.count_nonzero()} are wrong, the first at {wrong[0].tolist()}"
        )
        assert not call.violations(), (case, places)
        read = "abc" if case.beta else "ab"
        assert bool(expected.any()) == any(name in places for name in read), (case, places)


@pytest.mark.usefixtures("_special")
@pytest.mark.parametrize("way", ["rule", *LEVERS])
def test_fp16_becomes_inf_where_torch_rounds_to_it(way: str) -> None:
    """Sums of integers, exact in fp32, some of them too large for fp16."""
    integers = [lambda t, generator: t.random_(-64, 65, generator=generator)] * 3
    call = prepare(OVERFLOW, "cuda", *integers)
    call.run(runner(way, OVERFLOW))
    expected = call.product(slice(None)).to(F16)
    assert torch.equal(call.out.view, expected)
    assert 0 < int(expected.isinf().sum()) < expected.numel() // 2
