"""Gated MLPs whose first two layers are one GEMM.

Their weights stay two parameters, which are the halves of one matrix. While that holds, and the
layers and the activation are as `patch` saw them, an MLP is computed as down(glu(x @ matrix.T)),
otherwise as its class does.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from outblas.api import linear
from outblas.base.compat.torch_private import any_autocast, forward_levels
from outblas.patching import halves, replaced
from outblas.patching.functions import computes, has_hooks
from outblas.patching.halves import Halves
from outblas.torch_ops.autograd_levels import requires_grad, unobserved

Tensor = torch.Tensor
Module = torch.nn.Module
Parameter = torch.nn.Parameter


class GatedNames(NamedTuple):
    """The children of a gated MLP by name, the function of its activation, that of the product of
    gate and up, and the class of these.
    """

    gate: str
    up: str
    down: str
    act: str
    function: str
    activation: Any
    kind: type[torch.nn.Linear]


# The tensors of gate and up that are halves of matrices; layers in fp8 have both.
TENSORS = "weight", "weight_scale_inv"


class Gated(NamedTuple):
    """A gated MLP, the number of matrices whose halves gate and up have, and what computes it."""

    parent: Module
    names: GatedNames
    matrices: int
    forward: Callable[..., Tensor]

    def __str__(self) -> str:
        gate, up, down, *_ = self.names
        in_fp8 = f", in fp8 for {down}" if self.matrices == 2 else ""
        return f"{gate} and {up} are one product with {self.names.activation}{in_fp8}"

    def apply(self) -> None:
        """Makes tensors of gate and up halves of matrices if nobody else uses their memory, and
        replaces the module's forward.
        """
        matrices = [Halves() for _ in range(self.matrices)]
        _join(self.parent, self.names, *matrices)
        replaced.replace(self.parent, self.forward, self.names, *matrices, moved=_join)

    def remark(self) -> str:
        """Returns why gate and up cannot be one GEMM for the time being; "" if they can, or are."""
        layers = [(name, self.parent._modules[name]) for name in self.names[:2]]
        for tensor in TENSORS[: self.matrices]:
            if halves.are_joined(*(getattr(layer, tensor) for _, layer in layers)):
                continue
            for name, layer in layers:
                if why := halves.reason(getattr(layer, tensor)):
                    kind = replaced.kind_of(self.parent).__name__
                    return f"{name}.{tensor} {why}: {kind} computes as without patch"
        return ""


def _join(mlp: Module, names: GatedNames, *matrices: Halves) -> None:
    """Makes tensors of gate and up halves of matrices, where that is possible."""
    children: dict[str, Any] = mlp._modules
    gate, up = (children.get(name) for name in names[:2])
    if gate is not None and up is not None and alike(gate, up):
        for matrix, tensor in zip(matrices, TENSORS, strict=False):
            matrix.join(getattr(gate, tensor), getattr(up, tensor))


def alike(gate: Any, up: Any) -> bool:
    """Returns whether the weights of two layers can be halves of one matrix."""
    one, other = (layer._parameters.get("weight") for layer in (gate, up))
    return (
        type(one) is type(other) is Parameter
        and one is not other
        and one.shape == other.shape
        and one.dtype == other.dtype
        and one.device == other.device
        and one.requires_grad == other.requires_grad
        and (gate.bias is None) == (up.bias is None)
    )


# ---- computing
class _Entered(torch.autograd.Function):
    """The matrix and the input as the GEMM takes them. Gradients of the matrix go to gate and up.
    The backward pass raises if one of these has been modified since, which the matrix cannot tell.
    """

    @staticmethod
    def forward(
        ctx: Any, matrix: Tensor, gate: Tensor, up: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        _, of_gate, of_up, of_x = ctx.needs_input_grad
        matrix, x = matrix.view_as(matrix), x.view_as(x)
        idle = [t for t, is_needed in ((matrix, of_gate or of_up), (x, of_x)) if not is_needed]
        ctx.mark_non_differentiable(*idle)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(gate, up)
        return matrix, x

    @staticmethod
    def backward(
        ctx: Any, g: Tensor | None, g_x: Tensor | None
    ) -> tuple[None, Tensor | None, Tensor | None, Tensor | None]:
        if ctx.needs_input_grad[3]:
            _ = ctx.saved_tensors  # g_x comes from them
        if g is None:
            return None, None, None, g_x
        rows = g.shape[0] // 2
        return None, g[:rows], g[rows:], g_x


_entered: Callable[..., tuple[Tensor, Tensor]] = _Entered.apply


def forward(
    mlp: Module, names: GatedNames, of_weights: Halves, *args: Any, **kwargs: Any
) -> Tensor:
    """Computes down(f(gate(x)) * up(x))."""
    matrix = None if kwargs or len(args) != 1 else _matrix(mlp, names, of_weights, args[0])
    if matrix is None:
        result: Tensor = replaced.compute(mlp, *args, **kwargs)
        return result
    (x,) = args
    children: dict[str, Any] = mlp._modules
    gate, up, down = (children[name] for name in names[:3])
    weights = gate.weight, up.weight
    if requires_grad(x, *weights):
        matrix, x = _entered(matrix, *weights, x)
    bias = None if gate.bias is None else torch.cat((gate.bias, up.bias))
    result = down(linear(x, matrix, bias, activation=names.activation))
    return result


def _matrix(mlp: Any, names: GatedNames, of_weights: Halves, x: Any) -> Tensor | None:
    """Returns the matrix of both weights if gate and up may be one GEMM, otherwise None."""
    if type(x) is not Tensor or not is_plain_call():
        return None
    gate, up, down, act = (mlp._modules.get(name) for name in names[:4])
    if not (type(gate) is type(up) is names.kind) or down is None:
        return None
    weights: list[Any] = [layer._parameters.get("weight") for layer in (gate, up)]
    is_usual = (
        all(type(weight) is Parameter for weight in weights)
        and gate.activation is None
        and up.activation is None
        and not has_other_forward(gate, up)
        and (gate.bias is None) == (up.bias is None)
        and computes(act, names.function)
    )
    return of_weights.matrix(*weights) if is_usual else None


def is_plain_call() -> bool:
    """Returns whether a call is computed at once, in the dtype of its operands and at one level of
    gradients: by no compiler, tracer, transform or autocast.
    """
    return (
        not torch.compiler.is_compiling()
        and not any_autocast()
        and unobserved()
        and forward_levels._current_level < 0
    )


def has_other_forward(*layers: Module) -> bool:
    """Returns whether a layer computes more than its class does."""
    return any(has_hooks(layer) or "forward" in vars(layer) for layer in layers)
