"""The traits of a grouped product that are fixed when `hopper.grouped` is compiled."""

from dataclasses import dataclass

from ..gemm import traits

BY_BALLOT = 32  # groups that the lanes of a warp compare at once
CAPACITIES = (32, 128, 512)  # few, because each is a compile


@dataclass(frozen=True)
class GroupedTraits(traits.KernelTraits):
    """Besides those of `hopper.gemm`:

    form: "ragged_m" or "ragged_k", as in `core.grouped`.
    capacity: the number of groups that the schedule has room for, one of `CAPACITIES`.
    zero_tail: the rows behind the last group are one group more, whose sums are zero.
    masked: groups have places of their own, and their numbers of rows are told.
    gathers: each row of A is the one that an index names.
    scatters: each row of C is stored in the row that an index names.
    weighted: the outputs of each row are multiplied by a weight before the residual is added.
    row_order: with ragged terms, the tiles of a group follow each other along the rows of its
        result, so that the CTAs write whole rows together.
    turns: with ragged rows and clusters of 2×1, those that compute the last tile row of a group
        with an odd number of them lie across it, as 1×2.

    The scales of fp8 operands vary along K.

    A bias has a vector of "columns" or of "pairs" for each group. A residual is also "scattered":
    a matrix that is read in the rows in which C is stored.
    """

    form: str = "ragged_m"
    capacity: int = BY_BALLOT
    zero_tail: bool = False
    masked: bool = False
    gathers: bool = False
    scatters: bool = False
    weighted: bool = False
    row_order: bool = False
    turns: bool = False

    @property
    def plain(self) -> bool:
        return super().plain and not self.weighted

    @property
    def divides_terms(self) -> bool:
        """Whether the terms of sums are divided among groups."""
        return self.form == "ragged_k"

    @property
    def masks_terms(self) -> bool:
        return self.divides_terms and not self.formats
