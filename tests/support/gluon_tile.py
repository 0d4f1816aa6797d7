"""A Gluon kernel small enough to compile in a test, as a ladder's rung would hand it to
`inspect`.
"""

from dataclasses import dataclass

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from outblas.call.artifact import Artifact
from outblas.device import triton_artifact

TILE = (64, 64, 16)
WARPS = 4


@dataclass(frozen=True)
class TileConfig:
    """`max_registers` a thread, 0 for the assembler's choice."""

    max_registers: int = 0


@gluon.jit
def tile_kernel(a, b, c, K, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr):
    """C[64, 64] = A[64, K] B[K, 64] in one CTA, on FMA units, through shared memory."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    ACC: gl.constexpr = gl.BlockedLayout([8, 4], [8, 4], [1, 4], [1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LOAD))
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LOAD))
    k_of_a = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LOAD))
    k_of_b = gl.arange(0, BLOCK_K, gl.SliceLayout(1, LOAD))
    a_ptr = a + rows[:, None] * K + k_of_a[None, :]
    b_ptr = b + k_of_b[:, None] * BLOCK_N + columns[None, :]
    sA = gl.allocate_shared_memory(gl.float32, [BLOCK_M, BLOCK_K], SHARED)
    sB = gl.allocate_shared_memory(gl.float32, [BLOCK_K, BLOCK_N], SHARED)
    acc = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, ACC)
    for _ in range(0, K, BLOCK_K):
        sA.store(gl.load(a_ptr))
        sB.store(gl.load(b_ptr))
        acc = gl.dot_fma(
            sA.load(gl.DotOperandLayout(0, ACC, 0)), sB.load(gl.DotOperandLayout(1, ACC, 0)), acc
        )
        a_ptr += BLOCK_K
        b_ptr += BLOCK_K * BLOCK_N
    out_rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, ACC))
    out_columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, ACC))
    gl.store(c + out_rows[:, None] * BLOCK_N + out_columns[None, :], acc)


def artifact(config: TileConfig, arch: int) -> Artifact:
    blocks = {(4 + i,): size for i, size in enumerate(TILE)}
    types = (
        dict.fromkeys("abc", "*fp32")
        | {"K": "i32"}
        | dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_K"), "constexpr")
    )
    divisors = {(i,): [["tt.divisibility", 16]] for i in range(4)}
    options = {
        "num_warps": WARPS,
        "maxnreg": config.max_registers or None,
        "enable_fp_fusion": True,
    }
    source = GluonASTSource(tile_kernel, types, blocks, divisors)
    return triton_artifact.from_compiled(
        triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options),
        kernel="test.tile",
        config=config,
        dtype=torch.float32,
        out_dtype=torch.float32,
        layout="nn",
        stages=1,
        tile=TILE,
        bank_conflicts={"store A": 0},
    )
