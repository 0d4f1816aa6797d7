"""Gluon as the ladders use it: what differs between Triton's versions, and layouts from maps.

Nothing else imports names that changed between Triton 3.6 and 3.9.
"""

from collections.abc import Sequence
from typing import Any

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..core.compat.triton_private import CompiledKernel, GluonASTSource, GPUTarget
from . import language
from .mapping import Mapping


def compile(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[tuple[int, ...], Any],
    attributes: dict[tuple[int, ...], list[list[Any]]],
    arch: int,
    options: dict[str, Any],
) -> CompiledKernel:
    """A Gluon kernel compiled for an architecture (90 is sm_90); needs no GPU."""
    source = GluonASTSource(kernel, signature, constants, attributes)
    with language.lock:
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def registers(mapping: Mapping) -> Any:
    """The map as the layout of a tensor in registers."""
    parts = (
        [list(basis) for basis in bases]
        for bases in (mapping.registers, mapping.lanes, mapping.warps)
    )
    return gl.DistributedLinearLayout(*parts, [], list(mapping.shape))


# An option of `compile`: PTX that the drivers of CUDA 12 read, not the newest that Triton's
# assembler knows.
OLD_PTX = {"ptx_version": 80}


def load_as_ptx(compiled: CompiledKernel) -> None:
    """Has the driver assemble a kernel that is not loaded yet for whatever GPU loads it: so code
    for an older architecture runs on a newer one.
    """
    compiled.kernel = compiled.asm["ptx"].encode() + b"\0"


def swizzled(columns: int, itemsize: int, order: Sequence[int]) -> Any:
    """The layout of a tile in shared memory whose rows of `columns` elements along order[0] are
    swizzled by 16 bytes, so that the 16 bytes of eight rows which ldmatrix reads together lie in
    different banks.
    """
    vector = 16 // itemsize
    row = columns * itemsize
    together = max(1, 128 // row)  # rows that share the 32 banks
    return gl.SwizzledSharedLayout(vector, together, max(1, min(8, row // 16)), list(order))


def padded(shape: tuple[int, int], pad: int, order: Sequence[int] = (1, 0)) -> Any:
    """The layout of a tile in shared memory whose rows along order[0] are `pad` elements longer.

    Without padding it is written as padding that comes after the tile: into a plain layout Triton
    would move words with ldmatrix and stmatrix.
    """
    interval = shape[order[0]] if pad else shape[0] * shape[1]
    return gl.PaddedSharedLayout.with_identity_for([[interval, pad or 4]], list(shape), list(order))


def mma_layout(arch: int, warps: tuple[int, int]) -> Any:
    """The layout that says which lane holds which fp32 sum of mma.sync.m16n8k16, of m16n8k8 below
    sm_80, with so many warps along M and N.
    """
    return gl.NVMMADistributedLayout(
        version=[2, 0 if arch >= 80 else 1], warps_per_cta=list(warps), instr_shape=[16, 8]
    )


def dot_operand(index: int, mma: Any) -> Any:
    """The layout that says which lane holds which 16-bit element of operand A (0) or B (1) of
    mma.sync.
    """
    return gl.DotOperandLayout(index, mma, 2)


# All threads of a CTA have come here; Triton adds such barriers where accesses to shared memory
# need them.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

# Asynchronous copies from global to shared memory; masked elements become zeros.
copy_async = (
    async_copy.async_load
    if hasattr(async_copy, "async_load")
    else async_copy.async_copy_global_to_shared
)
commit_copies = async_copy.commit_group
wait_copies = async_copy.wait_group  # then a barrier, which Triton adds
