"""`torch._scaled_mm` under `outblas.enable`.

No kernel of fp8 products runs without a GPU. The operator is overridden on the CPU here, and a plan
of float32 stands for the kernel's.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.scaled_plans import Planned, outcome, small
from torch.nn import functional as F

import outblas
from outblas.runtime import dispatch
from outblas.torch_ops import aten, scaled_operator
from outblas.torch_ops.aten import Enabled, Rules
from outblas.torch_ops.aten_scaled import scales_of

Tensor = torch.Tensor
E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
BOTH = E4M3, E5M2
OPERATORS = ("_scaled_mm", "_scaled_mm.out", "_scaled_mm_v2", "_scaled_mm_v2.out")


def rules(**changes: Any) -> Rules:
    plain = Rules(BOTH, min_flops=0, min_gain=0, filter=None, key="CPU")
    return plain._replace(**changes)


@pytest.fixture(autouse=True)
def _nothing_stays_enabled() -> Iterator[None]:
    yield
    outblas.disable()


A, B = small(6, 32), small(16, 32).t()
A_E5M2, B_E5M2 = A.to(E5M2), B.to(E5M2)
HALF, TWO = torch.tensor(0.5), torch.tensor(2.0)
ROWS, COLUMNS = torch.full((6, 1), 0.25), torch.full((1, 16), 2.0)
BIAS = torch.arange(16).to(BF16)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    """A kernel runs here, and this plans it."""
    planned = Planned()
    dispatch.clear_cache()
    monkeypatch.setattr(scaled_operator, "unsupported_reason", lambda device: None)
    monkeypatch.setattr(dispatch, "find_plan", planned)
    return planned


def scaled(enabled: Enabled) -> list[str]:
    """What became of the fp8 products; the stand-in's own products are not among them."""
    return [by for product, by in enabled.decisions.items() if product.startswith("_scaled_mm")]


def into(out: Tensor, *given: Any, **named: Any) -> Tensor:
    result: Tensor = torch._scaled_mm(*given, out=out, **named)
    assert result is out
    return out


TAKEN: dict[str, Callable[[], Tensor]] = {
    "one scale each": lambda: torch._scaled_mm(A, B, HALF, TWO, out_dtype=BF16),
    "the same scale twice": lambda: torch._scaled_mm(A, B, HALF, HALF, out_dtype=BF16),
    "a scale of two dimensions": lambda: torch._scaled_mm(
        A, B, HALF.view(1, 1), TWO.view(1, 1), out_dtype=BF16
    ),
    "float32 out": lambda: torch._scaled_mm(A, B, HALF, TWO, out_dtype=torch.float32),
    "fast sums": lambda: torch._scaled_mm(A, B, HALF, TWO, out_dtype=BF16, use_fast_accum=True),
    "bias": lambda: torch._scaled_mm(A, B, HALF, TWO, BIAS, out_dtype=BF16),
    "e5m2": lambda: torch._scaled_mm(A_E5M2, B, HALF, TWO, out_dtype=BF16),
    "out": lambda: into(torch.full((6, 16), 7.0).to(BF16), A, B, HALF, TWO, out_dtype=BF16),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_product_is_computed_by_a_plan_and_is_torchs(name: str, planned: Planned) -> None:
    expected = TAKEN[name]()

    with aten._enable(rules()) as enabled:
        got = [TAKEN[name]() for _ in range(3)]

    assert all(torch.equal(each, expected) for each in got)
    assert all(each.dtype == expected.dtype for each in got)
    assert scaled(enabled) == [aten.OURS]
    assert (len(planned.calls), planned.runs) == (1, 3)


def test_calls_that_are_alike_have_plans_of_their_own(planned: Planned) -> None:
    """They differ in what a plan depends on: the sums, the output's dtype, the bias, the scales."""
    calls: list[Callable[[], Tensor]] = [
        lambda: torch._scaled_mm(A, B, HALF, TWO, out_dtype=BF16),
        lambda: torch._scaled_mm(A, B, HALF, TWO, out_dtype=BF16, use_fast_accum=True),
        lambda: torch._scaled_mm(A, B, HALF, TWO, out_dtype=torch.float32),
        lambda: torch._scaled_mm(A, B, HALF, TWO, BIAS, out_dtype=BF16),
        lambda: torch._scaled_mm(A, B, HALF, HALF, out_dtype=BF16),
    ]
    expected = [call() for call in calls]

    with aten._enable(rules()):
        got = [call() for call in calls * 2]

    assert [each.dtype for each in got] == [each.dtype for each in expected * 2]
    assert all(map(torch.equal, got, expected * 2))
    assert len(planned.calls) == len(calls)


def test_a_scale_of_the_result_is_not_taken_for_a_call_without_one(planned: Planned) -> None:
    with aten._enable(rules()):
        for scale_result in (None, HALF, None):
            torch._scaled_mm(A, B, HALF, TWO, scale_result=scale_result, out_dtype=BF16)

    assert (len(planned.calls), planned.runs) == (1, 2)


def test_a_scale_for_each_row_and_column_reaches_the_plan(planned: Planned) -> None:
    """torch has such products on a GPU only."""
    with aten._enable(rules()):
        got = torch._scaled_mm(A, B, ROWS, COLUMNS, out_dtype=BF16)

    assert torch.equal(got, (A.float() @ B.float() * ROWS * COLUMNS).to(BF16))
    assert planned.calls[0].formats == "e4m3 e4m3 promoted"


BY_RECIPE = pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="torch 2.10 has it first")


