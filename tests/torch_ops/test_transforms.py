"""What transforms make of calls: autocast, vmap and torch.func give of our functions what they give
of torch's, or of single calls; neither vmap nor torch's default dtype changes a bit of a result.
Where bits are compared, operands are small integers, whose products are exact in any order, so that
what rounds is the epilogue.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import vmap
from torch.nn.functional import ScalingType

from outblas import (
    FP8Linear,
    addmm,
    grouped_mm,
    linear,
    matmul,
    moe_mlp,
    quantize,
    scaled_grouped_mm,
    scaled_mm,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore::outblas.FallbackWarning",
    "ignore::DeprecationWarning",
    "ignore:There is a performance drop",
)

Tensor = torch.Tensor
Shape = tuple[int, ...]
FP8 = torch.float8_e4m3fn


# ---- bits
class Call(NamedTuple):
    """A function of the number K of terms, which returns one of tensors, and their shapes."""

    function: Callable[..., Any]
    shapes: Callable[[int], list[Shape]]


INDEX = torch.tensor([[0, 1], [2, 0], [1, 1], [2, 3]])
OFFS, COUNTS = (torch.tensor(ends, dtype=torch.int32) for ends in ([2, 2, 4], [1, 0, 4]))
LAYER = FP8Linear.from_linear(torch.nn.Linear(4, 6))
CALLS: dict[str, Call] = {
    "matmul": Call(matmul, lambda K: [(6, K), (K, 4)]),
    "matmul of vectors": Call(matmul, lambda K: [(K,), (K,)]),
    "matmul of a batch": Call(matmul, lambda K: [(3, 6, K), (K, 4)]),
    "matmul in fp32": Call(
        lambda a, b: matmul(a, b, out_dtype=torch.float32), lambda K: [(6, K), (K, 4)]
    ),
    "matmul with an epilogue": Call(
        lambda a, b, bias, c: matmul(a, b, bias=bias, activation="gelu", residual=c),
        lambda K: [(6, K), (K, 4), (4,), (6, 4)],
    ),
    "matmul of a gated pair": Call(
        lambda a, b, bias: matmul(a, b, bias=bias, activation="swiglu"),
        lambda K: [(6, K), (K, 4), (6, 1)],
    ),
    "matmul of a vector and a gated pair": Call(
        lambda a, b, bias: matmul(a, b, bias=bias, activation="swiglu"),
        lambda K: [(6, K), (K,), (6,)],
    ),
    "addmm": Call(addmm, lambda K: [(6, 4), (6, K), (K, 4)]),
    "addmm with factors": Call(
        lambda c, a, b: addmm(c, a, b, alpha=0.3, beta=0.7), lambda K: [(4,), (6, K), (K, 4)]
    ),
    "addmm with an epilogue": Call(
        lambda c, a, b, r: addmm(c, a, b, alpha=0.3, activation="silu", residual=r),
        lambda K: [(6, 4), (6, K), (K, 4), (4,)],
    ),
    "linear": Call(linear, lambda K: [(6, K), (4, K), (4,)]),
    "linear with an epilogue": Call(
        lambda x, w, bias, r: linear(x, w, bias, activation="gelu", residual=r),
        lambda K: [(2, 3, K), (4, K), (4,), (2, 3, 4)],
    ),
    "groups of rows": Call(
        lambda a, b, bias: grouped_mm(a, b, offs=OFFS, bias=bias, activation="gelu"),
        lambda K: [(4, K), (3, K, 6), (3, 6)],
    ),
    "groups of batches": Call(grouped_mm, lambda K: [(3, 4, K), (3, K, 6)]),
    "counted rows": Call(
        lambda a, b: grouped_mm(a.detach(), b.detach(), counts=COUNTS)[2],
        lambda K: [(3, 4, K), (3, K, 6)],
    ),
    "moe_mlp": Call(
        lambda x, up, down, w: moe_mlp(x, up, down, INDEX, w),
        lambda K: [(4, K), (3, K, 4), (3, 2, K), (4, 2)],
    ),
    "scaled_mm": Call(
        lambda a, b, r: scaled_mm(
            *(a.to(FP8), b.to(FP8)),
            *(a.new_ones((), dtype=torch.float32), ScalingType.TensorWise),
            *(a.new_ones((), dtype=torch.float32), ScalingType.TensorWise),
            activation="gelu",
            residual=r.bfloat16(),
        ),
        lambda K: [(6, K), (K, 4), (6, 4)],
    ),
    "scaled_mm to fp8": Call(
        lambda a, b: scaled_mm(
            *(a.to(FP8), b.to(FP8)),
            *(a.new_ones((), dtype=torch.float32), ScalingType.TensorWise),
            *(a.new_ones((), dtype=torch.float32), ScalingType.TensorWise),
            output_dtype=FP8,
            out_recipe="1x128",
        ),
        lambda K: [(6, K), (K, 4)],
    ),
    "quantize": Call(lambda x: quantize(x, "1x128"), lambda K: [(6, K)]),
    "quantize tensorwise": Call(lambda x: quantize(x, "tensorwise"), lambda K: [(6, K)]),
    "scaled_grouped_mm": Call(
        lambda a, b: scaled_grouped_mm(
            *(a.to(FP8), b.to(FP8)),
            a.new_ones((4, -(-a.shape[1] // 128)), dtype=torch.float32),
            ScalingType.BlockWise1x128,
            a.new_ones((3, -(-a.shape[1] // 128), 1), dtype=torch.float32),
            ScalingType.BlockWise128x128,
            offs=OFFS,
        ),
        lambda K: [(4, K), (3, K, 6)],
    ),
    "FP8Linear": Call(LAYER, lambda K: [(6, 4)]),
}
# Those whose result has no row of K values.
PRODUCTS = [name for name in CALLS if not name.startswith(("quantize", "moe_mlp", "FP8Linear"))]
COUNT = 3  # calls under vmap
DTYPES = torch.float32, torch.bfloat16


def integers(shape: Shape, dtype: torch.dtype) -> Tensor:
    return torch.randint(-4, 5, shape).to(dtype)


def outputs(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def assert_same_bits(got: Any, want: Any) -> None:
    for result, wanted in zip(outputs(got), outputs(want), strict=True):
        assert result.dtype == wanted.dtype
        torch.testing.assert_close(result.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", CALLS)
def test_calls_under_vmap(name: str) -> None:
    call = CALLS[name]
    for K, dtype in itertools.product((5, 0), DTYPES):
        batches = [integers((COUNT, *shape), dtype) for shape in call.shapes(K)]
        alone = [(i,) for i in range(len(batches))]
        for mapped in {tuple(range(len(batches))), *alone}:  # all of the tensors, each one alone
            dims = tuple(0 if i in mapped else None for i in range(len(batches)))
            tensors = [t if dim == 0 else t[0] for t, dim in zip(batches, dims, strict=True)]

            got = vmap(call.function, dims)(*tensors)

            for i in range(COUNT):
                single = [t[i] if dim == 0 else t for t, dim in zip(tensors, dims, strict=True)]
                assert_same_bits(tuple(t[i] for t in outputs(got)), call.function(*single))


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_no_terms_is_that_of_zeros(name: str) -> None:
    call = CALLS[name]
    for dtype in DTYPES:
        empty = [integers(shape, dtype) for shape in call.shapes(0)]
        zeros = [
            t if t.numel() else torch.zeros(shape, dtype=dtype)
            for t, shape in zip(empty, call.shapes(5), strict=True)
        ]

        assert_same_bits(call.function(*empty), call.function(*zeros))


@pytest.fixture
def default_dtypes() -> Iterator[list[torch.dtype]]:
    """Default dtypes that a test sets."""
    yield [torch.float64, torch.bfloat16]
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", CALLS)
def test_calls_and_gradients_under_another_default_dtype(
    name: str, default_dtypes: list[torch.dtype]
) -> None:
    call = CALLS[name]

    def results(tensors: list[Tensor]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            plain = outputs(call.function(*tensors))
        recorded = outputs(call.function(*tensors))
        wide = [t for t in recorded if t.requires_grad and t.dtype != FP8]
        if not wide:
            return (*plain, *recorded)
        try:
            gradients = torch.autograd.grad(
                wide,
                tensors,
                [t.detach() for t in wide],
                allow_unused=True,
                materialize_grads=True,
            )
        except NotImplementedError:  # there are none
            gradients = ()
        return (*plain, *recorded, *gradients)

    leaves = [[integers(s, dtype).requires_grad_() for s in call.shapes(5)] for dtype in DTYPES]
    want = [results(tensors) for tensors in leaves]
    for default in default_dtypes:
        torch.set_default_dtype(default)
        for tensors, expected in zip(leaves, want, strict=True):
            assert_same_bits(results(tensors), expected)
