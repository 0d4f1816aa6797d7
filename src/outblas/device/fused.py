"""Device code for what follows a product, in fp32, in kernels of Triton and of Gluon and in the
interpreter.

Triton makes functions of `triton.jit` in the dialect of the kernel that calls them. A view is
(pointer, outer, inner, m, n): where a tensor lies and how it steps along batch, rows and columns;
its pointer is None without the tensor, its m or n where all rows or columns are the same. A place
is (m, n, inside_m, inside_n, outer, inner): rows and columns of a tile as a column and a row, which
of them exist, and the indices of the batch.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def activate(x, FUNCTION: tl.constexpr):
    """One of `epilogue.FUNCTIONS`, x itself for "". NaN and infinities become what torch makes of
    them.
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
def pair(index, column, size, WIDTH: tl.constexpr):
    """Columns of the output, and of B, of a gated tile's columns, WIDTH of the gate and as many
    that it multiplies: `column` counts them from 0, `index` from the tile's first.
    """
    second = column // WIDTH
    index -= second * WIDTH
    return index, index + second * size


@triton.jit
def halves(x):
    """The left half of a tile's columns, and the right."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def quarters(x):
    """A tile's columns in four parts, from left to right."""
    left, right = halves(x)
    return halves(left) + halves(right)


@triton.jit
def pointers(view, place):
    """To a view's elements at a place: a row or a column of them where the others are the same."""
    ptr = view[0] + place[4] * view[1] + place[5] * view[2]
    if view[3] is None:
        return ptr + place[1] * view[4]
    elif view[4] is None:
        return ptr + place[0] * view[3]
    else:
        return ptr + (place[0] * view[3] + place[1] * view[4])


@triton.jit
def read(view, place, mask):
    """A view's elements at a place, as fp32."""
    inside = place[3] if view[3] is None else place[2] if view[4] is None else mask
    return tl.load(pointers(view, place), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def rounded(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """x to the nearest of dtype; the interpreter would truncate to bf16."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, nearest, x)
    return x.to(dtype)


@triton.jit
def x_of(
    acc, c, extra, alpha, beta, place, mask, FUNCTION: tl.constexpr, INTERPRETED: tl.constexpr
):
    """alpha · acc + beta · c, of an epilogue + bias, and stored as aux."""
    x = acc * alpha
    if c[0] is not None:
        c_ptr = pointers(c, place)
        x += beta * tl.load(c_ptr, mask=mask, other=0.0).to(tl.float32)
    if FUNCTION is not None:
        if extra[0][0] is not None:
            x += read(extra[0], place, mask)
        if extra[2][0] is not None:
            aux_ptr = pointers(extra[2], place)
            tl.store(aux_ptr, rounded(x, aux_ptr.dtype.element_ty, INTERPRETED), mask=mask)
    return x


@triton.jit
def finish(
    sums,
    c,
    out,
    extra,
    alpha,
    beta,
    N,
    place,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Stores what becomes of sums at a place: one tensor, or two of a gated pair. `extra` are the
    views of bias, residual and aux; without an epilogue FUNCTION is None, and so is `extra`.
    """
    mask = place[2] & place[3]
    y = x_of(sums[0], c, extra, alpha, beta, place, mask, FUNCTION, INTERPRETED)
    if FUNCTION is not None:
        y = activate(y, FUNCTION)
        if GATED:
            second = (place[0], place[1] + N, place[2], place[3], place[4], place[5])
            y *= x_of(sums[1], c, extra, alpha, beta, second, mask, FUNCTION, INTERPRETED)
        if extra[1][0] is not None:
            y += read(extra[1], place, mask)
    out_ptr = pointers(out, place)
    tl.store(out_ptr, rounded(y, out_ptr.dtype.element_ty, INTERPRETED), mask=mask)
