"""Gradients of first and second order, against finite differences and against torch's autograd."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.gradients import leaves, second_order

from outblas import addmm, batch_invariant, linear, matmul
from outblas.core import invariance
from outblas.core.epilogue import apply
from outblas.torch_ops import autograd, autograd_levels, ops

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")


# ---- against torch's autograd


@pytest.mark.parametrize("operand", ["a", "b", "bias"])
def test_a_wide_product_has_gradients_of_its_operands_dtype(operand: str) -> None:
    a, b = leaves((9, 16), (16, 8), dtype=torch.bfloat16)
    tensors = {"a": a, "b": b, "bias": leaves((8,), dtype=torch.float32)[0]}
    wide = {name: t.detach().float().requires_grad_() for name, t in tensors.items()}
    y = matmul(a, b, out_dtype=torch.float32, bias=tensors["bias"], activation="silu")
    want_y = torch.nn.functional.silu(wide["a"] @ wide["b"] + wide["bias"])

    (got,) = torch.autograd.grad(y.square().sum(), tensors[operand])

    (want,) = torch.autograd.grad(want_y.square().sum(), wide[operand])
    assert got.dtype == tensors[operand].dtype
    error = torch.linalg.vector_norm(got - want) / torch.linalg.vector_norm(want)
    assert error < 2**-7


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=["y", "x", "y and x"])
def test_of_two_outputs_one_may_have_no_gradient(used: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors = leaves((3, 4), (4, 2), (2,), (3, 2), dtype=dtype)
    a, b, bias, residual = tensors
    activation = "" if dtype.is_complex else "gelu"
    x = a @ b + bias
    torchs = apply(x, activation, residual), x

    def gradients(outputs: tuple[torch.Tensor, ...]) -> Any:
        loss = torch.stack([outputs[i].abs().sum() for i in used]).sum()
        return torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True)

    got = gradients(ops.gemm_aux(a, b, None, bias, residual, 1, 1, activation))

    torch.testing.assert_close(got, gradients(torchs))


# ---- what the backward pass of a call that was allowed does
INVARIANT_CALLS = [
    pytest.param(lambda a, b, **how: matmul(a, b, **how), id="matmul"),
    pytest.param(lambda a, b, **how: addmm(a[:, :1], a, b, alpha=2, **how), id="addmm"),
    pytest.param(lambda a, b, **how: linear(a, b.t(), activation="gelu", **how), id="linear gelu"),
]
ASKED_FOR_BY = [
    pytest.param({}, batch_invariant, id="context"),
    pytest.param({"batch_invariant": True}, contextlib.nullcontext, id="argument"),
]


@pytest.fixture
def never_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the process forget that batch invariance was ever asked for, as before the test:
    programs that are compiled later are then compiled as ever.
    """
    monkeypatch.setattr(invariance.flag, "ever", False)


@pytest.mark.usefixtures("never_invariant")
@pytest.mark.parametrize(("how", "context"), ASKED_FOR_BY)
@pytest.mark.parametrize("call", INVARIANT_CALLS)
def test_the_kernel_of_a_batch_invariant_forward_pass_computes_its_gradients(
    call: Callable[..., torch.Tensor], how: dict[str, bool], context: Callable[[], Any]
) -> None:
    a, b = leaves((6, 5), (5, 4), dtype=torch.float32)
    want = second_order(call(a, b), (a, b))

    with context():
        y = call(a, b, kernel="portable", **how)
    got = second_order(y, (a, b))

    # Terms of hundreds cancel in small elements: 4e-6 of the largest one in 120 random problems.
    for ours, torchs in zip(got, want, strict=True):
        largest = torchs.abs().max().item()
        torch.testing.assert_close(ours, torchs, atol=1e-4 * largest, rtol=0)


# ---- what is taken from torch
@pytest.fixture
def without_one_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has gradients recorded as with a torch that lacks the class for one level of autograd."""
    monkeypatch.setattr(autograd_levels, "OneLevelFunction", torch.autograd.Function)
    monkeypatch.setattr(autograd, "_record", autograd_levels.recorder(autograd.Product))


@pytest.mark.usefixtures("without_one_level")
def test_gradients_need_no_class_for_one_level() -> None:
    a, b = leaves((3, 4), (4, 2))

    (found,) = torch.autograd.grad(ops.matmul(a, b).sum(), a)

    torch.testing.assert_close(found, b.detach().sum(1).expand(3, 4))


@pytest.mark.usefixtures("without_one_level")
def test_transforms_fail_without_the_class_for_one_level() -> None:
    a, b = leaves((3, 4), (4, 2))

    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda a: ops.matmul(a, b).sum())(a.detach())
