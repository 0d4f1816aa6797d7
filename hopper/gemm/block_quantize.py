"""Outputs of `hopper.gemm` in fp8: 128 columns of a row get a scale and are rounded, to the bits
that `outblas.quantize` returns of the same values in fp32 (`kernels/quantize.py`).

An epilogue subtile of 8-bit elements has 128 columns, so it is one block of each of its 64 rows. A
quad of lanes has two of these rows, 32 values of each in every lane.
"""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Uint16

from outblas.call import fp8
from outblas.call.quantization import FORMATS, LEAST_SCALE
from outblas.hopper.gemm.epilogue_math import EpilogueTile

LARGEST = FORMATS[torch.float8_e4m3fn]
QUAD = 4


def quantize(tile: EpilogueTile, values, i: int, start: int, rounded):
    """Rounds the outputs of row group i in the block of columns from `start` on to `rounded`, bytes
    in the same order, and stores their scales.
    """
    count = cute.size(values)
    largest = [Float32(0.0), Float32(0.0)]
    for v in range(count):
        values[v] = finite_or_nan(values[v])
        largest[v % 4 // 2] = larger(largest[v % 4 // 2], values[v])
    scales = [scale_of(of_quad(each), tile.epilogue.traits.power_of_two) for each in largest]
    inverses = [divide(Float32(1.0), scale) for scale in scales]
    pairs = cute.recast_tensor(rounded, Uint16)
    for v in range(0, count, 2):
        inverse = inverses[v % 4 // 2]
        pairs[v // 2] = to_e4m3(values[v] * inverse, values[v + 1] * inverse)
    store_scales(tile, scales, i, start)


@cute.jit
def store_scales(tile: EpilogueTile, scales, i: cutlass.Constexpr, start: cutlass.Constexpr):
    """The first two lanes of each quad: store the scales of its two rows."""
    scale_out, (M, N) = tile.epilogue.tensors.scale_out, tile.epilogue.extents
    row, column, _ = tile.first_coord(i, start)
    lane = tile.consumer.context.thread % QUAD
    scale = scales[0]
    if lane == 1:
        scale = scales[1]
    row += lane * 8
    if lane < 2 and row < M and column < N:
        scale_out[row, column // fp8.BLOCK] = scale


# ---- arithmetic
def finite_or_nan(x):
    """Returns x, or NaN for an infinity, which e4m3 does not have. The comparison with NaN is
    false.
    """
    return cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .f32 size; abs.f32 size, {$r0}; setp.lt.f32 p, size, 0f7F800000; "
        "selp.f32 {$w0}, {$r0}, 0f7FFFFFFF, p; }",
        write_only_types=[Float32],
        read_only_args=[x],
    )


def larger(largest, x):
    """Returns the larger one of a magnitude and that of x, which takes no part if it is NaN."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 size; abs.f32 size, {$r1}; max.f32 {$w0}, {$r0}, size; }",
        write_only_types=[Float32],
        read_only_args=[largest, x],
    )


def of_quad(largest):
    """Returns the largest one of four neighbouring lanes."""
    for distance in (1, 2):
        other = cute.arch.shuffle_sync_bfly(largest, distance)
        largest = larger(largest, other)
    return largest


def scale_of(largest, power_of_two: bool):
    """Returns the scale of values whose largest magnitude is given."""
    scale = cute.arch.fmax(divide(largest, Float32(LARGEST)), Float32(LEAST_SCALE))
    if power_of_two:
        scale = cute.arch.inline_ptx(
            "{ .reg .b32 bits; mov.b32 bits, {$r0}; add.s32 bits, bits, 0x7FFFFF; "
            "and.b32 bits, bits, 0x7F800000; mov.b32 {$w0}, bits; }",
            write_only_types=[Float32],
            read_only_args=[scale],
        )
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.gt.f32 p, {$r0}, 0f00000000; selp.f32 {$w0}, {$r1}, 0f3F800000, p; }",
        write_only_types=[Float32],
        read_only_args=[largest, scale],
    )


def divide(x, y):
    """Returns x / y, rounded to nearest even."""
    return cute.arch.inline_ptx(
        "div.rn.f32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Float32],
        read_only_args=[x, y],
    )


def to_e4m3(low, high):
    """Returns two values in e4m3, the first one in the lower byte. Those beyond the largest finite
    value become that, and NaN becomes 0x7F.
    """
    return cute.arch.inline_ptx(
        "cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Uint16],
        read_only_args=[low, high],
    )
