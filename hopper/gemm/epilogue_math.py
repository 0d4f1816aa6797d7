"""The operations of `hopper.gemm` on accumulators before they are rounded: `core.epilogue` in
registers.

Of every eight columns of 64 rows, a thread has four values: two neighbours in one row, and two in
the row eight below. `EpilogueOps` process as many columns at a time as a subtile has. Tensors in
memory are read an element or a pair at a time. Beyond the edge of a matrix the last element is read
again, so that no load waits for a comparison.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Uint32

from outblas.hopper.gemm.records import Consumer, Cta, CtaEpilogue
from outblas.hopper.gemm.tile_scheduler import WorkTile
from outblas.hopper.parts.config import WARPGROUP

END = (1 << 30, 0)  # after every column of every row group

# gelu(x) = x Φ(x) = x / (1 + 2^-v) with v = x p(x²); gelu_tanh and silu have the same form. The
# tables hold the coefficients of p from the constant on, in bits. Those of Φ are a fit: its gelu is
# within 1.6e-7 |x| in fp32 arithmetic, and below -6 within 1e-9 of 0.
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
# "gelu_fit": gelu(x) = max(x, 0) - t Φ(-t), t = min(|x|, 6), with one special function. The tables
# hold log2 Φ(-t) in powers of -t. The result is within `traits.FIT` of gelu's value for bf16,
# within 4.1e-6 for fp16, and within 6e-9 of 0 below -5.
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


# ---- the accumulators of a tile
class ElementCoord(NamedTuple):
    """Row, column and matrix of the first of a thread's values in some columns."""

    row: Any
    column: Any
    matrix: Any


@dataclass(frozen=True)
class EpilogueTile:
    """A tile whose sums a consumer holds. `acc` belongs to a tile `width` columns wide and has the
    layout ((2, 2, V), MMA_M, MMA_N); a gated pair counts as two columns.
    """

    epilogue: CtaEpilogue
    consumer: Consumer
    work: WorkTile
    acc: Any
    width: int

    def first_coord(self, i: int, start: int) -> ElementCoord:
        """Returns the coordinate of this thread's first value in row group i at or after column
        `start` of the tile.
        """
        config, thread = self.epilogue.config, self.consumer.context.thread
        lane = thread % 32
        row = (
            self.work.first_row(config.tile_m)
            + (i * config.warpgroups_per_tile + self.consumer.warpgroup_in_tile) * 64
            + thread % WARPGROUP // 32 * 16
            + lane // 4
        )
        return ElementCoord(row, self.work.column + start + lane % 4 * 2, self.work.matrix)

    def registers(self, i: int, start: int, columns: int, half: int = 0) -> list[int]:
        """Returns the accumulators of `columns` columns in row group i; for gated pairs those of
        one half.
        """
        return registers(self.epilogue.config, self.width, i, start, columns, half)

    def values(self, which):
        """Returns copies of these accumulators."""
        values = cute.make_rmem_tensor((len(which),), Float32)
        for v, r in enumerate(which):
            values[v] = self.acc[r]
        return values

    def put_back(self, which, values):
        """Replaces these accumulators by `values`."""
        for v, r in enumerate(which):
            self.acc[r] = values[v]


def registers(config, width: int, i: int, start: int, columns: int, half: int = 0) -> list[int]:
    """Returns the indices of the accumulators, in a tile `width` columns wide, that hold `columns`
    columns of row group i; for gated pairs those of one half of the tile. Accumulators have the
    layout ((2, 2, V), MMA_M, MMA_N), four per eight columns.
    """
    mma_n, rows = config.mma_n or width, config.tile_m // (64 * config.warpgroups_per_tile)
    starts = range(start + half * config.tile_n, start + half * config.tile_n + columns, 8)
    return [
        c % mma_n // 2 + mma_n // 2 * (i + rows * (c // mma_n)) + v
        for c in starts
        for v in range(4)
    ]


# ---- activations
def polynomial(coefficients, x):
    """Evaluates a polynomial whose coefficients start with the constant."""
    value = Float32(coefficients[-1])
    for c in coefficients[-2::-1]:
        value = cute.math.fma(value, x, Float32(c))
    return value


@cute.jit
def activate(name: cutlass.Constexpr, values, dtype: cutlass.Constexpr):
    """Applies an activation to each value, for outputs of a dtype."""
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


