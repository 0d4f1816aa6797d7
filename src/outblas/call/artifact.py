"""The result of compiling a kernel without a GPU: the contract between the ladders and
`outblas.inspect`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from outblas.base.shapes import LAYOUTS
from outblas.call.epilogue import EpilogueArgs, glu_split
from outblas.call.problem import Problem, check_out_dtype, problem
from outblas.call.steps import NO_STEPS, Steps
from outblas.call.tensor_memory import LINE

_META = torch.device("meta")


@dataclass(frozen=True)
class Artifact:
    """One compiled variant of a kernel.

    `kernel` is the registry's name, `arch` the target ("sm_75", "sm_90a"), `config` the text of
    `configs.to_text`. `dtype`, `out_dtype` ("bfloat16") and `layout` ("nt") describe the operands.
    `log` is the complete output of the assembler (`ptxas -v`). `threads` and `smem_bytes` are per
    CTA: `smem_bytes` counts dynamic and static shared memory, without the KiB that the system
    reserves. `stages` is the depth of the pipeline from loads to MMAs, `tile` is the CTA tile (M,
    N, K).

    `bank_conflicts` maps each shared-memory access to the extra wavefronts per instruction.
    `passes` maps a level of memory ("l1": loads from global memory, or "shared") to the number of
    128-byte passes, conflicts included, in which it serves one k-block (`tile[2]` terms) of a CTA.
    Either is None where the kernel does not report it.
    """

    kernel: str
    arch: str
    config: str
    dtype: str
    out_dtype: str
    layout: str
    cubin: bytes
    ptx: str
    log: str
    threads: int
    smem_bytes: int
    stages: int
    tile: tuple[int, int, int]
    bank_conflicts: Mapping[str, float] | None = None
    passes: Mapping[str, float] | None = None


def cta_threads(ptx: str) -> int:
    """Reads the threads per CTA from the PTX of a kernel. Raises ValueError where the PTX does not
    declare them.
    """
    found = re.search(r"\.(?:reqntid|maxntid)\s+(\d+(?:\s*,\s*\d+)*)", ptx)
    if found is None:
        raise ValueError("ptx declares no .reqntid or .maxntid, expected the threads of a CTA")
    return math.prod(int(size) for size in found[1].split(","))


def example(
    dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    layout: str,
    shape: tuple[int, int, int],
    *,
    tf32: bool = False,
    steps: Steps = NO_STEPS,
) -> Problem:
    """Returns an aligned problem on the meta device, with a row-major output, to compile for.

    `steps` describe its epilogue: a bias has one value per column, and a gated activation makes one
    output column from two columns of B. Raises ValueError for a layout, a shape or an output dtype
    that does not exist.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, expected one of {', '.join(LAYOUTS)}")
    if len(shape) != 3 or not all(type(size) is int and size > 0 for size in shape):
        raise ValueError(f"shape is {shape!r}, expected three sizes (M, N, K), each at least 1")
    M, N, K = shape
    out_dtype = check_out_dtype(out_dtype, dtype)
    if steps == NO_STEPS:  # as below, without tensors: a lookup asks for it at every new shape
        a_strides = (K, 1) if layout[0] == "n" else (1, M)
        b_strides = (N, 1) if layout[1] == "n" else (1, K)
        return Problem(
            M=M,
            N=N,
            K=K,
            batch=(),
            a=a_strides,
            b=b_strides,
            c=None,
            out=(N, 1),
            dtype=dtype,
            out_dtype=out_dtype,
            device=_META,
            alignment=(LINE, LINE, 16),
            tf32=tf32,
        )

    def matrix(rows: int, columns: int, letter: str, dtype: torch.dtype) -> torch.Tensor:
        if letter == "t":
            return torch.empty(columns, rows, dtype=dtype, device="meta").t()
        return torch.empty(rows, columns, dtype=dtype, device="meta")

    a, b = matrix(M, K, layout[0], dtype), matrix(K, N, layout[1], dtype)
    columns = N // glu_split(steps.activation)
    extra = EpilogueArgs(
        steps.activation,
        torch.empty(N, dtype=out_dtype, device="meta") if steps.bias else None,
        matrix(M, columns, "n", out_dtype) if steps.residual else None,
    )
    return problem(a, b, matrix(M, columns, "n", out_dtype), tf32=tf32, extra=extra)
