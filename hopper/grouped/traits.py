"""The traits of a grouped product that are fixed when `hopper.grouped` is compiled."""

from dataclasses import dataclass

from ..gemm import traits

BY_BALLOT = 32  # groups that the lanes of a warp compare at once
CAPACITIES = (32, 128, 288, 512)  # few, because each is a compile
MOST_MIXED = 288  # groups whose order fits beside the stages, too


@dataclass(frozen=True)
class GroupedTraits(traits.KernelTraits):
    """Besides those of `hopper.gemm`:

    form: "ragged_m" or "ragged_k", as in `core.grouped`.
    capacity: the number of groups that the schedule has room for, one of `CAPACITIES`.
    zero_tail: the rows behind the last group are one group more, whose sums are zero.
    large: the number of cluster tiles below each other, or with ragged terms of terms, from which
        on a group counts as large: its tiles wait for the tensor cores, and those of other groups
        for DRAM. Tiles of both are computed in turns. 0: in the order of groups.
    """

    form: str = "ragged_m"
    capacity: int = BY_BALLOT
    zero_tail: bool = False
    large: int = 0

    @property
    def mixed(self) -> bool:
        """Whether tiles of large and of small groups are computed in turns."""
        return self.large > 0

    @property
    def masks_terms(self) -> bool:
        return self.form == "ragged_k"
