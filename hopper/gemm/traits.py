"""What a compile of `hopper.gemm` fixes of a call, and its tensors as the kernel takes them."""

from dataclasses import dataclass

import cutlass.cute as cute


@dataclass(frozen=True)
class Form:
    """What a compile fixes of a call. C has its rows contiguous, `width` elements of one at a time,
    or its columns (`by_columns`); `staged`: TMA can write it. `crossed`: tensors come as those of
    C^T = B^T A^T. `once`: no cluster has more than one piece of work. `ordered`: a table numbers
    the tiles, of all matrices done at once, else of one. The others are steps of
    `outblas.epilogue`, "" those that a call has not: `addend` (beta times it), `bias` and
    `residual` come as "columns", "pairs" of them, or "rows" of one value each, as a "matrix", or as
    a "batch" of them, and addend or residual "staged", as C leaves (`fetched`); x leaves as a
    "matrix", a "batch" or "staged". `formats` are those of fp8 operands, whose scales come as "one"
    or as a bias may; words of A and B are two values then. `in_turn`: of two consumers of a tile
    the second multiplies its last slices after the first, which stores meanwhile.
    """

    width: int
    by_columns: bool
    staged: bool
    crossed: bool
    batched: bool
    ordered: bool
    once: bool
    scaled: bool
    addend: str = ""
    function: str = ""
    gated: bool = False
    bias: str = ""
    residual: str = ""
    aux: str = ""
    scale_a: str = ""
    scale_b: str = ""
    formats: str = ""
    in_turn: bool = False

    @property
    def promoted(self) -> bool:
        """Whether sums leave the tensor cores slot by slot."""
        return "promoted" in self.formats

    @property
    def fetched(self) -> str:
        """Which tensor comes by TMA, "" for none."""
        return next(
            (name for name in ("addend", "residual") if getattr(self, name) == "staged"), ""
        )

    @property
    def plain(self) -> bool:
        """Whether sums are the output."""
        steps = (
            self.scaled,
            self.function,
            self.gated,
            self.bias,
            self.residual,
            self.aux,
            self.formats,
        )
        return not any(steps)

    def granule(self, layout: str, size: int) -> int:
        """What C's columns come in multiples of. TMA takes the second half of a row of pairs from
        16 bytes on.
        """
        if not self.gated:
            return 1
        if layout[1] == "n":
            return 8
        return 16 // size if self.staged and not self.by_columns else 1


def halves(tensor, mode: int, columns):
    """A tensor of two modes and L, of which one has 2 · `columns`, as one of three and L: the
    halves are the third.
    """
    shape, stride = list(tensor.layout.shape), list(tensor.layout.stride)
    shape[mode : mode + 1], shape[2:2] = [columns], [2]
    stride[2:2] = [stride[mode] * columns]
    return cute.make_tensor(tensor.iterator, cute.make_layout(tuple(shape), stride=tuple(stride)))


def turned(tensor, crossed: bool):
    """A host's tensor with the batch last, and its rows and columns changed if they are
    `crossed`.
    """
    batch = list(range(cute.rank(tensor) - 2))
    pair = [len(batch), len(batch) + 1]
    order = (pair[::-1] if crossed else pair) + batch
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=order))
