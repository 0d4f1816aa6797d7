"""The device code of grouped products, and the records that it takes. `grouped` is their host.

Where rows are ragged, group g owns the slots from begin[g] // block rows + g on, which are at least
as many as it has tile rows, whatever the sizes of groups are. So their number is known to the host,
a program finds its group by a binary search in the ends of groups, and a slot without rows ends at
once.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from outblas.device.fused import activate, gated_columns, quarter_columns, round_to, split_columns
from outblas.kernels.grouped_scaled import sum_scaled_products
from outblas.kernels.portable import add_product


class GroupedPointers(NamedTuple):
    """The tensors of a grouped product; None for those that it does not have."""

    a: Any
    b: Any
    out: Any
    offs: Any
    bias: Any
    residual: Any
    aux: Any
    a_index: Any
    scatter_index: Any
    scatter_weights: Any


class GroupedSizes(NamedTuple):
    """The sizes of a grouped product, as in GroupedProblem."""

    groups: Any
    M: Any
    N: Any
    K: Any
    rows_of_a: Any
    capacity: Any


class GroupedStrides(NamedTuple):
    """The strides of a grouped product in elements; those along groups are 0 for tensors that have
    none, as are all of a tensor that is missing.
    """

    a_m: Any
    a_k: Any
    b_g: Any
    b_k: Any
    b_n: Any
    out_g: Any
    out_m: Any
    out_n: Any
    bias_g: Any
    bias_n: Any
    residual_g: Any
    residual_m: Any
    residual_n: Any
    aux_g: Any
    aux_m: Any
    aux_n: Any


@dataclass(frozen=True)
class GroupTraits:
    """What is known when a kernel is compiled.

    block_m, block_n, block_k: the tile; a gated one makes block_n / 2 columns of the result.
    parts: how many parts of its columns are stored one after the other, because an epilogue of all
        columns at once would take too many registers.
    steps: those of a binary search among the groups.
    zero_tail: as in GroupedProblem.
    masked: each group has a place of its own, as GroupedProblem says of a `capacity`.
    function, gated: those of the epilogue.
    precision: of products of fp32 operands, "ieee" or "tf32".
    interpreted_k: K as a Python number, which the interpreter needs to iterate over a range; 0 when
        compiled.
    format_a, format_b: of fp8 operands with scales, "e4m3" or "e5m2"; "" for other operands.
    scale_columns: the columns of B that share a scale.
    native: the GPU multiplies fp8 operands itself.
    """

    block_m: int
    block_n: int
    block_k: int
    parts: int
    steps: int
    zero_tail: bool
    masked: bool
    function: str
    gated: bool
    precision: str
    interpreted_k: int
    format_a: str = ""
    format_b: str = ""
    scale_columns: int = 1
    native: bool = False


@triton.jit
def _group_begin(offs, group, extent):  # type: ignore[no-untyped-def]
    """Returns where a group begins in the ragged dimension, of size `extent`."""
    begin = tl.load(offs + group - 1, mask=group > 0, other=0)
    return tl.minimum(tl.maximum(begin, 0), extent)


@triton.jit  # type: ignore[untyped-decorator]
def _first_row(offs, group, size, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the first row of a group."""
    return group * size.capacity if MASKED else _group_begin(offs, group, size.M)


