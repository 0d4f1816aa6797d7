"""The providers of grouped products: torch, `outblas.grouped_mm` and `outblas.scaled_grouped_mm` as
called, their kernels by name, and DeepGEMM.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import ScalingType

from outblas.base.compat.torch_private import scaled_mm as cublas_scaled_mm
from outblas.bench import deepgemm
from outblas.bench.operands import K_MULTIPLE, by_columns
from outblas.bench.operation import Operation
from outblas.bench.providers import DEEPGEMM, PLAIN, Call, Prepare, Provider
from outblas.bench.record import GROUPED_BASE
from outblas.bench.tasks import blocks
from outblas.torch_ops.grouped_mm import HOPPER, KERNELS, PORTABLE, grouped_mm
from outblas.torch_ops.scaled_grouped_mm import scaled_grouped_mm
from outblas.verify.kernels import Refused

Tensor = torch.Tensor

# torch's function multiplies no tf32.
PRECISIONS = ("bfloat16", "float16", "float32", "fp8-block")
OUT_DTYPE = torch.bfloat16  # of products with scales
_ROWS, _SQUARES = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
# cuBLAS takes sizes that are multiples of 16, and multiples of 8 rows where each has scales of its
# own, as Transformer Engine found.
_TORCH_MULTIPLE = 16
_TORCH_ROWS = 8


def parse(name: str, operation: Operation = PLAIN) -> Provider:
    """Returns the provider of a name: `torch`, `outblas`, a kernel of `outblas.grouped_mm`, or with
    scales of blocks `deepgemm`.

    Raises ValueError for any other name.
    """
    by_torch = _torch_scaled if operation.scaling else _torch
    named: dict[str, Prepare] = {GROUPED_BASE: by_torch, "outblas": partial(_outblas, None)}
    named |= {kernel: partial(_outblas, kernel) for kernel in KERNELS}
    if operation.scaling:
        named[DEEPGEMM] = _deepgemm
    if name not in named:
        raise ValueError(
            f"--kernels has {name!r}, expected some of {', '.join(named)} "
            f"with --dtype {operation.dtype}"
        )
    return Provider(name, "", named[name], trusted=name == GROUPED_BASE)


def competitors(
    chosen: list[Provider], operation: Operation, device: torch.device, ladder: None = None
) -> list[Provider]:
    """Returns torch, and the chosen providers, by default the kernels that run on a device. Groups
    have no ladders.
    """
    on_sm90 = torch.cuda.get_device_capability(device) == (9, 0)
    runnable = (HOPPER, PORTABLE) if on_sm90 else (PORTABLE,)
    kernels = chosen or [parse(name, operation) for name in runnable]
    return [parse(GROUPED_BASE, operation), *kernels]


def _outblas(kernel: str | None, a: Tensor, b: Tensor, *scales_and_offs: Tensor) -> Call:
    """Prepares the call of a user, with or without the name of a kernel. Raises Refused if the
    kernel does not support it.
    """
    *scales, offs = scales_and_offs

    def call(b: Tensor = b) -> Tensor:
        if not scales:
            return grouped_mm(a, b, offs=offs, kernel=kernel)
        scale_a, scale_b = scales
        of_b, scale_b = (_ROWS, scale_b.t()) if b.dim() == 2 else (_SQUARES, scale_b)
        return scaled_grouped_mm(
            a, b, scale_a, _ROWS, scale_b, of_b, offs=offs, output_dtype=OUT_DTYPE, kernel=kernel
        )

    if kernel is not None:
        try:
            call()
        except ValueError as error:
            raise Refused(str(error)) from None
    return call


def _deepgemm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor) -> Call:
    """Prepares DeepGEMM's product of groups of rows, where it is installed."""
    if b.dim() == 2:
        raise Refused(f"{DEEPGEMM} takes groups of rows, not of terms")
    return deepgemm.prepared(a, b, scale_a, scale_b, offs=offs)


def _torch(a: Tensor, b: Tensor, offs: Tensor) -> Call:
    grouped: Callable[..., Tensor] = torch.nn.functional.grouped_mm
    return lambda b=b: grouped(a, b, offs=offs)


# ---- torch, which has no grouped product with scales of blocks
def _torch_scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor) -> Call:
    """Prepares one `torch._scaled_mm` for each group, which writes to its part of a result; a group
    without terms gets zeros. Raises Refused for sizes that torch refuses, of whatever groups.

    cuBLAS takes multiples of `_TORCH_ROWS` rows. A group with another number of rows is multiplied
    with the next rows, whose results the next groups write again, and whose scales are 1. Behind
    the last group are rows of zeros.
    """
    (M, K), N, of_rows = a.shape, b.shape[-1], b.dim() == 3
    for name, size, multiple in (
        ("columns", N, _TORCH_MULTIPLE),
        ("terms", K, K_MULTIPLE if of_rows else _TORCH_MULTIPLE),
        ("rows", M, 1 if of_rows else _TORCH_ROWS),
    ):
        if size % multiple:
            raise Refused(f"torch._scaled_mm takes multiples of {multiple} {name}, not {size}")
    groups = list(enumerate(pairwise((0, *offs.tolist()))))
    empty: list[Tensor] = []
    parts: list[tuple[int | slice, Tensor, Tensor, Tensor, Tensor]] = []
    if of_rows:
        rows = a.new_zeros((M + _TORCH_ROWS - 1, K))
        rows[:M].copy_(a)
        memory = a.new_full((rows.shape[0], N), math.nan, dtype=OUT_DTYPE)
        out = memory[:M]
        for group, (begin, end) in groups:
            count = math.ceil((end - begin) / _TORCH_ROWS) * _TORCH_ROWS
            scales = by_columns(scale_a.new_ones((count, scale_a.shape[1])))
            scales[: end - begin].copy_(scale_a[begin:end])
            part = slice(begin, begin + count)
            if count:
                parts.append((group, rows[part], scales, scale_b[group], memory[part]))
    else:
        scale_a, scale_b = by_columns(scale_a), scale_b.contiguous()
        out = a.new_full((len(groups), M, N), math.nan, dtype=OUT_DTYPE)
        empty = [out[group] for group, (begin, end) in groups if begin == end]
        for group, (begin, end) in groups:
            terms, x = slice(begin, end), blocks(begin, end)
            if begin < end:
                parts.append((terms, a[:, terms], scale_a[:, x], scale_b[x], out[group]))

    def call(b: Tensor = b) -> Tensor:
        weights: Any = b.unbind() if of_rows else b
        for part, x, scale_x, scale_y, result in parts:
            cublas_scaled_mm(x, weights[part], scale_x, scale_y, out_dtype=OUT_DTYPE, out=result)
        for result in empty:
            result.zero_()
        return out

    return call
