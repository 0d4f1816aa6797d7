"""Gluon as the ladders use it: wrappers for what differs between Triton's versions, and layouts
made from mappings.

No other module imports names that changed between Triton 3.6 and 3.9.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from outblas.base.compat.triton_private import CompiledKernel
from outblas.device.mapping import Mapping
from outblas.device.triton_variant import TritonVariant


def registers(mapping: Mapping) -> Any:
    """Returns the mapping as the layout of a tensor in registers."""
    parts = (
        [list(basis) for basis in bases]
        for bases in (mapping.registers, mapping.lanes, mapping.warps)
    )
    return gl.DistributedLinearLayout(*parts, [], list(mapping.shape))


# A PTX version that the drivers of CUDA 12 can read, where Triton's assembler supports newer ones.
_OLD_PTX = ("ptx_version", 80)


@functools.cache
def as_ptx(variant: TritonVariant, device: int | None) -> CompiledKernel:
    """Compiles a kernel for an older architecture than that of the GPU of this index, whose driver
    assembles it from PTX when it is loaded.
    """
    compiled = dataclasses.replace(variant, options=(*variant.options, _OLD_PTX)).compile()
    compiled.kernel = compiled.asm["ptx"].encode() + b"\0"
    return compiled


def swizzled(columns: int, itemsize: int, order: Sequence[int]) -> Any:
    """Returns the layout of a tile in shared memory whose rows of `columns` elements along order[0]
    are swizzled in units of 16 bytes. The 16-byte units of eight rows, which ldmatrix reads
    together, then lie in different banks.
    """
    vector = 16 // itemsize
    row = columns * itemsize
    together = max(1, 128 // row)  # number of rows that share the 32 banks
    return gl.SwizzledSharedLayout(vector, together, max(1, min(8, row // 16)), list(order))


def padded(shape: tuple[int, int], pad: int, order: Sequence[int] = (1, 0)) -> Any:
    """Returns the layout of a tile in shared memory whose rows along order[0] are `pad` elements
    longer.

    Without padding it is written as padding that comes after the tile, because Triton would move
    words into a plain layout with ldmatrix and stmatrix.
    """
    interval = shape[order[0]] if pad else shape[0] * shape[1]
    return gl.PaddedSharedLayout.with_identity_for([[interval, pad or 4]], list(shape), list(order))


def mma_layout(arch: int, warps: tuple[int, int]) -> Any:
    """Returns the layout of mma.sync's fp32 accumulators (m16n8k16, or m16n8k8 below sm_80) across
    lanes, with `warps` warps along M and N.
    """
    return gl.NVMMADistributedLayout(
        version=[2, 0 if arch >= 80 else 1], warps_per_cta=list(warps), instr_shape=[16, 8]
    )


def dot_operand(index: int, mma: Any) -> Any:
    """Returns the layout of mma.sync's 16-bit operand A (0) or B (1) across lanes."""
    return gl.DotOperandLayout(index, mma, 2)


# A barrier for all threads of a CTA. Triton itself inserts such barriers where accesses to shared
# memory need them.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

# Asynchronous copies from global to shared memory; masked elements become zeros.
copy_async = (
    async_copy.async_load
    if hasattr(async_copy, "async_load")
    else async_copy.async_copy_global_to_shared
)
commit_copies = async_copy.commit_group
wait_copies = async_copy.wait_group  # Triton adds the barrier that must follow
