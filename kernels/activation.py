"""The gradient of an activation: one pass over memory, in fp32, rounded once."""

import torch
import triton
import triton.language as tl

from outblas.call.epilogue import GATED
from outblas.device.grid import INT32_MAX
from outblas.kernels.passes import Passes

Tensor = torch.Tensor

BLOCK = 1024  # elements per program: a 16-byte vector of 16-bit elements for each of 128 threads


@triton.jit  # type: ignore[untyped-decorator]
def _value_and_slope(x, FUNCTION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns f(x) and f'(x)."""
    if FUNCTION == "relu":
        # The comparison with <= keeps NaN.
        return tl.where(x <= 0, 0.0, x), tl.where(x <= 0, 0.0, 1.0)
    elif FUNCTION == "gelu":
        below = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        return x * below, below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif FUNCTION == "gelu_tanh":
        # (1 + tanh u) / 2, computed without subtracting nearly equal numbers.
        s = 1 / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
        return x * s, s + x * s * (1 - s) * (1.5957691216057308 + 0.21406447 * x * x)
    else:
        tl.static_assert(FUNCTION == "silu")
        s = 1 / (1 + tl.exp(-x))
        return x * s, s * (1 + x * (1 - s))


@triton.jit  # type: ignore[untyped-decorator]
def backward_kernel(  # type: ignore[no-untyped-def]
    grad,
    x,
    out,
    elements,
    columns,
    FUNCTION: tl.constexpr,
    GATE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes out = grad · f'(x) for `elements` elements of grad, in rows of `columns`.

    GATE: rows of x and out are twice as wide; their first halves belong to the gate, whose value
    multiplies the second halves. WIDE: indices take 64 bits.
    """
    start = tl.program_id(0)
    if WIDE:
        start = start.to(tl.int64)
    i = start * BLOCK + tl.arange(0, BLOCK)
    inside = i < elements
    g = tl.load(grad + i, mask=inside, other=0.0).to(tl.float32)
    at = i + i // columns * columns if GATE else i
    value, slope = _value_and_slope(
        tl.load(x + at, mask=inside, other=0.0).to(tl.float32), FUNCTION
    )
    if GATE:
        other = tl.load(x + at + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at + columns, (g * value).to(out.dtype.element_ty), mask=inside)
        g *= other
    tl.store(out + at, (g * slope).to(out.dtype.element_ty), mask=inside)


_PASSES = Passes("the kernel of activations' gradients", backward_kernel)


def backward(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    """Computes `outblas::activation_backward` of checked, non-empty CUDA tensors.

    Raises RuntimeError while a CUDA graph is captured, if a kernel is needed for the first time,
    and CompileForbidden where it would have to be compiled and may not.
    """
    grad, x = grad.contiguous(), x.contiguous()
    out = torch.empty_like(x)
    elements, columns = grad.numel(), grad.shape[-1] if grad.dim() else 1
    constants = {
        "FUNCTION": GATED.get(activation, activation),
        "GATE": activation in GATED,
        "WIDE": x.numel() > INT32_MAX - BLOCK,
        "BLOCK": BLOCK,
    }
    grid = (triton.cdiv(elements, BLOCK),)
    _PASSES.launch(backward_kernel, grid, (grad, x, out, elements, columns), constants)
    return out