# ---- values in memory
def read_elements(tile: EpilogueTile, tensor, kind, coord: ElementCoord, half, count: int):
    """Returns the tensor's element for each of `count` values, in the first or second half of the
    columns, in fp32.

    `kind` is the tensor's access in `KernelTraits`: "one" for all values, "columns" or "rows" with
    one element each, "pairs" of columns, which begin at whole pairs, "matrix", "batch" of matrices,
    or "scattered": a matrix at the rows of C in which these rows are stored.
    """
    if kind == "pairs":
        return elements_of_pairs(read_pairs(tile, tensor, coord, half, count))
    row, column, matrix = coord
    M, N = tile.epilogue.extents
    scattered = scattered_rows(tile, row) if kind == "scattered" else None
    elements = []
    for v in range(0, count, 4):
        rows = scattered or [cutlass.min(row + i * 8, M - 1) for i in range(2)]
        columns = [cutlass.min(column + v * 2 + i, N - 1) + half * N for i in range(2)]
        if kind == "one":
            four = [tensor[0]] * 4
        else:
            indices = {
                "rows": lambda r, c: r,
                "columns": lambda r, c: c,
                "matrix": lambda r, c: (r, c),
                "scattered": lambda r, c: (r, c),
            }
            index = indices.get(kind, lambda r, c: (r, c, matrix))
            four = [tensor[index(rows[i // 2], columns[i % 2])] for i in range(4)]
        elements += [value.to(Float32) for value in four]
    return elements


def scattered_rows(tile: EpilogueTile, row):
    """Returns the rows of C in which a thread's two rows are stored; those outside of C, which are
    not stored, are clamped.
    """
    index, last = tile.epilogue.tensors.scatter_index, tile.epilogue.extents[0] - 1
    own = [index[cutlass.min(row + i * 8, last)] for i in range(2)]
    return [cutlass.min(cutlass.max(r, 0), last) for r in own]


def read_pairs(tile: EpilogueTile, tensor, coord: ElementCoord, half, count: int):
    """Returns, from a vector of columns, the pair of neighbours for each group of four values, in
    the dtype of memory.
    """
    N = tile.epilogue.extents[1]
    first = [cutlass.min(coord.column + v * 2, N - 2) + half * N for v in range(0, count, 4)]
    return [load_vector(tensor.iterator + at, 2) for at in first]


def elements_of_pairs(pairs):
    """Returns the element for each value, in fp32. Both rows of a group have the same columns."""
    return [value for pair in pairs for value in to_fp32(pair) * 2]


@cute.jit
def prefetch_bias(cta: Cta, work: WorkTile):
    """One loading warp: prefetches a tile's bias into L1, 32 times 8 columns, while the products
    run.
    """
    epilogue = cta.scheduler.tile_epilogue(cta.epilogue, work)
    column = cutlass.min(work.column + cta.context.thread % 32 * 8, epilogue.extents[1] - 1)
    cute.arch.inline_ptx(
        "prefetch.global.L1 [{$r0}];",
        read_only_args=[(epilogue.tensors.bias.iterator + column).toint()],
    )


def to_fp32(values):
    """Converts registers to fp32. A bf16 value is the upper half of an fp32 value, so one
    instruction per value suffices where a conversion takes two.
    """
    count, dtype = cute.size(values), values.element_type
    if dtype is not BFloat16 or count % 2:
        return [values[v].to(Float32) for v in range(count)]
    words, exact = cute.recast_tensor(values, Uint32), cute.make_rmem_tensor((count,), Uint32)
    for v in range(0, count, 2):
        exact[v], exact[v + 1] = words[v // 2] << Uint32(16), words[v // 2] & Uint32(0xFFFF0000)
    exact = cute.recast_tensor(exact, Float32)
    return [exact[v] for v in range(count)]


def load_vector(pointer, count: int):
    """Loads `count` neighbours into registers; they begin at a multiple of their size."""
    dtype = pointer.dtype
    at = cute.make_ptr(
        dtype, pointer.toint(), pointer.memspace, assumed_align=count * dtype.width // 8
    )
    vector = cute.make_rmem_tensor((count,), dtype)
    cute.autovec_copy(cute.make_tensor(at, count), vector)
    return vector


# ---- arithmetic on the values of a subtile
def add_scaled(values, factor, others):
    """Computes values += factor · others; a factor of None is 1. The instructions are explicit,
    because compilers would fuse a product into a sum or not, depending on the surrounding code.
    """
    for v, other in enumerate(others):
        if factor is None:
            values[v] = cute.math.add(
                values[v], other, rounding=cute.math.RoundingMode.NEAREST_EVEN
            )
        else:
            values[v] = cute.math.fma(factor, other, values[v])


@cute.jit
def add_tensor(
    tile: EpilogueTile,
    values,
    tensor,
    kind: cutlass.Constexpr,
    factor,
    coord: ElementCoord,
    half: cutlass.Constexpr,
):
    """Computes values += factor · tensor, with the elements of `read_elements`."""
    add_scaled(values, factor, read_elements(tile, tensor, kind, coord, half, cute.size(values)))


@cute.jit
def multiply_tensor(
    tile: EpilogueTile,
    values,
    tensor,
    kind: cutlass.Constexpr,
    coord: ElementCoord,
    half: cutlass.Constexpr,
):
    """Computes values *= tensor, with the elements of `read_elements`."""
    theirs = read_elements(tile, tensor, kind, coord, half, cute.size(values))
    for v in cutlass.range_constexpr(cute.size(values)):
        values[v] *= theirs[v]


# ---- the operations of a tile
class EpilogueOps:
    """The operations that a consumer has not applied yet to the accumulators of a tile.

    Each part is (row group, first column, columns). Its operations up to x, the input of the
    activation, come first (for gated pairs in both halves), then those up to the output.
    """

    def __init__(self, tile: EpilogueTile):
        self.tile = tile
        config, gated = tile.epilogue.config, tile.epilogue.traits.gated
        columns, width = min(64, config.tile_n), tile.width // (2 if gated else 1)
        if tile.consumer.writer is not None:
            columns = min(columns, tile.consumer.writer.columns)
        self.parts = [
            (i, start, min(columns, width - start))
            for i in range(config.tile_m // (64 * config.warpgroups_per_tile))
            for start in range(0, width, columns)
        ]
        self.to_x = {0: list(self.parts), 1: list(self.parts) if gated else []}
        self.to_outputs = list(self.parts)
        self.bias = self.read_bias()

    def read_bias(self):
        """Reads the bias of the next part before it is needed; returns None where it is not read in
        pairs.
        """
        traits = self.tile.epilogue.traits
        if traits.bias != "pairs" or traits.gated or not self.to_x[0]:
            return None
        i, start, columns = self.to_x[0][0]
        coord = self.tile.first_coord(i, start)
        return read_pairs(self.tile, self.tile.epilogue.tensors.bias, coord, 0, columns // 2)

    def compute_x(self, half: int, end: tuple[int, int] = END):
        """Turns accumulators into x, for all parts before `end` (row group, column)."""
        left = self.to_x[half]
        while left and left[0][:2] < end:
            part, bias = left.pop(0), self.bias
            self.bias = self.read_bias() if half == 0 else bias
            sums_to_x(self.tile, part, half, bias)

    def compute_outputs(self, end: tuple[int, int] = END):
        """Turns accumulators into outputs, for all parts before `end` (row group, column). What
        comes through shared memory is added later.
        """
        while self.to_outputs and self.to_outputs[0][:2] < end:
            i, start, columns = part = self.to_outputs.pop(0)
            for half in range(2 if self.tile.epilogue.traits.gated else 1):
                self.compute_x(half, (i, start + columns))
            x_to_outputs(self.tile, part)


@cute.jit
def sums_to_x(tile: EpilogueTile, part: cutlass.Constexpr, half: cutlass.Constexpr, bias):
    """Turns the accumulators of a part into x. `bias` is the bias that was read before, or None."""
    (i, start, columns), traits = part, tile.epilogue.traits
    tensors = tile.epilogue.tensors
    coord, which = tile.first_coord(i, start), tile.registers(i, start, columns, half)
    values = tile.values(which)
    if cutlass.const_expr(traits.formats != "" and traits.scale_a != "blocks"):
        multiply_tensor(tile, values, tensors.scale_a, traits.scale_a, coord, half)
        multiply_tensor(tile, values, tensors.scale_b, traits.scale_b, coord, half)
    if cutlass.const_expr(traits.scaled):
        for v in cutlass.range_constexpr(cute.size(values)):
            values[v] *= tensors.alpha
    if cutlass.const_expr(traits.addend not in ("", "staged")):
        add_tensor(tile, values, tensors.addend, traits.addend, tensors.beta, coord, half)
    if cutlass.const_expr(bias is not None):
        add_scaled(values, None, elements_of_pairs(bias))
    elif cutlass.const_expr(traits.bias != ""):
        add_tensor(tile, values, tensors.bias, traits.bias, None, coord, half)
    tile.put_back(which, values)


@cute.jit
def x_to_outputs(tile: EpilogueTile, part: cutlass.Constexpr):
    """Turns x of a part into outputs. If an addend is still to come from shared memory, the
    activation must wait for it.
    """
    (i, start, columns), traits = part, tile.epilogue.traits
    which, weights = tile.registers(i, start, columns), tile.epilogue.tensors.scatter_weights
    values = tile.values(which)
    if cutlass.const_expr(traits.function != "" and traits.addend != "staged"):
        activate(traits.function, values, tile.epilogue.dtype)
    if cutlass.const_expr(traits.gated):
        others = tile.values(tile.registers(i, start, columns, 1))
        for v in cutlass.range_constexpr(cute.size(values)):
            values[v] *= others[v]
    if cutlass.const_expr(weights is not None):
        multiply_tensor(tile, values, weights, "rows", tile.first_coord(i, start), 0)
    if cutlass.const_expr(traits.residual not in ("", "staged")):
        residual, coord = tile.epilogue.tensors.residual, tile.first_coord(i, start)
        add_tensor(tile, values, residual, traits.residual, None, coord, 0)
    tile.put_back(which, values)


@cute.jit
def add_source(epilogue: CtaEpilogue, values, load_source: cutlass.Constexpr):
    """Adds what `load_source` returns from shared memory to the outputs."""
    traits = epilogue.traits
    if cutlass.const_expr(traits.addend == "staged"):
        add_scaled(values, epilogue.tensors.beta, to_fp32(load_source()))
        if cutlass.const_expr(traits.function != ""):
            activate(traits.function, values, epilogue.dtype)
    if cutlass.const_expr(traits.residual == "staged"):
        add_scaled(values, None, to_fp32(load_source()))


def output_registers(operations: EpilogueOps, width: int):
    """Returns the outputs of a whole tile, in the accumulator layout of a tile `width` columns
    wide.
    """
    operations.compute_outputs()
    tile = operations.tile
    config = tile.epilogue.config
    outputs = cute.make_rmem_tensor(
        (config.tile_m // (64 * config.warpgroups_per_tile) * width // 2,), Float32
    )
    for i, start, columns in operations.parts:
        targets = registers(config, width, i, start, columns)
        for target, source in zip(targets, tile.registers(i, start, columns), strict=True):
            outputs[target] = tile.acc[source]
    return outputs


def store_aux(operations: EpilogueOps):
    """Stores x to memory, one element after the other."""
    for half in range(2 if operations.tile.epilogue.traits.gated else 1):
        operations.compute_x(half)
        for part in operations.parts:
            store_aux_part(operations.tile, part, half)


@cute.jit
def store_aux_part(tile: EpilogueTile, part: cutlass.Constexpr, half: cutlass.Constexpr):
    """Stores x of a part, in one half of the columns, up to the end of C or of the group."""
    i, start, columns = part
    aux, (M, N) = tile.epilogue.tensors.aux, tile.epilogue.extents
    if cutlass.const_expr(tile.work.end_row is not None):
        M = tile.work.end_row
    row, column, matrix = tile.first_coord(i, start)
    which = tile.registers(i, start, columns, half)
    for v in cutlass.range_constexpr(len(which)):
        r, c = row + v % 4 // 2 * 8, column + v // 4 * 8 + v % 2
        if r < M and c < N:
            index = (
                (r, c + half * N, matrix)
                if cutlass.const_expr(tile.epilogue.traits.batched)
                else (r, c + half * N)
            )
            aux[index] = tile.acc[which[v]].to(tile.epilogue.dtype)
