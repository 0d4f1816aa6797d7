"""Which thread holds which elements in a CUDA-core kernel: the maps that its config and the storage
of its operands ask for.
"""

from dataclasses import dataclass

from ..core.problem import Problem
from ..device.launch import contiguous, vector
from ..device.mapping import Mapping, copies, outputs
from .simt_config import SimtConfig


@dataclass(frozen=True)
class Maps:
    """Which thread holds which outputs, and which elements of the k-blocks of A and B on their way
    to shared memory.
    """

    outputs: Mapping
    a: Mapping
    b: Mapping


def maps(config: SimtConfig, problem: Problem) -> Maps:
    """Neighbouring lanes copy along the axis along which an operand is stored."""
    c = config
    computed = outputs(
        (c.block_m, c.block_n),
        (c.warp_m, c.warp_n),
        (c.thread_m, c.thread_n),
        (c.piece_m, c.piece_n),
        c.interleave,
    )
    if c.block_k == 1:
        return Maps(computed, computed, computed)
    wide_a, wide_b = (min(c.vector, vector(problem, operand)) for operand in "ab")
    a = copies((c.block_m, c.block_k), wide_a, c.num_warps)
    if contiguous(problem, "a") == "m":
        a = copies((c.block_k, c.block_m), wide_a, c.num_warps).transposed()
    b = copies((c.block_k, c.block_n), wide_b, c.num_warps)
    if contiguous(problem, "b") == "k":
        b = copies((c.block_n, c.block_k), wide_b, c.num_warps).transposed()
    return Maps(computed, a, b)
