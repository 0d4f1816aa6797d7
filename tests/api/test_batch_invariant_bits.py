"""Batch-invariance: a row of the product has the same bits alone, in any batch and beside
any rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from outblas import addmm, batch_invariant, matmul

pytest_plugins = ("support.batch_invariance",)
pytestmark = pytest.mark.usefixtures("no_context_before")

Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SEED = torch.Generator().manual_seed(0)
# Parts of a tile, all of it, and more than one.
SOME_ROWS = [
    1,
    *(pytest.param(rows, marks=pytest.mark.slow) for rows in (2, 3, 16)),
    17,
    64,
    65,
]


def normal(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(*shape, generator=SEED).to(dtype)


def by_columns(matrix: Tensor) -> Tensor:
    """The same matrix, column-major."""
    return matrix.t().contiguous().t()


# ---- on the CPU, by the interpreted kernel
@dataclass(frozen=True)
class Product:
    """A product of 130 rows, and how rows of it are computed by themselves."""

    a: Tensor
    b: Tensor
    dtype: torch.dtype
    whole: Tensor
    of: Callable[..., Tensor]


@pytest.fixture(scope="module", params=[False, True], ids=["B by rows", "B by columns"])
def transposed(request: pytest.FixtureRequest) -> bool:
    """Whether B is column-major."""
    return bool(request.param)


@pytest.fixture(
    scope="module",
    params=[(FP32, None), (BF16, None), (BF16, FP32)],
    ids=["fp32", "bf16", "bf16 to fp32"],
)
def product(request: pytest.FixtureRequest, transposed: bool) -> Product:
    """A product by `portable`, of several tiles and a part of one along each extent."""
    dtype, out_dtype = request.param
    a, b = normal(130, 97, dtype=dtype), normal(97, 33, dtype=dtype)
    if transposed:
        b = by_columns(b)
    of = partial(matmul, out_dtype=out_dtype, kernel="portable", batch_invariant=True)
    return Product(a, b, out_dtype or dtype, of(a, b), of)


@pytest.mark.parametrize("rows", SOME_ROWS)
def test_the_first_and_the_last_rows_have_the_same_bits_alone(rows: int, product: Product) -> None:
    assert product.whole.dtype == product.dtype
    assert torch.equal(product.of(product.a[:rows], product.b), product.whole[:rows])
    assert torch.equal(product.of(product.a[-rows:], product.b), product.whole[-rows:])


def test_rows_have_the_same_bits_however_they_lie(product: Product) -> None:
    for a in (product.a, by_columns(product.a)):
        assert torch.equal(product.of(a, product.b), product.whole)
        assert torch.equal(product.of(a[77], product.b), product.whole[77])


def test_rows_in_a_batch_have_the_same_bits(product: Product) -> None:
    batch, whole = product.a.view(10, 13, 97), product.whole.view(10, 13, 33)
    of_each = product.b.expand(3, 97, 33).contiguous()

    assert torch.equal(product.of(batch, product.b), whole)
    turned = product.of(batch.transpose(0, 1)[:3], product.b)
    assert torch.equal(turned, whole.transpose(0, 1)[:3])
    assert torch.equal(product.of(batch[:3], of_each), whole[:3])


def test_rows_of_a_product_with_a_vector_have_the_same_bits(product: Product) -> None:
    column = product.b[:, 0]
    whole = product.of(product.a, column)

    assert torch.equal(product.of(product.a[:3], column), whole[:3])
    assert torch.equal(product.of(product.a[5], column), whole[5])


@pytest.mark.parametrize("addend", ["row", "matrix"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_rows_of_addmm_have_the_same_bits(dtype: torch.dtype, addend: str) -> None:
    a, b = normal(130, 70, dtype=dtype), normal(70, 33, dtype=dtype)
    c = normal(130 if addend == "matrix" else 1, 33, dtype=dtype)

    def of(rows: slice, out: Tensor | None = None) -> Tensor:
        addend_of = c[rows] if addend == "matrix" else c
        how: Any = {"alpha": 0.7, "beta": -1.3, "kernel": "portable", "batch_invariant": True}
        return addmm(addend_of, a[rows], b, out=out, **how)

    whole = of(slice(None))
    for count in (1, 17, 65):
        rows = slice(9, 9 + count)
        assert torch.equal(of(rows), whole[rows]), count
        assert torch.equal(of(rows, torch.empty(33, count, dtype=dtype).t()), whole[rows]), count


# ---- on a GPU
ROWS_ON_A_GPU = [slice(7, 7 + rows) for rows in (1, 3, 17, 64, 130, 513)]
by_rows_or_columns = pytest.mark.parametrize(
    "lie", [torch.clone, by_columns], ids=["B by rows", "B by columns"]
)


@pytest.fixture(
    params=[(4096, 512), (509, 100), (1, 700)], ids=lambda extents: "N={} K={}".format(*extents)
)
def extents_on_a_gpu(request: pytest.FixtureRequest) -> tuple[int, int]:
    """N and K."""
    N, K = request.param
    return N, K


@pytest.fixture(params=[BF16, FP16, FP32], ids=str)
def on_a_gpu(
    request: pytest.FixtureRequest, extents_on_a_gpu: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """A, B and C of 700 rows on the GPU."""
    N, K = extents_on_a_gpu
    a, b, c = (normal(*shape, dtype=request.param).cuda() for shape in ((700, K), (K, N), (700, N)))
    return a, b, c


@pytest.mark.gpu
@by_rows_or_columns
def test_rows_have_the_same_bits_on_a_gpu(
    on_a_gpu: tuple[Tensor, Tensor, Tensor], lie: Callable[[Tensor], Tensor]
) -> None:
    a, b, c = on_a_gpu
    b = lie(b)

    with batch_invariant():
        whole, scaled = matmul(a, b), addmm(c, a, b, alpha=0.7, beta=-1.3)
        for rows in ROWS_ON_A_GPU:
            assert torch.equal(matmul(a[rows], b), whole[rows]), rows
            part = addmm(c[rows], a[rows], b, alpha=0.7, beta=-1.3)
            assert torch.equal(part, scaled[rows]), f"addmm, {rows}"
            assert torch.equal(matmul(by_columns(a)[rows], b), whole[rows]), f"columns, {rows}"
        assert torch.equal(matmul(a[77], b), whole[77])


@pytest.mark.gpu
@by_rows_or_columns
def test_rows_in_batches_have_the_same_bits_on_a_gpu(
    on_a_gpu: tuple[Tensor, Tensor, Tensor], lie: Callable[[Tensor], Tensor]
) -> None:
    a, b, _ = on_a_gpu
    b = lie(b)
    K, N = b.shape
    batch = a.view(7, 100, K)

    with batch_invariant():
        whole = matmul(a, b).view(7, 100, N)
        by_one = matmul(batch, b)
        by_seven = matmul(batch, b.expand(7, K, N))

    assert torch.equal(by_one, whole)
    assert torch.equal(by_seven, whole)
