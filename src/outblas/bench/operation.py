"""The operation that is timed at a shape: a bare product, one with an epilogue, or one of scaled
fp8 operands.

An operation makes the call of torch and the call of outblas for the same operands, and checks
results of either against float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from outblas.base.compat.torch_private import scaled_mm as cublas_scaled_mm
from outblas.base.shapes import Shape
from outblas.bench.block_scaled import (
    K_MULTIPLE,
    BlockScaled,
    by_columns,
    integers,
    quantised,
)
from outblas.bench.operands import normal
from outblas.core.epilogue import FUNCTIONS, GATED, apply, glu_split
from outblas.core.fp8 import BLOCK
from outblas.core.steps import NO_STEPS, Steps
from outblas.verify.oracle import ulp

Tensor = torch.Tensor

# precision name -> dtype of the operands
OPERANDS = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "tf32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8-rowwise": "float8_e4m3fn",
    "fp8-block": "float8_e4m3fn",
}
Scaling = Literal["", "tensor", "row", "block"]
_SCALING: dict[str, Scaling] = {"fp8": "tensor", "fp8-rowwise": "row", "fp8-block": "block"}

_UNIT = 2.0**-24  # unit roundoff of fp32
_TF32_UNIT = 2.0**-11
# of sums in the tensor cores of sm_90, relative to the sum of the terms' sizes
_FP8_UNIT = 2.0**-13
_STEEPEST_SLOPE = 1.13  # upper bound for all activations


def operand_dtype(precision: str) -> torch.dtype:
    """Returns the dtype of the operands for a precision, one of `OPERANDS`."""
    dtype: torch.dtype = getattr(torch, OPERANDS[precision])
    return dtype


@dataclass(frozen=True)
class Extras:
    """The tensors of one call besides its operands and its output."""

    bias: Tensor | None = None
    residual: Tensor | None = None
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None


@dataclass(frozen=True)
class Operation:
    """`dtype` is a precision of `OPERANDS`. `batch_invariant`: whether outblas must guarantee that
    the bits of a row depend on no other row. `integers`: whether block-scaled operands are small
    integers whose results must be exact, for a check.
    """

    dtype: str = "bfloat16"
    steps: Steps = NO_STEPS
    batch_invariant: bool = False
    integers: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in OPERANDS:
            raise ValueError(f"dtype is {self.dtype!r}, expected one of {', '.join(OPERANDS)}")
        if self.scaling and self.batch_invariant:
            raise ValueError(f"--batch-invariant cannot be combined with --dtype {self.dtype}")

    @property
    def scaling(self) -> Scaling:
        """Returns how fp8 operands are scaled: one scale each, one per row of A and per column of
        B, or one per block.
        """
        return _SCALING.get(self.dtype, "")

    def check(self, shapes: Sequence[Shape], layouts: Sequence[str], *, backward: bool) -> None:
        """Raises ValueError for shapes, layouts or backward passes that this operation does not
        support.
        """
        if self.scaling and (list(layouts) != ["nt"] or backward):
            raise ValueError(
                f"--dtype {self.dtype} needs --layout nt, and cannot be combined with --backward"
            )
        if self.steps and backward:
            raise ValueError(
                "--backward cannot be combined with --epilogue: backward passes have none"
            )
        for _, N, K in shapes:
            if self.scaling == "block" and K % K_MULTIPLE:
                raise ValueError(
                    f"--shapes has K = {K}, but --dtype {self.dtype} needs multiples of "
                    f"{K_MULTIPLE}, for which torch takes the same scales"
                )
            if N % self._split:
                raise ValueError(
                    f"--shapes has N = {N}, but {self.steps.activation} needs an even N"
                )

    @property
    def is_bare(self) -> bool:
        """Whether it is A B of operands of one dtype, and nothing else."""
        return not self.steps and not self.scaling

    def without_steps(self) -> Operation:
        """Returns the operation without its epilogue."""
        return replace(self, steps=NO_STEPS)

    def on_integers(self) -> Operation | None:
        """Returns the operation whose results are exact, of block-scaled operands without an
        epilogue; None for any other.
        """
        exact = self.scaling == "block" and not self.steps
        return replace(self, integers=True) if exact else None

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.scaling else operand_dtype(self.dtype)

    @property
    def operand_bytes(self) -> tuple[int, int]:
        """The bytes of an element of A and B, and of the output."""
        return operand_dtype(self.dtype).itemsize, self.out_dtype.itemsize

    def operands(
        self, shape: Shape, layout: str, device: str = "cuda"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns a[M, K] and b[K, N] from normal(0, 1), stored according to `layout`, and an empty
        output, which is half as wide as the product where the activation is gated.
        """
        M, N, _ = shape
        out = torch.empty(M, N // self._split, dtype=self.out_dtype, device=device)
        if self.scaling == "block":
            scaled = self._block_scaled(shape, device)
            return scaled.a, scaled.b, out
        a, b, _ = normal(shape, layout, self._source_dtype, device=device)
        return a.to(operand_dtype(self.dtype)), b.to(operand_dtype(self.dtype)), out

    def _block_scaled(self, shape: Shape, device: torch.device | str) -> BlockScaled:
        return integers(shape, device) if self.integers else quantised(shape, device)

    @property
    def _source_dtype(self) -> torch.dtype:
        """Returns the dtype in which operands are drawn; fp8 values are rounded from it."""
        return torch.bfloat16 if self.scaling else operand_dtype(self.dtype)

    @property
    def _split(self) -> int:
        return glu_split(self.steps.activation)

    def extras(self, a: Tensor, b: Tensor, out: Tensor) -> Extras:
        """Returns the same values every time: normal(0, 1), and scales between 1/2 and 1, or those
        of the blocks of `operands`.
        """
        generator = torch.Generator(a.device).manual_seed(1)

        def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=a.device).normal_(generator=generator)

        def scale(shape: tuple[int, ...]) -> Tensor:
            return torch.empty(shape, device=a.device).uniform_(0.5, 1.0, generator=generator)

        (M, K), N = a.shape, b.shape[1]
        bias = values((N,), out.dtype) if self.steps.bias else None
        residual = values(tuple(out.shape), out.dtype) if self.steps.residual else None
        match self.scaling:
            case "":
                return Extras(bias, residual)
            case "tensor":
                return Extras(bias, residual, scale(()), scale(()))
            case "row":
                return Extras(bias, residual, scale((M, 1)), scale((1, N)))
            case "block":
                scaled = self._block_scaled((M, N, K), a.device)
                return Extras(bias, residual, by_columns(scaled.scale_a), scaled.scale_b)

    def by_outblas(
        self, a: Tensor, b: Tensor, out: Tensor, extras: Extras, **choice: Any
    ) -> Tensor:
        """Makes the call of outblas. `choice` is the kernel and its config, where they are
        named.
        """
        from outblas import api
        from outblas.torch_ops.scaled_mm import scaled_mm

        activation: Any = self.steps.activation or None
        if extras.scale_a is not None and extras.scale_b is not None:
            return scaled_mm(
                a,
                b,
                extras.scale_a,
                extras.scale_b,
                extras.bias,
                out_dtype=out.dtype,
                activation=activation,
                residual=extras.residual,
            )
        if self.batch_invariant:
            choice["batch_invariant"] = True
        for name in ("bias", "residual"):
            if (tensor := getattr(extras, name)) is not None:
                choice[name] = tensor
        if activation is not None:
            choice["activation"] = activation
        return api.matmul(a, b, out=out, **choice)

    def by_torch(
        self, a: Tensor, b: Tensor, out: Tensor | None, extras: Extras, *, fast_accum: bool = False
    ) -> Tensor:
        """Makes the equivalent calls of torch: cuBLAS with a bias in its epilogue, and one kernel
        per further step. A product without an activation is written to `out`, if given.
        """
        steps = self.steps
        if extras.scale_a is not None and extras.scale_b is not None:
            x = cublas_scaled_mm(
                a,
                b,
                extras.scale_a,
                extras.scale_b,
                extras.bias,
                out_dtype=self.out_dtype,
                use_fast_accum=fast_accum,
            )
        elif steps.bias:
            x = torch.nn.functional.linear(a, b.t(), extras.bias)
        else:
            x = torch.mm(a, b, out=out if not steps.activation else None)
        return self.after(x, extras)

    def after(self, x: Tensor, extras: Extras) -> Tensor:
        """Applies the activation and the residual by torch functions."""
        activation = self.steps.activation
        if activation in GATED:
            gate, other = x.chunk(2, -1)
            x = FUNCTIONS[GATED[activation]](gate) * other
        elif activation:
            x = FUNCTIONS[activation](x)
        return x if extras.residual is None else x.add_(extras.residual)

    def fault(
        self,
        prepare: Callable[[Tensor, Tensor, Tensor], Callable[[], object]],
        shape: Shape,
        device: str = "cuda",
        layout: str = "nt",
    ) -> str | None:
        """Returns what is wrong with the result that a prepared call returns, or None. The output
        is full of NaNs before the call.

        Every element may have the error that fp32 sums of its terms can have before they are
        rounded. Tensor cores sum fp8 products with fewer bits; 13 bits are required. Products of
        `integers` may have none.
        """
        a, b, out = self.operands(shape, layout, device)
        found = prepare(a, b, out.fill_(math.nan))()
        if not isinstance(found, Tensor) or found.shape != out.shape or found.dtype != out.dtype:
            return f"wrong: expected a tensor of shape {tuple(out.shape)} and {out.dtype}"
        wrong = self._wrong_elements(found, a, b, self.extras(a, b, out))
        if not bool(wrong.any()):
            return None
        first = [int(i) for i in wrong.nonzero()[0]]
        return f"wrong: {int(wrong.sum())} of {wrong.numel()} elements, first at {first}"

    def _wrong_elements(self, found: Tensor, a: Tensor, b: Tensor, extras: Extras) -> Tensor:
        x, error = self._sums(a, b, extras)
        if self.integers:
            # torch rounds float64 by way of fp32, which represents these sums: one rounding
            return found != x.to(found.dtype)
        residual = extras.residual.double() if extras.residual is not None else None
        y = apply(x, self.steps.activation, residual)
        error = _through(self.steps.activation, x, error) + 4 * _UNIT * y.abs()
        if residual is not None:
            error += 8 * _UNIT * residual.abs()
        return is_beyond(found, y, error)

    def _sums(self, a: Tensor, b: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
        """Returns the product with its bias in float64, and the error that a kernel may have."""
        x, terms = self._products(a, b, extras)
        if extras.bias is not None:
            x, terms = x + extras.bias.double(), terms + extras.bias.double().abs()
        if self.scaling == "block":
            return x, error_of_blocks(terms, a.shape[1])
        if self.scaling:
            return x, _FP8_UNIT * terms
        if self.dtype == "tf32":
            return x, 4 * _TF32_UNIT * terms
        return x, 2 * (a.shape[1] + 2) * _UNIT * terms

    def _products(self, a: Tensor, b: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
        """Returns the scaled sums of products, and of the products' magnitudes, in float64."""
        scale_a, scale_b = extras.scale_a, extras.scale_b
        if self.scaling == "block" and scale_a is not None and scale_b is not None:
            a, b = BlockScaled(a, b, scale_a, scale_b).dequantised()
            return a @ b, a.abs() @ b.abs()
        x, terms = a.double() @ b.double(), a.double().abs() @ b.double().abs()
        for scale in (scale_a, scale_b):
            if scale is not None:
                x, terms = x * scale, terms * scale
        return x, terms


def error_of_blocks(terms: Tensor, K: int) -> Tensor:
    """Returns the error that sums of K products may have whose blocks are scaled apart, from the
    sums of the products' magnitudes.

    The tensor cores keep about 14 bits of the largest of 32 products. By an estimate a block of
    128 products of normal numbers deviates by a third of `_FP8_UNIT` times their magnitudes, and n
    blocks by the root of n times as much, while their magnitudes are n times as large. So the unit
    alone bounds sums of four blocks and more: of groups with 16 to 384 terms on an H200, 27 sums of
    3.7 million were beyond it (docs/worklog/epilogues-and-fp8.md).
    """
    blocks = max(1, math.ceil(K / BLOCK))
    unit = _FP8_UNIT * max(1.0, 2 / math.sqrt(blocks))
    return (unit + (blocks + 3) * _UNIT) * terms


def is_beyond(found: Tensor, y: Tensor, error: Tensor) -> Tensor:
    """Returns which elements differ from y, in float64, by more than an error and one rounding."""
    rounding = ulp(y.abs() + error, found.dtype) / 2
    return ~((found.double() - y).abs() <= error + rounding)  # a comparison with NaN is false


def _through(activation: str, x: Tensor, error: Tensor) -> Tensor:
    """Returns the possible error of an activation of x, from the error of x and from its own
    arithmetic.
    """
    own = _STEEPEST_SLOPE * error + 4 * _UNIT * x.abs()
    if activation not in GATED:
        return own
    gate, other = x.chunk(2, -1)
    error_of_gate, error_of_other = own.chunk(2, -1)
    return error_of_gate * (other.abs() + error_of_other) + gate.abs() * error_of_other
