"""Grouped products for every GPU that Triton knows, and on the CPU through its interpreter: one
product per group, whose sizes lie on the device.

Each program computes one tile of the result; `grouped_device` says how it finds its group. No size
is read by the host, and a captured CUDA graph may be replayed with other groups.

The ends of groups are clamped to the operand, so a wrong `offs` never leads outside of a tensor.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from outblas.base import compiling, gpus
from outblas.base.compat.torch_private import fp32_precision
from outblas.base.cuda_graphs import capturing, not_ready
from outblas.call.grouped import GroupedProblem, GroupedTensors
from outblas.call.problem import Strides
from outblas.device import language
from outblas.kernels.grouped_device import (
    GroupedPointers,
    GroupedSizes,
    GroupedStrides,
    GroupTraits,
    ragged_k_kernel,
    ragged_m_kernel,
)
from outblas.kernels.grouped_scaled import GroupedScales

Tensor = torch.Tensor


class Block(NamedTuple):
    """The tile of a program, in columns of B, and how Triton compiles it."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


_KERNELS = {"ragged_m": ragged_m_kernel, "ragged_k": ragged_k_kernel}
_INTERPRETED = {form: language.interpreted(kernel) for form, kernel in _KERNELS.items()}
_INTERPRETED_BLOCK = Block(16, 32, 32, 4, 1)
_INTERPRETED_SCALED_BLOCK = Block(16, 64, 64, 4, 1)
MOST_PLACES = 2**31 - 128  # rows, whose numbers fit 32 bits also behind the end of the last tile
_FP8_ARCH = 89  # the first with tensor cores for fp8
_NAME = "the portable kernel of grouped products"
_loaded: set[tuple[Any, ...]] = set()  # what has been compiled and put onto a GPU


def unsupported(problem: GroupedProblem) -> str | None:
    """Returns why the kernel cannot take a product; None if it can."""
    if problem.device.type not in ("cpu", "cuda"):
        return f"needs CUDA or CPU tensors, but was given tensors on {problem.device}"
    if problem.device.type == "cuda" and not isinstance(ragged_m_kernel, triton.JITFunction):
        return "needs CPU tensors while TRITON_INTERPRET=1 is set, but was given CUDA tensors"
    if problem.capacity and problem.zero_tail:
        return "it sets no rows to zero where groups have places of their own"
    if problem.capacity and problem.M > MOST_PLACES:
        return f"needs at most {MOST_PLACES} rows of all groups, but was given {problem.M}"
    if programs(problem, block(problem)) >= 2**31:
        return f"needs fewer than 2**31 tiles, but was given {programs(problem, block(problem))}"
    return None


def block(problem: GroupedProblem) -> Block:
    """Chooses the tile for a product: as many rows as a group has in the mean, in 16 to 128."""
    if problem.device.type == "cpu":
        return _INTERPRETED_BLOCK if problem.scales is None else _INTERPRETED_SCALED_BLOCK
    wide = problem.dtype.itemsize == 4
    mean = problem.M if problem.form == "ragged_k" else problem.M // problem.groups
    rows = min(max(16, triton.next_power_of_2(max(mean, 1))), 64 if wide else 128)
    is_old = gpus.arch_of(problem.device) < 80
    stages = 2 if is_old else 3
    if wide:
        return Block(rows, 64, 32, 4, stages)
    if problem.scales is not None and not is_old:  # a block of scales at once
        return Block(rows, 128, 128, 8 if rows == 128 else 4, stages)
    return Block(rows, 128, 64, 8 if rows == 128 else 4, stages)


