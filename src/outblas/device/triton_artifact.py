"""Artifacts of Triton and Gluon kernels: the compiler's output, the assembler's report, and bank
conflicts.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from outblas.base import forks
from outblas.base.compat.triton_private import CompiledKernel, assemble
from outblas.base.configs import to_text
from outblas.core.artifact import Artifact, cta_threads
from outblas.core.problem import dtype_name
from outblas.device.triton_variant import TritonVariant

_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
_lock = forks.Lock(held=True)  # held, because standard output is redirected for every thread


def from_compiled(
    compiled: CompiledKernel,
    *,
    machine_arch: int | None = None,
    kernel: str,
    config: Any,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    layout: str,
    stages: int,
    tile: tuple[int, int, int],
    bank_conflicts: Mapping[str, float] | None = None,
    passes: Mapping[str, float] | None = None,
) -> Artifact:
    """Returns the artifact of a kernel that `triton.compile` returned. `machine_arch` (90 is sm_90)
    is the architecture of the GPU, if the kernel was compiled for an older one. `config` is the
    rung's frozen config; the other arguments are fields of Artifact.
    """
    ptx, compiled_for = compiled.asm["ptx"], compiled.metadata.target.arch
    newer = machine_arch not in (None, compiled_for)
    arch = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    assert arch, "Triton's PTX names its target"
    cubin, log = _assemble(compiled, machine_arch or compiled_for)
    return Artifact(
        kernel=kernel,
        arch=f"sm_{machine_arch}" if newer else arch[1],
        config=to_text(config),
        dtype=dtype_name(dtype),
        out_dtype=dtype_name(out_dtype),
        layout=layout,
        cubin=cubin if newer else compiled.asm["cubin"],
        ptx=ptx,
        log=log,
        threads=cta_threads(ptx),
        smem_bytes=compiled.metadata.shared,  # Triton declares no static shared memory
        stages=stages,
        tile=tile,
        bank_conflicts=bank_conflicts,
        passes=passes,
    )


def _assemble(compiled: CompiledKernel, arch: int) -> tuple[bytes, str]:
    """Assembles a kernel's PTX for an architecture; returns the cubin and the log of ptxas.

    Triton keeps no log, and a kernel from its cache never had one. The PTX is therefore assembled
    again, by Triton itself, so that the assembler and its options are the same.
    """
    with _lock:
        return assemble(compiled.asm["ptx"], compiled.metadata._asdict(), arch)


def bank_conflicts(registers: Any, shared: Any, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Returns the extra wavefronts of each ld.shared or st.shared that moves a tile between two
    Gluon layouts; 0 means no conflicts.

    `registers` is a distributed layout, `shared` a swizzled shared layout, `shape` the shape of the
    tile. Compiles a kernel to find out. Raises ValueError for padded layouts, because
    `gl.bank_conflicts` aborts the process for them.
    """
    if isinstance(shared, gl.PaddedSharedLayout):
        raise ValueError(
            "shared is a PaddedSharedLayout, expected a layout that gl.bank_conflicts can count"
        )
    linear = isinstance(registers, gl.DistributedLinearLayout)
    warps = 2 ** len(registers.warp_bases) if linear else math.prod(registers.warps_per_cta)
    variant = TritonVariant(
        __name__,
        _conflicts_kernel.__name__,
        (("out", "*i32"), *((name, "constexpr") for name in _conflicts_kernel.arg_names[1:])),
        (((1,), registers), ((2,), shared), ((3,), shape), ((4,), _TYPES[dtype])),
        (),
        (("enable_fp_fusion", True), ("num_warps", warps)),
        80,
    )
    ir = variant.compile().asm["ttgir"]
    found = re.search(r"arith\.constant (\d+) : i32", ir)
    assert found, ir
    return int(found[1])


@gluon.jit  # type: ignore[untyped-decorator]
def _conflicts_kernel(  # type: ignore[no-untyped-def]
    out, REGISTERS: gl.constexpr, SHARED: gl.constexpr, SHAPE: gl.constexpr, DTYPE: gl.constexpr
):
    tile = gl.full(SHAPE, 0, DTYPE, REGISTERS)
    conflicts: gl.constexpr = gl.bank_conflicts(
        tile.type, gl.allocate_shared_memory(DTYPE, SHAPE, SHARED).type
    )
    gl.store(out, conflicts)
