"""The snapshot of machine code, tests/data/machine_code.json, and which of it CI compiles."""

from outblas.base import registry
from tools import machine_code
from tools.machine_code import KernelVariant

RECORDED = machine_code.load()
ENTRIES = RECORDED["variants"]

# A variant takes a core for a quarter of a second to five, so CI compiles each rung once, and of
# `hopper.gemm` and groups the smallest variants that have every feature: nearly all lines of device
# code that any variant enters. `make machine-code` and `pytest -m slow` compile all.
HOPPER_IN_CI = {
    *(kernel.name for kernel in registry.ladder("hopper")),
    "hopper.large_tile mma_n 32",
    "hopper.tma_wgmma nn",
    "hopper.tma_wgmma tn",
    "hopper.gemm GeGLU, bias, residual and aux, one consumer",
    "hopper.gemm K in a cluster of 2, 16 rows",
    "hopper.gemm addend, one consumer",
    "hopper.gemm batch, swapped operands",
    "hopper.gemm cluster 2x2",
    "hopper.gemm float16, float32 output, one consumer",
    "hopper.gemm fp8 blocks of both, GELU, bias and residual, one consumer",
    "hopper.gemm fp8 blocks to fp8, SwiGLU",
    "hopper.gemm fp8, promoted sums, scales by rows, bias, one consumer",
    "hopper.gemm fp8, swapped operands, one consumer",
    "hopper.gemm one wave, three consumers",
    "hopper.gemm pingpong nn",
    "hopper.gemm residual by columns, one consumer",
    "hopper.gemm split-K, one consumer",
    "hopper.gemm stores from registers, one consumer",
    "hopper.gemm stream-K, one consumer",
    "hopper.gemm strided output of unaligned operands, one consumer",
    "hopper.gemm variable tile N, one consumer",
    "hopper.gemm weights ready, one consumer",
    "hopper.grouped gathered and scattered rows, SwiGLU",
    "hopper.grouped masked rows, bias",
    "hopper.grouped rows",
    "hopper.grouped rows, GELU, bias, residual and aux",
    "hopper.grouped rows, fp8 blocks",
    "hopper.grouped terms",
}
# Each kernel in Triton for one architecture; other tests compile them for all. They share their
# epilogues' device code: each step of it in one kernel.
TRITON_IN_CI = {
    "activation_backward GELU",
    "activation_backward SwiGLU",
    "portable SwiGLU",
    "portable residual and aux",
    "portable sm_90",
    "simt.coalesced sm_80",
    "simt.naive addend, any sizes",
    "simt.naive sm_75",
    "simt.pipelined sm_80",
    "simt.register sm_80",
    "simt.shared sm_75",
    "simt.strip sm_75",
    "simt.vectorized sm_75",
    "simt.warptile batch",
    "turing.cp_async bias and GELU",
    "turing.double_buffer sm_75",
    "turing.ldmatrix code for sm_75 on sm_90",
    "turing.shared sm_75",
    "turing.vectorized sm_75",
    "turing.wmma sm_80",
}
IN_CI = HOPPER_IN_CI | TRITON_IN_CI


def is_hopper(name: str) -> bool:
    """Whether a variant of the snapshot is made with the CuTe DSL."""
    return name.startswith("hopper.")


def variant(name: str) -> KernelVariant:
    """A variant of the snapshot."""
    return machine_code.variant(ENTRIES[name])
