"""Operands of fp8 products."""

from typing import Any

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def fp8_operands(
    M: int,
    N: int,
    K: int,
    a: torch.dtype = E4M3,
    b: torch.dtype = E4M3,
    device: str = "cpu",
    most: int = 0,
) -> Any:
    """A (M, K) and B (K, N) of normal values, or of integers up to `most`; B lies as a transposed
    weight does.
    """
    generator = torch.Generator(device).manual_seed(M + N + K)

    def made(rows: int, dtype: torch.dtype) -> torch.Tensor:
        t = torch.randn(rows, K, generator=generator, device=device)
        return (t.round().clamp(-most, most) if most else t).to(dtype)

    return made(M, a), made(N, b).t()
