"""Random products whose gradients are compared with torch's: operands of random shapes that lie in
memory in random ways, some of which need gradients.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from outblas import addmm, matmul
from outblas.core.epilogue import ACTIVATIONS, GATED, Activation, apply

Tensor = torch.Tensor
Shape = list[int]

SIZES = 0, 1, 2, 3, 5
LAYOUTS = "contiguous", "transposed", "with gaps", "expanded", "first dimension last"


@dataclass(frozen=True)
class Operand:
    """A leaf, and the view of it that a call takes."""

    leaf: Tensor
    view: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class RandomProduct:
    """A product of operands by name: a and b, and perhaps c, bias and residual."""

    operands: dict[str, Operand]
    activation: Activation | None
    alpha: float
    beta: float

    @property
    def leaves(self) -> list[Tensor]:
        """The leaves of all operands, in the order of their names."""
        return [operand.leaf for operand in self.operands.values()]

    def ours(self) -> Tensor:
        """The product by outblas."""
        a, b, c, bias, residual = self._views()
        if c is None:
            return matmul(a, b, bias=bias, activation=self.activation, residual=residual)
        return addmm(
            c,
            a,
            b,
            alpha=self.alpha,
            beta=self.beta,
            bias=bias,
            activation=self.activation,
            residual=residual,
        )

    def torchs(self) -> Tensor:
        """The product by torch's own functions."""
        a, b, c, bias, residual = self._views()
        if c is None:
            x = torch.matmul(a, b)
        else:
            x = torch.addmm(c, a, b, alpha=self.alpha, beta=self.beta)
        return apply(x if bias is None else x + bias, self.activation, residual)

    def __str__(self) -> str:
        views = {name: operand.view(operand.leaf) for name, operand in self.operands.items()}
        shapes = {name: (tuple(t.shape), t.stride()) for name, t in views.items()}
        need = [name for name, operand in self.operands.items() if operand.leaf.requires_grad]
        return (
            f"shapes and strides {shapes}, gradients of {need}, activation "
            f"{self.activation}, alpha {self.alpha}, beta {self.beta}"
        )

    def _views(self) -> Sequence[Tensor | None]:
        views = {name: operand.view(operand.leaf) for name, operand in self.operands.items()}
        return [views.get(name) for name in ("a", "b", "c", "bias", "residual")]


class Draw(random.Random):
    """Draws products of one dtype by a seed."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__(seed)
        self.dtype = dtype
        torch.manual_seed(seed)

    def operand(self, shape: Sequence[int]) -> Operand:
        """A tensor of this shape that is a view of a leaf, in one of LAYOUTS."""
        layout, shape = self.choice(LAYOUTS), list(shape)
        if layout == "transposed" and len(shape) > 1:
            return Operand(self._leaf(*shape[:-2], shape[-1], shape[-2]), lambda t: t.mT)
        if layout == "with gaps" and shape:
            return Operand(self._leaf(*shape[:-1], 2 * shape[-1] + 1), lambda t: t[..., 1::2])
        if layout == "expanded" and shape:
            narrow = list(shape)
            narrow[self.randrange(len(shape))] = 1
            return Operand(self._leaf(*narrow), lambda t: t.expand(shape))
        if layout == "first dimension last" and len(shape) > 2:
            return Operand(self._leaf(*shape[1:], shape[0]), lambda t: t.movedim(-1, 0))
        return Operand(self._leaf(*shape), lambda t: t)

    def product(self) -> RandomProduct:
        """A product, or a product beside C, with or without an epilogue."""
        with_c = self.random() < 0.4
        activated = not self.dtype.is_complex and self.random() < 0.5
        activations = cast(tuple[Activation, ...], ACTIVATIONS)
        activation = self.choice(activations) if activated else None
        shapes = self._operand_shapes(with_c, activation)
        operands = {name: self.operand(shape) for name, shape in shapes.items()}
        for operand in operands.values():
            operand.leaf.requires_grad_(self.random() < 0.7)
        alpha, beta = (self.choice((0, 1, 1, -0.5, 2)) if with_c else 1 for _ in range(2))
        return RandomProduct(operands, activation, alpha, beta)

    def _operand_shapes(self, with_c: bool, activation: Activation | None) -> dict[str, Shape]:
        """Shapes that fit together: a vector or matrices, and what broadcasts to the product."""
        M, N, K = (self.choice(SIZES) for _ in range(3))
        N *= 2 if activation in GATED else 1
        batch_a: Shape = []
        batch_b: Shape = []
        if not with_c:
            batch = [self.choice(SIZES) for _ in range(self.choice((0, 0, 1, 2)))]
            batch_a, batch_b = self._broadcastable(batch), self._broadcastable(batch)
        vector_a = not (with_c or batch_a) and self.random() < 0.3
        vector_b = not (with_c or batch_b or activation in GATED) and self.random() < 0.3
        shapes = {
            "a": [K] if vector_a else [*batch_a, M, K],
            "b": [K] if vector_b else [*batch_b, K, N],
        }
        shape_x = list((torch.empty(shapes["a"]) @ torch.empty(shapes["b"])).shape)
        shape_y = [*shape_x[:-1], shape_x[-1] // 2] if activation in GATED else shape_x
        if with_c:
            shapes["c"] = self._broadcastable(shape_x)
        for name, shape in (("bias", shape_x), ("residual", shape_y)):
            if self.random() < 0.4:
                shapes[name] = self._broadcastable(shape)
        return shapes

    def _broadcastable(self, shape: Shape) -> Shape:
        """A shape that broadcasts to this one."""
        sizes = [size if self.random() < 0.7 else 1 for size in shape]
        if self.random() < 0.4:
            return sizes[self.randrange(len(sizes) + 1) :]
        return sizes

    def _leaf(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype)