@triton.jit  # type: ignore[untyped-decorator]
def _end_row(offs, group, begin, size, TRAITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the row behind the last one of a group that begins at `begin`."""
    MASKED: tl.constexpr = TRAITS.masked
    ZERO_TAIL: tl.constexpr = TRAITS.zero_tail
    is_group = group < size.groups
    if MASKED:
        count = tl.load(offs + group, mask=is_group, other=0)
        end = begin + tl.minimum(tl.maximum(count, 0), size.capacity)
    else:
        end = tl.load(offs + group, mask=is_group, other=size.M if ZERO_TAIL else 0)
        end = tl.minimum(end, size.M)
    return end


@triton.jit  # type: ignore[untyped-decorator]
def _group_of(offs, slot, size, TRAITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the group that owns a slot: the last one whose slots begin at it or before. The group
    after all others owns what is left over.
    """
    ROWS: tl.constexpr = TRAITS.block_m
    STEPS: tl.constexpr = TRAITS.steps
    MASKED: tl.constexpr = TRAITS.masked
    low, high = slot * 0, slot * 0 + size.groups
    for _ in tl.static_range(STEPS):
        middle = (low + high + 1) // 2
        is_before = _first_row(offs, middle, size, MASKED) // ROWS + middle <= slot
        low, high = tl.where(is_before, middle, low), tl.where(is_before, high, middle - 1)
    return low


@triton.jit  # type: ignore[untyped-decorator]
def _columns(size, column, TRAITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the columns of B that a tile multiplies, and the mask of those that exist."""
    BLOCK_N: tl.constexpr = TRAITS.block_n
    GATED: tl.constexpr = TRAITS.gated
    OUT_COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    local = tl.arange(0, BLOCK_N)
    n = column * OUT_COLUMNS + local
    b_column, columns = n, size.N
    if GATED:
        columns = size.N // 2
        n, b_column = gated_columns(n, local, columns, OUT_COLUMNS)
    return b_column, (n < columns)[None, :]


@triton.jit
def _rows_of_a(pointers, size, m, mask):  # type: ignore[no-untyped-def]
    """Returns which row of A each row of a group is, in 64 bits."""
    row = m.to(tl.int64)
    if pointers.a_index is not None:
        index = tl.load(pointers.a_index + row, mask=mask, other=0)
        row = tl.minimum(tl.maximum(index, 0), size.rows_of_a - 1).to(tl.int64)
    return row


@triton.jit  # type: ignore[untyped-decorator]
def _sum_products(  # type: ignore[no-untyped-def]
    a,
    b,
    row,
    n,
    k,
    mask_m,
    mask_n,
    terms,
    strides,
    TRAITS: tl.constexpr,
):
    """Returns the sums over `terms` terms of K, in fp32. `row`: the rows of A, in 64 bits. `k`: the
    terms of the first block.
    """
    BLOCK_M: tl.constexpr = TRAITS.block_m
    BLOCK_N: tl.constexpr = TRAITS.block_n
    BLOCK_K: tl.constexpr = TRAITS.block_k
    INTERPRETED_K: tl.constexpr = TRAITS.interpreted_k
    PRECISION: tl.constexpr = (
        TRAITS.precision
    )  # as a field of its own it is no constant to triton 3.6
    a_ptr = a + row[:, None] * strides.a_m + k.to(tl.int64)[None, :] * strides.a_k
    b_ptr = b + k.to(tl.int64)[:, None] * strides.b_k + n.to(tl.int64)[None, :] * strides.b_n
    step = tl.full((), BLOCK_K, tl.int64)
    offset = tl.arange(0, BLOCK_K)
    acc = tl.full((BLOCK_M, BLOCK_N), 0, tl.float32)
    for start in range(0, INTERPRETED_K if INTERPRETED_K else terms, BLOCK_K):
        mask_k = offset < terms - start
        a_tile = tl.load(a_ptr, mask=mask_m & mask_k[None, :], other=0.0)
        b_tile = tl.load(b_ptr, mask=mask_k[:, None] & mask_n, other=0.0)
        acc = add_product(acc, a_tile, b_tile, PRECISION, INTERPRETED_K != 0)
        a_ptr += step * strides.a_k
        b_ptr += step * strides.b_k
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def _add_bias(  # type: ignore[no-untyped-def]
    x, pointers, strides, group, m, n, mask, INTERPRETED: tl.constexpr
):
    """Returns x + bias, which is stored as aux where there is one."""
    if pointers.bias is not None:
        at = pointers.bias + group * strides.bias_g + n * strides.bias_n
        x += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if pointers.aux is not None:
        at = pointers.aux + group * strides.aux_g + m * strides.aux_m + n * strides.aux_n
        tl.store(at, round_to(x, at.dtype.element_ty, INTERPRETED), mask=mask)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _store_tile(  # type: ignore[no-untyped-def]
    acc,
    pointers,
    size,
    strides,
    group,
    m,
    column,
    mask_m,
    in_group,
    TRAITS: tl.constexpr,
):
    """Stores a tile of a group's result, in the rows `mask_m`. Those of them that are not
    `in_group` have no terms; they are zeros, and have no epilogue.
    """
    BLOCK_N: tl.constexpr = TRAITS.block_n
    GATED: tl.constexpr = TRAITS.gated
    COUNT: tl.constexpr = TRAITS.parts
    FUNCTION: tl.constexpr = TRAITS.function
    OUT_COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    PART: tl.constexpr = BLOCK_N // COUNT
    INTERPRETED: tl.constexpr = TRAITS.interpreted_k != 0
    parts = (acc,) if COUNT == 1 else split_columns(acc) if COUNT == 2 else quarter_columns(acc)
    m = m.to(tl.int64)[:, None]
    target, weight, columns = m, 1.0, size.N
    if pointers.scatter_index is not None:
        target = tl.load(pointers.scatter_index + m, mask=mask_m, other=-1).to(tl.int64)
        mask_m &= (target >= 0) & (target < size.M)
    if pointers.scatter_weights is not None:
        weight = tl.load(pointers.scatter_weights + m, mask=in_group, other=0.0)
    if GATED:
        columns = size.N // 2
    for part in tl.static_range(COUNT // 2 if GATED else COUNT):
        n = column * OUT_COLUMNS + part * PART + tl.arange(0, PART)
        mask_n = (n < columns)[None, :]
        n = n.to(tl.int64)[None, :]
        has_x = in_group & mask_n
        y = _add_bias(parts[part], pointers, strides, group, m, n, has_x, INTERPRETED)
        y = activate(y, FUNCTION)
        if GATED:
            y *= _add_bias(
                parts[part + COUNT // 2],
                pointers,
                strides,
                group,
                m,
                n + columns,
                has_x,
                INTERPRETED,
            )
        if pointers.scatter_weights is not None:
            y *= weight
        if pointers.residual is not None:
            at = pointers.residual + group * strides.residual_g
            at += target * strides.residual_m + n * strides.residual_n
            y += tl.load(at, mask=has_x & mask_m, other=0.0).to(tl.float32)
        at = pointers.out + group * strides.out_g + target * strides.out_m + n * strides.out_n
        tl.store(at, round_to(y, at.dtype.element_ty, INTERPRETED), mask=mask_m & mask_n)


@triton.jit  # type: ignore[untyped-decorator]
def ragged_m_kernel(  # type: ignore[no-untyped-def]
    pointers, size, strides, scales, TRAITS: tl.constexpr
):
    """Computes one tile of x[m, :] = A[m, :] B[g] + bias[g] for the rows m of group g, and of what
    `GroupedProblem` says of x.
    """
    BLOCK_M: tl.constexpr = TRAITS.block_m
    OUT_COLUMNS: tl.constexpr = TRAITS.block_n // 2 if TRAITS.gated else TRAITS.block_n
    columns = size.N // 2 if TRAITS.gated else size.N
    columns = (columns + OUT_COLUMNS - 1) // OUT_COLUMNS
    slot, column = tl.program_id(0) // columns, tl.program_id(0) % columns
    MASKED: tl.constexpr = TRAITS.masked
    group = _group_of(pointers.offs, slot, size, TRAITS)
    begin = _first_row(pointers.offs, group, size, MASKED)
    end = _end_row(pointers.offs, group, begin, size, TRAITS)
    first = begin + (slot - begin // BLOCK_M - group) * BLOCK_M
    if first < end:
        m = first + tl.arange(0, BLOCK_M)
        n, mask_n = _columns(size, column, TRAITS)
        is_group = group < size.groups  # what is left over has no terms, and gets zeros
        matrix = group.to(tl.int64)
        mask_m = (m < end)[:, None]
        row, terms = _rows_of_a(pointers, size, m, m < end), tl.where(is_group, size.K, 0)
        if scales is not None:
            acc = sum_scaled_products(
                pointers, strides, scales, matrix, row, n, terms * 0, terms, mask_m, mask_n, TRAITS
            )
        else:
            acc = _sum_products(
                pointers.a,
                pointers.b + matrix * strides.b_g,
                row,
                n,
                tl.arange(0, TRAITS.block_k),
                mask_m,
                mask_n,
                terms,
                strides,
                TRAITS,
            )
        in_group = (m < tl.where(is_group, end, 0))[:, None]
        _store_tile(acc, pointers, size, strides, matrix, m, column, mask_m, in_group, TRAITS)


@triton.jit  # type: ignore[untyped-decorator]
def ragged_k_kernel(  # type: ignore[no-untyped-def]
    pointers, size, strides, scales, TRAITS: tl.constexpr
):
    """Computes one tile of x[g] = A[:, k] B[k, :] + bias[g] over the terms k of group g, and of
    what `GroupedProblem` says of x.
    """
    BLOCK_M: tl.constexpr = TRAITS.block_m
    OUT_COLUMNS: tl.constexpr = TRAITS.block_n // 2 if TRAITS.gated else TRAITS.block_n
    columns = size.N // 2 if TRAITS.gated else size.N
    columns = (columns + OUT_COLUMNS - 1) // OUT_COLUMNS
    rows = (size.M + BLOCK_M - 1) // BLOCK_M
    tile, group = tl.program_id(0) % (rows * columns), tl.program_id(0) // (rows * columns)
    begin = _group_begin(pointers.offs, group, size.K)
    end = tl.maximum(_group_begin(pointers.offs, group + 1, size.K), begin)
    m = tile % rows * BLOCK_M + tl.arange(0, BLOCK_M)
    n, mask_n = _columns(size, tile // rows, TRAITS)
    mask_m = (m < size.M)[:, None]
    row, matrix = m.to(tl.int64), group.to(tl.int64)
    if scales is not None:
        acc = sum_scaled_products(
            pointers, strides, scales, matrix, row, n, begin, end, mask_m, mask_n, TRAITS
        )
    else:
        acc = _sum_products(
            pointers.a,
            pointers.b,
            row,
            n,
            begin + tl.arange(0, TRAITS.block_k),
            mask_m,
            mask_n,
            end - begin,
            strides,
            TRAITS,
        )
    _store_tile(acc, pointers, size, strides, matrix, m, tile // rows, mask_m, mask_m, TRAITS)