def by_recipe(scale_a: Tensor, scale_b: Tensor, **named: Any) -> Tensor:
    kinds = [
        F.ScalingType.TensorWise if scale.numel() == 1 else F.ScalingType.RowWise
        for scale in (scale_a, scale_b)
    ]
    result: Tensor = F.scaled_mm(
        A, B, scale_a, kinds[0], scale_b, kinds[1], output_dtype=BF16, **named
    )
    return result


@BY_RECIPE
@pytest.mark.parametrize(
    "named", [{}, {"use_fast_accum": True}, {"bias": BIAS}], ids=["plain", "fast", "bias"]
)
def test_a_call_with_recipes_is_computed_by_a_plan_and_is_torchs(
    named: dict[str, Any], planned: Planned
) -> None:
    expected = by_recipe(HALF, TWO, **named)

    with aten._enable(rules()) as enabled:
        got = by_recipe(HALF, TWO, **named)

    assert torch.equal(got, expected)
    assert scaled(enabled) == [aten.OURS]
    assert planned.calls[0].formats.endswith("promoted") == ("use_fast_accum" not in named)


@BY_RECIPE
def test_both_functions_share_a_plan(planned: Planned) -> None:
    with aten._enable(rules()):
        by_recipe(HALF, TWO)
        torch._scaled_mm(A, B, HALF, TWO, out_dtype=BF16)

    assert (len(planned.calls), planned.runs) == (1, 2)


@BY_RECIPE
def test_scales_by_row_reach_the_plan_from_a_call_with_recipes(planned: Planned) -> None:
    with aten._enable(rules()):
        got = by_recipe(ROWS, COLUMNS)

    assert torch.equal(got, (A.float() @ B.float() * ROWS * COLUMNS).to(BF16))


def scales_by(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "scale_a": [HALF],
        "recipe_a": [0],
        "swizzle_a": [],
        "scale_b": [COLUMNS],
        "recipe_b": [1],
        "swizzle_b": [0],
        "contraction": [1, 0],
    }
    return scales_of(A, B, **given | changes)


def test_scales_of_recipes_are_told_by_their_shapes() -> None:
    assert scales_by() == (HALF, COLUMNS)


@pytest.mark.parametrize(
    "changes",
    [
        {"recipe_a": [2]},
        {"recipe_a": [0, 1], "scale_a": [HALF, HALF]},
        {"scale_a": []},
        {"scale_b": [ROWS]},
        {"recipe_b": [0]},
        {"recipe_b": [3]},
        {"recipe_a": [4]},
        {"recipe_a": [4], "scale_a": [ROWS]},
        {"recipe_a": [4], "recipe_b": [5]},
        {"swizzle_b": [1]},
        {"contraction": [0, 1]},
    ],
    ids=str,
)
def test_scales_of_other_recipes_are_torchs(changes: dict[str, Any]) -> None:
    assert scales_by(**changes) is None


REFUSED = {
    "B by rows": lambda: torch._scaled_mm(A, B.contiguous(), HALF, TWO, out_dtype=BF16),
    "K of 24": lambda: torch._scaled_mm(A[:, :24], B[:24], HALF, TWO, out_dtype=BF16),
    "two e5m2": lambda: torch._scaled_mm(A_E5M2, B_E5M2, HALF, TWO, out_dtype=BF16),
    "shapes that do not fit": lambda: torch._scaled_mm(A, B[:16], HALF, TWO, out_dtype=BF16),
    "a vector": lambda: torch._scaled_mm(A[0], B, HALF, TWO, out_dtype=BF16),
    "a scale of one operand only": lambda: torch._scaled_mm(A, B, ROWS, TWO, out_dtype=BF16),
    "fp8 out": lambda: torch._scaled_mm(A, B, HALF, TWO, out_dtype=E4M3),
    "no dtype": lambda: torch._scaled_mm(A, B, HALF, TWO),
    "a scale of the result": lambda: torch._scaled_mm(
        A, B, HALF, TWO, scale_result=HALF, out_dtype=BF16
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_product_that_is_not_covered_stays_with_torch(name: str, planned: Planned) -> None:
    expected = outcome(REFUSED[name])

    with aten._enable(rules()) as enabled:
        got = outcome(REFUSED[name])

    assert got == expected
    assert aten.OURS not in scaled(enabled)
    assert planned.calls == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtypes": (E5M2,)}, "torch.float8_e4m3fn is not among the dtypes"),
        ({"min_flops": 1e6}, "its 6144 FLOP are less than min_flops"),
        ({"filter": lambda product: product.operator != "_scaled_mm"}, "the filter does not take"),
    ],
    ids=["another dtype", "small", "filtered"],
)
def test_rules_leave_products_to_torch(
    changes: dict[str, Any], reason: str, planned: Planned
) -> None:
    with aten._enable(rules(**changes)) as enabled:
        TAKEN["one scale each"]()

    assert reason in enabled.decisions["_scaled_mm 6x16x32 float8_e4m3fn"]
    assert planned.calls == []


