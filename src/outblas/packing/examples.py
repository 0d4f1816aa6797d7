"""The problems that the calls of a list of products pose, of operands as torch allocates them, on
the meta device.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from outblas.call import dispatch, grouped, quantization
from outblas.call import problem as operands
from outblas.call.artifact import example
from outblas.call.epilogue import EpilogueArgs, glu_split
from outblas.call.grouped import GroupedProblem, GroupedTensors
from outblas.call.problem import Problem, Strides
from outblas.call.product_groups import Groups
from outblas.call.products import TF32, Products
from outblas.call.recorded_scaling import TERMS
from outblas.call.scaling import BY_ROWS, FP8_DTYPES, Scaling
from outblas.torch_ops import scaled_operator, scaled_output

Tensor = torch.Tensor

_FORMATS = {name: dtype for dtype, name in scaled_operator.FORMATS.items()}
_FORMS: dict[str, grouped.Form] = {"rows": "ragged_m", "terms": "ragged_k", "masked": "masked"}


def problems(products: Products) -> Iterator[Problem]:
    """Yields the problem of each number of rows."""
    for M in products.each_M():
        if products.scaling is not None:
            problem = _of_fp8(products, products.scaling, M)
        else:
            problem = _of_plain(products, M)
        yield problem if products.batch else _stored_as(problem, products)


def _of_plain(products: Products, M: int) -> Problem:
    """Returns the problem of `matmul`, of packed matrices."""
    tf32 = products.dtype == TF32
    dtype = torch.float32 if tf32 else getattr(torch, products.dtype)
    shape = M, products.N, products.K
    result, steps = getattr(torch, products.result), products.steps
    if products.batch:
        problem = _of_batch(products, M, dtype, result, tf32=tf32)
    else:
        problem = example(dtype, result, products.layout, shape, tf32=tf32, steps=steps)
    return replace(problem, batch_invariant=products.batch_invariant)


def _of_batch(
    products: Products, M: int, dtype: torch.dtype, result: torch.dtype, *, tf32: bool
) -> Problem:
    """Returns the problem of `matmul` of batches whose matrices follow one another."""
    count, N, K, steps = products.batch, products.N, products.K, products.steps
    stored = count, M, N // glu_split(steps.activation)
    return operands.problem(
        _stored((count, M, K), dtype, by_columns=products.layout[0] == "t"),
        _stored((count, N, K), dtype, by_columns=products.layout[1] == "n").mT,
        _empty(*stored, dtype=result),
        tf32=tf32,
        extra=EpilogueArgs(
            steps.activation,
            _empty(N, dtype=result) if steps.bias else None,
            _empty(*stored, dtype=result) if steps.residual else None,
        ),
    )


def _stored_as(problem: Problem, products: Products) -> Problem:
    """Returns a problem of packed matrices as one of those that products have."""
    storage, terms = products.storage, 1 if products.scaling is None else TERMS

    def strides(packed: Strides, apart: int) -> Strides:
        if not apart:
            return packed
        return (apart, 1) if packed[1] == 1 else (1, apart)

    given = storage.align_a, storage.align_b, storage.align_out
    known = problem.alignment[:3]
    return replace(
        problem,
        a=strides(problem.a, storage.lda // terms),
        b=strides(problem.b, storage.ldb // terms),
        out=strides(problem.out, storage.ldc),
        alignment=tuple(new or old for new, old in zip(given, known, strict=True)),
    )


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
    call = scaled_operator.call_of(
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


def grouped_problems(products: Products, groups: Groups) -> Iterator[GroupedProblem]:
    """Yields the problem of each number of rows of products that groups divide."""
    for rows in products.each_M():
        yield _of_groups(products, groups, rows)


def _of_groups(products: Products, groups: Groups, rows: int) -> GroupedProblem:
    """Returns the problem of `grouped_mm` or `scaled_grouped_mm`."""
    N, K, count, steps = products.N, products.K, groups.count, products.steps
    # The shapes of A, of B as its columns are stored, and of the result.
    shape_a: tuple[int, ...] = (rows, K)
    shape_b: tuple[int, ...] = (count, N, K)
    product: tuple[int, ...] = (rows, N)
    if groups.form == "masked":
        shape_a, product = (count, rows, K), (count, rows, N)
    elif groups.form == "terms":
        shape_a, shape_b, product = (K, rows), (N, rows), (count, K, N)
    of_a, of_b, dtype = _grouped_dtypes(products)
    result = (*product[:-1], N // glu_split(steps.activation))
    index = _empty(rows, dtype=torch.int32)
    tensors = GroupedTensors(
        bias=_empty(count, N, dtype=dtype) if steps.bias else None,
        residual=_empty(*result, dtype=dtype) if steps.residual else None,
        a_index=index if groups.gathers else None,
        scatter_index=index if groups.scatters else None,
        scatter_weights=_empty(rows, dtype=torch.float32) if groups.weighted else None,
    )
    if scaling := products.scaling:
        scale_a, scale_b = _scale(shape_a, scaling.a), _scale(shape_b, scaling.b).mT
        tensors = tensors._replace(scale_a=scale_a, scale_b=scale_b)
    return grouped.describe(
        _FORMS[groups.form],
        _stored(shape_a, of_a, by_columns=products.layout[0] == "t"),
        _stored(shape_b, of_b, by_columns=products.layout[1] == "n").mT,
        _empty(*result, dtype=dtype),
        count,
        tensors,
        activation=steps.activation,
        zero_tail=groups.zero_tail,
    )


def _grouped_dtypes(products: Products) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Returns the dtypes of A, B and the result of a product that groups divide."""
    if products.scaling is None:
        dtype: torch.dtype = getattr(torch, products.dtype)
        return dtype, dtype, dtype
    a, b = (_FORMATS[name] for name in FP8_DTYPES[products.dtype])
    return a, b, getattr(torch, products.scaling.result)


def _stored(shape: tuple[int, ...], dtype: torch.dtype, *, by_columns: bool) -> Tensor:
    """Returns matrices whose rows, or columns, are contiguous."""
    if by_columns:
        return _empty(*shape[:-2], shape[-1], shape[-2], dtype=dtype).mT
    return _empty(*shape, dtype=dtype)


def _scale(of: tuple[int, ...], recipe: str) -> Tensor:
    """Returns the scales of a matrix whose columns are terms."""
    if recipe == BY_ROWS:
        return _empty(*of[:-1], quantization.blocks(of[-1]), dtype=torch.float32)
    return quantization.empty_scales(of, recipe, torch.device("meta"))


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
