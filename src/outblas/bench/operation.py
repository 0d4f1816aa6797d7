"""The operation that is timed at a shape: a bare product, one with an epilogue, or one of scaled
fp8 operands.

An operation makes the call of torch and the call of outblas for the same operands, and checks
results of either against float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.functional import ScalingType

from outblas.base.compat.torch_private import scaled_mm as cublas_scaled_mm
from outblas.base.shapes import Shape
from outblas.bench.operands import K_MULTIPLE, BlockScaled, block_scaled, by_columns, normal
from outblas.call.epilogue import FUNCTIONS, GATED, apply, glu_split
from outblas.call.fp8 import BLOCK
from outblas.call.steps import NO_STEPS, Steps
from outblas.verify.oracle import ulp

Tensor = torch.Tensor
Place = tuple[int, ...]  # of an element

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
_RECIPES = {  # of A and B
    "tensor": (ScalingType.TensorWise, ScalingType.TensorWise),
    "row": (ScalingType.RowWise, ScalingType.RowWise),
    "block": (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128),
}

_UNIT = 2.0**-24  # unit roundoff of fp32
_TF32_UNIT = 2.0**-11
# of sums in the tensor cores of sm_90, relative to the sum of the terms' sizes
_FP8_UNIT = 2.0**-13
_STEEPEST_SLOPE = 1.13  # upper bound for all activations


def operand_dtype(precision: str) -> torch.dtype:
    """Returns the dtype of the operands for a precision, one of `OPERANDS`."""
    dtype: torch.dtype = getattr(torch, OPERANDS[precision])
    return dtype


class Extras(NamedTuple):
    """The tensors of one call besides its operands and its output. `scales`: of A and of B."""

    bias: Tensor | None = None
    residual: Tensor | None = None
    scales: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Operation:
    """`dtype` is a precision of `OPERANDS`. `batch_invariant`: whether outblas must guarantee that
    the bits of a row depend on no other row.
    """

    dtype: str = "bfloat16"
    steps: Steps = NO_STEPS
    batch_invariant: bool = False

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

    @property
    def has_exact_blocks(self) -> bool:
        """Whether it is a product of block-scaled operands without an epilogue, which is exact on
        small integers.
        """
        return self.scaling == "block" and not self.steps

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.scaling else operand_dtype(self.dtype)

    @property
    def operand_bytes(self) -> tuple[int, int]:
        """The bytes of an element of A and B, and of the output."""
        return operand_dtype(self.dtype).itemsize, self.out_dtype.itemsize

    def operands(
        self, shape: Shape, layout: str, device: str = "cuda", *, integers: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Extras]:
        """Returns a[M, K] and b[K, N] from normal(0, 1), stored according to `layout`, an empty
        output, which is half as wide as the product where the activation is gated, and the other
        tensors of a call. `integers`: block-scaled operands are small integers whose sums are
        exact.
        """
        M, N, K = shape
        out = torch.empty(M, N // self._split, dtype=self.out_dtype, device=device)
        if self.scaling == "block":
            x = block_scaled(shape, device, exact_terms=K if integers else None)
            extras = self.extras(x.a, x.b, out)
            return x.a, x.b, out, extras._replace(scales=(by_columns(x.scale_a), x.scale_b))
        dtype = operand_dtype(self.dtype)
        # fp8 values are rounded from bfloat16
        a, b, _ = normal(shape, layout, torch.bfloat16 if self.scaling else dtype, device=device)
        a, b = a.to(dtype), b.to(dtype)
        return a, b, out, self.extras(a, b, out)

    @property
    def _split(self) -> int:
        return glu_split(self.steps.activation)

    def extras(self, a: Tensor, b: Tensor, out: Tensor) -> Extras:
        """Returns the same values every time: normal(0, 1), and scales between 1/2 and 1, except
        those of blocks.
        """
        generator = torch.Generator(a.device).manual_seed(1)

        def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=a.device).normal_(generator=generator)

        def scale(shape: tuple[int, ...]) -> Tensor:
            return torch.empty(shape, device=a.device).uniform_(0.5, 1.0, generator=generator)

        M, N = a.shape[0], b.shape[1]
        bias = values((N,), out.dtype) if self.steps.bias else None
        residual = values(tuple(out.shape), out.dtype) if self.steps.residual else None
        shapes = {"tensor": ((), ()), "row": ((M, 1), (1, N))}.get(self.scaling, ())
        return Extras(bias, residual, tuple(map(scale, shapes)))

    def by_outblas(
        self, a: Tensor, b: Tensor, out: Tensor, extras: Extras, **choice: Any
    ) -> Tensor:
        """Makes the call of outblas. `choice` is the kernel and its config, where they are
        named.
        """
        from outblas import api
        from outblas.torch_ops.scaled_mm import scaled_mm

        steps: dict[str, Any] = {
            "bias": extras.bias,
            "residual": extras.residual,
            "activation": self.steps.activation or None,
        }
        if extras.scales:
            (scale_a, scale_b), (of_a, of_b) = extras.scales, _RECIPES[self.scaling]
            scaled: Tensor = scaled_mm(
                a, b, scale_a, of_a, scale_b, of_b, output_dtype=out.dtype, **steps
            )
            return scaled
        choice |= {name: value for name, value in steps.items() if value is not None}
        if self.batch_invariant:
            choice["batch_invariant"] = True
        return api.matmul(a, b, out=out, **choice)

    def by_torch(
        self, a: Tensor, b: Tensor, out: Tensor | None, extras: Extras, *, fast_accum: bool = False
    ) -> Tensor:
        """Makes the equivalent calls of torch: cuBLAS with a bias in its epilogue, and one kernel
        per further step. A product without an activation is written to `out`, if given.
        """
        steps = self.steps
        if extras.scales:
            options = {"out_dtype": self.out_dtype, "use_fast_accum": fast_accum}
            x = cublas_scaled_mm(a, b, *extras.scales, extras.bias, **options)
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
        prepare: Callable[[Tensor, Tensor, Tensor, Extras], Callable[[], object]],
        shape: Shape,
        device: str = "cuda",
        layout: str = "nt",
        *,
        integers: bool = False,
    ) -> str | None:
        """Returns what is wrong with the result that a prepared call returns, or None. The output
        is full of NaNs before the call.

        Every element may have the error that fp32 sums of its terms can have before they are
        rounded. Tensor cores sum fp8 products with fewer bits; 13 bits are required. Products of
        `integers` may have none.
        """
        a, b, out, extras = self.operands(shape, layout, device, integers=integers)
        result = prepare(a, b, out.fill_(math.nan), extras)()

        def wrong(result: Tensor) -> Tensor:
            x, error = self._sums(a, b, extras)
            return is_inexact(result, x) if integers else self._is_beyond(result, x, error, extras)

        return wrong_elements(result, out.shape, out.dtype, lambda y: [((0, 0), wrong(y))])

    def _is_beyond(self, result: Tensor, x: Tensor, error: Tensor, extras: Extras) -> Tensor:
        """Returns which elements of a result are farther from sums x, after the steps, than the
        error of these sums allows.
        """
        residual = extras.residual.double() if extras.residual is not None else None
        y = apply(x, self.steps.activation, residual)
        error = _through(self.steps.activation, x, error) + 4 * _UNIT * y.abs()
        if residual is not None:
            error += 8 * _UNIT * residual.abs()
        return is_beyond(result, y, error)

    def _sums(self, a: Tensor, b: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
        """Returns the product with its bias in float64, and the error that a kernel may have."""
        K, has_blocks = a.shape[1], self.scaling == "block"
        if has_blocks:
            a, b = BlockScaled(a, b, *extras.scales).dequantised()
        a, b = a.double(), b.double()
        x, terms = a @ b, a.abs() @ b.abs()
        for scale in () if has_blocks else extras.scales:
            x, terms = x * scale, terms * scale
        if extras.bias is not None:
            x, terms = x + extras.bias.double(), terms + extras.bias.double().abs()
        if has_blocks:
            return x, error_of_blocks(terms, K)
        if self.scaling:
            return x, _FP8_UNIT * terms
        return x, terms * (4 * _TF32_UNIT if self.dtype == "tf32" else 2 * (K + 2) * _UNIT)


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


def is_inexact(result: Tensor, x: Tensor) -> Tensor:
    """Returns which elements are not x, in float64, rounded once. torch rounds it by way of fp32,
    which represents sums of integers.
    """
    return result != x.to(result.dtype)


def is_beyond(result: Tensor, y: Tensor, error: Tensor) -> Tensor:
    """Returns which elements differ from y, in float64, by more than an error and one rounding."""
    rounding = ulp(y.abs() + error, result.dtype) / 2
    return ~((result.double() - y).abs() <= error + rounding)  # a comparison with NaN is false


def wrong_elements(
    result: object,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    masks: Callable[[Tensor], Iterable[tuple[Place, Tensor]]],
) -> str | None:
    """Returns what is wrong with the result of a call, or None. `masks` gives the wrong elements of
    parts of a result, each with the place of its first element.
    """
    if not isinstance(result, Tensor) or result.shape != shape or result.dtype != dtype:
        return f"wrong: expected a tensor of shape {shape} and {dtype}"
    count, first = 0, None
    for (*lead, row, column), wrong in masks(result):
        if bool(wrong.any()):
            at = [int(i) for i in wrong.nonzero()[0]]
            first = first or [*lead, row + at[0], column + at[1]]
            count += int(wrong.sum())
    return f"wrong: {count} of {result.numel()} elements, first at {first}" if count else None


def _through(activation: str, x: Tensor, error: Tensor) -> Tensor:
    """Returns the possible error of an activation of x, from the error of x and from its own
    arithmetic.
    """
    of_activation = _STEEPEST_SLOPE * error + 4 * _UNIT * x.abs()
    if activation not in GATED:
        return of_activation
    gate, other = x.chunk(2, -1)
    error_of_gate, error_of_other = of_activation.chunk(2, -1)
    return error_of_gate * (other.abs() + error_of_other) + gate.abs() * error_of_other
