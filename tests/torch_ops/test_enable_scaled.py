"""`torch._scaled_mm` and `torch.nn.functional.scaled_mm` under `outblas.enable`.

No kernel of fp8 GEMMs runs without a GPU. The operators are overridden on the CPU here, and a plan
of float32 stands for the kernel's.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import fp8
from support.scaled_plans import Planned, outcome
from torch.nn import functional as F

import outblas
from outblas.call import dispatch
from outblas.torch_ops import aten, scaled_operator
from outblas.torch_ops.aten import Enabled, Rules
from outblas.torch_ops.aten_scaled import scales_of

Tensor = torch.Tensor
E4M3, E5M2, BF16, F32 = fp8.E4M3, fp8.E5M2, torch.bfloat16, torch.float32
BOTH = E4M3, E5M2
OPERATORS = "_scaled_mm", "_scaled_mm.out", "_scaled_mm_v2", "_scaled_mm_v2.out"


def rules(**changes: Any) -> Rules:
    plain = Rules(BOTH, min_flops=0, min_gain=0, filter=None, key="CPU")
    return plain._replace(**changes)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    """A kernel runs here, and this plans it."""
    planned = Planned()
    monkeypatch.setattr(scaled_operator, "unsupported_reason", lambda device: None)
    monkeypatch.setattr(dispatch, "find_plan", planned)
    return planned


def decisions(enabled: Enabled) -> list[str]:
    """What became of the fp8 GEMMs; the stand-in's own products are not among them."""
    return [by for product, by in enabled.decisions.items() if product.startswith("_scaled_mm")]


def small(rows: int, columns: int) -> Tensor:
    """Small integers, whose products have one right result."""
    return torch.randint(-4, 5, (rows, columns)).to(E4M3)


A, B = small(6, 32), small(16, 32).t()
A_E5M2, B_E5M2 = A.to(E5M2), B.to(E5M2)
HALF, TWO = torch.tensor(0.5), torch.tensor(2.0)
ROWS, COLUMNS = torch.full((6, 1), 0.25), torch.full((1, 16), 2.0)
BIAS = torch.arange(16).to(BF16)


def multiply(a: Tensor = A, b: Tensor = B, *scales: Tensor, **named: Any) -> Tensor:
    of_a, of_b = scales or (HALF, TWO)
    result: Tensor = torch._scaled_mm(a, b, of_a, of_b, **{"out_dtype": BF16} | named)
    return result


def by_recipe(scale_a: Tensor = HALF, scale_b: Tensor = TWO, **named: Any) -> Tensor:
    kinds = [
        F.ScalingType.TensorWise if scale.numel() == 1 else F.ScalingType.RowWise
        for scale in (scale_a, scale_b)
    ]
    recipes = scale_a, kinds[0], scale_b, kinds[1]
    result: Tensor = F.scaled_mm(A, B, *recipes, output_dtype=BF16, **named)
    return result


