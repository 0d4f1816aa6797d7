"""What `hopper.gemm` does to sums before it rounds them: `outblas.epilogue` in registers, a slab of 64 rows at a time.

A thread has four values of every eight columns of a slab: two neighbours of one row, and those of the row eight below.
What lies in memory is read one element after the other, at the edge of a matrix the last element once more, so that no
load waits for a comparison.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from .config import WARPGROUP

# gelu(x) = x Φ(x) = x / (1 + 2^-v) with v = x p(x²), and so are tanh's variant and silu: coefficients of p from the
# constant on, in bits. Φ's are a fit: its gelu is within 1.6e-7 |x| in fp32 arithmetic, below -6 within 1e-9 of 0.
_LOG2E = 1.4426950408889634
_ERF = (
    1.5957692618786827, 0.07266804902870688, -6.684545669869996e-05, -0.0001100166672455707, 7.831996633362428e-06,
    -2.573994760121863e-07, 3.3259117274699695e-09,
)  # fmt: skip
_SQUARE = {
    "gelu": tuple(_LOG2E * c for c in _ERF),
    "gelu_tanh": (_LOG2E * 1.5957691216057308, _LOG2E * 1.5957691216057308 * 0.044715),
    "silu": (_LOG2E,),
}


def register(config, width: int, i: int, column: int) -> int:
    """The first of four accumulators that hold eight columns of row group i of a tile so many columns wide: they lie
    ((2, 2, V), MMA_M, MMA_N).
    """
    mma_n, tall = config.mma_n or width, config.tile_m // (64 * config.sharing)
    return int(column % mma_n // 2 + mma_n // 2 * (i + tall * (column // mma_n)))


@cute.jit
def activate(name: cutlass.Constexpr, values):
    """Each value becomes its function's."""
    for i in cutlass.range_constexpr(cute.size(values)):
        x = values[i]
        if cutlass.const_expr(name == "relu"):
            values[i] = Float32(0.0) if x < 0.0 else x  # NaN stays
        else:
            bits = Float32(_SQUARE[name][-1])
            for c in cutlass.range_constexpr(len(_SQUARE[name]) - 1):
                bits = cute.math.fma(bits, x * x, Float32(_SQUARE[name][-2 - c]))
            values[i] = x * cute.arch.rcp_approx(1.0 + cute.math.exp2(-(x * bits), fastmath=True))


