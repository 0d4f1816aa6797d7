"""Gradients of the public calls and of the operators: against finite differences in float64, and against torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from triton.runtime.interpreter import InterpretedFunction

from outblas import addmm, dispatch, linear, matmul, ops
from outblas.epilogue import ACTIVATIONS, GATED, apply
from outblas.gradients import formula
from outblas.kernels import activation as activation_kernel

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "matrices": ((3, 4), (4, 2)),
    "vectors": ((4,), (4,)),
    "row": ((4,), (4, 2)),
    "column": ((3, 4), (4,)),
    "batch, shared B": ((2, 3, 4), (4, 2)),
    "batches, shared B of ones": ((2, 2, 3, 4), (1, 4, 2)),
    "shared A": ((3, 4), (2, 4, 2)),
    "batches that broadcast": ((2, 1, 3, 4), (3, 4, 2)),
    "batch of columns": ((2, 3, 4), (4,)),
    "row, batch": ((4,), (2, 4, 2)),
    "no rows": ((0, 4), (4, 2)),
    "no terms": ((3, 0), (0, 2)),
    "no batch": ((0, 3, 4), (4, 2)),
}


def grown(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    seed = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(shape, generator=seed, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def close(call: Callable[..., Any], torchs: Callable[..., Any], tensors: list[torch.Tensor], **tolerance: Any) -> None:
    """Values and gradients, of both, for one gradient of the output."""
    got, want = call(*tensors), torchs(*tensors)
    torch.testing.assert_close(got, want, **tolerance)
    weight = torch.linspace(-1, 1, max(want.numel(), 1))[: want.numel()].view(want.shape).to(want.dtype)
    for mine, theirs in zip(
        torch.autograd.grad(got, tensors, weight), torch.autograd.grad(want, tensors, weight), strict=True
    ):
        torch.testing.assert_close(mine, theirs, **tolerance)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_matmul(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    tensors = grown(*shapes)
    close(matmul, torch.matmul, tensors)
    if 0 not in (*shapes[0], *shapes[1]):
        assert gradcheck(matmul, tensors)
        assert gradgradcheck(matmul, tensors)


@pytest.mark.parametrize("shape", [(3, 2), (2,), (3, 1), ()])
def test_addmm(shape: tuple[int, ...]) -> None:
    tensors = grown(shape, (3, 4), (4, 2))
    for alpha, beta in ((1, 1), (0.5, -2.0), (3, 0)):

        def call(c: Any, a: Any, b: Any, alpha: float = alpha, beta: float = beta) -> Any:
            return addmm(c, a, b, alpha=alpha, beta=beta)

        close(call, lambda c, a, b, s=alpha, t=beta: torch.addmm(c, a, b, alpha=s, beta=t), tensors)
        assert gradcheck(call, tensors)
        assert gradgradcheck(call, tensors)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_linear(activation: str | None) -> None:
    halves = 2 if activation in GATED else 1

    def call(x: Any, w: Any, bias: Any, residual: Any) -> Any:
        return linear(x, w, bias, activation=activation, residual=residual)

    def torchs(x: Any, w: Any, bias: Any, residual: Any) -> Any:
        return apply(torch.nn.functional.linear(x, w, bias), activation or "", residual)

    tensors = grown((2, 3, 4), (2 * halves, 4), (2 * halves,), (3, 2))
    close(call, torchs, tensors)
    assert gradcheck(call, tensors)
    assert gradgradcheck(call, tensors)


def test_addmm_with_an_epilogue() -> None:
    def call(c: Any, a: Any, b: Any, bias: Any, residual: Any) -> Any:
        more = {"bias": bias, "activation": "swiglu", "residual": residual}
        return addmm(c, a, b, alpha=0.5, beta=-2.0, **more)

    tensors = grown((1, 4), (3, 4), (4, 4), (3, 1), (2,))
    assert gradcheck(call, tensors)
    assert gradgradcheck(call, tensors)


def test_both_outputs_of_gemm_aux() -> None:
    def call(a: Any, b: Any, bias: Any) -> Any:
        return ops.gemm_aux(a, b, None, bias, None, 1, 1, "gelu")

    tensors = grown((3, 4), (4, 2), (2,))
    assert gradcheck(call, tensors)
    assert gradgradcheck(call, tensors)
    with torch.no_grad():
        y, x = call(*tensors)
    assert not y.requires_grad
    torch.testing.assert_close(torch.nn.functional.gelu(x), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu"])
def test_as_torch_in_other_dtypes(activation: str, dtype: torch.dtype) -> None:
    unit = torch.finfo(dtype).eps
    tensors = grown((2, 9, 16), (8, 16), (8,), dtype=dtype)
    close(
        lambda x, w, bias: linear(x, w, bias, activation=activation),
        lambda x, w, bias: apply(torch.nn.functional.linear(x, w, bias), activation, None),
        tensors,
        atol=8 * unit * 4,
        rtol=8 * unit,
    )


@pytest.mark.interpreter
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_kernel_of_the_derivative(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called = InterpretedFunction(activation_kernel._value_and_slope.fn)
    monkeypatch.setattr(activation_kernel, "_value_and_slope", called)
    kernel = InterpretedFunction(activation_kernel.backward_kernel.fn)
    gate, columns = activation in GATED, 70
    grad, x = torch.randn(37, columns), 3 * torch.randn(37, columns * (1 + gate))
    x[0, :3] = torch.tensor([0.0, torch.nan, -30.0])
    want = formula(grad, x, activation)
    for wide in (False, True):
        out = torch.full_like(x, -7)
        programs = -(-grad.numel() // activation_kernel.BLOCK)
        given = grad.numel(), columns, GATED.get(activation, activation), gate, wide, activation_kernel.BLOCK
        with np.errstate(all="ignore"):
            kernel[(programs,)](grad, x, out, *given)
        torch.testing.assert_close(out, want, equal_nan=True, atol=1e-5, rtol=1e-5)


@pytest.mark.compile
@pytest.mark.parametrize("arch", [75, 90])
def test_the_kernel_of_the_derivative_moves_16_bytes_at_a_time(arch: int) -> None:
    for pointer in ("*bf16", "*fp32"):
        compiled = activation_kernel.compile_for(("gelu", False, False, pointer, (16, 16, 16, 1)), arch)
        assert "ld.global.v4" in compiled.asm["ptx"]
    assert activation_kernel.compile_for(("silu", True, True, "*fp16", (2, 16, 2, 2)), arch).asm["cubin"]


def test_a_wide_product_has_gradients_of_its_operands_dtype() -> None:
    a, b, bias = *grown((9, 16), (16, 8), dtype=torch.bfloat16), *grown((8,), dtype=torch.float32)
    y = matmul(a, b, out_dtype=torch.float32, bias=bias, activation="silu")
    d_a, d_b, d_bias = torch.autograd.grad(y.square().sum(), (a, b, bias))
    assert (y.dtype, d_a.dtype, d_b.dtype, d_bias.dtype) == (*[torch.float32] * 1, a.dtype, b.dtype, torch.float32)
    wide = [t.detach().float().requires_grad_() for t in (a, b, bias)]
    torch.nn.functional.silu(wide[0] @ wide[1] + wide[2]).square().sum().backward()
    for got, want in zip((d_a, d_b, d_bias), wide, strict=True):
        assert torch.linalg.vector_norm(got.float() - want.grad) < 2**-7 * torch.linalg.vector_norm(want.grad)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], ...]]:
    """Shapes of A and B, and of x where it was stored, of each product."""
    seen: list[tuple[tuple[int, ...], ...]] = []

    def by_torch(*_: Any) -> Any:
        def execute(a: Any, b: Any, c: Any, out: Any, alpha: Any, beta: Any, *extra: Any) -> Any:
            aux = extra[2] if extra else None
            seen.append((tuple(a.shape), tuple(b.shape), *((tuple(aux.shape),) if aux is not None else ())))
            return real(a, b, c, out, alpha, beta, *extra)

        real = made(*_)
        return execute

    made = dispatch._by_torch
    monkeypatch.setattr(dispatch, "_by_torch", by_torch)
    dispatch.forget()
    yield seen
    dispatch.forget()


@pytest.mark.parametrize("needed", ["", "x", "w", "bias", "x w bias"])
def test_nothing_needless_is_multiplied_or_kept(needed: str, launched: list[Any]) -> None:
    x, w, bias = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)
    for name, t in (("x", x), ("w", w), ("bias", bias)):
        t.requires_grad_(name in needed.split())
    backward = {"x": ((2, 3, 5), (5, 4)), "w": ((4, 6), (6, 5))}
    for activation in (None, "gelu"):
        for _ in range(3):  # cold and warm
            launched.clear()
            y = linear(x, w, bias, activation=activation)
            stored = [(2, 3, 5)] if activation and needed else []
            assert launched == [((2, 3, 4), (4, 5), *stored)]
            launched.clear()
            if needed:
                y.sum().backward()
            assert launched == [backward[name] for name in needed.split() if name in backward]


def test_a_named_kernel_has_gradients_and_out_has_none() -> None:
    a, b = grown((6, 5), (5, 4), dtype=torch.float32)
    matmul(a, b, kernel="portable").sum().backward()
    torch.testing.assert_close(a.grad, b.detach().sum(1).expand(6, 5))
    for how in ({"out": torch.empty(6, 4)}, {"bias": b[0], "aux": torch.empty(6, 4)}):
        with pytest.raises(ValueError, match="is given with inputs that need gradients"):
            matmul(a, b, **how)
    with pytest.raises(ValueError, match="out is given with inputs that need gradients"):
        ops.matmul_out(a, b, torch.empty(6, 4))


def test_warm_calls_go_on_having_gradients() -> None:
    a, b = grown((6, 5), (5, 4), dtype=torch.float32)
    for _ in range(4):
        close(matmul, torch.matmul, [a, b])
        with torch.no_grad():
            assert not matmul(a, b).requires_grad
        assert not matmul(a.detach(), b.detach()).requires_grad
        (second,) = torch.autograd.grad(
            torch.autograd.grad(matmul(a, b).square().sum(), a, create_graph=True)[0].sum(), b
        )
        assert second.abs().sum() > 0
    with torch.inference_mode():
        assert matmul(a, b).is_inference()


def test_checkpointed() -> None:
    tensors = grown((6, 5), (4, 5), (4,), dtype=torch.float32)

    def layer(x: Any, w: Any, bias: Any) -> Any:
        return linear(x, w, bias, activation="gelu")

    close(lambda *t: torch.utils.checkpoint.checkpoint(layer, *t, use_reentrant=False), layer, tensors)
