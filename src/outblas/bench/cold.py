"""Cold weights: calls that find none of their weights in L2, as in a model that decodes.

A call that is repeated with the same weights reads them from L2 if they fit, and is then faster
than memory allows: the weights of 16×4096×4096 have 33.6 MB. Therefore the calls of a batch rotate
over copies of the weights that do not fit L2 together.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from outblas.bench import turn

L2_TIMES = 2  # bytes of the copies, as a multiple of the capacity of L2
FEW_ROWS = 256  # up to this many rows, a product is bound by the bytes of its weights
COPY_BYTES = 1 << 30
COPIES_TIMED = 4
COPY_ROUNDS = 8


def is_memory_bound(rows: float, bytes_moved: int, l2_bytes: int) -> bool:
    """Returns whether a call is also timed with cold weights: it has few rows for each matrix of
    weights, or everything that it reads and writes fits twice into L2.
    """
    return rows <= FEW_ROWS or 2 * bytes_moved <= l2_bytes


def copies(b: torch.Tensor, l2_bytes: int) -> list[torch.Tensor]:
    """Returns b and copies with its layout, whose bytes together are twice those of L2; at least
    two.
    """
    count = max(2, math.ceil(L2_TIMES * l2_bytes / (b.numel() * b.element_size())))
    return [b, *(torch.empty_like(b).copy_(b) for _ in range(count - 1))]


def batch(
    call: turn.WeightCall,
    weights: Sequence[torch.Tensor],
    us: float,
    *,
    short: bool,
    calls: int = turn.CALLS,
) -> turn.Batch:
    """Returns a batch of calls of about `us` µs that use the weights in turn, each equally often.
    `short`: inside a CUDA graph; otherwise at least `calls` of them.
    """
    one_each = [partial(call, copy) for copy in weights]
    for first_call in one_each:  # a capture allows no planning, which other addresses may require
        first_call()
    rounds = math.ceil((turn.graph_calls(us) if short else calls) / len(one_each))
    make = turn.graph if short else turn.eager
    return replace(make(one_each * rounds), holds=tuple(weights))


def copy_gbs() -> float:
    """Returns the GB/s with which a copy of a gigabyte reads and writes on the current GPU, by the
    faster of the driver's copy and a kernel. This is the bandwidth that a call can reach.
    """
    source = torch.ones(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    ways: tuple[turn.Call, ...] = (
        lambda: target.copy_(source),
        lambda: torch.mul(source, 1.0, out=target),
    )
    fastest = math.inf
    for way in ways:
        way()
        batch = turn.graph([way] * COPIES_TIMED)
        us = statistics.median(turn.elapsed_us(batch) for _ in range(COPY_ROUNDS))
        fastest = min(fastest, us)
    return 2 * COPY_BYTES / fastest / 1e3
