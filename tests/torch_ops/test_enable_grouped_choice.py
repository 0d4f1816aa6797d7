"""Which products of `torch.nn.functional.grouped_mm` stay with torch under `outblas.enable`, and
which are refused where batch invariance is promised.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from support.torch_grouped_calls import (
    BF16,
    ENDS,
    FP16,
    FP32,
    ON_CPU,
    PRODUCTS,
    found,
    rules,
    same,
)

import outblas
from outblas.kernels import grouped as portable
from outblas.torch_ops import aten, aten_choice, grouped_mm
from outblas.torch_ops.aten import Product
from outblas.torch_ops.aten_grouped import SLOWER, Slower, slower_reason

pytestmark = pytest.mark.interpreter

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def _nothing_stays_enabled() -> Iterator[None]:
    yield
    outblas.disable()


@pytest.fixture(autouse=True)
def _nothing_is_left_in_new_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New memory is NaN, so that what no group covers can be compared."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# ---- what stays with torch
@dataclass(frozen=True)
class Staying:
    """A product, the reason why it stays with torch, and changes of the rules."""

    make: Callable[[], Tensor]
    reason: str
    changes: dict[str, Any]


def rows_in_groups(tokens: int, groups: int) -> Tensor:
    a, b = torch.zeros(tokens, 8, dtype=BF16), torch.zeros(groups, 8, 8, dtype=BF16)
    return F.grouped_mm(a, b, offs=torch.full((groups,), tokens, dtype=torch.int32))


BEST = {"kernel": "", "min_gain": 1.0}  # what `enable` has by default
STAYING = {
    "another dtype": Staying(
        lambda: PRODUCTS["rows"](ON_CPU), "torch.bfloat16 is not among", {"dtypes": (FP16,)}
    ),
    "no rows": Staying(lambda: rows_in_groups(0, 2), "nothing is multiplied", {}),
    "small": Staying(
        lambda: PRODUCTS["rows"](ON_CPU), "its 6144 FLOP are less", {"min_flops": 6145}
    ),
    "small batches": Staying(
        lambda: PRODUCTS["batches"](ON_CPU), "its 27648 FLOP are less", {"min_flops": 27649}
    ),
    "filtered": Staying(
        lambda: PRODUCTS["rows"](ON_CPU),
        "the filter does not take it",
        {"filter": lambda product: product.divided != "M"},
    ),
    "too many groups": Staying(lambda: rows_in_groups(1, 1024), "it has 1024 groups", {}),
    "groups of columns": Staying(
        lambda: PRODUCTS["columns"](ON_CPU),
        "1 and more groups of any number along N were 0.97 times as fast as torch's at worst, and "
        "min_gain is 1",
        BEST,
    ),
    "on a CPU": Staying(lambda: PRODUCTS["rows"](ON_CPU), "CPU tensors", {"kernel": ""}),
}


@pytest.mark.parametrize("name", STAYING)
def test_a_product_that_is_not_covered_is_computed_by_torch(name: str) -> None:
    case = STAYING[name]
    expected = case.make()

    with aten._enable(rules(**case.changes)) as enabled:
        got = case.make()

    assert same(got, expected)
    (reason,) = found(enabled)
    assert case.reason in reason


def test_what_only_an_unmeasured_kernel_computes_stays_with_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grouped_mm, "_no_kernel_reason", lambda a: None)

    with aten._enable(rules(**BEST)) as enabled:
        PRODUCTS["rows"](ON_CPU)
    with aten._enable(rules(kernel="", min_gain=0)) as lenient:
        PRODUCTS["rows"](ON_CPU)

    (reason,) = found(enabled)
    assert reason == (
        "kernel 'hopper.grouped': needs an NVIDIA GPU, but was given tensors on cpu; no other "
        "kernel was compared with torch, and min_gain is 1"
    )
    assert found(lenient) == [aten.OURS]


def divided(dimension: str, mean: int, *, groups: int = 8) -> Product:
    """A product of which groups have `mean` rows, columns or terms in the mean."""
    M, N, K = (groups * mean if name == dimension else 64 for name in "MNK")
    return Product("_grouped_mm", 1, M, N, K, BF16, groups, dimension)


@pytest.mark.parametrize("known", SLOWER, ids=str)
def test_a_class_that_was_slower_is_taken_by_those_who_accept_its_gain(known: Slower) -> None:
    within = divided(known.divided, known.above + 1, groups=known.groups)

    assert slower_reason(within, 1.0)
    assert slower_reason(within, known.gain) == ""
    assert slower_reason(within, 0) == ""


@pytest.mark.parametrize(
    ("given", "is_slower"),
    [
        (divided("M", 129, groups=256), True),
        (divided("M", 128, groups=256), False),
        (divided("M", 8192, groups=255), False),
        (divided("K", 1, groups=256), True),
        (divided("K", 256, groups=256), True),
        (divided("K", 256, groups=128), False),
        (divided("K", 32, groups=8), True),
        (divided("K", 33, groups=8), False),
        (divided("K", 2, groups=128), False),
    ],
    ids=lambda given: f"{given.groups} {given.divided}" if isinstance(given, Product) else "",
)
def test_classes_end_where_nothing_slower_was_measured(given: Product, is_slower: bool) -> None:
    assert bool(slower_reason(given, 1.0)) == is_slower


def test_a_class_is_one_of_a_dimension_that_is_divided() -> None:
    assert slower_reason(divided("M", 10_000), 1.0) == ""
    assert slower_reason(divided("K", 10_000), 1.0) == ""
    assert slower_reason(Product("_grouped_mm", 8, 10_000, 8, 8, BF16), 1.0) == ""


WRONG: dict[str, Callable[[], Tensor]] = {
    "inner sizes": lambda: F.grouped_mm(ON_CPU.tokens, ON_CPU.experts.mT, offs=ENDS),
    "no ends": lambda: F.grouped_mm(ON_CPU.tokens, ON_CPU.experts),
    "ends of batches": lambda: F.grouped_mm(ON_CPU.experts.mT, ON_CPU.experts, offs=ENDS),
    "ends of int64": lambda: F.grouped_mm(ON_CPU.tokens, ON_CPU.experts, offs=ENDS.long()),
    "too few ends": lambda: F.grouped_mm(ON_CPU.tokens, ON_CPU.experts, offs=ENDS[:2]),
    "a bias": lambda: F.grouped_mm(
        ON_CPU.tokens, ON_CPU.experts, offs=ENDS, bias=torch.zeros(3, 24, dtype=BF16)
    ),
    "a bias of batches": lambda: F.grouped_mm(
        ON_CPU.experts.mT, ON_CPU.experts, bias=torch.zeros(3, 24, dtype=BF16)
    ),
    "float32 out": lambda: F.grouped_mm(ON_CPU.tokens, ON_CPU.experts, offs=ENDS, out_dtype=FP32),
    "float32 out of batches": lambda: F.grouped_mm(
        ON_CPU.experts.mT, ON_CPU.experts, out_dtype=FP32
    ),
    "float64": lambda: F.grouped_mm(ON_CPU.tokens.double(), ON_CPU.experts.double(), offs=ENDS),
    "dimensions": lambda: F.grouped_mm(ON_CPU.tokens[0], ON_CPU.experts, offs=ENDS),
    "rows of 20": lambda: F.grouped_mm(
        ON_CPU.tokens, ON_CPU.experts[:, :, :20].contiguous(), offs=ENDS
    ),
    "batches of rows of 20": lambda: F.grouped_mm(
        ON_CPU.experts.mT, ON_CPU.experts[:, :, :20].contiguous()
    ),
    "an operand that repeats": lambda: F.grouped_mm(
        ON_CPU.tokens[:1].expand(16, 8), ON_CPU.experts, offs=ENDS
    ),
    "every other column": lambda: F.grouped_mm(ON_CPU.others[:, ::3], ON_CPU.experts, offs=ENDS),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_torchs(name: str) -> None:
    with pytest.raises(RuntimeError) as by_torch:
        WRONG[name]()

    with aten._enable(rules()), pytest.raises(RuntimeError) as mine:
        WRONG[name]()

    assert (mine.type, str(mine.value)) == (by_torch.type, str(by_torch.value))


def test_a_product_whose_kernel_fails_stays_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = PRODUCTS["rows"](ON_CPU)
    monkeypatch.setattr(portable, "run", Mock(side_effect=OSError("no compiler")))

    with (
        aten._enable(rules()) as enabled,
        pytest.warns(RuntimeWarning, match="M in 3 groups stays with torch: no compiler"),
    ):
        got = PRODUCTS["rows"](ON_CPU)

    assert same(got, expected)
    assert found(enabled) == ["no compiler"]


def test_a_product_that_is_first_met_in_a_capture_is_torchs_in_that_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = PRODUCTS["rows"](ON_CPU)
    with monkeypatch.context() as patched, aten._enable(rules()) as enabled:
        patched.setattr(aten_choice, "capturing", lambda device: True)
        captured = PRODUCTS["rows"](ON_CPU)
        in_capture = found(enabled)
        patched.setattr(aten_choice, "capturing", lambda device: False)
        PRODUCTS["rows"](ON_CPU)

    assert same(captured, expected)
    assert in_capture == []
    assert found(enabled) == [aten.OURS]


# ---- batch invariance
@pytest.mark.parametrize("name", ["rows", "columns", "terms", "float32 out of batches"])
def test_a_product_that_would_break_the_promise_is_refused(name: str) -> None:
    product = WRONG.get(name) or (lambda: PRODUCTS[name](ON_CPU))
    with (
        aten._enable(rules(batch_invariant=True)),
        pytest.raises(ValueError, match="batch_invariant is True"),
    ):
        product()
    with (
        aten._enable(rules()),
        outblas.batch_invariant(),
        pytest.raises(ValueError, match="batch_invariant is True"),
    ):
        product()


def test_nothing_that_is_multiplied_keeps_the_promise() -> None:
    with aten._enable(rules(batch_invariant=True)):
        assert rows_in_groups(0, 2).shape == (0, 8)


def test_a_row_of_a_batch_does_not_depend_on_others_where_that_is_promised() -> None:
    a, b = torch.randn(2, 6, 64), torch.randn(2, 64, 8)
    with aten._enable(rules(batch_invariant=True)) as enabled:
        alone, together = F.grouped_mm(a[:, :1], b), F.grouped_mm(a, b)

    assert torch.equal(alone, together[:, :1])
    assert set(enabled.decisions.values()) == {aten.OURS}
