"""Device code that Triton kernels, Gluon kernels and the interpreter share: which tile a CTA works
on, and epilogues in fp32.

Triton compiles a `triton.jit` function in the dialect of the kernel that calls it. The records are
defined in `records.py`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from outblas.device.records import OutputCoord, TileOrigin


@triton.jit
def current_tile(size, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Returns the TileOrigin of this CTA. CTAs process GROUP_M rows of tiles together, column by
    column, so that CTAs that run at the same time share rows of A and columns of B in L2.
    """
    tiles_m = (size.M + BLOCK_M - 1) // BLOCK_M
    tiles_n = (size.N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) % (tiles_m * tiles_n)
    product = tl.program_id(0) // (tiles_m * tiles_n)
    in_group = tile % (GROUP_M * tiles_n)
    top = tile // (GROUP_M * tiles_n) * GROUP_M
    rows = tl.minimum(tiles_m - top, GROUP_M)
    return TileOrigin(
        (top + in_group % rows) * BLOCK_M,
        in_group // rows * BLOCK_N,
        (product // size.inner).to(tl.int64),
        (product % size.inner).to(tl.int64),
    )


@triton.jit
def matrix_ptr(ptr, strides, tile):
    """Returns a pointer to the first element of the batch's matrix that a tile belongs to."""
    return ptr + tile.outer * strides.outer + tile.inner * strides.inner


@triton.jit
def activate(x, FUNCTION: tl.constexpr):
    """Applies one of `epilogue.FUNCTIONS` to x; "" returns x unchanged. NaN and infinities give the
    same results as in torch.
    """
    if FUNCTION == "relu":
        x = tl.where(x < 0, 0.0, x)
    elif FUNCTION == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif FUNCTION == "gelu_tanh":  # (1 + tanh u) / 2 = 1 / (1 + exp(-2u))
        x = x / (1 + tl.exp(-1.5957691216057308 * x * (1 + 0.044715 * x * x)))
    elif FUNCTION == "silu":
        x = x / (1 + tl.exp(-x))
    return x


@triton.jit
def gated_columns(index, column, N, WIDTH: tl.constexpr):
    """Returns the columns of the output, and of B, that belong to the columns of a gated tile: the
    first WIDTH columns are the gate's, the rest are the columns that it multiplies, which lie N
    columns further in B.

    `column` counts from 0, `index` from the tile's first column of the output.
    """
    second_half = column // WIDTH
    index -= second_half * WIDTH
    return index, index + second_half * N


@triton.jit
def split_columns(x):
    """Splits a tile's columns into a left and a right half."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def quarter_columns(x):
    """Splits a tile's columns into four parts, from left to right."""
    left, right = split_columns(x)
    return split_columns(left) + split_columns(right)


@triton.jit
def element_ptr(tensor, coord):
    """Returns pointers to a tensor's elements at a coordinate; to a single row or column where all
    of them are the same.
    """
    ptr = tensor.ptr + coord.outer * tensor.outer + coord.inner * tensor.inner
    if tensor.row is None:
        return ptr + coord.n * tensor.col
    elif tensor.col is None:
        return ptr + coord.m * tensor.row
    else:
        return ptr + (coord.m * tensor.row + coord.n * tensor.col)


@triton.jit
def load_source(tensor, coord, mask):
    """Loads the bias or the residual at a coordinate, as fp32."""
    if tensor.row is None:
        mask = coord.mask_n
    elif tensor.col is None:
        mask = coord.mask_m
    return tl.load(element_ptr(tensor, coord), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def round_to(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Rounds x to the nearest value of dtype; the interpreter's own conversion would truncate to
    bf16.
    """
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, nearest, x)
    return x.to(dtype)


@triton.jit
def linear_part(
    acc,
    c,
    epilogue_tensors,
    alpha,
    beta,
    coord,
    mask,
    EPILOGUE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Returns x = alpha · acc + beta · C. With an epilogue, adds the bias and stores x as aux."""
    x = acc * alpha
    if c.ptr is not None:
        c_ptr = element_ptr(c, coord)
        x += beta * tl.load(c_ptr, mask=mask, other=0.0).to(tl.float32)
    if EPILOGUE is not None:
        if epilogue_tensors.bias.ptr is not None:
            x += load_source(epilogue_tensors.bias, coord, mask)
        if epilogue_tensors.aux.ptr is not None:
            aux_ptr = element_ptr(epilogue_tensors.aux, coord)
            tl.store(aux_ptr, round_to(x, aux_ptr.dtype.element_ty, INTERPRETED), mask=mask)
    return x


@triton.jit
def store_outputs(
    sums,
    c,
    out,
    epilogue_tensors,
    alpha,
    beta,
    N,
    coord,
    EPILOGUE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Applies the epilogue to `sums` and stores the output at a coordinate.

    `sums` is a tuple of one tensor, or of two (gate and value) where the epilogue is gated. Without
    an epilogue EPILOGUE and `epilogue_tensors` are None.
    """
    mask = coord.mask_m & coord.mask_n
    y = linear_part(sums[0], c, epilogue_tensors, alpha, beta, coord, mask, EPILOGUE, INTERPRETED)
    if EPILOGUE is not None:
        FUNCTION: tl.constexpr = EPILOGUE.function
        y = activate(y, FUNCTION)
        if EPILOGUE.gated:
            gated = OutputCoord(
                coord.m, coord.n + N, coord.mask_m, coord.mask_n, coord.outer, coord.inner
            )
            y *= linear_part(
                sums[1], c, epilogue_tensors, alpha, beta, gated, mask, EPILOGUE, INTERPRETED
            )
        if epilogue_tensors.residual.ptr is not None:
            y += load_source(epilogue_tensors.residual, coord, mask)
    out_ptr = element_ptr(out, coord)
    tl.store(out_ptr, round_to(y, out_ptr.dtype.element_ty, INTERPRETED), mask=mask)
