"""What `hopper.gemm` does to sums before it rounds them: `outblas.epilogue` in registers, where the
sums lie.

A thread has four values of every eight columns of 64 rows: two neighbours of one row, and those of
the row eight below. `EpilogueOps` are done for as many columns at a time as a subtile has. What
lies in memory is read an element or a pair at a time, at the edge of a matrix the last once more,
so that no load waits for a comparison.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Uint32

from ..core.config import WARPGROUP
from .records import Consumer, Cta, Epilogue
from .tile_scheduler import WorkTile

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


# ---- the sums of a tile
class ElementCoord(NamedTuple):
    """Row, column and matrix of the first value that a thread has of some columns."""

    row: Any
    column: Any
    matrix: Any


@dataclass(frozen=True)
class EpilogueTile:
    """A tile whose sums a consumer holds: `acc` of a tile `width` columns wide, ((2, 2, V), MMA_M,
    MMA_N), gated pairs counted as two columns.
    """

    epilogue: Epilogue
    consumer: Consumer
    work: WorkTile
    acc: Any
    width: int

    def first_coord(self, i: int, start: int) -> ElementCoord:
        """The first value that this thread has in row group i from column `start` of the tile
        on.
        """
        config, thread = self.epilogue.config, self.consumer.context.thread
        lane = thread % 32
        row = (
            self.work.m * config.tile_m
            + (i * config.warpgroups_per_tile + self.consumer.warpgroup_in_tile) * 64
            + thread % WARPGROUP // 32 * 16
            + lane // 4
        )
        return ElementCoord(row, self.work.column + start + lane % 4 * 2, self.work.matrix)

    def registers(self, i: int, start: int, columns: int, half: int = 0) -> list[int]:
        """The accumulators of `columns` columns of row group i, of gated pairs in one half."""
        return registers(self.epilogue.config, self.width, i, start, columns, half)

    def values(self, which):
        """Copies of these accumulators."""
        values = cute.make_rmem_tensor((len(which),), Float32)
        for v, r in enumerate(which):
            values[v] = self.acc[r]
        return values

    def put_back(self, which, values):
        """These accumulators become `values`."""
        for v, r in enumerate(which):
            self.acc[r] = values[v]


def registers(config, width: int, i: int, start: int, columns: int, half: int = 0) -> list[int]:
    """Which accumulators of a tile `width` columns wide hold `columns` columns of row group i, of
    gated pairs in one half of the tile. They lie ((2, 2, V), MMA_M, MMA_N), four to eight columns.
    """
    mma_n, rows = config.mma_n or width, config.tile_m // (64 * config.warpgroups_per_tile)
    starts = range(start + half * config.tile_n, start + half * config.tile_n + columns, 8)
    return [
        c % mma_n // 2 + mma_n // 2 * (i + rows * (c // mma_n)) + v
        for c in starts
        for v in range(4)
    ]


# ---- activations
def resolve_activation(name: str, size: int, K: int) -> str:
    """The activation as it is computed: gelu by a fit for 16 bits, where the bound of K roundings
    in fp32 is above the fit's.
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
    """Each value becomes its activation's, for outputs of a dtype."""
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
    """The element of a tensor that belongs to each of `count` values, in the first or second half
    of the columns, in fp32. `kind` is as `KernelTraits` says: "one" for all, "columns" or "rows" of
    one each, "pairs" of columns, which begin at whole pairs, "matrix", or "batch" of matrices.
    """
    if kind == "pairs":
        return elements_of_pairs(read_pairs(tile, tensor, coord, half, count))
    row, column, matrix = coord
    M, N = tile.epilogue.extents
    elements = []
    for v in range(0, count, 4):
        rows = [cutlass.min(row + i * 8, M - 1) for i in range(2)]
        columns = [cutlass.min(column + v * 2 + i, N - 1) + half * N for i in range(2)]
        if kind == "one":
            four = [tensor[0]] * 4
        else:
            indices = {
                "rows": lambda r, c: r,
                "columns": lambda r, c: c,
                "matrix": lambda r, c: (r, c),
            }
            index = indices.get(kind, lambda r, c: (r, c, matrix))
            four = [tensor[index(rows[i // 2], columns[i % 2])] for i in range(4)]
        elements += [value.to(Float32) for value in four]
    return elements


def read_pairs(tile: EpilogueTile, tensor, coord: ElementCoord, half, count: int):
    """Of a vector of columns, the pair of each four values, as it lies in memory."""
    N = tile.epilogue.extents[1]
    first = [cutlass.min(coord.column + v * 2, N - 2) + half * N for v in range(0, count, 4)]
    return [load_vector(tensor.iterator + at, 2) for at in first]


def elements_of_pairs(pairs):
    """The element that belongs to each value, in fp32: two rows have the same columns."""
    return [value for pair in pairs for value in to_fp32(pair) * 2]


@cute.jit
def prefetch_bias(cta: Cta, work: WorkTile):
    """A warp that loads: a tile's bias comes to L1, 32 times 8 columns, while its products run."""
    column = cutlass.min(work.column + cta.context.thread % 32 * 8, cta.epilogue.extents[1] - 1)
    cute.arch.inline_ptx(
        "prefetch.global.L1 [{$r0}];",
        read_only_args=[(cta.epilogue.tensors.bias.iterator + column).toint()],
    )


def to_fp32(values):
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


def load_vector(pointer, count: int):
    """`count` neighbours in memory, in registers: they begin at a multiple of their size."""
    dtype = pointer.dtype
    at = cute.make_ptr(
        dtype, pointer.toint(), pointer.memspace, assumed_align=count * dtype.width // 8
    )
    vector = cute.make_rmem_tensor((count,), dtype)
    cute.autovec_copy(cute.make_tensor(at, count), vector)
    return vector


# ---- arithmetic on the values of a subtile
def add_scaled(values, factor, others):
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
def add_tensor(
    tile: EpilogueTile,
    values,
    tensor,
    kind: cutlass.Constexpr,
    factor,
    coord: ElementCoord,
    half: cutlass.Constexpr,
):
    """values += factor · tensor, whose elements are those of `read_elements`."""
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
    """values *= tensor, whose elements are those of `read_elements`."""
    theirs = read_elements(tile, tensor, kind, coord, half, cute.size(values))
    for v in cutlass.range_constexpr(cute.size(values)):
        values[v] *= theirs[v]


# ---- the operations of a tile
class EpilogueOps:
    """What a consumer has yet to do to its sums of a tile: for each part (row group, first column,
    columns) first the operations up to x, the input of the activation, of gated pairs in both
    halves, then those up to the output.
    """

    def __init__(self, tile: EpilogueTile):
        self.tile = tile
        config, gated = tile.epilogue.config, tile.epilogue.traits.gated
        columns, width = min(64, config.tile_n), tile.width // (2 if gated else 1)
        if tile.consumer.writer is not None:
            columns = tile.consumer.writer.columns
        self.parts = [
            (i, start, min(columns, width - start))
            for i in range(config.tile_m // (64 * config.warpgroups_per_tile))
            for start in range(0, width, columns)
        ]
        self.to_x = {0: list(self.parts), 1: list(self.parts) if gated else []}
        self.to_outputs = list(self.parts)
        self.bias = self.read_bias()

    def read_bias(self):
        """The bias of the next part, before it is needed: None where it does not come in pairs."""
        traits = self.tile.epilogue.traits
        if traits.bias != "pairs" or traits.gated or not self.to_x[0]:
            return None
        i, start, columns = self.to_x[0][0]
        coord = self.tile.first_coord(i, start)
        return read_pairs(self.tile, self.tile.epilogue.tensors.bias, coord, 0, columns // 2)

    def compute_x(self, half: int, end: tuple[int, int] = END):
        """Sums become x, up to a column of a row group."""
        left = self.to_x[half]
        while left and left[0][:2] < end:
            part, bias = left.pop(0), self.bias
            self.bias = self.read_bias() if half == 0 else bias
            sums_to_x(self.tile, part, half, bias)

    def compute_outputs(self, end: tuple[int, int] = END):
        """Sums become outputs, but for what comes through shared memory, up to a column of a row
        group.
        """
        while self.to_outputs and self.to_outputs[0][:2] < end:
            i, start, columns = part = self.to_outputs.pop(0)
            for half in range(2 if self.tile.epilogue.traits.gated else 1):
                self.compute_x(half, (i, start + columns))
            x_to_outputs(self.tile, part)


@cute.jit
def sums_to_x(tile: EpilogueTile, part: cutlass.Constexpr, half: cutlass.Constexpr, bias):
    """Sums of a part become x. `bias`: as it was read before, or None."""
    (i, start, columns), traits = part, tile.epilogue.traits
    tensors = tile.epilogue.tensors
    coord, which = tile.first_coord(i, start), tile.registers(i, start, columns, half)
    values = tile.values(which)
    if cutlass.const_expr(traits.formats != ""):
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
    """x of a part becomes outputs. Where an addend is yet to come nothing can be done before."""
    (i, start, columns), traits = part, tile.epilogue.traits
    which = tile.registers(i, start, columns)
    values = tile.values(which)
    if cutlass.const_expr(traits.function != "" and traits.addend != "staged"):
        activate(traits.function, values, tile.epilogue.dtype)
    if cutlass.const_expr(traits.gated):
        others = tile.values(tile.registers(i, start, columns, 1))
        for v in cutlass.range_constexpr(cute.size(values)):
            values[v] *= others[v]
    if cutlass.const_expr(traits.residual not in ("", "staged")):
        residual, coord = tile.epilogue.tensors.residual, tile.first_coord(i, start)
        add_tensor(tile, values, residual, traits.residual, None, coord, 0)
    tile.put_back(which, values)


@cute.jit
def add_source(epilogue: Epilogue, values, load_source: cutlass.Constexpr):
    """Outputs, with what `load_source` returns for them, which came through shared memory."""
    traits = epilogue.traits
    if cutlass.const_expr(traits.addend == "staged"):
        add_scaled(values, epilogue.tensors.beta, to_fp32(load_source()))
        if cutlass.const_expr(traits.function != ""):
            activate(traits.function, values, epilogue.dtype)
    if cutlass.const_expr(traits.residual == "staged"):
        add_scaled(values, None, to_fp32(load_source()))


def output_registers(operations: EpilogueOps, width: int):
    """The outputs of a whole tile, as accumulators of a tile `width` columns wide lie."""
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
    """x to memory, one element after the other."""
    for half in range(2 if operations.tile.epilogue.traits.gated else 1):
        operations.compute_x(half)
        for part in operations.parts:
            store_aux_part(operations.tile, part, half)


@cute.jit
def store_aux_part(tile: EpilogueTile, part: cutlass.Constexpr, half: cutlass.Constexpr):
    """x of a part, in one half of the columns."""
    i, start, columns = part
    aux, (M, N) = tile.epilogue.tensors.aux, tile.epilogue.extents
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