TAKEN: dict[str, Callable[[], Tensor]] = {
    "one scale each": multiply,
    "the same scale twice": lambda: multiply(A, B, HALF, HALF),
    "a scale of two dimensions": lambda: multiply(A, B, HALF.view(1, 1), TWO.view(1, 1)),
    "float32 out": lambda: multiply(out_dtype=F32),
    "fast sums": lambda: multiply(use_fast_accum=True),
    "bias": lambda: multiply(bias=BIAS),
    "e5m2": lambda: multiply(A_E5M2),
    "out": lambda: multiply(out=torch.full((6, 16), 7.0).to(BF16)),
    "recipes": by_recipe,
    "recipes, fast": lambda: by_recipe(use_fast_accum=True, bias=BIAS),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_product_is_computed_by_a_plan_and_is_torchs(name: str, planned: Planned) -> None:
    expected = TAKEN[name]()

    with aten._enable(rules()) as enabled:
        got = [TAKEN[name]() for _ in range(3)]

    assert all(torch.equal(result, expected) for result in got)
    assert all(result.dtype == expected.dtype for result in got)
    assert decisions(enabled) == [aten.OURS]
    assert (len(planned.calls), planned.runs) == (1, 3)
    assert planned.calls[0].formats.endswith("promoted") == ("fast" not in name)


def test_a_scale_for_each_row_and_column_reaches_the_plan(planned: Planned) -> None:
    """torch has such products on a GPU only. Both functions share a plan."""
    with aten._enable(rules()):
        got = multiply(A, B, ROWS, COLUMNS), by_recipe(ROWS, COLUMNS)

    want = (A.float() @ B.float() * ROWS * COLUMNS).to(BF16)
    assert all(torch.equal(result, want) for result in got)
    assert [call.formats for call in planned.calls] == ["e4m3 e4m3 promoted"]


# ---- scales of blocks
LARGE_A, LARGE_B = small(200, 640), small(304, 640).t()
RECIPES = {fp8.BY_ROW: 4, fp8.SQUARE: 5}  # torch's numbers
PAIRS = [(fp8.BY_ROW, fp8.SQUARE), (fp8.BY_ROW, fp8.BY_ROW), (fp8.SQUARE, fp8.BY_ROW)]


def stored_scales(pair: tuple[str, str]) -> tuple[Tensor, Tensor]:
    """The scales of both operands as torch accepts them, with one row for each row (or 128 rows) of
    the stored operand: those of 128x128 lie along K, others do not.
    """
    orders = ["by rows" if recipe == fp8.SQUARE else "by columns" for recipe in pair]
    return (
        fp8.block_scale(200, 640, pair[0], orders[0]),
        fp8.block_scale(304, 640, pair[1], orders[1]),
    )


def padded_as_torch_wants(scale: Tensor, recipe: str) -> Tensor:
    """A scale as `F.scaled_mm` takes it."""
    if recipe == fp8.BY_ROW:
        return scale
    wide = torch.full((scale.shape[0], 8), float("nan"))
    wide[:, : scale.shape[1]] = scale
    return wide.t()


@pytest.mark.parametrize("pair", PAIRS, ids=" by ".join)
def test_scales_of_blocks_reach_the_plan(pair: tuple[str, str], planned: Planned) -> None:
    of_a, of_b = stored_scales(pair)
    exact = fp8.scaled(LARGE_A, of_a, pair[0]) @ fp8.scaled(LARGE_B.t(), of_b, pair[1]).t()
    kinds = [F.ScalingType(RECIPES[recipe]) for recipe in pair]
    scale_a, scale_b = map(padded_as_torch_wants, (of_a, of_b), pair)

    with aten._enable(rules()):
        got = [multiply(LARGE_A, LARGE_B, of_a, of_b.t(), out_dtype=F32) for _ in range(2)]
        recipes = scale_a, kinds[0], scale_b, kinds[1]
        got.append(F.scaled_mm(LARGE_A, LARGE_B, *recipes, output_dtype=F32))

    assert all(torch.equal(result.double(), exact) for result in got)
    assert planned.runs == len(got)
    assert {call.formats for call in planned.calls} == {f"e4m3 e4m3 promoted {' '.join(pair)}"}


def with_blocks(pair: tuple[str, str] = PAIRS[0], **changes: Any) -> Tensor:
    of_a, of_b = stored_scales(pair)
    arguments: dict[str, Any] = {"scale_a": of_a, "scale_b": of_b.t(), "out_dtype": BF16} | changes
    return torch._scaled_mm(LARGE_A, LARGE_B, **arguments)


def unpadded() -> Tensor:
    """A call with recipes, and scales of 128x128 without the rows that torch requires."""
    of_a, of_b = stored_scales(PAIRS[0])
    scales: tuple[Any, ...] = [of_a], [4], [], [of_b.t()], [5], []
    multiply_v2: Any = torch._scaled_mm_v2
    return multiply_v2(LARGE_A, LARGE_B, *scales, None, BF16)


# ---- what stays with torch
REFUSED: dict[str, Callable[[], Tensor]] = {
    "B by rows": lambda: multiply(A, B.contiguous()),
    "K of 24": lambda: multiply(A[:, :24], B[:24]),
    "two e5m2": lambda: multiply(A_E5M2, B_E5M2),
    "shapes that do not fit": lambda: multiply(A, B[:16]),
    "a vector": lambda: multiply(A[0]),
    "a scale of one operand only": lambda: multiply(A, B, ROWS, TWO),
    "fp8 out": lambda: multiply(out_dtype=E4M3),
    "no dtype": lambda: torch._scaled_mm(A, B, HALF, TWO),
    "a scale of the result": lambda: multiply(scale_result=HALF),
    "two of 128x128": lambda: with_blocks((fp8.SQUARE, fp8.SQUARE)),
    "scales of A by rows": lambda: with_blocks(scale_a=torch.ones(200, 5)),
    "scales of B by columns": lambda: with_blocks(scale_b=torch.ones(5, 3)),
    "fast sums of blocks": lambda: with_blocks(use_fast_accum=True),
    "float16 of blocks": lambda: with_blocks(out_dtype=torch.float16),
    "scales without padding": unpadded,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_product_that_is_not_covered_stays_with_torch(name: str, planned: Planned) -> None:
    expected = outcome(REFUSED[name])

    with aten._enable(rules()) as enabled:
        got = outcome(REFUSED[name])

    assert got == expected
    assert aten.OURS not in decisions(enabled)
    assert planned.calls == []


RULES: list[tuple[dict[str, Any], str]] = [
    ({"dtypes": (E5M2,)}, "torch.float8_e4m3fn is not among the dtypes"),
    ({"min_flops": 1e6}, "its 6144 FLOP are less than min_flops"),
    ({"filter": lambda product: product.operator != "_scaled_mm"}, "the filter does not take"),
]


def test_rules_leave_products_to_torch(planned: Planned) -> None:
    for changes, reason in RULES:
        with aten._enable(rules(**changes)) as enabled:
            multiply()

        assert reason in enabled.decisions["_scaled_mm 6x16x32 float8_e4m3fn"]
    assert planned.calls == []


def test_without_a_gpu_torch_computes_it() -> None:
    with aten._enable(rules()) as enabled:
        multiply()

    assert decisions(enabled) == ["fp8 CPU tensors"]


def scales_by(**changes: Any) -> Any:
    arguments: dict[str, Any] = {"scale_a": [HALF], "recipe_a": [0], "swizzle_a": []}
    arguments |= {"scale_b": [COLUMNS], "recipe_b": [1], "swizzle_b": [0], "contraction": [1, 0]}
    return scales_of(A, B, **arguments | changes)


OTHER_RECIPES: list[dict[str, Any]] = [
    {"recipe_a": [2]},
    {"recipe_a": [0, 1], "scale_a": [HALF, HALF]},
    {"scale_a": []},
    {"scale_b": [ROWS]},
    {"recipe_b": [0]},
    {"recipe_b": [3]},
    {"recipe_a": [4]},
    {"recipe_a": [4], "recipe_b": [5]},
    {"swizzle_b": [1]},
    {"contraction": [0, 1]},
]


def test_scales_of_other_recipes_are_torchs() -> None:
    assert scales_by() == (HALF, COLUMNS)
    assert [changes for changes in OTHER_RECIPES if scales_by(**changes) is not None] == []


# ---- when it holds
def test_the_operator_is_overridden_on_request_alone() -> None:
    def kernels_now() -> list[str]:
        return [str(torch.library.get_kernel(f"aten::{name}", "CPU")) for name in OPERATORS]

    before = kernels_now()

    with aten._enable(rules(dtypes=(F32,))):
        without = kernels_now()
        with aten._enable(rules()):
            within = kernels_now()
        after = kernels_now()

    assert without == after == before
    assert set(within).isdisjoint(before)


def test_a_thread_that_asks_for_batch_invariance_is_told(planned: Planned) -> None:
    message = "_scaled_mm has no batch-invariant kernel"
    with (
        aten._enable(rules()),
        outblas.batch_invariant(),
        pytest.raises(ValueError, match=message),
    ):
        multiply()

    assert planned.calls == []


# ---- on a GPU
ON_GPU: dict[str, tuple[Tensor, Tensor, dict[str, Any]]] = {
    "one scale each": (HALF, TWO, {}),
    "fast sums": (HALF, TWO, {"use_fast_accum": True}),
    "bias": (HALF, TWO, {"bias": BIAS}),
    "a scale for each row and column": (ROWS, COLUMNS, {}),
}


def to_gpu(*tensors: Tensor) -> list[Tensor]:
    """Copies on a GPU, B by columns as before."""
    return [t.t().contiguous().cuda().t() if t is B else t.cuda() for t in tensors]


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("name", ON_GPU)
def test_products_on_a_gpu_are_exact(name: str) -> None:
    """With an output that is given and without, and in a compiled program."""
    scale_a, scale_b, named = ON_GPU[name]
    exact = A.float() @ B.float() * scale_a * scale_b + named.get("bias", torch.zeros(())).float()
    how = {option: t.cuda() if isinstance(t, Tensor) else t for option, t in named.items()}
    out = torch.full((6, 16), 7.0, device="cuda", dtype=BF16)
    tensors = to_gpu(A, B, scale_a, scale_b)

    def program(*tensors: Tensor) -> Tensor:
        return multiply(*tensors, **how).relu()

    with outblas.enable(dtypes=BOTH) as enabled:
        got = multiply(*tensors, **how), multiply(*tensors, **how, out=out)
        compiled = torch.compile(program, fullgraph=True)(*tensors)

    assert all(torch.equal(result.cpu(), exact.to(BF16)) for result in got)
    assert torch.equal(compiled.cpu(), exact.to(BF16).relu())
    assert set(decisions(enabled)) == {aten.OURS}
