"""A warm call with a number of rows that was never met is right: it is found without M, with all
tensors that have rows, and calls that do not fit together are refused as ever.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.warm_calls import stand_in_launcher

from outblas import addmm, linear, matmul
from outblas.call import dispatch, launcher
from outblas.torch_ops import eager

pytest_plugins = ("support.eager_fixtures",)
pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

Tensor = torch.Tensor
K, N = 5, 4
W, BIAS, ROW = torch.randn(N, K), torch.randn(N), torch.randn(1, N)
WEIGHT = torch.nn.Parameter(W.clone())


@pytest.fixture(params=["kernel", "torch"])
def plans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[dispatch.Call]:
    """The calls that are planned anew. Their plans run a stand-in for a kernel, or torch's
    product.
    """
    if request.param == "kernel":
        monkeypatch.setattr(launcher, "no_kernel_reason", lambda problem: None)
        monkeypatch.setattr(launcher, "best_launcher", stand_in_launcher)
    calls: list[dispatch.Call] = []
    make = eager.make_plan

    def recorded(entry: Any, call: dispatch.Call, details: Any) -> bool:
        calls.append(call)
        return make(entry, call, details)

    monkeypatch.setattr(eager, "make_plan", recorded)
    return calls


def like(lead: tuple[int, ...], columns: int = N) -> Tensor:
    """Small integers, whose sums over all rows are exact in a gradient."""
    return torch.randint(-4, 5, (*lead, columns)).float()


# A call of an input and of a tensor like the result, and torch's result.
Case = tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
CASES: dict[str, Case] = {
    "matmul": (lambda x, r: matmul(x, W.t()), lambda x, r: x @ W.t()),
    "out": (lambda x, r: matmul(x, W.t(), out=torch.empty_like(r)), lambda x, r: x @ W.t()),
    "residual": (lambda x, r: matmul(x, W.t(), residual=r), lambda x, r: x @ W.t() + r),
    "a row as residual": (
        lambda x, r: matmul(x, W.t(), residual=ROW),
        lambda x, r: x @ W.t() + ROW,
    ),
    "aux": (
        lambda x, r: matmul(x, W.t(), activation="relu", aux=torch.empty_like(r)),
        lambda x, r: (x @ W.t()).relu(),
    ),
    "linear": (lambda x, r: linear(x, W, BIAS), lambda x, r: x @ W.t() + BIAS),
    "linear with an epilogue": (
        lambda x, r: linear(x, W, BIAS, activation="relu", residual=r),
        lambda x, r: (x @ W.t() + BIAS).relu() + r,
    ),
    "recorded": (lambda x, r: linear(x, WEIGHT, BIAS), lambda x, r: x @ W.t() + BIAS),
    "recorded activation": (
        lambda x, r: linear(x, WEIGHT, BIAS, activation="relu"),
        lambda x, r: (x @ W.t() + BIAS).relu(),
    ),
    "recorded activation of matmul": (
        lambda x, r: matmul(x, WEIGHT.t(), activation="relu"),
        lambda x, r: (x @ W.t()).relu(),
    ),
}
LEADS = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)


@pytest.mark.parametrize("name", CASES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(leads=st.lists(LEADS, min_size=2, max_size=6))
def test_any_number_of_rows_is_right(
    name: str, plans: list[dispatch.Call], leads: list[tuple[int, ...]]
) -> None:
    ours, of_torch = CASES[name]
    for lead in leads:
        x, r = like(lead, K), like(lead)
        got, want = ours(x, r), of_torch(x, r)
        torch.testing.assert_close(got, want)
        assert not got.numel() or got.stride() == want.stride()
        if got.requires_grad:
            (d_ours,) = torch.autograd.grad(got, WEIGHT, torch.ones_like(got))
            with torch.enable_grad():
                w = W.clone().requires_grad_()
                y = x @ w.t() + (0 if "matmul" in name else BIAS)
                y = y.relu() if "activation" in name else y
                (d_torch,) = torch.autograd.grad(y, w, torch.ones_like(y))
            torch.testing.assert_close(d_ours, d_torch)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("lead", [(6,), (2, 3)], ids=str)
def test_a_new_number_of_rows_is_not_planned_anew(
    name: str, plans: list[dispatch.Call], lead: tuple[int, ...]
) -> None:
    """Whose operands begin as those of the first call did."""
    ours, _ = CASES[name]
    planned = []
    for rows in (lead[0], 3, 5, 2):
        ours(aligned((rows, *lead[1:], K)), aligned((rows, *lead[1:], N)))
        planned.append(len(plans))

    assert planned == [planned[0]] * 4


def aligned(shape: tuple[int, ...]) -> Tensor:
    """A tensor that begins at a cache line."""
    count = torch.Size(shape).numel()
    memory = torch.randn(count + 32)
    start = -memory.data_ptr() % 128 // 4
    return memory[start : start + count].view(shape)


WRONG: dict[str, Callable[[], Tensor]] = {
    "out": lambda: matmul(like((5,), K), W.t(), out=torch.empty(4, N)),
    "residual": lambda: matmul(like((5,), K), W.t(), residual=like((4,))),
    "addend": lambda: addmm(like((4,)), like((5,), K), W.t()),
    "residual of a batch": lambda: matmul(like((2, 3), K), W.t(), residual=like((3, 2))),
}


@pytest.mark.parametrize("name", WRONG)
def test_rows_that_differ_are_refused(name: str, plans: list[dispatch.Call]) -> None:
    for lead in ((6,), (7,), (2, 2), (4, 3)):
        x, r = like(lead, K), like(lead)
        matmul(x, W.t(), out=torch.empty_like(r))
        matmul(x, W.t(), residual=r)
        if len(lead) == 1:
            addmm(r, x, W.t())

    with pytest.raises(ValueError, match="expected"):
        WRONG[name]()
