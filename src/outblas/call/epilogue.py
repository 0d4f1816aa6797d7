"""The epilogue: the operations on a product between the MMAs and memory, evaluated in fp32 and
rounded once.

    x = alpha · A B + beta · C + bias        stored as `aux` where a call asks for it
    y = f(x), or f(x's first half) · x's second half
    out = y + residual

For a gated activation B has twice as many columns as the output: first those of the gate, then
those that the gate multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from outblas.call import steps
from outblas.call.errors import OperandError
from outblas.call.sizes import holds

Tensor = torch.Tensor

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}
# The names that a caller may use: a function, or a gated pair.
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "reglu", "geglu", "geglu_tanh", "swiglu"]
GATED = steps.GATED
_GATES = {function: gated for gated, function in GATED.items()}
ACTIVATIONS = steps.ACTIVATIONS
EPILOGUE_ARGS = "bias", "residual", "aux"
# The tensors of an epilogue, in the order in which a launch takes them.
TENSORS = *EPILOGUE_ARGS, "scale_a", "scale_b", "scale_out"


@dataclass(frozen=True)
class View:
    """The layout of a tensor in memory: strides in elements (batch dimensions first, then rows,
    columns; 0 where the tensor repeats), and the largest power of two up to 16 that divides its
    address in bytes.
    """

    strides: tuple[int, ...]
    alignment: int

    def transposed(self) -> View:
        """The view of the transposed matrices."""
        *batch, row, column = self.strides
        return View((*batch, column, row), self.alignment)


@dataclass(frozen=True)
class Epilogue:
    """The operations that a kernel applies to the accumulators besides alpha and C, and the layouts
    of the tensors that they read or write.

    function: a key of FUNCTIONS, or "".
    gated: columns N.. of B, C, bias and aux belong to the second half of a gated linear unit.
    bias, residual, aux: the views of these tensors; None for a tensor that the call does not have.
    scale_a, scale_b: the views of the fp32 scales of fp8 operands.
    scale_out: the view of the fp32 scales of an output in fp8, one for 128 columns of a row, which
        the kernel writes. `power_of_two`: they are rounded up to powers of two.
    """

    function: str = ""
    gated: bool = False
    bias: View | None = None
    residual: View | None = None
    aux: View | None = None
    scale_a: View | None = None
    scale_b: View | None = None
    scale_out: View | None = None
    power_of_two: bool = False

    @property
    def views(self) -> dict[str, View]:
        """The views of the tensors that this epilogue has, by name."""
        found = {name: getattr(self, name) for name in TENSORS}
        return {name: view for name, view in found.items() if view is not None}

    @property
    def activation(self) -> str:
        """One of ACTIVATIONS, or ""."""
        return _GATES[self.function] if self.gated else self.function

    def mapped(self, change: Callable[[View], View]) -> Epilogue:
        """Returns the epilogue with each of its views replaced by the result of `change`."""
        changed: dict[str, Any] = {name: change(view) for name, view in self.views.items()}
        return replace(self, **changed)

    def transposed(self) -> Epilogue:
        """Returns the epilogue of the transposed product. A gated epilogue cannot be transposed."""
        return self.mapped(View.transposed)

    def __str__(self) -> str:
        """A short text for messages: "bias, gelu, residual"."""
        steps = {
            "bias": self.bias,
            "aux": self.aux,
            self.activation: self.activation,
            "residual": self.residual,
        }
        return ", ".join(name for name, on in steps.items() if on)


NONE = Epilogue()


class EpilogueArgs(NamedTuple):
    """The epilogue of a call: its activation (one of ACTIVATIONS, or "") and its tensors, all of
    the product's dtype. `bias` broadcasts to the shape of x, `residual` to that of the output; x is
    written to `aux`, which has x's shape.
    """

    activation: str = ""
    bias: Tensor | None = None
    residual: Tensor | None = None
    aux: Tensor | None = None


def glu_split(activation: str) -> int:
    """Returns how many columns of B make one column of the output: 2 for a gated linear unit, whose
    gate and value are the two halves of B's columns, otherwise 1.
    """
    return 2 if activation in GATED else 1


def gated_name(function: str) -> str:
    """Returns the name of the gated activation whose gate passes through a function."""
    return _GATES[function]


def check_columns(activation: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Checks that an activation can pair the columns of a product of this shape, and returns the
    shape of the output. Raises OperandError.
    """
    if glu_split(activation) == 1:
        return tuple(shape)
    if not shape or not holds(shape[-1] % 2 == 0):
        raise OperandError(
            f"activation {activation!r} pairs the columns of the product, expected an even number "
            f"of them, got shape {tuple(shape)}"
        )
    return (*shape[:-1], shape[-1] // 2)


def apply(x: Tensor, activation: str, residual: Tensor | None) -> Tensor:
    """Computes the output of a call from x, in x's dtype, with torch operators. The result is
    differentiable; tests use it in float64 as the reference. Raises OperandError where an
    activation cannot pair x's columns.
    """
    if activation in GATED:
        check_columns(activation, x.shape)
    return composed(x, activation, residual)


def composed(x: Tensor, activation: str, residual: Tensor | None) -> Tensor:
    """Computes `apply` without checking the shape of x, which may be symbolic while a program is
    traced.
    """
    if activation in GATED:
        gate, other = x.chunk(2, -1)
        x = FUNCTIONS[GATED[activation]](gate) * other
    elif activation:
        x = FUNCTIONS[activation](x)
    return x if residual is None else x + residual
