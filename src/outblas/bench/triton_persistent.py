"""A persistent product in Triton with one tile for every shape. It is the kind of kernel with which
models give the same bits in every batch: every tile sums K in the same order, so that the sums of a
row depend on no other row.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from outblas.base.gpus import sm_count
from outblas.verify.kernels import Refused

Tensor = torch.Tensor

# One of the configs among which Triton's tutorial of a persistent product chooses, for 16-bit
# operands; float32 has half the terms of a step.
BLOCK_M, BLOCK_N, GROUP_M, STAGES, WARPS = 128, 128, 8, 3, 8
BLOCK_K = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 32}


@triton.jit
def _product(
    a,
    b,
    c,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """C = A B. Program p computes the tiles p, p + PROGRAMS, ..., GROUP_M rows of tiles at once."""
    across = (N + BLOCK_N - 1) // BLOCK_N
    down = (M + BLOCK_M - 1) // BLOCK_M
    terms = tl.arange(0, BLOCK_K)
    for tile in tl.range(tl.program_id(0), across * down, PROGRAMS, flatten=True):
        first = tile // (GROUP_M * across) * GROUP_M
        height = min(down - first, GROUP_M)
        inside = tile % (GROUP_M * across)
        row, column = first + inside % height, inside // height
        rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
        # Rows and columns behind the last are read as the first ones, and not written.
        safe_rows = tl.max_contiguous(tl.multiple_of(tl.where(rows < M, rows, 0), BLOCK_M), BLOCK_M)
        safe_columns = tl.where(columns < N, columns, 0)
        safe_columns = tl.max_contiguous(tl.multiple_of(safe_columns, BLOCK_N), BLOCK_N)
        total = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
        for k in range((K + BLOCK_K - 1) // BLOCK_K):
            at = k * BLOCK_K + terms
            left = a + safe_rows[:, None] * stride_am + at[None, :] * stride_ak
            right = b + at[:, None] * stride_bk + safe_columns[None, :] * stride_bn
            x = tl.load(left, mask=at[None, :] < K, other=0.0)
            y = tl.load(right, mask=at[:, None] < K, other=0.0)
            total = tl.dot(x, y, total, input_precision="ieee")
        inside_c = (rows[:, None] < M) & (columns[None, :] < N)
        at_c = c + rows[:, None] * stride_cm + columns[None, :]
        tl.store(at_c, total.to(c.dtype.element_ty), mask=inside_c)


def prepared(a: Tensor, b: Tensor, out: Tensor) -> Callable[..., Tensor]:
    """Returns a call that writes a (M, K) times b (K, N) to `out`, whose rows are contiguous, and
    returns it. Raises Refused for sizes that 32 bits do not index.
    """
    (M, K), N = a.shape, b.shape[1]
    if max(a.numel(), b.numel(), out.numel()) >= 2**31:
        raise Refused("the persistent Triton kernel indexes with 32 bits")
    tiles = -(-M // BLOCK_M) * -(-N // BLOCK_N)
    programs = min(sm_count(a.device), tiles)
    meta: dict[str, Any] = {
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": BLOCK_K[a.dtype],
        "GROUP_M": GROUP_M,
        "PROGRAMS": programs,
        "num_stages": STAGES,
        "num_warps": WARPS,
    }

    def call(b: Tensor = b) -> Tensor:
        strides = *a.stride(), *b.stride(), out.stride(0)
        _product[(programs,)](a, b, out, M, N, K, *strides, **meta)
        return out

    return call