def each(k, tensor, kind, place, half, count: int):
    """The element of a tensor that belongs to each of so many values, in the first or second half of the columns, in
    fp32. `kind`: "one" for all, "columns" or "rows" of one each, "pairs" of columns, which begin at whole pairs,
    "matrix", or "batch" of matrices.
    """
    row, column, matrix = place
    M, N = k.extents
    found = []
    for v in range(0, count, 4):
        rows = [cutlass.min(row + i * 8, M - 1) for i in range(2)]
        columns = [cutlass.min(column + v * 2 + i, N - 1) + half * N for i in range(2)]
        if kind == "pairs":
            pair = held(tensor.iterator + (cutlass.min(column + v * 2, N - 2) + half * N), 2)
            four = [pair[i % 2] for i in range(4)]
        elif kind == "one":
            four = [tensor[0]] * 4
        else:
            ways = {"rows": lambda r, c: r, "columns": lambda r, c: c, "matrix": lambda r, c: (r, c)}
            way = ways.get(kind, lambda r, c: (r, c, matrix))
            four = [tensor[way(rows[i // 2], columns[i % 2])] for i in range(4)]
        found += [value.to(Float32) for value in four]
    return found


@cute.jit
def add(k, values, tensor, kind: cutlass.Constexpr, factor, place, half: cutlass.Constexpr):
    """values += factor · tensor, as `each` says."""
    theirs = each(k, tensor, kind, place, half, cute.size(values))
    for v in cutlass.range_constexpr(cute.size(values)):
        values[v] += factor * theirs[v]


@cute.jit
def scale(k, values, tensor, kind: cutlass.Constexpr, place, half: cutlass.Constexpr):
    """values *= tensor, as `each` says."""
    theirs = each(k, tensor, kind, place, half, cute.size(values))
    for v in cutlass.range_constexpr(cute.size(values)):
        values[v] *= theirs[v]


def held(pointer, count: int):
    """So many neighbours in memory, in registers: they begin at a multiple of their size."""
    dtype = pointer.dtype
    at = cute.make_ptr(dtype, pointer.toint(), pointer.memspace, assumed_align=count * dtype.width // 8)
    registers = cute.make_rmem_tensor((count,), dtype)
    cute.autovec_copy(cute.make_tensor(at, count), registers)
    return registers


def place(k, config, work, i: int, start: int):
    """Row, column and matrix of the first value that a thread has in row group i from column `start` of the tile on."""
    lane = k.tidx % 32
    row = work.m * config.tile_m + (i * config.sharing + k.share) * 64 + k.tidx % WARPGROUP // 32 * 16 + lane // 4
    return row, work.column + start + lane % 4 * 2, work.matrix


@cute.jit
def sums(k, config: cutlass.Constexpr, work, i: cutlass.Constexpr, start: cutlass.Constexpr, shape: cutlass.Constexpr,
         half: cutlass.Constexpr, fetched=None):  # fmt: skip
    """x of `outblas.epilogue`: values of row group i from column `start` of the tile on, as many as `shape` has.
    `fetched`: what came through shared memory for them, if anything did.
    """
    form, at = k.form, place(k, config, work, i, start)
    values = cute.make_rmem_tensor(shape, Float32)
    for v in cutlass.range_constexpr(cute.size(values)):
        values[v] = k.acc[register(config, k.width, i, start + half * config.tile_n + v // 4 * 8) + v % 4]
    if cutlass.const_expr(form.formats != ""):
        scale(k, values, k.scale_a, form.scale_a, at, half)
        scale(k, values, k.scale_b, form.scale_b, at, half)
    for v in cutlass.range_constexpr(cute.size(values)):
        if cutlass.const_expr(form.scaled):
            values[v] *= k.alpha
        if cutlass.const_expr(form.addend == "staged"):
            values[v] += k.beta * fetched[v].to(Float32)
    if cutlass.const_expr(form.addend not in ("", "staged")):
        add(k, values, k.addend, form.addend, k.beta, at, half)
    if cutlass.const_expr(form.bias != ""):
        add(k, values, k.bias, form.bias, Float32(1.0), at, half)
    return values


@cute.jit
def outputs(k, config: cutlass.Constexpr, work, i: cutlass.Constexpr, start: cutlass.Constexpr,
            shape: cutlass.Constexpr, fetched=None):  # fmt: skip
    """As `sums`, the output."""
    form = k.form
    values = sums(k, config, work, i, start, shape, 0, fetched)
    if cutlass.const_expr(form.function != ""):
        activate(form.function, values)
    if cutlass.const_expr(form.gated):
        others = sums(k, config, work, i, start, shape, 1)
        for v in cutlass.range_constexpr(cute.size(values)):
            values[v] *= others[v]
    if cutlass.const_expr(form.residual == "staged"):
        for v in cutlass.range_constexpr(cute.size(values)):
            values[v] += fetched[v].to(Float32)
    elif cutlass.const_expr(form.residual != ""):
        add(k, values, k.residual, form.residual, Float32(1.0), place(k, config, work, i, start), 0)
    return values


@cute.jit
def in_registers(k, config: cutlass.Constexpr, work, width: cutlass.Constexpr):
    """The outputs of a whole tile so many columns wide, as accumulators of such a tile lie."""
    tall = config.tile_m // (64 * config.sharing)
    made = cute.make_rmem_tensor((tall * width // 2,), Float32)
    for i in cutlass.range_constexpr(tall):
        for start in cutlass.range_constexpr(0, width, 8):
            values = outputs(k, config, work, i, start, (4,))
            for v in cutlass.range_constexpr(4):
                made[register(config, width, i, start) + v] = values[v]
    return made


@cute.jit
def store_sums(k, config: cutlass.Constexpr, work, width: cutlass.Constexpr):
    """x to memory, one element after the other."""
    form, dtype, aux = k.form, k.mC.element_type, k.aux
    M, N = k.extents
    for half in cutlass.range_constexpr(2 if form.gated else 1):
        for i in cutlass.range_constexpr(config.tile_m // (64 * config.sharing)):
            for start in cutlass.range_constexpr(0, width, 8):
                values = sums(k, config, work, i, start, (4,), half)
                row, column, matrix = place(k, config, work, i, start)
                for v in cutlass.range_constexpr(4):
                    r, c = row + v // 2 * 8, column + v % 2
                    if r < M and c < N:
                        at = (r, c + half * N, matrix) if cutlass.const_expr(form.batched) else (r, c + half * N)
                        aux[at] = values[v].to(dtype)
