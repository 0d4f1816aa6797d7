"""The operands of every measurement: normal(0, 1), never zeros, because zeros draw less power."""

import torch

from outblas.base.shapes import Shape


def normal(
    shape: Shape,
    layout: str,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None = None,
    device: str = "cuda",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a[M, K] and b[K, N] from normal(0, 1), stored according to `layout`, and an empty
    out[M, N], on the current GPU.
    """
    M, N, K = shape
    generator = torch.Generator(device).manual_seed(0)

    def matrix(rows: int, columns: int, letter: str) -> torch.Tensor:
        stored = (rows, columns) if letter == "n" else (columns, rows)
        t = torch.empty(stored, dtype=dtype, device=device).normal_(generator=generator)
        return t if letter == "n" else t.t()

    return (
        matrix(M, K, layout[0]),
        matrix(K, N, layout[1]),
        torch.empty(M, N, dtype=out_dtype or dtype, device=device),
    )
