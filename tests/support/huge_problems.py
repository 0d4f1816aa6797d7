"""Problems larger than any memory: their sizes are all that counts."""

import math
from dataclasses import replace

import torch

from outblas.call.artifact import example
from outblas.call.problem import Problem


def huge(M: int, N: int, K: int, *batch: int) -> Problem:
    """A bfloat16 product of layout nt. The matrices of A overlap one another, and those of B and C
    do.
    """
    aligned = example(torch.bfloat16, None, "nt", (64, 64, 64))
    zeros = (0,) * len(batch)
    a, b, out = (*zeros, K, 1), (*zeros, 1, K), (*zeros, N, 1)
    return replace(aligned, M=M, N=N, K=K, batch=batch, a=a, b=b, out=out)


def numbered(batch: tuple[int, ...]) -> Problem:
    """A batch of products of 1x20x8 whose offset in C is their number."""
    steps = [math.prod(batch[i + 1 :]) for i in range(len(batch))]
    return replace(huge(1, 20, 8, *batch), out=(*steps, 1, 1))
