"""Which thread holds which elements in a CUDA-core kernel: the maps for its config and for the
storage order of its operands.
"""

from dataclasses import dataclass

from outblas.call.problem import Problem
from outblas.device.launch import contiguous
from outblas.device.mapping import Mapping, copies, outputs
from outblas.kernels.simt_config import SimtConfig


@dataclass(frozen=True)
class Maps:
    """The maps from threads to outputs, and from threads to the elements of the k-blocks of A and B
    that they copy to shared memory.
    """

    outputs: Mapping
    a: Mapping
    b: Mapping


def maps(config: SimtConfig, problem: Problem) -> Maps:
    """Returns the maps. Neighbouring lanes copy along the contiguous axis of an operand."""
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
    wide_a, wide_b = (min(c.vector, problem.vector(operand)) for operand in "ab")
    a = copies((c.block_m, c.block_k), wide_a, c.num_warps)
    if contiguous(problem, "a") == "m":
        a = copies((c.block_k, c.block_m), wide_a, c.num_warps).transposed()
    b = copies((c.block_k, c.block_n), wide_b, c.num_warps)
    if contiguous(problem, "b") == "k":
        b = copies((c.block_n, c.block_k), wide_b, c.num_warps).transposed()
    return Maps(computed, a, b)
