"""Gradients of `scaled_mm`: bias and residual have them, and what has none says so."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.fp8 import fp8_operands

from outblas import scaled_mm
from outblas.core.epilogue import ACTIVATIONS, GATED, Activation, apply

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
on_hopper = [pytest.mark.gpu, pytest.mark.sm90]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_hopper)])

Tensor = torch.Tensor


# ---- bias and residual
@dataclass(frozen=True)
class Differentiable:
    """A call as a function of bias and residual, what torch makes of it in fp32, the two, and a
    gradient that arrives.
    """

    ours: Callable[[Tensor, Tensor], Tensor]
    torchs: Callable[[Tensor, Tensor], Tensor]
    leaves: tuple[Tensor, Tensor]
    grad: Tensor


def differentiable(
    activation: Activation | None, dtype: torch.dtype, device: str = "cpu"
) -> Differentiable:
    M, N, K = 6, 16, 32
    columns = 2 * N if activation in GATED else N
    # Sums of integers up to 2, which the tensor cores hold.
    a, b = fp8_operands(M, columns, K, device=device, most=2)
    scale_a = torch.full((), 0.5, device=device)
    scale_b = torch.rand(1, columns, device=device) + 0.5
    bias = torch.randn(columns, device=device).to(dtype).requires_grad_()
    residual = torch.randn(M, 1, device=device).to(dtype).requires_grad_()

    def ours(bias: Tensor, residual: Tensor) -> Tensor:
        return scaled_mm(
            a,
            b,
            scale_a,
            scale_b,
            bias=bias,
            residual=residual,
            activation=activation,
            out_dtype=dtype,
        )

    def torchs(bias: Tensor, residual: Tensor) -> Tensor:
        x = (scale_a * a.float()) @ (scale_b * b.float()) + bias.float()
        return apply(x, activation or "", residual.float()).to(dtype)

    grad = torch.randn(N, M, device=device).to(dtype).t()
    return Differentiable(ours, torchs, (bias, residual), grad)


TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"atol": 1e-4, "rtol": 1e-4},
    torch.bfloat16: {"atol": 0.1, "rtol": 0.03},
}
SOME_ACTIVATIONS = [None, "gelu_tanh", "swiglu"]
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
activations = pytest.mark.parametrize("activation", [None, *ACTIVATIONS], ids=str)


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@devices
@dtypes
@activations
def test_bias_and_residual_have_gradients(
    activation: Activation | None, dtype: torch.dtype, device: str
) -> None:
    case = differentiable(activation, dtype, device)

    got = torch.autograd.grad(case.ours(*case.leaves), case.leaves, case.grad)

    want = torch.autograd.grad(case.torchs(*case.leaves), case.leaves, case.grad)
    torch.testing.assert_close(got, want, **TOLERANCES[dtype])


# One activation of each kind in each dtype is compiled in CI: none, a function of one number, and a
# gated one. The others follow the same way through the compiler.
@devices
@dtypes
@pytest.mark.parametrize(
    "activation",
    [
        pytest.param(name, marks=() if name in SOME_ACTIVATIONS else pytest.mark.slow)
        for name in (None, *ACTIVATIONS)
    ],
    ids=str,
)
def test_bias_and_residual_of_a_compiled_call_have_gradients(
    activation: Activation | None, dtype: torch.dtype, device: str
) -> None:
    case = differentiable(activation, dtype, device)

    y = compiled(case.ours)(*case.leaves)
    got = torch.autograd.grad(y, case.leaves, case.grad)

    want = torch.autograd.grad(case.torchs(*case.leaves), case.leaves, case.grad)
    torch.testing.assert_close(got, want, **TOLERANCES[dtype])


some_activations = pytest.mark.parametrize("activation", SOME_ACTIVATIONS, ids=str)


@some_activations
def test_second_derivatives_are_torchs(activation: Activation | None) -> None:
    case = differentiable(activation, torch.float32)

    def derivatives(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        loss = function(*case.leaves).square().sum()
        first = torch.autograd.grad(loss, case.leaves, create_graph=True)
        squares = torch.stack([t.square().sum() for t in first])
        return (*first, *torch.autograd.grad(squares.sum(), case.leaves))

    got = derivatives(case.ours)

    torch.testing.assert_close(got, derivatives(case.torchs), atol=1e-3, rtol=1e-4)


# ---- arguments without gradients
arguments = pytest.mark.parametrize("name", ["a", "b", "scale_a", "scale_b"])
MESSAGE = "{}.* requires grad, but only bias and residual of scaled_mm have gradients"


@pytest.fixture
def given(name: str) -> dict[str, Tensor]:
    """Operands and scales, of which the one that is named needs gradients."""
    a, b = fp8_operands(4, 6, 8)
    tensors = {"a": a, "b": b, "scale_a": torch.ones(()), "scale_b": torch.ones(())}
    tensors[name].requires_grad_()
    return tensors


@arguments
def test_no_gradient_is_cut_beside_one_that_there_is(name: str, given: dict[str, Any]) -> None:
    bias = torch.ones(6).bfloat16().requires_grad_()

    y = scaled_mm(**given, activation="gelu", bias=bias)

    with pytest.raises(NotImplementedError, match=MESSAGE.format(name)):
        y.sum().backward()
    assert bias.grad is None


@arguments
def test_a_transform_for_what_has_no_gradient_fails(name: str, given: dict[str, Any]) -> None:
    def loss(t: Tensor) -> Tensor:
        return scaled_mm(**given | {name: t}).sum()

    with pytest.raises(NotImplementedError, match=MESSAGE.format(name)):
        torch.func.grad(loss)(given[name].detach())
