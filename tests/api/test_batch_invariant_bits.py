"""Batch-invariance: a row of the product has the same bits alone, in any batch and beside
any rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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


def test_the_product_has_the_dtype_that_was_asked_for(product: Product) -> None:
    assert product.whole.dtype == product.dtype


@pytest.mark.parametrize("rows", SOME_ROWS)
def test_the_first_rows_have_the_same_bits_alone(rows: int, product: Product) -> None:
    assert torch.equal(product.of(product.a[:rows], product.b), product.whole[:rows])


@pytest.mark.parametrize("rows", [1, 65])
def test_the_last_rows_have_the_same_bits_alone(rows: int, product: Product) -> None:
    assert torch.equal(product.of(product.a[-rows:], product.b), product.whole[-rows:])


def test_rows_that_lie_by_columns_have_the_same_bits(product: Product) -> None:
    assert torch.equal(product.of(by_columns(product.a), product.b), product.whole)


@pytest.mark.parametrize("lie", [torch.clone, by_columns], ids=["by rows", "by columns"])
def test_a_vector_has_the_bits_of_its_row(
    lie: Callable[[Tensor], Tensor], product: Product
) -> None:
    row = lie(product.a)[77]

    assert torch.equal(product.of(row, product.b), product.whole[77])


def test_rows_in_a_batch_have_the_same_bits(product: Product) -> None:
    batch = product.a.view(10, 13, 97)

    assert torch.equal(product.of(batch, product.b), product.whole.view(10, 13, 33))


def test_rows_in_a_transposed_batch_have_the_same_bits(product: Product) -> None:
    batch = product.a.view(10, 13, 97).transpose(0, 1)[:3]

    got = product.of(batch, product.b)

    assert torch.equal(got, product.whole.view(10, 13, 33).transpose(0, 1)[:3])


def test_rows_beside_a_batch_of_b_have_the_same_bits(product: Product) -> None:
    batch = product.a.view(10, 13, 97)[:3]

    got = product.of(batch, product.b.expand(3, 97, 33).contiguous())

    assert torch.equal(got, product.whole.view(10, 13, 33)[:3])


def test_rows_of_a_product_with_a_vector_have_the_same_bits(product: Product) -> None:
    column = product.b[:, 0]
    whole = product.of(product.a, column)

    assert torch.equal(product.of(product.a[:3], column), whole[:3])
    assert torch.equal(product.of(product.a[5], column), whole[5])


@dataclass(frozen=True)
class Sum:
    """An `addmm` of 130 rows, and how some of its rows are computed by themselves."""

    whole: Tensor
    of: Callable[..., Tensor]


@pytest.fixture(scope="module", params=["row", "matrix"])
def addend(request: pytest.FixtureRequest) -> str:
    """The form of the addend."""
    return str(request.param)


@pytest.fixture(scope="module", params=[FP32, BF16], ids=["fp32", "bf16"])
def scaled_sum(request: pytest.FixtureRequest, addend: str) -> Sum:
    """An `addmm` with alpha and beta by `portable`."""
    dtype = request.param
    a, b = normal(130, 70, dtype=dtype), normal(70, 33, dtype=dtype)
    c = normal(130 if addend == "matrix" else 1, 33, dtype=dtype)

    def of(rows: slice, out: Tensor | None = None) -> Tensor:
        return addmm(
            c[rows] if addend == "matrix" else c,
            a[rows],
            b,
            alpha=0.7,
            beta=-1.3,
            out=out,
            kernel="portable",
            batch_invariant=True,
        )

    return Sum(of(slice(None)), of)


@pytest.mark.parametrize("count", SOME_ROWS)
def test_rows_of_addmm_have_the_same_bits(count: int, scaled_sum: Sum) -> None:
    rows = slice(9, 9 + count)

    assert torch.equal(scaled_sum.of(rows), scaled_sum.whole[rows])


def test_rows_of_addmm_have_the_same_bits_in_a_column_major_out(scaled_sum: Sum) -> None:
    rows, out = slice(17), torch.empty(33, 17, dtype=scaled_sum.whole.dtype).t()

    assert torch.equal(scaled_sum.of(rows, out), scaled_sum.whole[rows])


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
    a, b, _ = on_a_gpu
    b = lie(b)

    with batch_invariant():
        whole = matmul(a, b)
        for rows in ROWS_ON_A_GPU:
            assert torch.equal(matmul(a[rows], b), whole[rows]), rows
            assert torch.equal(matmul(by_columns(a)[rows], b), whole[rows]), f"columns, {rows}"
        assert torch.equal(matmul(a[77], b), whole[77])


@pytest.mark.gpu
@by_rows_or_columns
def test_rows_of_addmm_have_the_same_bits_on_a_gpu(
    on_a_gpu: tuple[Tensor, Tensor, Tensor], lie: Callable[[Tensor], Tensor]
) -> None:
    a, b, c = on_a_gpu
    b = lie(b)

    with batch_invariant():
        whole = addmm(c, a, b, alpha=0.7, beta=-1.3)
        for rows in ROWS_ON_A_GPU:
            got = addmm(c[rows], a[rows], b, alpha=0.7, beta=-1.3)
            assert torch.equal(got, whole[rows]), rows


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
