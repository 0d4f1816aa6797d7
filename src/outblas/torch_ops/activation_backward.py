"""The operator `outblas::activation_backward`, which computes the gradient of an activation's
argument.
"""

from typing import Any

import torch
from torch import Tensor

from outblas.base import compiling
from outblas.base.compat.torch_private import below_autograd, from_below
from outblas.base.compiling import CompileForbidden
from outblas.call import fallback, hooks
from outblas.call.epilogue import ACTIVATIONS, FUNCTIONS, GATED, glu_split
from outblas.call.errors import OperandError
from outblas.call.problem import DTYPES
from outblas.call.sizes import are_equal, holds
from outblas.torch_ops import ops
from outblas.torch_ops.autograd_levels import has_tangent, requires_grad, unobserved
from outblas.torch_ops.call import has_address
from outblas.torch_ops.schema import fake, implement


def formula(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    """Computes the operator with torch functions, differentiably. 16-bit gradients are rounded
    once.
    """
    dtype = x.dtype
    if dtype in (torch.float16, torch.bfloat16):
        grad, x = grad.float(), x.float()
    if activation not in GATED:
        return _slope(grad, x, activation).to(dtype)
    gate, other = x.chunk(2, -1)
    function = GATED[activation]
    d_gate = _slope(grad * other, gate, function)
    return torch.cat((d_gate, grad * FUNCTIONS[function](gate)), -1).to(dtype)


def _slope(grad: Tensor, x: Tensor, function: str) -> Tensor:
    """Returns grad · f'(x)."""
    if function == "silu":  # aten::silu_backward has no derivative
        s = torch.sigmoid(x)
        return grad * s * (1 + x * (1 - s))
    result: Tensor
    if function == "relu":
        result = torch.ops.aten.threshold_backward(grad, x, 0)
    else:
        approximate = "none" if function == "gelu" else "tanh"
        result = torch.ops.aten.gelu_backward(grad, x, approximate=approximate)
    return result


def check(grad: Tensor, x: Tensor, activation: str) -> None:
    """Checks the arguments of the operator.

    Raises ValueError where they do not fit together, and NotImplementedError for sparse and nested
    tensors, as torch's dispatcher does.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}")
    for name, t in (("grad", grad), ("x", x)):
        if t.is_nested or t.layout is not torch.strided:
            layout = "nested" if t.is_nested else t.layout
            raise NotImplementedError(f"{name} has layout {layout}, expected {torch.strided}")
    if activation in GATED and not (x.dim() and holds(x.shape[-1] % 2 == 0)):
        raise OperandError(
            f"x.shape is {tuple(x.shape)}, expected an even number of columns, which activation "
            f"{activation!r} pairs"
        )
    shape = (*x.shape[:-1], x.shape[-1] // glu_split(activation)) if x.dim() else ()
    given, expected = (tuple(grad.shape), grad.dtype, grad.device), (shape, x.dtype, x.device)
    if given[1:] != expected[1:] or not are_equal(grad.shape, shape):
        raise OperandError(
            f"grad is {given}, expected {expected} for x.shape {tuple(x.shape)} and {activation!r}"
        )


def _compute(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    check(grad, x, activation)
    if x.is_cuda and x.dtype in DTYPES and x.numel():
        try:
            kernels = hooks.activation_kernels.get()
        except ImportError as error:
            fallback.warn_once(str(error))
        else:
            try:
                with compiling.deferred():
                    result: Tensor = kernels.backward(grad, x, activation)
                return result
            except CompileForbidden as error:
                fallback.warn_fallback(error)
    return formula(grad, x, activation).contiguous()


def activation_backward(grad: Tensor, x: Tensor, activation: str) -> Any:
    """Runs the operator as its Autograd kernel does; without autograd it goes straight to the
    computation.
    """
    if requires_grad(grad, x) or has_tangent(grad, x):
        check(grad, x, activation)
        return formula(grad, x, activation)
    # What the dispatcher resolves or unwraps before it calls a kernel goes through it here too.
    is_plain = all(
        type(t) is Tensor and has_address(t) and not (t.is_neg() or t.is_conj()) for t in (grad, x)
    )
    if is_plain and unobserved():
        return _compute(grad, x, activation)
    with below_autograd():
        found = ops.activation_backward(grad, x, activation)
    return from_below(found)


@fake("activation_backward")
def _(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    check(grad, x, activation)
    return x.new_empty(x.shape)


for _key, _function in {
    "CPU": _compute,
    "CUDA": _compute,
    "Autograd": activation_backward,
}.items():
    implement("activation_backward", _key, _function)