def programs(problem: GroupedProblem, tile: Block) -> int:
    """Returns how many programs are launched: as many as any division into groups needs."""
    width = tile.n // 2 if problem.epilogue.gated else tile.n
    rows, columns = triton.cdiv(problem.M, tile.m), triton.cdiv(problem.columns, width)
    if problem.form == "ragged_k":
        return int(problem.groups * rows * columns)
    return int((problem.M // tile.m + problem.groups + 1) * columns)


def sizes(problem: GroupedProblem) -> GroupedSizes:
    """Returns the sizes of a product in the form that the kernels take."""
    rows_of_a = problem.rows_of_a if problem.gathers else problem.M
    return GroupedSizes(
        problem.groups, problem.M, problem.N, problem.K, rows_of_a, problem.capacity
    )


def strides(problem: GroupedProblem) -> GroupedStrides:
    """Returns the strides of a product in the form that the kernels take."""
    epilogue = problem.epilogue
    bias_g, _, bias_n = epilogue.bias.strides if epilogue.bias else (0, 0, 0)
    a_m, a_k = problem.a
    return GroupedStrides(
        a_m,
        a_k,
        *_with_groups(problem.b),
        *_with_groups(problem.out),
        bias_g,
        bias_n,
        *_with_groups(epilogue.residual.strides if epilogue.residual else (0, 0)),
        *_with_groups(epilogue.aux.strides if epilogue.aux else (0, 0)),
    )


def scales(problem: GroupedProblem, tensors: GroupedTensors) -> GroupedScales | None:
    """Returns the scales of a product in the form that the kernels take."""
    known = problem.scales
    if known is None:
        return None
    a_g, a_m, a_k = known.a
    return GroupedScales(
        tensors.scale_a, tensors.scale_b, a_g - problem.capacity * a_m, a_m, a_k, *known.b
    )


def _with_groups(given: Strides) -> tuple[int, int, int]:
    """Returns the strides along groups, rows and columns."""
    *group, row, column = given
    return group[0] if group else 0, row, column


def traits(
    problem: GroupedProblem,
    tile: Block,
    precision: str,
    *,
    arch: int = 0,
    interpreted: bool = False,
) -> GroupTraits:
    """Returns what a kernel is compiled for. `arch`: of the GPU; only products with scales need
    it.
    """
    epilogue, known = problem.epilogue, problem.scales
    format_a, format_b = ("", "") if known is None else known.formats
    is_bare = not (epilogue.function or epilogue.residual or epilogue.aux)
    return GroupTraits(
        block_m=tile.m,
        block_n=tile.n,
        block_k=tile.k,
        parts=1 if is_bare else 2 if tile.n < 128 else 4,
        steps=problem.groups.bit_length(),
        zero_tail=problem.zero_tail,
        masked=problem.capacity > 0,
        function=epilogue.function,
        gated=epilogue.gated,
        precision=precision,
        interpreted_k=problem.K if interpreted else 0,
        format_a=format_a,
        format_b=format_b,
        scale_columns=1 if known is None else known.columns,
        native=known is not None and arch >= _FP8_ARCH,
    )


def run(
    problem: GroupedProblem,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    offs: Tensor,
    tensors: GroupedTensors,
) -> None:
    """Computes a product that `unsupported` does not refuse.

    Raises RuntimeError while a CUDA graph is captured, if a kernel is needed for the first time,
    and CompileForbidden where it would have to be compiled and may not.
    """
    tile = block(problem)
    count = programs(problem, tile)
    if not count:
        return
    precision = "tf32" if problem.dtype == torch.float32 and _wants_tf32(problem) else "ieee"
    is_cpu = problem.device.type == "cpu"
    arch = 0 if is_cpu or problem.scales is None else gpus.arch_of(problem.device)
    known = traits(problem, tile, precision, arch=arch, interpreted=is_cpu)
    if problem.scales is not None:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    pointers = GroupedPointers(a, b, out, offs, *tensors[:6])
    arguments = pointers, sizes(problem), strides(problem), scales(problem, tensors)
    if is_cpu:
        with language.lock, np.errstate(all="ignore"):
            _INTERPRETED[problem.form][(count,)](*arguments, known)
        return
    key = _specialization(problem, tile, known, arguments)
    if key not in _loaded:
        compiling.check_allowed(_NAME)
        if capturing(problem.device):
            raise not_ready()
    with torch.cuda.device(problem.device), language.lock:
        _KERNELS[problem.form][(count,)](
            *arguments, known, num_warps=tile.num_warps, num_stages=tile.num_stages
        )
    _loaded.add(key)


def _specialization(
    problem: GroupedProblem,
    tile: Block,
    known: GroupTraits,
    arguments: tuple[GroupedPointers, GroupedSizes, GroupedStrides, GroupedScales | None],
) -> tuple[Any, ...]:
    """Returns what a compiled kernel depends on, as Triton tells: of numbers, whether they are 1,
    divide by 16, and fit 32 bits; of tensors, their dtypes and whether addresses divide by 16.
    """
    pointers, *given, scales_given = arguments
    tensors: list[Tensor | None] = list(pointers)
    if scales_given is not None:
        tensors += scales_given[:2]
        given.append(scales_given[2:])
    numbers = tuple([(n == 1, n % 16 == 0, abs(n) < 2**31) for values in given for n in values])
    of_tensors = tuple([None if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in tensors])
    launched = tile.num_warps, tile.num_stages
    device = problem.device.index
    return problem.form, known, launched, numbers, of_tensors, device


def _wants_tf32(problem: GroupedProblem) -> bool:
    """Returns whether products of fp32 operands may be rounded to tf32. Sums of single rows, which
    gradients of a bias are, gain nothing by it.
    """
    is_allowed = fp32_precision("cuda", "matmul") == "tf32" and problem.M > 1
    return is_allowed and gpus.arch_of(problem.device) >= 80
