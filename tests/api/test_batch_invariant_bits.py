"""Batch-invariance: a row of the product has the same bits alone, in any batch and beside
any rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from outblas import addmm, batch_invariant, matmul

pytest_plugins = ("support.batch_invariance",)
pytestmark = pytest.mark.usefixtures("no_context_before")

Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SOME_ROWS = 1, 17, 65  # parts of a tile, and more than one


def normal(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def by_columns(matrix: Tensor) -> Tensor:
    """The same matrix, column-major."""
    return matrix.t().contiguous().t()


# ---- on the CPU, by the interpreted kernel
@pytest.mark.parametrize(
    ("dtype", "out_dtype", "lie"),
    [(FP32, None, torch.clone), (BF16, None, by_columns), (BF16, FP32, torch.clone)],
    ids=["fp32", "bf16, B by columns", "bf16 to fp32"],
)
def test_rows_have_the_same_bits_alone_in_batches_and_however_they_lie(
    dtype: torch.dtype, out_dtype: torch.dtype | None, lie: Callable[[Tensor], Tensor]
) -> None:
    """By `portable`, whose product has several tiles and a part of one along each extent."""
    a, b = normal(130, 97, dtype=dtype), lie(normal(97, 33, dtype=dtype))
    product = partial(matmul, out_dtype=out_dtype, kernel="portable", batch_invariant=True)

    whole = product(a, b)
    batch, batch_of_b = a.view(10, 13, 97), b.expand(3, 97, 33).contiguous()
    of_batches = whole.view(10, 13, 33)
    column = b[:, 0]
    of_column = product(a, column)

    assert whole.dtype == (out_dtype or dtype)
    for rows in SOME_ROWS:
        assert torch.equal(product(a[:rows], b), whole[:rows]), rows
        assert torch.equal(product(a[-rows:], b), whole[-rows:]), rows
    assert torch.equal(product(by_columns(a), b), whole)
    assert torch.equal(product(by_columns(a)[77], b), whole[77])
    assert torch.equal(product(batch, b), of_batches)
    assert torch.equal(product(batch.transpose(0, 1)[:3], b), of_batches.transpose(0, 1)[:3])
    assert torch.equal(product(batch[:3], batch_of_b), of_batches[:3])
    assert torch.equal(product(a[:3], column), of_column[:3])
    assert torch.equal(product(a[5], column), of_column[5])


@pytest.mark.parametrize(("dtype", "addend"), [(FP32, "row"), (BF16, "matrix")], ids=str)
def test_rows_of_addmm_have_the_same_bits(dtype: torch.dtype, addend: str) -> None:
    a, b = normal(130, 70, dtype=dtype), normal(70, 33, dtype=dtype)
    c = normal(130 if addend == "matrix" else 1, 33, dtype=dtype)

    def of(rows: slice, out: Tensor | None = None) -> Tensor:
        addend_of = c[rows] if addend == "matrix" else c
        how: Any = {"alpha": 0.7, "beta": -1.3, "kernel": "portable", "batch_invariant": True}
        return addmm(addend_of, a[rows], b, out=out, **how)

    whole = of(slice(None))
    for count in SOME_ROWS:
        rows = slice(9, 9 + count)
        assert torch.equal(of(rows), whole[rows]), count
        assert torch.equal(of(rows, torch.empty(33, count, dtype=dtype).t()), whole[rows]), count


# ---- on a GPU
ROWS_ON_A_GPU = [slice(7, 7 + rows) for rows in (1, 3, 17, 64, 130, 513)]


@pytest.mark.gpu
@pytest.mark.parametrize("lie", [torch.clone, by_columns], ids=["B by rows", "B by columns"])
@pytest.mark.parametrize(("N", "K"), [(4096, 512), (509, 100), (1, 700)])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_rows_have_the_same_bits_on_a_gpu(
    dtype: torch.dtype, N: int, K: int, lie: Callable[[Tensor], Tensor]
) -> None:
    a, b, c = (normal(*shape, dtype=dtype).cuda() for shape in ((700, K), (K, N), (700, N)))
    b = lie(b)
    batch = a.view(7, 100, K)

    with batch_invariant():
        whole, scaled = matmul(a, b), addmm(c, a, b, alpha=0.7, beta=-1.3)
        for rows in ROWS_ON_A_GPU:
            assert torch.equal(matmul(a[rows], b), whole[rows]), rows
            part = addmm(c[rows], a[rows], b, alpha=0.7, beta=-1.3)
            assert torch.equal(part, scaled[rows]), f"addmm, {rows}"
            assert torch.equal(matmul(by_columns(a)[rows], b), whole[rows]), f"columns, {rows}"
        assert torch.equal(matmul(a[77], b), whole[77])
        assert torch.equal(matmul(batch, b), whole.view(7, 100, N))
        assert torch.equal(matmul(batch, b.expand(7, K, N)), whole.view(7, 100, N))
