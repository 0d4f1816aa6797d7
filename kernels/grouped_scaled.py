"""The device code of grouped products of fp8 operands with scales of blocks: what takes the place
of the plain sum of `grouped_device`.

Operands come as bytes. GPUs with fp8 tensor cores multiply them as they are; for others they become
fp16, which holds every value of both formats exactly.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from outblas.kernels.portable import add_product


class GroupedScales(NamedTuple):
    """The scales of a grouped product and their strides, as in `core.grouped_scales`. Where groups
    have places of their own, `a_g` is the stride along groups less that of a group's rows, because
    rows are numbered through all groups.
    """

    a: Any
    b: Any
    a_g: Any
    a_m: Any
    a_k: Any
    b_g: Any
    b_k: Any
    b_n: Any


@triton.jit  # type: ignore[untyped-decorator]
def as_values(tile, FORMAT: tl.constexpr, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the values whose bytes a tile holds, in fp8 where it is NATIVE, else in fp16."""
    if NATIVE:
        values = tile.to(tl.float8e4nv if FORMAT == "e4m3" else tl.float8e5, bitcast=True)
    elif FORMAT == "e5m2":  # the upper byte of an fp16 value
        values = (tile.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        # Exponents of e4m3 are less by 8 than those of fp16, and subnormal ones fit in too.
        word = tile.to(tl.uint16)
        magnitude = word & 0x7F
        bits = (magnitude << 7) | ((word & 0x80) << 8)
        bits = tl.where(magnitude == 0x7F, 0x7E00, bits).to(tl.uint16)  # NaN
        values = bits.to(tl.float16, bitcast=True) * 256.0
    return values


@triton.jit  # type: ignore[untyped-decorator]
def sum_scaled_products(  # type: ignore[no-untyped-def]
    pointers,
    strides,
    scales,
    group,
    row,
    n,
    begin,
    end,
    mask_m,
    mask_n,
    TRAITS: tl.constexpr,
):
    """Returns the sums over the terms from `begin` to `end` of K, in fp32. `group`, `row`: the
    matrix of B, and the rows of A, in 64 bits.

    A step has terms of one block only, so it begins at a multiple of its terms.
    """
    BLOCK_M: tl.constexpr = TRAITS.block_m
    BLOCK_N: tl.constexpr = TRAITS.block_n
    BLOCK_K: tl.constexpr = TRAITS.block_k
    COLUMNS: tl.constexpr = TRAITS.scale_columns
    INTERPRETED_K: tl.constexpr = TRAITS.interpreted_k
    FORMAT_A: tl.constexpr = TRAITS.format_a
    FORMAT_B: tl.constexpr = TRAITS.format_b
    NATIVE: tl.constexpr = TRAITS.native
    first = begin // BLOCK_K * BLOCK_K
    offset = tl.arange(0, BLOCK_K)
    k = first.to(tl.int64) + offset
    n = n.to(tl.int64)[None, :]
    row = row[:, None]
    a_ptr = pointers.a + row * strides.a_m + k[None, :] * strides.a_k
    b_ptr = pointers.b + group * strides.b_g + k[:, None] * strides.b_k + n * strides.b_n
    scale_a_ptr = scales.a + group * scales.a_g + row * scales.a_m
    scale_b_ptr = scales.b + group * scales.b_g + n // COLUMNS * scales.b_n
    step = tl.full((), BLOCK_K, tl.int64)
    acc = tl.full((BLOCK_M, BLOCK_N), 0, tl.float32)
    for start in range(0, INTERPRETED_K if INTERPRETED_K else end - first, BLOCK_K):
        term = first + start + offset
        mask_k = (term >= begin) & (term < end)
        a_tile = tl.load(a_ptr, mask=mask_m & mask_k[None, :], other=0)
        b_tile = tl.load(b_ptr, mask=mask_k[:, None] & mask_n, other=0)
        is_there = tl.full((1, 1), 0, tl.int32) + first + start < end
        block = ((first + start) // 128).to(tl.int64)
        scale_a = tl.load(scale_a_ptr + block * scales.a_k, mask=mask_m & is_there, other=0.0)
        scale_b = tl.load(scale_b_ptr + block * scales.b_k, mask=mask_n & is_there, other=0.0)
        product = add_product(
            tl.full((BLOCK_M, BLOCK_N), 0, tl.float32),
            as_values(a_tile, FORMAT_A, NATIVE),
            as_values(b_tile, FORMAT_B, NATIVE),
            "ieee",
            INTERPRETED_K != 0,
        )
        acc = tl.fma(product, scale_a * scale_b, acc)
        a_ptr += step * strides.a_k
        b_ptr += step * strides.b_k
    return acc
