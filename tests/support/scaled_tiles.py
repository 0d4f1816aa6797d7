"""Products of fp8 operands with scales of blocks, by hopper.gemm in a tile of the test's choice and
between guards. Operands are small integers and scales powers of two, so that sums are exact.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

import outblas
from outblas.call import quantization
from outblas.call.epilogue import EpilogueArgs, glu_split
from outblas.call.problem import problem as describe
from outblas.hopper import gemm
from outblas.torch_ops import eager_scaled

from .fp8 import BY_ROW, E4M3, SQUARE, block_scale, fp8_operands, scaled, with_recipes
from .gemm_problems import gemm_config

Tensor = torch.Tensor
# The recipes of A and B, and how the scales of B lie: TMA loads those that lie by columns.
RECIPES = {
    "1x128 by 128x128": (BY_ROW, SQUARE, "by rows"),
    "1x128 by 1x128": (BY_ROW, BY_ROW, "by rows"),
    "1x128 by 1x128, loaded": (BY_ROW, BY_ROW, "by columns"),
    "128x128 by 1x128": (SQUARE, BY_ROW, "by rows"),
}
POISON = 0xA5


def bits(t: Tensor) -> Tensor:
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])


def assert_same(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    """Compares values and scales, bit for bit and by strides."""
    for our, their, name in zip(ours, theirs, ("values", "scales"), strict=True):
        assert our.stride() == their.stride(), name
        different = (bits(our) != bits(their)).nonzero()
        assert not len(different), f"{len(different)} {name} differ, as {different[:4].tolist()}"


def guarded(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Poisoned bytes, a view in their midst, and where the bytes are not the view's."""
    count = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    storage = torch.full((1024 + count * dtype.itemsize,), POISON, dtype=torch.uint8, device="cuda")
    is_outside = torch.ones_like(storage)
    view, inside = (
        t[512 : 512 + count * dtype.itemsize].view(dtype).as_strided(shape, strides)
        for t in (storage, is_outside)
    )
    bits(inside).zero_()
    return storage, view, is_outside.bool()


@dataclass(frozen=True)
class ScaledProduct:
    """The product of A (M, K) and B (K, N), whose columns are N pairs where the activation gates
    them.
    """

    M: int
    N: int
    K: int
    recipe: str = "1x128 by 128x128"
    activation: str = ""
    operands: list[Any] = field(init=False, repr=False)  # A, B, and their scales

    def __post_init__(self) -> None:
        columns = self.N * glu_split(self.activation)
        of_a, of_b, order = RECIPES[self.recipe]
        a, b = fp8_operands(self.M, columns, self.K, device="cuda", most=1)
        scale_a = block_scale(self.M, self.K, of_a, "by columns", "cuda")
        scale_b = block_scale(columns, self.K, of_b, order, "cuda").t()
        object.__setattr__(self, "operands", [a, b, scale_a, scale_b])

    def sums(self) -> Tensor:
        """A @ B in float64."""
        a, b, scale_a, scale_b = self.operands
        of_a, of_b, _ = RECIPES[self.recipe]
        return scaled(a, scale_a, of_a) @ scaled(b.t(), scale_b.t(), of_b).t()

    def activated(self, x: Tensor) -> Tensor:
        """Results in float32, of no activation or of reglu."""
        if not self.activation:
            return x.float()
        gate, value = x.float().chunk(2, dim=1)
        return gate.relu() * value

    def run(self, config: str, out: Tensor, *more: Any, scale_out: Tensor | None = None) -> None:
        """Launches the kernel three times. `more`: the bias, the residual and aux."""
        a, b, *scales = self.operands
        words = eager_scaled.as_16_bit_pairs(a), eager_scaled.as_16_bit_pairs(b.t()).t()
        scales = [*scales, *([] if scale_out is None else [scale_out])]
        problem = describe(
            *words,
            out,
            extra=EpilogueArgs(self.activation, *more),
            scales=tuple(scales),
            formats=f"e4m3 e4m3 promoted {' '.join(RECIPES[self.recipe][:2])}",
        )
        launch = gemm.plan(problem, gemm_config(config))
        for _ in range(3):
            launch(*words, None, out, 1, 0, *(more or (None, None, None)), *scales)

    def check(self, config: str, out_dtype: torch.dtype) -> None:
        """The result is exact, and nothing beside it is written."""
        storage, out, is_outside = guarded((self.M, self.N), (self.N, 1), out_dtype)
        self.run(config, out)
        assert torch.equal(out, self.activated(self.sums()).to(out_dtype)), self
        assert (storage[is_outside] == POISON).all(), self

    def check_quantized(self, config: str) -> None:
        """A result in fp8 has the bits of the result in float32, quantized by another kernel."""
        scaled_mm: Any = outblas.scaled_mm
        activation = self.activation or None
        operands = with_recipes(*self.operands)
        wide = scaled_mm(*operands, output_dtype=torch.float32, activation=activation)
        expected = outblas.quantize(wide, "1x128")
        like = quantization.empty_scales((self.M, self.N), "1x128", wide.device)
        guarded_out = guarded((self.M, self.N), (self.N, 1), E4M3)
        guarded_scales = guarded(tuple(like.shape), like.stride(), torch.float32)

        self.run(config, guarded_out[1], scale_out=guarded_scales[1])

        assert_same((guarded_out[1], guarded_scales[1]), expected)
        for storage, _, is_outside in (guarded_out, guarded_scales):
            assert (storage[is_outside] == POISON).all(), self
