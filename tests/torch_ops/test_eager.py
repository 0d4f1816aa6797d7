"""The short way of an eager call: taken when warm, whatever kernel runs, and by every kind of
operand apart.
"""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.warm_calls import SHORT_WAY_CALLS, A, B, C, assert_short_way, product, warm

from outblas import FallbackWarning, addmm, linear, matmul
from outblas.call import dispatch, launcher
from outblas.call.problem import Problem

pytest_plugins = ("support.eager_fixtures",)
pytestmark = [
    pytest.mark.usefixtures("cpu_plans_run"),
    pytest.mark.filterwarnings("ignore::outblas.FallbackWarning", "ignore::DeprecationWarning"),
]

Tensor = torch.Tensor


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The rows and columns of A of each plan that is made."""
    plans: list[tuple[int, ...]] = []
    plan_of = dispatch._plan_of

    def recording_plan_of(call: dispatch.Call, problem: Problem, *given: Any) -> dispatch.Plan:
        plans.append((problem.M, problem.K))
        return plan_of(call, problem, *given)

    monkeypatch.setattr(dispatch, "_plan_of", recording_plan_of)
    return plans


# ---- what is warm
@pytest.mark.parametrize("name", SHORT_WAY_CALLS)
def test_a_call_is_planned_once_and_skips_the_operator(
    name: str, planned: list[tuple[int, ...]], operators: list[str]
) -> None:
    """Under a default device too, which torch holds in a function mode."""
    call, want = SHORT_WAY_CALLS[name]
    results = []
    try:
        for device in (None, "meta"):
            torch.set_default_device(device)
            results += [call() for _ in range(3)]
    finally:
        torch.set_default_device(None)

    assert len(planned) == 1
    assert operators == []
    for result in results:
        assert torch.equal(result, want())
        assert result.stride() == want().stride()
        assert result._version or "out" not in name, "autograd sees what is written"


# What the plans run matters less than that there are many calls.
@pytest.mark.parametrize("cpu_plans_run", ["torch's product", "stand-in"], indirect=True)
def test_every_thread_takes_it() -> None:
    def multiply(_: int) -> None:
        for i in range(100):
            rows, row_stride = 1 + i % 7, 5 + i % 25
            a = torch.empty(6, row_stride)[:rows, :5].copy_(A[:rows])
            assert torch.equal(matmul(a, B), A[:rows] @ B), f"{a.shape} {a.stride()}"
            if i % 50 == 0:
                dispatch.clear_cache()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(multiply, range(4)))


# ---- what is planned anew
@pytest.mark.parametrize("cpu_plans_run", ["portable"], indirect=True)
def test_the_oldest_plan_is_forgotten_where_there_are_too_many(
    planned: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's product is one plan for all numbers of rows."""
    monkeypatch.setattr(dispatch, "PLAN_LIMIT", 2)
    monkeypatch.setattr(dispatch, "SIZES_LIMIT", 2)
    for rows in (1, 2, 3):
        matmul(A[:rows], B)
    planned.clear()

    for rows in (3, 2, 1):
        matmul(A[:rows], B)

    assert planned == [(1, 5)]


@pytest.mark.parametrize("cpu_plans_run", ["stand-in"], indirect=True)
def test_a_plan_that_is_in_use_stays_where_there_are_too_many(
    planned: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "PLAN_LIMIT", 6)
    for size in range(2, 30):
        matmul(A, B)
        matmul(torch.ones(3, size), torch.ones(size, 2))

    assert planned.count((6, 5)) == 1
    assert len(planned) == 29


def test_the_oldest_kind_of_one_shape_is_forgotten(planned: list[tuple[int, ...]]) -> None:
    operands = [torch.empty(6, stride)[:, :5].copy_(A) for stride in range(5, 22)]
    for a in operands:
        matmul(a, B)

    assert all(torch.equal(matmul(a, B), A @ B) for a in operands)

    assert len(planned) == len(operands), "a plan is kept for the kinds that are looked up anew"


@pytest.mark.parametrize("cpu_plans_run", ["torch's product"], indirect=True)
def test_strict_mode_is_read_on_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        warm(product)
    monkeypatch.setenv("OUTBLAS_STRICT", "1")

    with pytest.raises(RuntimeError, match="OUTBLAS_STRICT=1 forbids"):
        matmul(A, B)


# ---- out
MEMORY = torch.zeros(64)
IN_A, IN_B = MEMORY[:30].view(6, 5), MEMORY[30:50].view(5, 4)
OUT, RESIDUAL, AUX = torch.zeros(6, 4), MEMORY[:24].view(6, 4), torch.zeros(6, 4)
with torch.inference_mode():
    INFERENCE = torch.zeros(6, 4)
