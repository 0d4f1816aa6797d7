"""The kernels of Triton and Gluon that the calls of a list of products launch on a GPU: products
that `hopper.gemm` does not compute, what quantizes operands and results to fp8, and what lies
between the products of experts.
"""

from collections.abc import Iterator

import torch

from outblas.base import configs, registry
from outblas.base.machines import Machine
from outblas.call.problem import Problem
from outblas.call.products import DTYPES, Products
from outblas.call.quantization import RECIPES
from outblas.device.triton_variant import TritonVariant

Shape = tuple[int, ...]


def of_problem(
    problem: Problem, machine: Machine, kernel: str, config: str = ""
) -> Iterator[TritonVariant]:
    """Yields what a kernel with a config (as text; "" for its own) launches for a product. Raises
    ValueError where the kernel does not support it, or is none that packs hold, and ImportError
    without Triton.
    """
    module = registry.load(kernel)
    if not getattr(module, "PACKED", False):
        raise ValueError(f"packs do not hold {kernel}")
    given = configs.from_text(module.Config, config) if config else None
    yield module.pack_variant(problem, machine, given)


def of_operands(products: Products) -> Iterator[TritonVariant]:
    """Yields the kernels that quantize the fp8 operands A of products, from contiguous rows of the
    dtype of the result, where that has 16 bits, else of bfloat16. Raises ImportError without
    Triton.
    """
    scaling, groups = products.scaling, products.groups
    if scaling is None or (groups is not None and groups.form == "terms"):
        return
    recipe = scaling.a.removesuffix("-rows")
    dtype = getattr(torch, scaling.result if scaling.result in DTYPES else DTYPES[0])
    for rows in products.each_M():
        is_masked = groups is not None and groups.form == "masked"
        lead = (groups.count, rows) if groups is not None and is_masked else (rows,)
        yield from _of_quantize((*lead, products.K), dtype, recipe)


def of_result(problem: Problem, power_of_two: bool) -> Iterator[TritonVariant]:
    """Yields the kernels that quantize a result in float32 by rows, where the kernel that
    multiplies does not. Raises ImportError without Triton.
    """
    shape = problem.M, problem.N
    yield from _of_quantize(shape, torch.float32, "1x128", power_of_two=power_of_two)


def of_experts(products: Products) -> Iterator[TritonVariant]:
    """Yields the kernels between the products of `moe_mlp`, without gradients, of which products
    are the first: experts in int64, as `topk` returns them, weights of the dtype of the operands or
    in float32. Raises ImportError without Triton.
    """
    groups = products.groups
    if groups is None or not groups.top or products.scaling is not None:
        return
    dtype = getattr(torch, products.dtype)
    for rows in products.each_M():
        if rows % groups.top == 0:
            tokens = rows // groups.top
            yield from _of_experts(tokens, products.K, groups.count, groups.top, dtype)


def _of_experts(
    tokens: int, columns: int, experts: int, top: int, dtype: torch.dtype
) -> list[TritonVariant]:
    from outblas.kernels import moe, passes

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def run() -> None:
        _, row_of_slot, _ = moe.route(empty(tokens, top, dtype=torch.int64), experts)
        rows = moe.dispatch(empty(tokens, columns), row_of_slot)
        for of_weights in dict.fromkeys((dtype, torch.float32)):
            moe.combine(rows, row_of_slot, empty(tokens, top, dtype=of_weights))

    return passes.planned(run)


def _of_quantize(
    shape: Shape, dtype: torch.dtype, recipe: str, *, power_of_two: bool = False
) -> list[TritonVariant]:
    from outblas.kernels import passes, quantize

    assert recipe in RECIPES, "a line has no others"
    x = torch.empty(shape, dtype=dtype, device="meta")
    given = recipe, torch.float8_e4m3fn, power_of_two
    return passes.planned(lambda: quantize.quantize(x, *given))
