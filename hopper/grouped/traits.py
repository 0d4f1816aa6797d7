"""The traits of a grouped product that are fixed when `hopper.grouped` is compiled."""

from dataclasses import dataclass

from ..gemm import traits

BY_BALLOT = 32  # groups that the lanes of a warp compare at once


@dataclass(frozen=True)
class GroupedTraits(traits.KernelTraits):
    """Besides those of `hopper.gemm`:

    capacity: the number of groups that the schedule has room for, a multiple of 32.
    zero_tail: the rows behind the last group are one group more, whose sums are zero.
    """

    capacity: int = BY_BALLOT
    zero_tail: bool = False