# By message: a call that is warm, and one like it that is refused.
REFUSED: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
    "out overlaps input": (
        lambda: matmul(IN_A, B, out=OUT),
        lambda: matmul(IN_A, B, out=MEMORY[20:44].view(6, 4)),
    ),
    "out overlaps other": (
        lambda: matmul(A, IN_B, out=OUT),
        lambda: matmul(A, IN_B, out=MEMORY[16:40].view(6, 4)),
    ),
    "out requires grad": (
        lambda: matmul(A, B, out=OUT),
        lambda: matmul(A, B, out=torch.empty(6, 4, requires_grad=True)),
    ),
    "out is an inference tensor": (
        lambda: matmul(A, B, out=OUT),
        lambda: matmul(A, B, out=INFERENCE),
    ),
    "aux overlaps residual": (
        lambda: matmul(A, B, residual=RESIDUAL, aux=AUX),
        lambda: matmul(A, B, residual=RESIDUAL, aux=MEMORY[20:44].view(6, 4)),
    ),
    "out overlaps residual": (
        lambda: matmul(A, B, residual=RESIDUAL, out=OUT),
        lambda: matmul(A, B, residual=RESIDUAL, out=RESIDUAL),
    ),
    "out overlaps aux": (
        lambda: matmul(A, B, aux=AUX, out=OUT),
        lambda: matmul(A, B, aux=OUT, out=OUT),
    ),
    "aux overlaps bias": (
        lambda: matmul(A, B, bias=RESIDUAL, aux=AUX),
        lambda: matmul(A, B, bias=RESIDUAL, aux=RESIDUAL),
    ),
    "alpha is .*, expected a number that float32 can hold": (
        lambda: addmm(C, A, B, alpha=2.0),
        lambda: addmm(C, A, B, alpha=-1e39),
    ),
}


@pytest.mark.parametrize("cpu_plans_run", ["torch's product", "stand-in"], indirect=True)
@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused_after_warm_calls(message: str) -> None:
    call, wrong = REFUSED[message]
    warm(call)

    with pytest.raises(ValueError, match=message):
        wrong()

    assert not MEMORY.any(), "nothing is written"
    assert not INFERENCE.any()


def test_an_out_of_inference_mode_is_warm(operators: list[str]) -> None:
    with torch.inference_mode():
        out = torch.empty(6, 4)
        assert_short_way(lambda: matmul(A, B, out=out), operators)


def test_new_memory_is_filled_where_torch_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def launcher_that_writes_nothing(*_: Any, no_product: bool) -> Callable[..., None]:
        return lambda *_: None

    monkeypatch.setattr(launcher, "no_kernel_reason", lambda problem: None)
    monkeypatch.setattr(launcher, "best_launcher", launcher_that_writes_nothing)
    warm(product)
    torch.use_deterministic_algorithms(True)
    try:
        filled = matmul(A, B)
    finally:
        torch.use_deterministic_algorithms(False)

    assert filled.isnan().all()


@pytest.mark.skipif(not hasattr(Tensor, "const_data_ptr"), reason="to read an address is to copy")
@pytest.mark.parametrize("cpu_plans_run", ["torch's product"], indirect=True)
def test_operands_stay_lazy_clones() -> None:
    """They share memory until one is written."""
    a, w, out = (torch._lazy_clone(t) for t in (A, B.t(), torch.zeros(6, 4)))

    warm(lambda: (matmul(a, B), addmm(C, a, B, out=out), linear(a, w)))

    assert [torch._C._is_cow_tensor(t) for t in (a, w, out)] == [True, True, False]  # type: ignore[attr-defined]


# ---- gradients
@pytest.mark.usefixtures("meta_by_default")
def test_training_is_warm_under_a_default_device(operators: list[str]) -> None:
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    grad, w = A @ B, torch.nn.Parameter(B.t().contiguous(), requires_grad=False)

    def step() -> None:
        a.grad = None
        matmul(a, b).backward(grad)
        linear(A, w)

    assert_short_way(step, operators)

    assert torch.equal(a.grad, grad @ B.t())


def test_gradients_of_warm_calls_keep_the_mode_that_was_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    warm(lambda: matmul(A, B, tune="off"))
    modes: list[str] = []
    find_plan = dispatch.find_plan

    def recorded(call: dispatch.Call) -> dispatch.Plan:
        modes.append(call.tune)
        return find_plan(call)

    monkeypatch.setattr(dispatch, "find_plan", recorded)
    for _ in range(3):
        a.grad = b.grad = None
        matmul(a, b, tune="off").backward(torch.ones(6, 4))

    assert set(modes) == {"off"}
    assert torch.equal(a.grad, torch.ones(6, 4) @ B.t())
    assert torch.equal(b.grad, A.t() @ torch.ones(6, 4))
