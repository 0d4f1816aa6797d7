"""The snapshot of machine code, tests/data/machine_code.json, and which of it CI compiles.

Tests of what a variant of a Hopper kernel is made of look at variants of the snapshot, by their
names there: both then take one compile.
"""

import pytest

from outblas.base import registry
from tools import machine_code
from tools.machine_code import KernelVariant

RECORDED = machine_code.load()
ENTRIES = RECORDED["variants"]

# A Hopper variant takes a core for about a second, so CI compiles each rung as it is called by
# default, and of `hopper.gemm` a variant for each of its features. `make machine-code` and
# `pytest -m slow` compile all.
HOPPER_IN_CI = {
    *(kernel.name for kernel in registry.ladder("hopper")),
    "hopper.hilbert three consumers",
    "hopper.hilbert tt",
    "hopper.large_tile mma_n 32",
    "hopper.store_tuning stores through L1",
    "hopper.tma_wgmma 16 columns",
    "hopper.tma_wgmma nn",
    "hopper.tma_wgmma tn",
    "hopper.gemm 16 columns nn",
    "hopper.gemm GeGLU, bias, residual and aux",
    "hopper.gemm K in a cluster of 2, 16 rows",
    "hopper.gemm addend",
    "hopper.gemm all epilogue steps, one consumer",
    "hopper.gemm batch, swapped operands",
    "hopper.gemm cluster 2x2",
    "hopper.gemm float16",
    "hopper.gemm float32 output",
    "hopper.gemm fp8 blocks of both, GELU, bias and residual",
    "hopper.gemm fp8 blocks of rows, 256x128",
    "hopper.gemm fp8 blocks, 256x128, GELU, bias and residual",
    "hopper.gemm fp8 blocks to fp8, SwiGLU",
    "hopper.gemm fp8, fast sums, scales by rows",
    "hopper.gemm fp8, promoted sums",
    "hopper.gemm odd N",
    "hopper.gemm one wave, three consumers",
    "hopper.gemm one wave, two consumers",
    "hopper.gemm operands that TMA cannot load",
    "hopper.gemm output without contiguous dimension",
    "hopper.gemm split-K, three consumers",
    "hopper.gemm stores from registers",
    "hopper.gemm stream-K nn",
    "hopper.gemm tanh GELU, pingpong",
    "hopper.gemm variable tile N nn",
}
# Triton kernels share their epilogues' device code: CI compiles each step of it in one kernel.
TRITON_LEFT_OUT = {
    "portable bias and GELU",
    "simt.pipelined addend, any sizes",
    "turing.cp_async SwiGLU",
    "turing.cp_async residual and aux",
}


def is_hopper(name: str) -> bool:
    """Whether a variant of the snapshot is made with the CuTe DSL."""
    return name.startswith("hopper.")


IN_CI = {
    name
    for name in ENTRIES
    if (name in HOPPER_IN_CI if is_hopper(name) else name not in TRITON_LEFT_OUT)
}


def variant(name: str) -> KernelVariant:
    """A variant of the snapshot."""
    return machine_code.variant(ENTRIES[name])


def parameter(name: str, *values: object) -> object:
    """A case that looks at a variant of the snapshot: `slow` where CI does not compile that."""
    return pytest.param(name, *values, id=name, marks=() if name in IN_CI else pytest.mark.slow)
