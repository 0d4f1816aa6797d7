"""Gradients against finite differences in float64, what they cost, and the kernel of an activation's derivative."""

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from triton.runtime.interpreter import InterpretedFunction

from outblas import addmm, dispatch, linear, matmul, ops
from outblas.epilogue import ACTIVATIONS, GATED, apply
from outblas.gradients import formula
from outblas.kernels import activation as kernels

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")


def grown(*shapes, dtype=torch.float64):
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def fused(activation):
    return lambda x, w, bias, residual: linear(x, w, bias, activation=activation, residual=residual)


CASES = {
    f"matmul {a} {b}": (matmul, [a, b])
    for a, b in [
        ((3, 4), (4, 2)), ((4,), (4,)), ((4,), (4, 2)), ((3, 4), (4,)), ((2, 3, 4), (4, 2)), ((2, 2, 3, 4), (1, 4, 2)),
        ((3, 4), (2, 4, 2)), ((2, 1, 3, 4), (3, 4, 2)), ((2, 3, 4), (4,)), ((4,), (2, 4, 2)),
    ]
}  # fmt: skip
for alpha, beta in ((1, 1), (0.5, -2.0), (3, 0)):
    for c in ((3, 2), (2,), (3, 1), ()):
        call = lambda c, a, b, s=alpha, t=beta: addmm(c, a, b, alpha=s, beta=t)  # noqa: E731
        CASES[f"addmm {c} {alpha} {beta}"] = call, [c, (3, 4), (4, 2)]
for name in (None, *ACTIVATIONS):
    columns = 4 if name in GATED else 2
    CASES[f"linear {name}"] = fused(name), [(2, 3, 4), (columns, 4), (columns,), (3, 2)]
CASES["addmm swiglu"] = (
    lambda c, a, b, bias: addmm(c, a, b, alpha=0.5, beta=-2.0, bias=bias, activation="swiglu"),
    [(1, 4), (3, 4), (4, 4), (3, 1)],
)
CASES["gemm_aux"] = lambda a, b, bias: ops.gemm_aux(a, b, None, bias, None, 1, 1, "gelu"), [(3, 4), (4, 2), (2,)]


@pytest.mark.parametrize("name", CASES)
def test_first_and_second_derivatives(name):
    call, shapes = CASES[name]
    tensors = grown(*shapes)
    assert gradcheck(call, tensors)
    assert gradgradcheck(call, tensors)


def test_a_wide_product_has_gradients_of_its_operands_dtype():
    a, b, bias = *grown((9, 16), (16, 8), dtype=torch.bfloat16), *grown((8,), dtype=torch.float32)
    wide = [t.detach().float().requires_grad_() for t in (a, b, bias)]
    matmul(a, b, out_dtype=torch.float32, bias=bias, activation="silu").square().sum().backward()
    torch.nn.functional.silu(wide[0] @ wide[1] + wide[2]).square().sum().backward()
    for got, want in zip((a, b, bias), wide, strict=True):
        assert got.grad.dtype == got.dtype
        assert torch.linalg.vector_norm(got.grad - want.grad) < 2**-7 * torch.linalg.vector_norm(want.grad)


@pytest.fixture
def launched(monkeypatch):
    """Shapes of A and B, and of x where it was stored, of each product."""
    seen = []

    def by_torch(*given, made=dispatch._by_torch):
        run = made(*given)

        def execute(*tensors):
            seen.append(tuple(t.shape for t in (*tensors[:2], *tensors[8:]) if t is not None))
            return run(*tensors)

        return execute

    monkeypatch.setattr(dispatch, "_by_torch", by_torch)
    dispatch.forget()
    yield seen
    dispatch.forget()


@pytest.mark.parametrize("needed", ["", "x", "w", "bias", "x w bias"])
def test_nothing_needless_is_multiplied_or_kept(needed, launched):
    tensors = {"x": torch.randn(2, 3, 4), "w": torch.randn(5, 4), "bias": torch.randn(5)}
    for name, t in tensors.items():
        t.requires_grad_(name in needed.split())
    backward = {"x": ((2, 3, 5), (5, 4)), "w": ((4, 6), (6, 5))}
    for activation in (None, "gelu"):
        for _ in range(3):  # cold and warm
            launched.clear()
            y = linear(*tensors.values(), activation=activation)
            assert launched == [((2, 3, 4), (4, 5), *([(2, 3, 5)] if activation and needed else []))]
            launched.clear()
            if needed:
                y.sum().backward()
            assert launched == [backward[name] for name in needed.split() if name in backward]


def test_warm_calls_go_on_having_gradients():
    a, b = grown((6, 5), (5, 4), dtype=torch.float32)
    for i in range(4):
        (first,) = torch.autograd.grad(matmul(a, b).square().sum(), a, create_graph=i % 2 == 0)
        torch.testing.assert_close(first, 2 * a @ b @ b.t())
        assert first.requires_grad == (i % 2 == 0)
        with torch.no_grad():
            assert not matmul(a, b).requires_grad
        assert not matmul(a.detach(), b.detach()).requires_grad
    matmul(a, b, kernel="portable").sum().backward()
    torch.testing.assert_close(a.grad, b.detach().sum(1).expand(6, 5))
    for written in ({"out": torch.empty(6, 4)}, {"bias": b[0], "aux": torch.empty(6, 4)}):
        with pytest.raises(ValueError, match="is given with inputs that need gradients"):
            matmul(a, b, **written)
    with pytest.raises(ValueError, match="out is given with inputs that need gradients"):
        ops.matmul_out(a, b, torch.empty(6, 4))


def test_checkpointed():
    tensors = grown((6, 5), (4, 5), (4,), (4,))
    y = torch.utils.checkpoint.checkpoint(fused("gelu"), *tensors, use_reentrant=False)
    want = apply(torch.nn.functional.linear(*tensors[:3]), "gelu", tensors[3])
    torch.testing.assert_close(*(torch.autograd.grad(t.square().sum(), tensors) for t in (y, want)))


# ---- the activation's derivative
@pytest.mark.interpreter
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_its_kernel(activation, monkeypatch):
    monkeypatch.setattr(kernels, "_value_and_slope", InterpretedFunction(kernels._value_and_slope.fn))
    kernel = InterpretedFunction(kernels.backward_kernel.fn)
    gate = activation in GATED
    grad, x = torch.randn(37, 70), 3 * torch.randn(37, 70 * (1 + gate))
    x[0, :3] = torch.tensor([0.0, torch.nan, -30.0])
    want = formula(grad.double(), x.double(), activation).float()
    for wide in (False, True):
        out = torch.full_like(x, -7)
        with np.errstate(all="ignore"):
            function = GATED.get(activation, activation)
            kernel[(3,)](grad, x, out, grad.numel(), 70, function, gate, wide, kernels.BLOCK)
        torch.testing.assert_close(out, want, equal_nan=True, atol=3e-6, rtol=3e-6)


@pytest.mark.compile
@pytest.mark.parametrize("arch", [75, 90])
def test_its_kernel_moves_16_bytes_at_a_time(arch):
    for pointer in ("*bf16", "*fp32"):
        assert "ld.global.v4" in kernels.compile_for(("gelu", False, False, pointer, (16, 16, 16, 1)), arch).asm["ptx"]
    assert kernels.compile_for(("silu", True, True, "*fp16", (2, 16, 2, 2)), arch).asm["cubin"]
