"""The portable kernel compiled without a GPU, and what its machine code has."""

import re
from collections import Counter
from typing import Any

import torch

from outblas.call.problem import Problem, problem
from outblas.inspect import machine_code
from outblas.kernels.portable import Config, choose, compile_for
from outblas.kernels.portable_config import uses_fma

KIB = 1024


# SMs, architecture and shared memory of a CTA: T4, A100, RTX 3090, H100.
DEVICES = {
    75: (40, 75, 64 * KIB),
    80: (108, 80, 163 * KIB),
    86: (82, 86, 99 * KIB),
    90: (132, 90, 227 * KIB),
}


BF16 = torch.bfloat16


def operand(rows: int, columns: int, letter: str, dtype: torch.dtype, pad: int = 0) -> torch.Tensor:
    if letter == "t":
        return operand(columns, rows, "n", dtype, pad).mT
    return torch.empty(rows, columns + pad, dtype=dtype, device="meta")[:, :columns]


def form(
    M: int = 4096,
    N: int = 4096,
    K: int = 4096,
    dtype: torch.dtype = BF16,
    *,
    layout: str = "nt",
    pad: int = 0,
    addend: bool = False,
    tf32: bool = False,
) -> Problem:
    a, b = operand(M, K, layout[0], dtype, pad), operand(K, N, layout[1], dtype, pad)
    out = operand(M, N, "n", dtype, pad)
    return problem(a, b, out, out if addend else None, tf32=tf32, scaled=addend)


def copies(compiled: Any) -> Counter[int]:
    """cp.async instructions by their bytes."""
    found = re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*\], (0x\w+)", compiled.asm["ptx"])
    return Counter(int(n, 16) for n in found)


def check(given: Problem, config: Config | None = None, arch: int = 90) -> Any:
    """Compiles (without a config, what is chosen); no local memory, where spills would lie, the dot
    the architecture should use, shared memory within the budget.
    """
    config = config or choose(given, *DEVICES[arch])
    compiled = compile_for(given, config, arch)
    assert machine_code.resources(compiled.asm["cubin"]).stack == 0, f"{config}: local memory"
    assert compiled.metadata.shared <= config.shared_memory(given.dtype), config
    used = set(re.findall(r"wgmma\.mma_async|mma\.sync|fma\.rn\.f32", compiled.asm["ptx"]))
    if uses_fma(given, arch):
        assert used == {"fma.rn.f32"}, config
    else:
        wanted = "wgmma.mma_async" if arch == 90 and config.block_m >= 64 else "mma.sync"
        assert used - {"fma.rn.f32"} == {wanted}, config
    return compiled
