"""What stands for the arithmetic of scales that vary along K (`gemm.block_scales`). Its own code
finds, moves and reads them; here sums are added only if they are multiplied by the scales of their
own row, column and block of K.
"""

from dataclasses import dataclass, replace
from typing import Any

from . import state
from .fault import ProtocolFault
from .scale_memory import Scale, ScaleWords, land_copies

WARP = 32
WARPGROUP = 128


# ---- the warp that copies, which is one agent: its lanes one after the other
def lanes_of(cta: Any) -> list[Any]:
    """The state of the CTA as each lane of a warp has it."""
    context = cta.context
    return [
        replace(cta, context=replace(context, thread=context.thread + lane)) for lane in range(WARP)
    ]


def row_addresses(real, cta, work):
    state.machine.agent.pause("global read")
    return [(lane, real(lane, work)) for lane in lanes_of(cta)]


def column_addresses(real, cta, work):
    state.machine.agent.pause("global read")
    return [real(lane, work) for lane in lanes_of(cta)]


def copy_stage(real, cta, rows, columns, k_tile, stage):
    state.machine.agent.pause("issue")
    for (lane, of_rows), of_columns in zip(rows, columns, strict=True):
        real(lane, of_rows, of_columns, k_tile, stage)
    land_copies()


# ---- a consumer
def row_scales(real, cta, row, group, stage):
    state.machine.agent.pause()
    return real(reading(cta), row, group, stage)


def reading(cta):
    """The state of the CTA whose scales in shared memory may be read."""
    return replace(cta, scales=replace(cta.scales, shared=ScaleWords(cta.scales.shared)))


@dataclass
class Additions:
    """What an agent adds of a row group at the moment, in the order of its code. `by_blocks`: of
    columns of eight and of rows, the two factors.
    """

    in_order: list[Any]
    by_blocks: dict[tuple[int, int], Any]


def in_order(total, product, factor):
    """Where each column has a scale: four factors of eight columns, two of each row."""
    state.machine.agent.additions.in_order.append(factor)
    return total


def add_pair(sums, row, column, pair):
    """Where columns share scales: the factors of two columns of a row."""
    added = state.machine.agent.additions.by_blocks
    if (row, column) in added:
        raise ProtocolFault("wrong result", f"columns {column} of row {row} are added twice")
    added[row, column] = tuple(pair)


def add_by_blocks(real, cta, sums, factors, boundaries):
    agent = state.machine.agent
    agent.additions = Additions([], {})
    real(cta, sums, factors, boundaries)
    add(cta, sums, agent.additions.by_blocks)


def add_by_columns(real, cta, row, sums, stage):
    agent = state.machine.agent
    agent.pause()
    agent.additions = Additions([], {})
    real(reading(cta), row, sums, stage)
    found = agent.additions.in_order
    by_blocks = {
        (row, sums.columns[n // 4]): (found[n + 2 * row], found[n + 2 * row + 1])
        for n in range(0, len(found), 4)
        for row in range(2)
    }
    add(cta, sums, by_blocks)


def add_unscaled(sums):
    """Adds the sums of a row group of a stage, all of whose rows have the same in the model."""
    acc, partial = sums.mma.fragments.acc, sums.partial
    if sums.group == 0 and sums.part == 0:
        for i in range(acc.count):
            acc[i] = acc[i] + partial[i]


def add(cta, sums, factors):
    """Adds the sums of a row group that were multiplied by so many factors."""
    products = sums.partial[0].products
    if len(products) != 1:
        raise ProtocolFault("wrong result", f"the products of a stage are {products}")
    wanted = {(row, column) for row in range(2) for column in sums.columns}
    if factors.keys() != wanted:
        raise ProtocolFault("wrong result", f"of {sums.columns} the columns {[*factors]} are added")
    tile, own = Tile.of(products[0], cta, sums), state.machine.agent.tidx % 4 * 2
    rows = [tile.scale_of_row(row) for row in range(2)]
    columns = {
        column: tile.scale_of_column(column)
        for first in range(own, sums.mma.width, 8)
        for column in (first, first + 1)
    }
    for (row, column), pair in factors.items():
        for v in range(2):
            scales = rows[row], columns[column + own + v]
            if pair[v] != scales and None not in scales:
                raise ProtocolFault(
                    "wrong result", f"{products[0]} is multiplied by {pair[v]}, not by {scales}"
                )
    add_unscaled(sums)


@dataclass(frozen=True)
class Tile:
    """What a consumer multiplies in a stage. row: the agent's first one. columns: where those of
    each half begin, of which `width` are. block: of K. group: whose scales they are.
    """

    row: int
    columns: tuple[int, ...]
    width: int
    block: int
    group: int

    @staticmethod
    def of(product, cta, sums) -> "Tile":
        config, (of_a, of_b) = cta.config, product
        halves = of_b if isinstance(of_b[0], tuple) else (of_b,)
        (_, (first, k, *_)), agent = of_a, state.machine.agent
        warpgroup = (agent.tidx // WARPGROUP - 1) % config.warpgroups_per_tile
        thread = agent.tidx % WARPGROUP
        row = first + (sums.group * config.warpgroups_per_tile + warpgroup) * 64
        columns, N = [], state.machine.case.N
        for number, (_, (column, k_of_b, *_)) in enumerate(halves):
            columns.append(number * N + column)
            if k != k_of_b:
                raise ProtocolFault("wrong result", f"{of_a} is multiplied by {of_b}")
        matrix = halves[0][1][-1]
        return Tile(
            row + thread // 32 * 16 + thread % 32 // 4,
            tuple(columns),
            sums.mma.width // len(halves),
            k // config.tile_k,
            matrix,
        )

    def scale_of_row(self, number) -> Scale | None:
        """The scale of the agent's first row, or the one eight below; None where A has no such."""
        launch: Any = state.machine
        row = launch.scaled_row(self.row + 8 * number, self.group)
        return None if row is None else self._scale("A", row, launch.traits.block_a)

    def scale_of_column(self, column) -> Scale | None:
        """The scale of a column of the tile; None where B has no such."""
        launch: Any = state.machine
        half, rest = divmod(column, self.width)
        index = self.columns[half] + rest
        if index >= launch.case.N * (half + 1):
            return None
        return self._scale("B", index, launch.traits.block_b)

    def _scale(self, operand, index, per_scale) -> Scale:
        root = state.machine.scales[1 if operand == "A" else 2]
        group = self.group if "group" in root.modes else 0
        return Scale(operand, index // per_scale, self.block, group)


def consumer_release(real, pipeline, index):
    """Each warp arrives for itself when all of its lanes have read. Those that are agents of their
    own are of the first warp, the agent of all other threads is of the other three.
    """
    agent = state.machine.agent
    if agent.threads == 1:
        real(pipeline, index)
        return
    tidx, threads = agent.tidx, agent.threads
    agent.threads = 1
    for warp in range(1, WARPGROUP // WARP):
        for lane in range(max(pipeline.cluster, 1)):
            agent.tidx = tidx // WARPGROUP * WARPGROUP + warp * WARP + lane
            real(replace(pipeline, lane=lane), index)
    agent.tidx, agent.threads = tidx, threads
