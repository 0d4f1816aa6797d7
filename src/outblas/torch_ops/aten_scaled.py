"""`torch._scaled_mm` and `torch.nn.functional.scaled_mm` under `outblas.enable`: their calls in the
form of `outblas.scaled_mm`, and which of them stay with torch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from outblas.call.dispatch import Call, Plan
from outblas.call.epilogue import EpilogueArgs
from outblas.call.errors import OperandError
from outblas.torch_ops import block_scales, eager_scaled, scaled_operator

Tensor = torch.Tensor

OPERATOR = "_scaled_mm"
DTYPES = tuple(scaled_operator.FORMATS)
NOT_INVARIANT = "_scaled_mm has no batch-invariant kernel"


class Scaled(NamedTuple):
    """The arguments of a call of `torch._scaled_mm`. `out` is None without an output that is
    given.
    """

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    bias: Tensor | None
    scale_result: Tensor | None
    out_dtype: torch.dtype | None
    use_fast_accum: bool
    out: Tensor | None

    @classmethod
    def of(
        cls,
        a: Tensor,
        b: Tensor,
        scales: tuple[Tensor, Tensor],
        bias: Tensor | None,
        out_dtype: torch.dtype | None,
        use_fast_accum: bool,
        out: Tensor | None,
    ) -> "Scaled":
        return cls(a, b, *scales, bias, None, out_dtype, use_fast_accum, out)

    def reason(self) -> str:
        """Returns why torch computes the call, whatever the rules are; "" if it need not."""
        a, b, scale_a, scale_b, out_dtype = *self[:4], self.out_dtype
        if self.scale_result is not None:
            return "scale_result scales its result"
        if out_dtype not in scaled_operator.OUT_DTYPES:
            return f"its result is {out_dtype or a.dtype}"
        try:
            scaled_operator.checked(
                a, b, scale_a, scale_b, self.bias, out_dtype, self.use_fast_accum
            )
        except OperandError as error:  # torch says what is wrong, or has other recipes
            return str(error)
        return self._refusal() or scaled_operator.unsupported_reason(a.device) or ""

    def _refusal(self) -> str:
        """Returns what torch does not accept of a call that `outblas.scaled_mm` accepts: it raises
        under `enable`, too.
        """
        a, b, scale_a, scale_b = self[:4]
        recipes = self._recipes()
        if a.stride(1) != 1 or b.stride(0) != 1:
            return "A is not row-major, or B is not column-major"
        if a.shape[1] % 16 or b.shape[1] % 16:
            return f"{a.shape[1]} and {b.shape[1]}, its K and N, are no multiples of 16"
        if a.dtype == b.dtype == torch.float8_e5m2:
            return "both operands are float8_e5m2"
        if recipes:
            return self._refusal_of_blocks(*recipes)
        if (scale_a.numel() == 1) != (scale_b.numel() == 1):
            return "one operand has one scale, and the other has several"
        if scale_a.numel() > 1 and self.out_dtype != torch.bfloat16:
            return f"its result is {self.out_dtype} with a scale for each row"
        return ""

    def _refusal_of_blocks(self, recipe_a: str, recipe_b: str) -> str:
        """Returns what torch does not accept, or was not seen to compute, of a call with scales of
        blocks.
        """
        K = self.a.shape[1]
        if recipe_a == recipe_b == block_scales.SQUARE:
            return "both operands have scales of 128x128"
        for scale, recipe in ((self.scale_a, recipe_a), (self.scale_b.t(), recipe_b)):
            if not block_scales.torch_accepts(scale, recipe, K):
                return f"its scales of {recipe} have the strides {scale.stride()}"
        if self.out_dtype == torch.float16:
            return f"its result is {self.out_dtype} with scales of blocks"
        return ""

    def _recipes(self) -> block_scales.Recipes | None:
        """Returns the recipes of scales of blocks. Raises OperandError for scales that do not
        fit.
        """
        (M, K), N = self.a.shape, self.b.shape[1]
        return block_scales.recipes(M, N, K, self.scale_a, self.scale_b)

    def call(self) -> Call:
        """Returns the call in the form that is planned."""
        assert self.out_dtype is not None
        extra = EpilogueArgs("", self.bias, None, None)
        call = scaled_operator.call_of(
            self.a,
            self.b,
            self.scale_a,
            self.scale_b,
            self.out_dtype,
            self.use_fast_accum,
            extra,
        )
        return call._replace(out=self.out)

    def run(self, plan: Plan) -> Tensor:
        """Runs the plan of a call."""
        in_blocks = self._recipes() is not None
        return eager_scaled.launch(plan, in_blocks, *self[:5], residual=None, out=self.out)


# The values of torch's enumeration of recipes.
_TENSOR_WISE, _ROW_WISE = 0, 1
_BLOCK_WISE = {4: block_scales.BY_ROW, 5: block_scales.SQUARE}


def scales_of(
    a: Tensor,
    b: Tensor,
    scale_a: Sequence[Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    *,
    contraction: Sequence[int],
) -> tuple[Tensor, Tensor] | None:
    """Returns both scales of a call of aten's `_scaled_mm_v2` in the form of `_scaled_mm`, or None
    where its recipes are not covered, or its scales do not have their shapes.
    """
    swizzled = any(swizzle_a) or any(swizzle_b)
    if swizzled or tuple(contraction) not in ((), (1, 0)) or not a.dim() == b.dim() == 2:
        return None
    if not len(scale_a) == len(recipe_a) == len(scale_b) == len(recipe_b) == 1:
        return None
    (M, K), N = a.shape, b.shape[1]
    of_a, of_b, kind_a, kind_b = scale_a[0], scale_b[0], recipe_a[0], recipe_b[0]
    if kind_a in _BLOCK_WISE and kind_b in _BLOCK_WISE:
        blocks_a = _of_blocks(of_a, _BLOCK_WISE[kind_a], M, K)
        blocks_b = _of_blocks(of_b, _BLOCK_WISE[kind_b], N, K)
        return None if blocks_a is None or blocks_b is None else (blocks_a, blocks_b.t())
    fits = _fits(of_a, kind_a, (M, 1)) and _fits(of_b, kind_b, (1, N))
    return (of_a, of_b) if fits else None


def _fits(scale: Tensor, recipe: int, by_row: tuple[int, int]) -> bool:
    """Returns whether a scale has the shape of a recipe without blocks. `by_row` is the shape with
    one element for each row of A, or column of B.
    """
    if recipe == _TENSOR_WISE:
        return scale.numel() == 1
    return recipe == _ROW_WISE and tuple(scale.shape) == by_row


def _of_blocks(scale: Tensor, recipe: str, rows: int, K: int) -> Tensor | None:
    """Returns a scale of blocks as `block_scales.from_torch` does, but None where torch requires
    padding.
    """
    if recipe == block_scales.SQUARE and scale.shape[:1] != (block_scales.padded_count(K),):
        return None
    return block_scales.from_torch(scale, recipe, rows, K)
