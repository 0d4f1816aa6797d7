"""What `hopper.gemm` does to sums before it rounds them: `outblas.epilogue` in registers, where the
sums lie.

A thread has four values of every eight columns of 64 rows: two neighbours of one row, and those of
the row eight below. `Steps` are taken for as many columns at a time as a slab has. What lies in
memory is read an element or a pair at a time, at the edge of a matrix the last once more, so that
no load waits for a comparison.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Uint32

from ..core.config import WARPGROUP

END = (1 << 30, 0)  # behind every column of every row group

# gelu(x) = x Φ(x) = x / (1 + 2^-v) with v = x p(x²), and so are tanh's variant and silu:
# coefficients of p from the constant on, in bits. Φ's are a fit: its gelu is within 1.6e-7 |x| in
# fp32 arithmetic, below -6 within 1e-9 of 0.
_LOG2E = 1.4426950408889634
_ERF = (
    1.5957692618786827,
    0.07266804902870688,
    -6.684545669869996e-05,
    -0.0001100166672455707,
    7.831996633362428e-06,
    -2.573994760121863e-07,
    3.3259117274699695e-09,
)
_SQUARE = {
    "gelu": tuple(_LOG2E * c for c in _ERF),
    "gelu_tanh": (_LOG2E * 1.5957691216057308, _LOG2E * 1.5957691216057308 * 0.044715),
    "silu": (_LOG2E,),
}
# "gelu_fit": gelu(x) = max(x, 0) - t Φ(-t), t = min(|x|, 6), by one special function. log2 Φ(-t) in
# powers of -t: within FIT of gelu's value for bf16, 4.1e-6 for fp16, and 6e-9 of 0 below -5.
FIT = 1.3e-5
_TAIL = {
    BFloat16: (
        -1.0000170469284058,
        1.150876760482788,
        -0.4596008360385895,
        0.05262960121035576,
        0.007755917496979237,
        0.0007107094279490411,
        2.9597849788842723e-05,
    ),
    Float16: (
        -0.9999961256980896,
        1.1512305736541748,
        -0.45854493975639343,
        0.053845521062612534,
        0.008432507514953613,
        0.0009056261042132974,
        5.759354098699987e-05,
        1.585459131092648e-06,
    ),
}


def function(name: str, size: int, K: int) -> str:
    """As it is computed: gelu by a fit for 16 bits, where the bound of K roundings in fp32 is above
    the fit's.
    """
    return "gelu_fit" if name == "gelu" and size == 2 and K * 2**-23 > FIT else name


def polynomial(coefficients, x):
    """Its value, coefficients from the constant on."""
    value = Float32(coefficients[-1])
    for c in coefficients[-2::-1]:
        value = cute.math.fma(value, x, Float32(c))
    return value


@cute.jit
def activate(name: cutlass.Constexpr, values, dtype: cutlass.Constexpr):
    """Each value becomes its function's, for outputs of a dtype."""
    for i in cutlass.range_constexpr(cute.size(values)):
        x = values[i]
        if cutlass.const_expr(name == "relu"):
            values[i] = Float32(0.0) if x < 0.0 else x  # NaN stays
        elif cutlass.const_expr(name == "gelu_fit"):
            below, above = (
                cute.arch.fmax(-cute.math.absf(x), -6.0, nan=True),
                cute.arch.fmax(x, 0.0, nan=True),
            )
            values[i] = cute.math.fma(
                below, cute.math.exp2(polynomial(_TAIL[dtype], below), fastmath=True), above
            )
        else:
            v = x * polynomial(_SQUARE[name], x * x)
            values[i] = x * cute.arch.rcp_approx(1.0 + cute.math.exp2(-v, fastmath=True))


