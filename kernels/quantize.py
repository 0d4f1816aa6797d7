"""Quantization to fp8: the largest magnitude of each block, its scale, and the rounded values, in
one pass over memory where a block fits a program.

`core/quantization.py` says which scales there are. NaN and infinities take no part in a scale.
GPUs before sm_89 have no instruction that rounds to fp8, so the kernels can round by integer
arithmetic as well; both ways give the same bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from outblas.call import quantization
from outblas.call.fp8 import BLOCK
from outblas.kernels.passes import Passes, arch

Tensor = torch.Tensor

COLUMNS = tl.constexpr(BLOCK)  # of a tile
TILE_ROWS = 32  # of a tile whose rows have scales of their own
FEW_ROWS = 8  # of such a tile where x has few rows: 16 bytes for each of 128 threads
ONE_PASS = 16384  # columns of a row that a program holds in registers
AT_A_TIME = 4096  # columns of a longer row
_MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}  # bits
_LEAST = tl.constexpr(quantization.LEAST_SCALE)
_NATIVE_ARCH = 89  # the first one with instructions that round to fp8


# ---- arithmetic
@triton.jit
def _larger(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b)


@triton.jit
def _magnitude(x):  # type: ignore[no-untyped-def]
    """Returns |x|, or 0 where it is not finite."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _scale_of(largest, MANTISSA: tl.constexpr, POWER_OF_TWO: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the scale of blocks whose largest magnitudes are given."""
    most = tl.full(largest.shape, 448.0 if MANTISSA == 3 else 57344.0, tl.float32)
    scale = tl.maximum(tl.div_rn(largest, most), _LEAST)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(largest > 0, scale, 1.0)


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(x, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the codes of finite values that the format can hold, rounded to nearest even."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    BIAS: tl.constexpr = 7 if MANTISSA == 3 else 15
    # Added to a value below the least normal one, 2^(1 - BIAS), it leaves the code in the last
    # bits: a unit of its last place is the step of subnormal values.
    MAGIC: tl.constexpr = 16384.0 if MANTISSA == 3 else 128.0
    MAGIC_BITS: tl.constexpr = (141 if MANTISSA == 3 else 134) << 23
    LEAST_NORMAL: tl.constexpr = (128 - BIAS) << 23
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    half = ((1 << (SHIFT - 1)) - 1) + ((size >> SHIFT) & 1)
    normal = ((size + half) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    subnormal = (tl.abs(x) + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
    code = tl.where(size < LEAST_NORMAL, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]
def _code(x, scale, MANTISSA: tl.constexpr, NATIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the bits of x / scale in fp8. Values beyond the largest one become that; e4m3 has no
    infinities, so they become NaN.
    """
    most: tl.constexpr = 448.0 if MANTISSA == 3 else 57344.0
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    value = tl.minimum(tl.maximum(x * inverse, -most), most)
    if NATIVE:
        if MANTISSA == 3:
            code = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            code = value.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        code = _rounded(value, MANTISSA)
    if MANTISSA == 3:
        other = tl.full(x.shape, 0x7F, tl.uint8)
    else:
        other = tl.where(x == x, tl.where(x < 0, 0xFC, 0x7C), 0x7F).to(tl.uint8)
    return tl.where(tl.abs(x) < float("inf"), code, other)


# ---- kernels
@triton.jit  # type: ignore[untyped-decorator]
def _tile(rows, columns, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns this program's place among tiles, its rows and columns, and which of them exist."""
    across = (columns + COLUMNS - 1) // COLUMNS
    block_row, block_column = tl.program_id(0) // across, tl.program_id(0) % across
    row = block_row.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = block_column * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return block_row, block_column, row, column, (row < rows) & (column < columns)


@triton.jit  # type: ignore[untyped-decorator]
def largest_kernel(  # type: ignore[no-untyped-def]
    x, largest, rows, columns, x_row, x_column, ROWS: tl.constexpr
):
    """Raises `largest`, the bits of a float32 that begins as 0, to the largest magnitude of x. Bits
    of numbers that are not negative are in the order of the numbers.
    """
    _, _, row, column, is_inside = _tile(rows, columns, ROWS)
    at = x + row * x_row + column.to(tl.int64) * x_column
    size = _magnitude(tl.load(at, mask=is_inside, other=0.0).to(tl.float32))
    found = tl.reduce(tl.reduce(size, 1, _larger), 0, _larger)
    tl.atomic_max(largest, found.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def tile_kernel(  # type: ignore[no-untyped-def]
    x,
    out,
    scale,
    largest,
    rows,
    columns,
    x_row,
    x_column,
    scale_row,
    scale_column,
    ROWS: tl.constexpr,
    SCALES: tl.constexpr,
    MANTISSA: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Quantizes a tile.

    SCALES: "row" for a scale of each row, "tile" for one of the tile, "all" for one of x, whose
    largest magnitude `largest` has.
    """
    block_row, block_column, row, column, is_inside = _tile(rows, columns, ROWS)
    at = x + row * x_row + column.to(tl.int64) * x_column
    value = tl.load(at, mask=is_inside, other=0.0).to(tl.float32)
    if SCALES == "row":
        found = _scale_of(tl.reduce(_magnitude(value), 1, _larger), MANTISSA, POWER_OF_TWO)
        found = found[:, None]
        to = scale + row * scale_row + block_column.to(tl.int64) * scale_column
        tl.store(to, found, mask=row < rows)
    else:
        if SCALES == "tile":
            size = tl.reduce(tl.reduce(_magnitude(value), 1, _larger), 0, _larger)
            to = scale + block_row.to(tl.int64) * scale_row + block_column * scale_column
        else:
            size = tl.load(largest).to(tl.float32, bitcast=True)
            to = scale
        found = _scale_of(tl.full((1, 1), 0.0, tl.float32) + size, MANTISSA, POWER_OF_TWO)
        is_stored = (SCALES == "tile") | (tl.program_id(0) == 0)
        tl.store(to + tl.full((1, 1), 0, tl.int32), found, mask=is_stored)
    code = _code(value, found + tl.full((ROWS, 1), 0.0, tl.float32), MANTISSA, NATIVE)
    tl.store(out + row * columns + column, code, mask=is_inside)


@triton.jit  # type: ignore[untyped-decorator]
def row_kernel(  # type: ignore[no-untyped-def]
    x,
    out,
    scale,
    columns,
    x_row,
    x_column,
    WIDTH: tl.constexpr,
    IS_ONE_PASS: tl.constexpr,
    MANTISSA: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Quantizes a row, WIDTH columns at a time; these are all of them where IS_ONE_PASS."""
    row = tl.program_id(0).to(tl.int64)
    inner = tl.arange(0, WIDTH)
    if IS_ONE_PASS:
        at = x + row * x_row + inner.to(tl.int64) * x_column
        value = tl.load(at, mask=inner < columns, other=0.0).to(tl.float32)
        size = _magnitude(value)
    else:
        size = tl.full((WIDTH,), 0.0, tl.float32)
        for start in range(0, columns, WIDTH):
            column = start + inner
            at = x + row * x_row + column.to(tl.int64) * x_column
            value = tl.load(at, mask=column < columns, other=0.0).to(tl.float32)
            size = tl.maximum(size, _magnitude(value))
    largest = tl.full((1,), 0.0, tl.float32) + tl.reduce(size, 0, _larger)
    found = _scale_of(largest, MANTISSA, POWER_OF_TWO)
    tl.store(scale + row + tl.full((1,), 0, tl.int32), found)
    if IS_ONE_PASS:
        code = _code(value, found, MANTISSA, NATIVE)
        tl.store(out + row * columns + inner, code, mask=inner < columns)
    else:
        for start in range(0, columns, WIDTH):
            column = start + inner
            at = x + row * x_row + column.to(tl.int64) * x_column
            value = tl.load(at, mask=column < columns, other=0.0).to(tl.float32)
            code = _code(value, found, MANTISSA, NATIVE)
            tl.store(out + row * columns + column, code, mask=column < columns)


# ---- launches
_PASSES = Passes("the kernels that quantize to fp8", largest_kernel, tile_kernel, row_kernel)
_launch = _PASSES.launch


def quantize(
    x: Tensor, recipe: str, dtype: torch.dtype, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """Computes `outblas::quantize` of a checked tensor that has elements. Raises RuntimeError while
    a CUDA graph is captured, if a kernel is needed for the first time, and CompileForbidden where
    it may not be compiled.
    """
    out, scale = quantization.empty(x, recipe, dtype)
    is_native = arch(x.device) >= _NATIVE_ARCH
    rounding = {
        "MANTISSA": _MANTISSA[dtype],
        "POWER_OF_TWO": power_of_two,
        "NATIVE": is_native,
    }
    for matrix, codes, scales in _matrices(x, out.view(torch.uint8), scale, recipe):
        if recipe == "rowwise":
            _rows(matrix, codes, scales, rounding)
        else:
            _tiles(matrix, codes, scales, recipe, rounding)
    return out, scale


def _matrices(
    x: Tensor, out: Tensor, scale: Tensor, recipe: str
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns matrices that together are x, each with its part of the output and of the scales, as
    matrices too. There is one unless a block of 128 rows would cover rows of two matrices.
    """
    rows, columns = (x.shape[-2] if x.dim() > 1 else 1), (x.shape[-1] if x.dim() else 1)
    if recipe == "128x128" and x.dim() > 2 and rows % BLOCK:
        parts = (t.flatten(0, -3) for t in (x, out, scale))
        return list(zip(*parts, strict=True))
    across = scale.shape[-1] if scale.dim() else 1
    return [(x.reshape(-1, columns), out.view(-1, columns), scale.view(-1, across))]


def _tiles(x: Tensor, out: Tensor, scale: Tensor, recipe: str, rounding: dict[str, Any]) -> None:
    """Quantizes a matrix by tiles."""
    rows, columns = x.shape
    size, scales, warps = TILE_ROWS if rows > FEW_ROWS else FEW_ROWS, "row", 4
    if recipe == "128x128":
        size, scales, warps = BLOCK, "tile", 8
    grid = (triton.cdiv(rows, size) * triton.cdiv(columns, BLOCK),)
    largest = None
    if recipe == "tensorwise":
        scales, largest = "all", torch.zeros((), dtype=torch.int32, device=x.device)
        _launch(largest_kernel, grid, (x, largest, rows, columns, *x.stride()), {"ROWS": size})
    given = x, out, scale, largest, rows, columns, *x.stride(), *scale.stride()
    _launch(tile_kernel, grid, given, {"ROWS": size, "SCALES": scales} | rounding, warps)


def _rows(x: Tensor, out: Tensor, scale: Tensor, rounding: dict[str, Any]) -> None:
    """Quantizes a matrix by rows."""
    rows, columns = x.shape
    is_one_pass = columns <= ONE_PASS
    width = max(BLOCK, triton.next_power_of_2(columns)) if is_one_pass else AT_A_TIME
    constants = {"WIDTH": width, "IS_ONE_PASS": is_one_pass} | rounding
    warps = min(16, max(1, width // 512))
    _launch(row_kernel, (rows,), (x, out, scale, columns, *x.stride()), constants, warps)
