"""What becomes of a product on its way to memory, evaluated in fp32 and rounded once.

    x = alpha · A B + beta · C + bias        stored as `aux` where a call asks for it
    y = f(x), or f(x's first half) · x's second half
    out = y + residual

Of a gated pair, B has twice as many columns as the output: those of the gate first, then those that
it multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

Tensor = torch.Tensor

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}
GATED = {"reglu": "relu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}
_GATES = {function: gated for gated, function in GATED.items()}
ACTIVATIONS = (*FUNCTIONS, *GATED)
EXTRAS = "bias", "residual", "aux"
TENSORS = *EXTRAS, "scale_a", "scale_b"  # in the order in which a launch takes them


@dataclass(frozen=True)
class View:
    """How a tensor lies: strides in elements (batch dimensions first, then rows, columns; 0 where
    it repeats), and the largest power of two up to 16 that divides its address in bytes.
    """

    strides: tuple[int, ...]
    alignment: int

    def turned(self) -> View:
        """Of the transposed matrices."""
        *batch, row, column = self.strides
        return View((*batch, column, row), self.alignment)


@dataclass(frozen=True)
class Epilogue:
    """What a kernel does to sums beside alpha and C. `function` is a key of FUNCTIONS or "".
    `gated`: columns N.. of B, C, bias and aux are those of the second half. `scale_a` and
    `scale_b`: fp32, of fp8 operands.
    """

    function: str = ""
    gated: bool = False
    bias: View | None = None
    residual: View | None = None
    aux: View | None = None
    scale_a: View | None = None
    scale_b: View | None = None

    @property
    def views(self) -> dict[str, View]:
        """Of its tensors, those that there are."""
        found = {name: getattr(self, name) for name in TENSORS}
        return {name: view for name, view in found.items() if view is not None}

    @property
    def activation(self) -> str:
        """Of ACTIVATIONS, or ""."""
        return _GATES[self.function] if self.gated else self.function

    def mapped(self, change: Callable[[View], View]) -> Epilogue:
        """With its tensors as `change` makes them."""
        return Epilogue(
            self.function, self.gated, **{name: change(view) for name, view in self.views.items()}
        )

    def transposed(self) -> Epilogue:
        """That of the transposed product, which has no halves."""
        return self.mapped(View.turned)

    def __str__(self) -> str:
        """For people: "bias, gelu, residual"."""
        steps = {
            "bias": self.bias,
            "aux": self.aux,
            self.activation: self.activation,
            "residual": self.residual,
        }
        return ", ".join(name for name, on in steps.items() if on)


NONE = Epilogue()


class Extra(NamedTuple):
    """The epilogue of a call, and its tensors, all of the product's dtype. `activation`: of
    ACTIVATIONS, or "". `bias` broadcasts to the shape of x, `residual` to that of the output; x is
    written to `aux`, which has its shape.
    """

    activation: str = ""
    bias: Tensor | None = None
    residual: Tensor | None = None
    aux: Tensor | None = None


def halves(activation: str) -> int:
    """How many columns of B an output takes."""
    return 2 if activation in GATED else 1


def apply(x: Tensor, activation: str, residual: Tensor | None) -> Tensor:
    """The output of a call from x, in x's dtype, by torch: differentiable, and in float64 the truth
    that tests use.
    """
    if activation in GATED:
        from .problem import check_columns

        check_columns(activation, x.shape)
    return composed(x, activation, residual)


def composed(x: Tensor, activation: str, residual: Tensor | None) -> Tensor:
    """As `apply`, without a look at x, which may stand for a tensor while a program is traced."""
    if activation in GATED:
        gate, other = x.chunk(2, -1)
        x = FUNCTIONS[GATED[activation]](gate) * other
    elif activation:
        x = FUNCTIONS[activation](x)
    return x if residual is None else x + residual