def test_without_a_gpu_torch_computes_it() -> None:
    with aten._enable(rules()) as enabled:
        TAKEN["one scale each"]()

    assert scaled(enabled) == ["fp8 CPU tensors"]


# ---- which operators are overridden
def kernels_now() -> list[str]:
    return [str(torch.library.get_kernel(f"aten::{name}", "CPU")) for name in OPERATORS]


def test_the_operator_is_overridden_on_request_alone() -> None:
    before = kernels_now()

    with aten._enable(rules(dtypes=(torch.float32,))):
        without = kernels_now()
        with aten._enable(rules()):
            within = kernels_now()
        after = kernels_now()

    assert without == after == before
    assert set(within).isdisjoint(before)


def test_batch_invariance_is_not_promised() -> None:
    with pytest.raises(ValueError, match=r"dtypes has torch\.float8_e4m3fn with batch"):
        outblas.enable(dtypes=[BF16, E4M3], batch_invariant=True)


def test_a_thread_that_asks_for_batch_invariance_is_told(planned: Planned) -> None:
    with (
        aten._enable(rules()),
        outblas.batch_invariant(),
        pytest.raises(ValueError, match="_scaled_mm has no batch-invariant kernel"),
    ):
        TAKEN["one scale each"]()

    assert planned.calls == []


def test_fp8_is_among_the_dtypes_that_may_be_asked_for() -> None:
    outblas.enable(dtypes=BOTH)


# ---- on a GPU
ON_GPU = [
    pytest.param(HALF, TWO, {}, id="one scale each"),
    pytest.param(HALF, TWO, {"use_fast_accum": True}, id="fast sums"),
    pytest.param(HALF, TWO, {"bias": BIAS}, id="bias"),
    pytest.param(ROWS, COLUMNS, {}, id="a scale for each row and column"),
]


@pytest.fixture
def on_a_gpu() -> Enabled:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("fp8 products have a kernel on sm_90")
    return outblas.enable(dtypes=BOTH)


def to_gpu(*tensors: Tensor) -> list[Tensor]:
    """Copies on a GPU, B by columns as before."""
    return [t.t().contiguous().cuda().t() if t is B else t.cuda() for t in tensors]


@pytest.mark.gpu
@pytest.mark.parametrize(("scale_a", "scale_b", "named"), ON_GPU)
@pytest.mark.parametrize("with_out", [False, True], ids=["returned", "out"])
def test_products_on_a_gpu_are_exact(
    scale_a: Tensor, scale_b: Tensor, named: dict[str, Any], with_out: bool, on_a_gpu: Enabled
) -> None:
    exact = A.float() @ B.float() * scale_a * scale_b + named.get("bias", torch.zeros(())).float()
    how: dict[str, Any] = {"out_dtype": BF16}
    how |= {name: t.cuda() if isinstance(t, Tensor) else t for name, t in named.items()}
    if with_out:
        how["out"] = torch.full((6, 16), 7.0, device="cuda", dtype=BF16)

    a, b, scale_a, scale_b = to_gpu(A, B, scale_a, scale_b)
    got = torch._scaled_mm(a, b, scale_a, scale_b, **how)

    assert torch.equal(got.cpu(), exact.to(BF16))
    assert set(on_a_gpu.decisions.values()) == {aten.OURS}


@pytest.mark.gpu
@BY_RECIPE
def test_a_call_with_recipes_on_a_gpu_is_exact(on_a_gpu: Enabled) -> None:
    a, b, rows, columns = to_gpu(A, B, ROWS, COLUMNS)
    recipe = F.ScalingType.RowWise

    got = F.scaled_mm(a, b, rows, recipe, columns, recipe, output_dtype=BF16)

    assert torch.equal(got.cpu(), (A.float() @ B.float() * ROWS * COLUMNS).to(BF16))
    assert set(on_a_gpu.decisions.values()) == {aten.OURS}


@pytest.mark.gpu
def test_a_compiled_product_on_a_gpu_is_taken(on_a_gpu: Enabled) -> None:
    def program(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=BF16).relu()

    got = torch.compile(program, fullgraph=True)(*to_gpu(A, B, HALF, TWO))

    assert torch.equal(got.cpu(), (A.float() @ B.float()).relu().to(BF16))
    assert aten.OURS in on_a_gpu.decisions.values()
