"""Artifacts of Triton and Gluon kernels: the compiler's output, the assembler's report, and bank
conflicts.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from outblas.base import forks
from outblas.base.compat.triton_private import CompiledKernel, assemble
from outblas.base.configs import to_text
from outblas.call.artifact import Artifact, cta_threads
from outblas.call.problem import dtype_name

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
