"""The accumulators of 64 rows of a consumer where sums are promoted: those of the tile, and of a
stage. Of wide tiles of gated pairs a stage has those of one half after the other.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from outblas.hopper.gemm import epilogue_math
from outblas.hopper.gemm.records import TileMma


@dataclass(frozen=True)
class RowGroup:
    """Row group `group` of a consumer: 64 of its rows. The accumulators of a stage in `mma.partial`
    hold part `part` of the `parts` of its columns; those of the tile all rows and columns.
    """

    mma: TileMma
    config: Any
    group: int
    part: int = 0
    parts: int = 1

    @property
    def columns(self) -> range:
        """The first of each eight columns of the tile whose sums a stage has."""
        width = self.mma.width // self.parts
        return range(self.part * width, (self.part + 1) * width, 8)

    def registers(self, column: int) -> list[int]:
        """Returns the four accumulators of the tile in the eight columns from `column` on: two
        neighbours in a row, and two in the row eight below.
        """
        return epilogue_math.registers(self.config, self.mma.width, self.group, column, 8)

    @property
    def partial(self) -> Any:
        """The accumulators of a stage."""
        assert self.mma.partial is not None, "row groups are of promoted sums"
        return self.mma.partial.acc

    def partial_registers(self, column: int) -> list[int]:
        """Returns the same of the accumulators of a stage."""
        mma_n = self.config.mma_n or self.mma.width
        column -= self.columns.start
        first = column % mma_n // 2 + mma_n // 2 * (column // mma_n)
        return [first + v for v in range(4)]


def column_parts(config: Any, gated: bool) -> int:
    """Returns in how many parts a stage's sums of a row group are computed: two where wgmmas have
    as many columns as a half of gated pairs. Their accumulators then serve both halves.
    """
    return 2 if gated and 2 * config.mma_n == config.tile_n else 1


def in_order(total, product, factor=None):
    """Returns total + product · factor, without a factor total + product, rounded once.

    The instruction is explicit because compilers keep its place among those that wait for tensor
    cores. An addition that they moved behind the next products would need its sums twice.
    """
    if factor is None:
        return cute.arch.inline_ptx(
            "add.rn.f32 {$w0}, {$r0}, {$r1};",
            write_only_types=[Float32],
            read_only_args=[total, product],
        )
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[product, factor, total],
    )
