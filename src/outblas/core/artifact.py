"""What compiling a kernel produces where no GPU is needed: the contract between ladders and
`outblas.inspect`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .epilogue import EpilogueArgs, glu_split
from .problem import Problem, check_out_dtype, problem
from .shapes import LAYOUTS
from .steps import NO_STEPS, Steps


@dataclass(frozen=True)
class Artifact:
    """One compiled variant of a kernel.

    `kernel` is the registry's name, `arch` the target ("sm_75", "sm_90a"), `config` the text of
    `configs.to_text`. `dtype`, `out_dtype` ("bfloat16") and `layout` ("nt") say what it multiplies.
    `log` is all that the assembler said (`ptxas -v`). `threads` and `smem_bytes` are those of one
    CTA: shared memory is dynamic and static, without the KiB that the system reserves. `stages` is
    the depth of the pipeline from loads to products, `tile` is (M, N, K) of a CTA. `bank_conflicts`
    maps an access to the extra wavefronts of each of its instructions, `passes` the level of memory
    ("l1": loads from global memory, "shared") to the passes of 128 bytes, conflicts among them, in
    which it serves a CTA's k-block of `tile[2]` terms; None: the kernel does not say.
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
    """Threads of one CTA, from the PTX of a kernel that declares them. Raises ValueError for one
    that does not.
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
    """An aligned, row-major product without data, to compile for; with steps after it, whose bias
    is of columns, and of which a gated activation makes one column of two of B's.

    Raises ValueError for a layout, a shape or an output dtype that does not exist.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, expected one of {', '.join(LAYOUTS)}")
    if len(shape) != 3 or not all(type(size) is int and size > 0 for size in shape):
        raise ValueError(f"shape is {shape!r}, expected three sizes (M, N, K), each at least 1")
    M, N, K = shape

    def matrix(rows: int, columns: int, letter: str, dtype: torch.dtype) -> torch.Tensor:
        if letter == "t":
            return torch.empty(columns, rows, dtype=dtype, device="meta").t()
        return torch.empty(rows, columns, dtype=dtype, device="meta")

    a, b = matrix(M, K, layout[0], dtype), matrix(K, N, layout[1], dtype)
    out_dtype = check_out_dtype(out_dtype, dtype)
    columns = N // glu_split(steps.activation)
    extra = EpilogueArgs(
        steps.activation,
        torch.empty(N, dtype=out_dtype, device="meta") if steps.bias else None,
        matrix(M, columns, "n", out_dtype) if steps.residual else None,
    )
    return problem(a, b, matrix(M, columns, "n", out_dtype), tf32=tf32, extra=extra)
