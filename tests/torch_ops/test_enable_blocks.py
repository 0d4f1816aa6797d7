"""`torch._scaled_mm` and `torch.nn.functional.scaled_mm` with scales of blocks under
`outblas.enable`: a plan of float32 stands for the kernel's, as in `test_enable_scaled`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import fp8
from support.scaled_plans import Planned, outcome, small
from torch.nn import functional as F

import outblas
from outblas.runtime import dispatch
from outblas.torch_ops import aten, scaled_operator
from outblas.torch_ops.aten import Rules

Tensor = torch.Tensor
BF16 = torch.bfloat16
BY_RECIPE = pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="torch 2.10 has it first")


@pytest.fixture(autouse=True)
def _nothing_stays_enabled() -> Iterator[None]:
    yield
    outblas.disable()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    """A kernel runs here, and this plans it."""
    planned = Planned()
    dispatch.clear_cache()
    monkeypatch.setattr(scaled_operator, "unsupported_reason", lambda device: None)
    monkeypatch.setattr(dispatch, "find_plan", planned)
    return planned


RULES = Rules((fp8.E4M3, fp8.E5M2), min_flops=0, min_gain=0, filter=None, key="CPU")


A, B = small(200, 640), small(304, 640).t()
RECIPES = {fp8.BY_ROW: 4, fp8.SQUARE: 5}  # torch's numbers
BLOCK_PAIRS = [(fp8.BY_ROW, fp8.SQUARE), (fp8.BY_ROW, fp8.BY_ROW), (fp8.SQUARE, fp8.BY_ROW)]
block_pairs = pytest.mark.parametrize("pair", BLOCK_PAIRS, ids=" by ".join)


def stored_scales(pair: tuple[str, str]) -> tuple[Tensor, Tensor]:
    """The scales of both operands as torch accepts them, with one row for each row (or 128 rows) of
    the stored operand: those of 128x128 lie along K, others do not.
    """
    orders = ["by rows" if recipe == fp8.SQUARE else "by columns" for recipe in pair]
    return (
        fp8.block_scale(200, 640, pair[0], orders[0]),
        fp8.block_scale(304, 640, pair[1], orders[1]),
    )


def exact_with_blocks(pair: tuple[str, str]) -> Tensor:
    of_a, of_b = stored_scales(pair)
    return fp8.scaled(A, of_a, pair[0]) @ fp8.scaled(B.t(), of_b, pair[1]).t()


@block_pairs
def test_scales_of_blocks_reach_the_plan(pair: tuple[str, str], planned: Planned) -> None:
    """torch has such products on a GPU only."""
    of_a, of_b = stored_scales(pair)

    with aten._enable(RULES):
        got = [torch._scaled_mm(A, B, of_a, of_b.t(), out_dtype=torch.float32) for _ in range(2)]

    assert all(torch.equal(each.double(), exact_with_blocks(pair)) for each in got)
    assert planned.runs == 2
    assert [call.formats for call in planned.calls] == [f"e4m3 e4m3 promoted {pair[0]} {pair[1]}"]


def test_one_block_of_a_reaches_the_plan_with_both_dimensions(planned: Planned) -> None:
    a, b = small(6, 32), small(304, 32).t()
    one, each = torch.full((1, 1), 2.0), torch.tensor([[2.0, 4.0, 8.0]])

    with aten._enable(RULES):
        got = torch._scaled_mm(a[:1], b, one, each, out_dtype=torch.float32)

    columns = each.repeat_interleave(128, 1)[:, :304]
    assert torch.equal(got, a[:1].float() @ b.float() * 2 * columns)


def padded_as_torch_wants(scale: Tensor, recipe: str) -> Tensor:
    """A scale as `F.scaled_mm` takes it."""
    if recipe == fp8.BY_ROW:
        return scale
    wide = torch.full((scale.shape[0], 8), float("nan"))
    wide[:, : scale.shape[1]] = scale
    return wide.t()


@BY_RECIPE
@block_pairs
def test_scales_of_blocks_reach_the_plan_from_a_call_with_recipes(
    pair: tuple[str, str], planned: Planned
) -> None:
    kinds = [F.ScalingType(RECIPES[recipe]) for recipe in pair]
    of_a, of_b = map(padded_as_torch_wants, stored_scales(pair), pair)

    with aten._enable(RULES):
        got = F.scaled_mm(A, B, of_a, kinds[0], of_b, kinds[1], output_dtype=torch.float32)

    assert torch.equal(got.double(), exact_with_blocks(pair))
    assert [call.formats for call in planned.calls] == [f"e4m3 e4m3 promoted {pair[0]} {pair[1]}"]


def with_blocks(pair: tuple[str, str] = BLOCK_PAIRS[0], **changes: Any) -> Tensor:
    of_a, of_b = stored_scales(pair)
    given: dict[str, Any] = {"scale_a": of_a, "scale_b": of_b.t(), "out_dtype": BF16} | changes
    return torch._scaled_mm(A, B, **given)


def unpadded(recipe_a: int, recipe_b: int) -> Tensor:
    """A call with recipes, and scales of 128x128 without the rows that torch requires."""
    of_a, of_b = stored_scales(BLOCK_PAIRS[0])
    return torch._scaled_mm_v2(A, B, [of_a], [recipe_a], [], [of_b.t()], [recipe_b], [], None, BF16)


REFUSED_BLOCKS: dict[str, Callable[[], Tensor]] = {
    "two of 128x128": lambda: with_blocks((fp8.SQUARE, fp8.SQUARE)),
    "scales of A by rows": lambda: with_blocks(scale_a=torch.ones(200, 5)),
    "scales of B by columns": lambda: with_blocks(scale_b=torch.ones(5, 3)),
    "fast sums": lambda: with_blocks(use_fast_accum=True),
    "float16": lambda: with_blocks(out_dtype=torch.float16),
    "scales without padding": lambda: unpadded(4, 5),
}


@pytest.mark.parametrize("name", REFUSED_BLOCKS)
def test_scales_of_blocks_that_torch_refuses_stay_with_torch(name: str, planned: Planned) -> None:
    with aten._enable(RULES):
        got = outcome(REFUSED_BLOCKS[name])

    assert isinstance(got, type)  # torch's error: it has no such products on a CPU
    assert planned.calls == []