def each(k, tensor, kind, place, half, count: int):
    """The element of a tensor that belongs to each of so many values, in the first or second half
    of the columns, in fp32. `kind`: "one" for all, "columns" or "rows" of one each, "pairs" of
    columns, which begin at whole pairs, "matrix", or "batch" of matrices.
    """
    if kind == "pairs":
        return of_pairs(pairs(k, tensor, place, half, count))
    row, column, matrix = place
    M, N = k.extents
    found = []
    for v in range(0, count, 4):
        rows = [cutlass.min(row + i * 8, M - 1) for i in range(2)]
        columns = [cutlass.min(column + v * 2 + i, N - 1) + half * N for i in range(2)]
        if kind == "one":
            four = [tensor[0]] * 4
        else:
            ways = {
                "rows": lambda r, c: r,
                "columns": lambda r, c: c,
                "matrix": lambda r, c: (r, c),
            }
            way = ways.get(kind, lambda r, c: (r, c, matrix))
            four = [tensor[way(rows[i // 2], columns[i % 2])] for i in range(4)]
        found += [value.to(Float32) for value in four]
    return found


def pairs(k, tensor, place, half, count: int):
    """Of a vector of columns, the pair of each four values, as it lies in memory."""
    _, column, _ = place
    N = k.extents[1]
    first = [cutlass.min(column + v * 2, N - 2) + half * N for v in range(0, count, 4)]
    return [held(tensor.iterator + at, 2) for at in first]


def of_pairs(pairs):
    """The element that belongs to each value, in fp32: two rows have the same columns."""
    return [value for pair in pairs for value in widened(pair) * 2]


@cute.jit
def warm(k, work):
    """A warp that loads: a tile's bias comes to L1, 32 times 8 columns, while its products run."""
    column = cutlass.min(work.column + k.tidx % 32 * 8, k.extents[1] - 1)
    cute.arch.inline_ptx(
        "prefetch.global.L1 [{$r0}];", read_only_args=[(k.bias.iterator + column).toint()]
    )


def plus(values, factor, others):
    """values += factor · others, 1 if None. Compilers would round a product in a sum, or not, by
    what is around it.
    """
    for v, other in enumerate(others):
        if factor is None:
            values[v] = cute.math.add(
                values[v], other, rounding=cute.math.RoundingMode.NEAREST_EVEN
            )
        else:
            values[v] = cute.math.fma(factor, other, values[v])


@cute.jit
def add(k, values, tensor, kind: cutlass.Constexpr, factor, place, half: cutlass.Constexpr):
    """values += factor · tensor, as `each` says."""
    plus(values, factor, each(k, tensor, kind, place, half, cute.size(values)))


@cute.jit
def scale(k, values, tensor, kind: cutlass.Constexpr, place, half: cutlass.Constexpr):
    """values *= tensor, as `each` says."""
    theirs = each(k, tensor, kind, place, half, cute.size(values))
    for v in cutlass.range_constexpr(cute.size(values)):
        values[v] *= theirs[v]


def widened(values):
    """Registers in fp32. Of bf16 it is the upper half of the bits: one instruction each, for two of
    conversions.
    """
    count, dtype = cute.size(values), values.element_type
    if dtype is not BFloat16 or count % 2:
        return [values[v].to(Float32) for v in range(count)]
    words, exact = cute.recast_tensor(values, Uint32), cute.make_rmem_tensor((count,), Uint32)
    for v in range(0, count, 2):
        exact[v], exact[v + 1] = words[v // 2] << Uint32(16), words[v // 2] & Uint32(0xFFFF0000)
    exact = cute.recast_tensor(exact, Float32)
    return [exact[v] for v in range(count)]


def held(pointer, count: int):
    """So many neighbours in memory, in registers: they begin at a multiple of their size."""
    dtype = pointer.dtype
    at = cute.make_ptr(
        dtype, pointer.toint(), pointer.memspace, assumed_align=count * dtype.width // 8
    )
    registers = cute.make_rmem_tensor((count,), dtype)
    cute.autovec_copy(cute.make_tensor(at, count), registers)
    return registers


def place(k, config, work, i: int, start: int):
    """Row, column and matrix of the first value that a thread has in row group i from column
    `start` of the tile on.
    """
    lane = k.tidx % 32
    row = (
        work.m * config.tile_m
        + (i * config.sharing + k.share) * 64
        + k.tidx % WARPGROUP // 32 * 16
        + lane // 4
    )
    return row, work.column + start + lane % 4 * 2, work.matrix


class Steps:
    """What a consumer has yet to do to its sums of a tile `width` columns wide: for each piece of
    so many columns of a row group first those of x, of gated pairs in both halves, then the others.
    """

    def __init__(self, k, config, work, width: int):
        self.given = k, config, work
        columns, own = min(64, config.tile_n), width // (2 if k.form.gated else 1)
        if k.staged:
            columns = k.slab_columns
        self.pieces = [
            (i, start, min(columns, own - start))
            for i in range(config.tile_m // (64 * config.sharing))
            for start in range(0, own, columns)
        ]
        self.to_x = {0: list(self.pieces), 1: list(self.pieces) if k.form.gated else []}
        self.to_outputs = list(self.pieces)
        self.bias = self.read_bias()

    def read_bias(self):
        """That of the next piece, before it is needed: None where it does not come in pairs."""
        k, config, work = self.given
        if k.form.bias != "pairs" or k.form.gated or not self.to_x[0]:
            return None
        i, start, columns = self.to_x[0][0]
        return pairs(k, k.bias, place(k, config, work, i, start), 0, columns // 2)

    def x(self, half: int, end: tuple[int, int] = END):
        """Sums become x, up to a column of a row group."""
        k, config, work = self.given
        left = self.to_x[half]
        while left and left[0][:2] < end:
            piece, bias = left.pop(0), self.bias
            self.bias = self.read_bias() if half == 0 else bias
            become_x(k, config, work, piece, half, bias)

    def outputs(self, end: tuple[int, int] = END):
        """As `x`, outputs, but for what comes through shared memory."""
        k, config, work = self.given
        while self.to_outputs and self.to_outputs[0][:2] < end:
            i, start, columns = piece = self.to_outputs.pop(0)
            for half in range(2 if k.form.gated else 1):
                self.x(half, (i, start + columns))
            become_outputs(k, config, work, piece)


def registers(config, width: int, i: int, start: int, columns: int, half: int = 0) -> list[int]:
    """Which accumulators hold so many columns of row group i, of gated pairs in one half of the
    tile. They lie ((2, 2, V), MMA_M, MMA_N), four to eight columns.
    """
    mma_n, tall = config.mma_n or width, config.tile_m // (64 * config.sharing)
    starts = range(start + half * config.tile_n, start + half * config.tile_n + columns, 8)
    return [
        c % mma_n // 2 + mma_n // 2 * (i + tall * (c // mma_n)) + v
        for c in starts
        for v in range(4)
    ]


def values_of(k, which):
    values = cute.make_rmem_tensor((len(which),), Float32)
    for v, r in enumerate(which):
        values[v] = k.acc[r]
    return values


def put_back(k, which, values):
    for v, r in enumerate(which):
        k.acc[r] = values[v]


@cute.jit
def become_x(
    k, config: cutlass.Constexpr, work, piece: cutlass.Constexpr, half: cutlass.Constexpr, bias
):
    """`bias`: as it was read, if it was."""
    (i, start, columns), form = piece, k.form
    at, which = (
        place(k, config, work, i, start),
        registers(config, k.width, i, start, columns, half),
    )
    values = values_of(k, which)
    if cutlass.const_expr(form.formats != ""):
        scale(k, values, k.scale_a, form.scale_a, at, half)
        scale(k, values, k.scale_b, form.scale_b, at, half)
    if cutlass.const_expr(form.scaled):
        for v in cutlass.range_constexpr(cute.size(values)):
            values[v] *= k.alpha
    if cutlass.const_expr(form.addend not in ("", "staged")):
        add(k, values, k.addend, form.addend, k.beta, at, half)
    if cutlass.const_expr(bias is not None):
        plus(values, None, of_pairs(bias))
    elif cutlass.const_expr(form.bias != ""):
        add(k, values, k.bias, form.bias, None, at, half)
    put_back(k, which, values)


@cute.jit
def become_outputs(k, config: cutlass.Constexpr, work, piece: cutlass.Constexpr):
    """From x. Of an addend that is yet to come nothing can be done before."""
    (i, start, columns), form = piece, k.form
    which = registers(config, k.width, i, start, columns)
    values = values_of(k, which)
    if cutlass.const_expr(form.function != "" and form.addend != "staged"):
        activate(form.function, values, k.mC.element_type)
    if cutlass.const_expr(form.gated):
        others = values_of(k, registers(config, k.width, i, start, columns, 1))
        for v in cutlass.range_constexpr(cute.size(values)):
            values[v] *= others[v]
    if cutlass.const_expr(form.residual not in ("", "staged")):
        add(k, values, k.residual, form.residual, None, place(k, config, work, i, start), 0)
    put_back(k, which, values)


@cute.jit
def finished(k, values, come: cutlass.Constexpr):
    """Outputs, with what `come` returns for them, which came through shared memory."""
    if cutlass.const_expr(k.form.addend == "staged"):
        plus(values, k.beta, widened(come()))
        if cutlass.const_expr(k.form.function != ""):
            activate(k.form.function, values, k.mC.element_type)
    if cutlass.const_expr(k.form.residual == "staged"):
        plus(values, None, widened(come()))


def in_registers(k, config, width: int, steps):
    """The outputs of a whole tile so many columns wide, as accumulators of such a tile lie."""
    steps.outputs()
    made = cute.make_rmem_tensor((config.tile_m // (64 * config.sharing) * width // 2,), Float32)
    for i, start, columns in steps.pieces:
        there = registers(config, width, i, start, columns)
        for r, own in zip(there, registers(config, k.width, i, start, columns), strict=True):
            made[r] = k.acc[own]
    return made


def store_sums(k, config, work, steps):
    """x to memory, one element after the other."""
    for half in range(2 if k.form.gated else 1):
        steps.x(half)
        for piece in steps.pieces:
            store_piece(k, config, work, piece, half)


@cute.jit
def store_piece(
    k, config: cutlass.Constexpr, work, piece: cutlass.Constexpr, half: cutlass.Constexpr
):
    i, start, columns = piece
    aux, (M, N) = k.aux, k.extents
    row, column, matrix = place(k, config, work, i, start)
    which = registers(config, k.width, i, start, columns, half)
    for v in cutlass.range_constexpr(len(which)):
        r, c = row + v % 4 // 2 * 8, column + v // 4 * 8 + v % 2
        if r < M and c < N:
            at = (
                (r, c + half * N, matrix)
                if cutlass.const_expr(k.form.batched)
                else (r, c + half * N)
            )
            aux[at] = k.acc[which[v]].to(k.mC.element_type)
