"""The loads of a tensor-core rung, predicted without a GPU: which thread loads which elements, and
the cost in L1, counted as 128-byte lines that the warps look up.
"""

from outblas.core.problem import Problem
from outblas.device import access, launch
from outblas.device.mapping import Mapping, copies
from outblas.turing.config import ITEM, TuringConfig

# Which thread holds which of 16×16 elements, rows of A or columns of B by K: groups of four lanes
# along K, two elements each.
FRAGMENT = Mapping((16, 16), ((0, 1), (8, 0), (0, 8)), ((0, 2), (0, 4), (1, 0), (2, 0), (4, 0)), ())


def width(config: TuringConfig, problem: Problem, name: str) -> int:
    """Returns the number of elements that one load of operand "a" or "b" moves."""
    return min(config.vector, launch.vector(problem, name))


def copied(config: TuringConfig, problem: Problem, name: str) -> Mapping:
    """Returns which thread loads which elements of a k-block, rows of A or columns of B by K.
    Neighbouring lanes go along the operand's contiguous axis.
    """
    rows = config.block_m if name == "a" else config.block_n
    wide = width(config, problem, name)
    if launch.contiguous(problem, name) == "k":
        return copies((rows, config.block_k), wide, config.num_warps, spread=False)
    return copies((config.block_k, rows), wide, config.num_warps, spread=False).transposed()


def lines(config: TuringConfig, problem: Problem, direct: bool) -> float:
    """Returns the cache lines that all warps of a CTA look up for one k-block of A and one of B.
    `direct`: fragments are loaded straight from global memory, and each warp loads its own, even
    where warps side by side need the same.
    """
    return sum(_lines(config, problem, name, direct) for name in "ab")


def _lines(c: TuringConfig, problem: Problem, name: str, direct: bool) -> float:
    rows, again = (c.block_m, c.warps_n) if name == "a" else (c.block_n, c.warps_m)
    strides = (
        problem.a[-2:] if name == "a" else problem.b[-2:][::-1]
    )  # along rows of A or columns of B, along K
    wide = width(c, problem, name)
    if direct:
        mapping, wide = FRAGMENT, min(wide, 2) if launch.contiguous(problem, name) == "k" else 1
    else:
        mapping, again = copied(c, problem, name), 1

    def byte(row: int, k: int) -> int:
        return (row * strides[0] + k * strides[1]) * ITEM

    requests = rows * c.block_k / (access.WARP * wide) * again
    return requests * access.touched(mapping, byte, wide * ITEM, access.LINE)
