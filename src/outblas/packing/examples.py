"""The problems that the calls of a list of products pose, of operands as torch allocates them, on
the meta device.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..core import quantization
from ..core.artifact import example
from ..core.epilogue import EpilogueArgs, glu_split
from ..core.problem import Problem
from ..core.products import Products
from ..core.scaling import BY_ROWS, FP8_DTYPES, Scaling
from ..runtime import dispatch
from ..torch_ops import scaled_mm, scaled_output

Tensor = torch.Tensor

_FORMATS = {name: dtype for dtype, name in scaled_mm.FORMATS.items()}


def problems(products: Products) -> Iterator[Problem]:
    """Yields the problem of each number of rows."""
    for M in products.each_M():
        if products.scaling is not None:
            yield _of_fp8(products, products.scaling, M)
            continue
        shape, dtype = (M, products.N, products.K), getattr(torch, products.dtype)
        problem = example(dtype, None, products.layout, shape, steps=products.steps)
        yield replace(problem, batch_invariant=products.batch_invariant)


def _of_fp8(products: Products, scaling: Scaling, M: int) -> Problem:
    """Returns the problem of `scaled_mm`."""
    N, K, steps = products.N, products.K, products.steps
    of_a, of_b = (_FORMATS[name] for name in FP8_DTYPES[products.dtype])
    result, has_scales, rounding = scaling.result.partition("e4m3")
    dtype = torch.float32 if has_scales else getattr(torch, result)
    stored = M, N // glu_split(steps.activation)
    extra = EpilogueArgs(
        steps.activation,
        _empty(N, dtype=dtype) if steps.bias else None,
        _empty(*stored, dtype=dtype) if steps.residual else None,
    )
    call = scaled_mm._call(
        _empty(M, K, dtype=of_a),
        _empty(N, K, dtype=of_b).t(),
        _scale((M, K), scaling.a),
        _scale((N, K), scaling.b).t(),
        dtype,
        scaling.fast,
        extra,
    )
    if has_scales:
        scale = _scale(stored, scaled_output.RECIPES[0])
        call = scaled_output.fused_call(call, scale, power_of_two=bool(rounding))
    return dispatch.problem_of(call)


def _scale(of: tuple[int, int], recipe: str) -> Tensor:
    """Returns the scales of a matrix whose columns are terms."""
    if recipe == BY_ROWS:
        return _empty(of[0], quantization.blocks(of[1]), dtype=torch.float32)
    return quantization.empty_scales(of, recipe, torch.device("meta"))


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
