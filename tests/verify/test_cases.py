"""The cases that kernels are checked on, and the operands that are made of them."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from outblas.base.shapes import LAYOUTS
from outblas.verify import cases
from outblas.verify.call import GuardedCall, prepare
from outblas.verify.cases import Case

BF16, FP16 = torch.bfloat16, torch.float16


def normal(t: torch.Tensor, generator: torch.Generator) -> None:
    """Fills an operand with normal data."""
    t.normal_(generator=generator)


class TestACall:
    """Strides, offsets and expansion are those that the case names."""

    @pytest.fixture
    def call(self) -> GuardedCall:
        """A by columns in a batch, B repeated in another, C by columns, all with gaps."""
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
        return prepare(case, "cpu", normal, normal, normal)

    def test_has_the_case_s_strides(self, call: GuardedCall) -> None:
        assert call.a.view.stride() == (56, 56, 1, 8)
        assert call.b.view.stride() == (7, 0, 1)
        assert call.out.view.stride() == (120, 40, 1, 8)

    def test_has_the_case_s_offset(self, call: GuardedCall) -> None:
        tensors = (call.a, call.b, call.out)

        assert {tensor.view.data_ptr() % 16 for tensor in tensors} == {2 * 3}

    def test_has_an_unwritten_output_for_both_batches(self, call: GuardedCall) -> None:
        assert call.out.view.shape == (2, 3, 6, 5)
        assert call.out.view.isnan().all()


def all_cases() -> list[Case]:
    return list(cases.full(BF16, 128, 256, 64))


def quick_cases() -> list[Case]:
    return list(cases.quick(BF16))


@pytest.mark.parametrize("generate", [all_cases, quick_cases])
class TestTheCases:
    """Each is another, and together they have all options."""

    def test_are_distinct(self, generate: Callable[[], list[Case]]) -> None:
        generated = generate()

        assert len({str(case) for case in generated}) == len(generated)

    def test_have_all_options(self, generate: Callable[[], list[Case]]) -> None:
        generated = generate()

        assert {case.layout for case in generated} == set(LAYOUTS)
        assert {case.expand for case in generated} == {"", "a", "b"}
        assert {case.addend for case in generated} == set(cases.ADDENDS)


def test_all_cases_have_the_sizes_beside_a_tile() -> None:
    generated = all_cases()

    assert 200 < len(generated) < 400
    beside_a_tile = {*itertools.product((127, 128, 129), (255, 256, 257), (64,))}
    assert {(case.M, case.N, case.K) for case in generated} >= beside_a_tile


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
    ids=["layout", "pad", "out_dtype", "alpha", "addend and batch", "tf32", "beta"],
)
def test_cases_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Case(8, 8, 8, BF16, **options)
