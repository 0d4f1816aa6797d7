"""The names of the operations after a product. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

# Each gated linear unit, and the function that it applies to its gate.
GATED = {"reglu": "relu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}
ACTIVATIONS = (*GATED.values(), *GATED)


@dataclass(frozen=True)
class Steps:
    """The operations after a product, in this order: a bias per column, an activation, a
    residual.
    """

    bias: bool = False
    activation: str = ""
    residual: bool = False

    @staticmethod
    def parse(text: str) -> Steps:
        """Parses `bias+gelu+residual`: any of bias, an activation and residual, in this order; ""
        for none. Raises ValueError.
        """
        parts = [part.strip() for part in text.split("+")] if text.strip() else []
        middle = [part for part in parts if part in ACTIVATIONS]
        steps = Steps("bias" in parts, "".join(middle[:1]), "residual" in parts)
        if str(steps) != "+".join(parts):
            raise ValueError(
                f"epilogue is {text!r}, expected some of bias, an activation "
                f"({', '.join(ACTIVATIONS)}) and residual, in this order, joined by +"
            )
        return steps

    def __str__(self) -> str:
        parts = ("bias" * self.bias, self.activation, "residual" * self.residual)
        return "+".join(part for part in parts if part)

    def __bool__(self) -> bool:
        return self != Steps()


NO_STEPS = Steps()
