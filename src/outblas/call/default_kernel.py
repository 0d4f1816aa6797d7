"""The default kernel for a call that names none, chosen by the GPU's architecture and the call's
shape. Imports no DSL.
"""

import math
from typing import Literal

import torch

from outblas.base import gpus
from outblas.call import hooks
from outblas.call.problem import Problem

Mode = Literal["off", "lookup", "on"]
# How a call that names no kernel gets one: always the default, the best one in the tuned tables, or
# the winner of a measurement when a shape is first met.
MODES: tuple[Mode, ...] = ("off", "lookup", "on")

PRODUCTION = "hopper.gemm"
_CHOICES = ((64, 8), (512, 16), (2048, 64), (8192, 128))  # rows, and the step to the next choice
# The size of a kernel's smallest square tile, and the fraction of SMs that those tiles must keep
# busy.
_CP_ASYNC_TILE, _CP_ASYNC_SHARE = 64, 0.75
_LDMATRIX_TILE, _LDMATRIX_SHARE = 128, 0.4


def kernel_for(problem: Problem) -> str:
    """Returns the name of the kernel for a product that `portable` supports. Of float32 products
    few get here (`launcher.slower_reason`).

    sm_75 has tensor cores for fp16, which Triton's `tl.dot` does not use there. Such products take
    `turing.ldmatrix`, or `turing.double_buffer` if there are few tiles.

    sm_80 to sm_89 and sm_120 on reach their tensor cores only through mma.sync. Such products take
    `turing.cp_async` if there are enough tiles to fill the GPU: compiled for sm_80 and run on an
    H100, it is 1.02 to 1.40 times as fast as `portable` there (WORKLOG.md has the table).

    On sm_90, 16-bit products take `hopper.gemm`, unless copying operands costs more than the kernel
    saves (`pruned_reason`).

    All other products take `portable`, whose `tl.dot` becomes wgmma or tcgen05 where the GPU has
    them. So do batch-invariant products on GPUs other than sm_90, because their kernel must not
    depend on the shape.
    """
    if problem.formats:
        return PRODUCTION
    if problem.device.type != "cuda":
        return "portable"
    return by_rule(problem, gpus.arch_of(problem.device), gpus.sm_count(problem.device))


def by_rule(problem: Problem, arch: int, sms: int) -> str:
    """Returns what `kernel_for` returns, for a GPU with `sms` SMs that need not be in this
    machine.
    """
    if (
        arch == 90
        and problem.dtype in (torch.float16, torch.bfloat16)
        and pruned_reason(PRODUCTION, problem) is None
    ):
        return PRODUCTION
    if problem.batch_invariant:
        return "portable"
    if 75 <= arch < 80 and problem.dtype == torch.float16:
        return (
            "turing.ldmatrix"
            if _fills(problem, _LDMATRIX_TILE, _LDMATRIX_SHARE, sms)
            else "turing.double_buffer"
        )
    only_mma_sync = 80 <= arch < 90 or arch >= 120
    if (
        only_mma_sync
        and problem.dtype in (torch.float16, torch.bfloat16)
        and _suits_cp_async(problem, sms)
    ):
        return "turing.cp_async"
    return "portable"


def pruned_reason(kernel: str, problem: Problem) -> str | None:
    """Returns why a kernel that supports a problem is likely slower than `portable`, or None.

    `hopper.gemm` copies operands that TMA cannot load, which does not pay for few rows or a small
    product. Batch-invariant products are never pruned.

    The times in µs are estimates, fitted to 17 products on an H100 (WORKLOG.md): a copy takes its
    launch plus its bytes at 1.4 TB/s; `hopper.gemm` runs at 700 TFLOP/s; `portable`, on unaligned
    operands, runs at 60 TFLOP/s or takes half a µs per 64 terms of K.
    """
    if kernel != PRODUCTION or problem.batch_invariant:
        return None
    try:
        copied = hooks.operand_copies.get().needs_copy(problem)
    except ImportError:  # loading the kernel reports this error
        return None
    copy_time = 0.0
    for strides, extent, is_copied in zip(
        (problem.a, problem.b), (problem.M, problem.N), copied, strict=True
    ):
        if is_copied:
            batch = (
                size for size, stride in zip(problem.batch, strides[:-2], strict=True) if stride
            )
            copy_time += 1.75 + 2 * 2 * extent * problem.K * math.prod(batch) / 1.4e6
    if not copy_time:
        return None
    flop = 2 * problem.M * problem.N * problem.K * math.prod(problem.batch)
    with_copies = copy_time + 3 + flop / 700e6
    in_place = max(flop / 60e6, 1.5 + problem.K / 128)
    if with_copies <= in_place:
        return None
    return (
        f"it copies operands first, about {with_copies:.0f} µs in all where portable takes "
        f"{in_place:.0f}"
    )


def rows_of_choice(rows: int) -> int:
    """Returns the number of rows at which the config of a call with this many is chosen, the next
    of a series: 1, multiples of 8 to 64, of 16 to 512, of 64 to 2048, of 128 to 8192, then of 256.
    """
    if rows < 2:
        return rows
    step = next((step for most, step in _CHOICES if rows <= most), 256)
    return -(-rows // step) * step


def candidates(arch: int, dtype: str) -> tuple[str, ...]:
    """Returns the kernels that are tuned for products on an architecture (90 is sm_90).

    `dtype` names the precision: bfloat16, float16, float32 or tf32.
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
    """Returns whether operands can be copied asynchronously (at least 4 bytes each), and the
    smallest tiles fill the GPU.
    """
    aligned = min(problem.vector(name) for name in "ab") > 1
    return (
        aligned
        and min(problem.M, problem.N) >= _CP_ASYNC_TILE
        and _fills(problem, _CP_ASYNC_TILE, _CP_ASYNC_SHARE, sms)
    )


def _fills(problem: Problem, tile: int, share: float, sms: int) -> bool:
    """Returns whether there are enough square tiles to keep this fraction of the SMs busy."""
    tiles = -(-problem.M // tile) * -(-problem.N // tile) * math.prod(problem.batch)
    return tiles >= share * sms
