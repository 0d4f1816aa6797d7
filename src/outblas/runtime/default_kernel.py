"""The kernel of a call that names none, by the GPU's architecture and the call's shape; imports no
DSL.
"""

import math
from typing import Literal

import torch

from ..core.problem import Problem

Mode = Literal["off", "lookup", "on"]
MODES: tuple[Mode, ...] = (
    "off",
    "lookup",
    "on",
)  # of tuning: by a rule, by what is known, by what is measured first

PRODUCTION = "hopper.gemm"
_SMALLEST = 64  # edge of the smallest tile of turing.cp_async
_LEAST_SHARE = 0.75  # of the SMs that such tiles must keep busy
_TURING = 128, 0.4  # edge of the tile of turing.ldmatrix, and the same share for it


def kernel_for(problem: Problem) -> str:
    """The name of the kernel for a product that `portable` could take.

    sm_75 has tensor cores for fp16, which Triton's `tl.dot` does not use there: `turing.ldmatrix`,
    or where it has few tiles `turing.double_buffer`. GPUs whose tensor cores are reached by
    mma.sync alone, sm_80 to 89 and from sm_120 on, take `turing.cp_async` where it fills them:
    compiled for sm_80 and run on an H100, it is 1.02 to 1.40 times as fast as `portable` there
    (WORKLOG.md has the table). sm_90 takes `hopper.gemm` for 16-bit operands, but where its copies
    of operands cost more than they save (`spared`). All else is `portable`'s, whose `tl.dot`
    becomes wgmma or tcgen05 where there is such, and so are batch-invariant products on other GPUs:
    they have no choice by shape.
    """
    if problem.formats:
        return PRODUCTION
    if problem.device.type != "cuda":
        return "portable"
    from ..device import launch

    return by_rule(problem, launch.arch_of(problem.device), launch.sm_count(problem.device))


def by_rule(problem: Problem, arch: int, sms: int) -> str:
    """As `kernel_for`, for a GPU of so many SMs that need not be there."""
    if (
        arch == 90
        and problem.dtype in (torch.float16, torch.bfloat16)
        and spared(PRODUCTION, problem) is None
    ):
        return PRODUCTION
    if problem.batch_invariant:
        return "portable"
    if 75 <= arch < 80 and problem.dtype == torch.float16:
        return "turing.ldmatrix" if _busy(problem, *_TURING, sms) else "turing.double_buffer"
    only_mma_sync = 80 <= arch < 90 or arch >= 120
    if (
        only_mma_sync
        and problem.dtype in (torch.float16, torch.bfloat16)
        and _suits_cp_async(problem, sms)
    ):
        return "turing.cp_async"
    return "portable"


def spared(kernel: str, problem: Problem) -> str | None:
    """Why a kernel that could take a product had better not: `hopper.gemm` copies operands that TMA
    cannot take, and few rows or a small product do not pay for that. None if it should. A
    batch-invariant product has no choice.

    Estimates in µs, fitted to 17 products on an H100 (WORKLOG.md): copies' launches and 1.4 TB/s;
    `hopper.gemm` at 700 TFLOP/s; `portable`, unaligned, at 60 TFLOP/s or half a µs for 64 terms of
    K.
    """
    if kernel != PRODUCTION or problem.batch_invariant:
        return None
    try:
        from ..hopper.gemm.operand_copies import needs_copy
    except ImportError:  # whoever loads the kernel says so
        return None
    copying = 0.0
    for strides, extent, is_copied in zip(
        (problem.a, problem.b), (problem.M, problem.N), needs_copy(problem), strict=True
    ):
        if is_copied:
            own = (size for size, stride in zip(problem.batch, strides[:-2], strict=True) if stride)
            copying += 1.75 + 2 * 2 * extent * problem.K * math.prod(own) / 1.4e6
    if not copying:
        return None
    flop = 2 * problem.M * problem.N * problem.K * math.prod(problem.batch)
    with_copies = copying + 3 + flop / 700e6
    in_place = max(flop / 60e6, 1.5 + problem.K / 128)
    if with_copies <= in_place:
        return None
    return (
        f"it copies operands first, about {with_copies:.0f} µs in all where portable takes "
        f"{in_place:.0f}"
    )


def rivals(arch: int, dtype: str) -> tuple[str, ...]:
    """The kernels that compete when a product is tuned on an architecture (90 is sm_90), by the
    name of its precision: bfloat16, float16, float32 or tf32.
    """
    if dtype == "float32":
        return "simt.pipelined", "portable"
    if dtype == "tf32":
        return ("portable",)
    if arch == 90:
        return PRODUCTION, "portable"
    if 75 <= arch < 80 and dtype == "float16":
        return "turing.ldmatrix", "turing.double_buffer", "portable"
    if 80 <= arch < 90 or arch >= 120:
        return "turing.cp_async", "portable"
    return ("portable",)


def _suits_cp_async(problem: Problem, sms: int) -> bool:
    """Whether operands can be copied asynchronously, 4 bytes at least, and the smallest tiles fill
    the GPU.
    """
    from ..device import launch

    aligned = min(launch.vector(problem, name) for name in "ab") > 1
    return (
        aligned
        and min(problem.M, problem.N) >= _SMALLEST
        and _busy(problem, _SMALLEST, _LEAST_SHARE, sms)
    )


def _busy(problem: Problem, edge: int, share: float, sms: int) -> bool:
    """Whether square tiles of an edge keep this share of the SMs busy."""
    tiles = -(-problem.M // edge) * -(-problem.N // edge) * math.prod(problem.batch)
    return tiles >= share * sms
