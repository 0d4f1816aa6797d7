"""The traits of a call that are fixed when `hopper.gemm` is compiled."""

from dataclasses import dataclass

from outblas.call import fp8

BY_BALLOT = 32  # groups that the lanes of a warp compare at once
CAPACITIES = (32, 128, 512)  # few, because each is a compile


@dataclass(frozen=True)
class KernelTraits:
    """The traits of a call that one compile of `hopper.gemm` fixes, besides its config and its
    dtypes.

    How C is written
        width: neighbouring elements of C that can be written at once (1, 2, or 16 bytes of them).
        by_columns: columns of C are contiguous, not rows.
        staged: TMA can store C, so it is stored through shared memory.
        transposed: tensors are passed as those of C^T = B^T A^T.
        batched: there is a batch dimension L.

    How tiles are scheduled
        ordered: a table numbers the tiles: those of all matrices in a single wave, else of one.
        single_wave: no cluster has more than one work tile.
        staggered_tail: consumers that share a tile multiply its last k tiles one after the other;
            each stores its part while the next one multiplies.

    The epilogue (`outblas.call.epilogue`); "" stands for a tensor that the call does not have
        scaled: sums are multiplied by alpha.
        addend: how the tensor that is multiplied by beta is read.
        function, gated: the activation, and whether it is a gated linear unit of two columns.
        bias, residual, scale_a, scale_b: how each is read.
        aux: how the input of the activation is written.

    A tensor of the epilogue is accessed as "one" value, as a vector of "columns", of "pairs" of
    columns or of "rows", as a "matrix", as a "batch" of matrices, or "staged": it has C's layout
    and is moved by TMA. Scales that vary along K are accessed by "blocks" (`block_scales`).

    fp8
        formats: the text of `core.fp8.Formats`. A 16-bit word of A or B holds two values.
        wide_scales: the scales of neighbouring rows of A are neighbours in memory, and those of
            four begin at 16 bytes, so that TMA loads them; so do those of the columns of B where
            each has its own.
        from_any_row: tiles begin at any row, and TMA loads `wide_scales` from the last row on that
            divides by 4 and does not lie behind it.
        whole_halves: each half of gated pairs has whole blocks of 128 columns, which share a scale.
        scale_out: C is fp8, and its scales, one for 128 columns of a row, are written by "blocks".
        power_of_two: these scales are rounded up to powers of two.

    Groups
        form: "ragged_m" or "ragged_k", as in `core.grouped`; "" for a product without groups. Then
            the others are as they are by default.
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

    Scales of fp8 operands of groups vary along K. A bias has a vector of "columns" or of "pairs"
    for each group. A residual is also "scattered": a matrix that is read in the rows in which C is
    stored.
    """

    width: int
    by_columns: bool
    staged: bool
    transposed: bool = False
    batched: bool = False
    ordered: bool = False
    single_wave: bool = False
    scaled: bool = False
    addend: str = ""
    function: str = ""
    gated: bool = False
    bias: str = ""
    residual: str = ""
    aux: str = ""
    scale_a: str = ""
    scale_b: str = ""
    formats: str = ""
    staggered_tail: bool = False
    wide_scales: bool = False
    from_any_row: bool = False
    whole_halves: bool = False
    scale_out: str = ""
    power_of_two: bool = False
    form: str = ""
    capacity: int = 0
    zero_tail: bool = False
    masked: bool = False
    gathers: bool = False
    scatters: bool = False
    weighted: bool = False
    row_order: bool = False
    turns: bool = False

    @property
    def promoted(self) -> bool:
        """Whether the sum of each stage is added up outside the tensor cores."""
        return bool(self.formats) and fp8.formats(self.formats).promoted

    @property
    def block_scaled(self) -> bool:
        """Whether scales vary along K."""
        return self.block_b > 0

    @property
    def block_a(self) -> int:
        """How many rows of A share a scale, where scales vary along K, else 0."""
        return fp8.formats(self.formats).block_a if self.formats else 0

    @property
    def block_b(self) -> int:
        """How many columns of B share a scale, where scales vary along K, else 0."""
        return fp8.formats(self.formats).block_b if self.formats else 0

    @property
    def source(self) -> str:
        """The tensor that TMA loads for the epilogue: "addend", "residual", or "" for none."""
        return next(
            (name for name in ("addend", "residual") if getattr(self, name) == "staged"), ""
        )

    @property
    def plain(self) -> bool:
        """Whether the epilogue only rounds."""
        operations = (
            self.scaled,
            self.function,
            self.gated,
            self.bias,
            self.residual,
            self.aux,
            self.formats,
            self.weighted,
        )
        return not any(operations)

    @property
    def divides_terms(self) -> bool:
        """Whether the terms of sums are divided among groups."""
        return self.form == "ragged_k"

    @property
    def masks_terms(self) -> bool:
        """Whether sums may end inside a k tile, as those of groups of terms do."""
        return self.divides_terms and not self.formats

    def granule(self, layout: str, size: int) -> int:
        """Returns the number that C's columns are a multiple of. TMA reads the second half of a row
        of gated pairs, so that half begins at a multiple of 16 bytes. Rows of groups are stored in
        vectors of `width` elements.
        """
        least = self.width if self.form else 1
        if not self.gated:
            return least
        if layout[1] == "n":
            return max(least, 8)
        return max(least, 16 // size) if self.staged and not self.by_columns else least


# "gelu_fit", with which 16-bit outputs are computed, is within this of gelu's value for bf16, in
# fractions of |x| (`epilogue_math`).
FIT = 1.3e-5


def resolve_activation(name: str, size: int, K: int) -> str:
    """Returns the activation as the kernel computes it. For 16-bit outputs gelu becomes a fit, if
    the bound of K roundings in fp32 is larger than the fit's error.
    """
    return "gelu_fit" if name == "gelu" and size == 2 and K * 2**-23 > FIT else name
