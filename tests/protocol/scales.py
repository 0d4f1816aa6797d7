"""What stands for the arithmetic of scales that vary along K (`gemm.block_scales` and
`gemm.scale_loads`). Their own code finds, moves and reads them; here sums are added only if they
are multiplied by the scales of their own row, column and block of K.
"""

from dataclasses import dataclass
from typing import Any

from . import state
from .fault import ProtocolFault
from .scale_memory import Scale, ScaleWords, land_copies, scale_of

WARP = 32
WARPGROUP = 128


def changed(record: Any, **changes: Any) -> Any:
    """What `dataclasses.replace` returns of a record that computes nothing when it is made."""
    copy = object.__new__(type(record))
    copy.__dict__.update(record.__dict__)
    copy.__dict__.update(changes)
    return copy


# ---- the warp that copies, which is one agent: its lanes one after the other
def lanes_of(cta: Any) -> list[Any]:
    """The state of the CTA as each lane of a warp has it."""
    agent, context = state.machine.agent, cta.context
    if agent.lanes is None or agent.lanes[0] is not cta:
        lanes = [
            changed(cta, context=changed(context, thread=context.thread + lane))
            for lane in range(WARP)
        ]
        agent.lanes = cta, lanes
    found: list[Any] = agent.lanes[1]
    return found


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
    agent = state.machine.agent
    if agent.reading is None or agent.reading[0] is not cta:
        scales = changed(cta.scales, shared=ScaleWords(cta.scales.shared))
        agent.reading = cta, changed(cta, scales=scales)
    return agent.reading[1]


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
    if sums.group == 0 and sums.part == 0:
        sums.mma.fragments.acc.add(sums.partial)


def add(cta, sums, factors):
    """Adds the sums of a row group that were multiplied by so many factors."""
    products = sums.partial[0].products
    if len(products) != 1:
        raise ProtocolFault("wrong result", f"the products of a stage are {products}")
    tile, own = Tile.of(products[0], cta, sums), state.machine.agent.tidx % 4 * 2
    wanted = tile.factors(own, sums.columns)
    if factors != wanted:
        check_factors(products[0], factors, wanted)
    add_unscaled(sums)


def check_factors(product, factors, wanted):
    """Factors are as they are wanted, but for rows and columns that do not exist."""
    if factors.keys() != wanted.keys():
        raise ProtocolFault("wrong result", f"columns {[*factors]} are added")
    for place, pair in factors.items():
        for factor, scales in zip(pair, wanted[place], strict=True):
            if factor != scales and None not in scales:
                raise ProtocolFault(
                    "wrong result", f"{product} is multiplied by {factor}, not by {scales}"
                )


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

    def factors(self, own: int, firsts: range) -> dict[tuple[int, int], Any]:
        """By which scales a thread, whose columns of eight begin with `own`, multiplies the sums of
        each of two rows and eight columns: two pairs. `firsts`: the first of each eight columns.
        Threads with the same scales share them.
        """
        rows = tuple(self.scale_of_row(row) for row in range(2))
        known: dict[Any, Any] = state.machine.factors
        key = rows, self.columns, self.block, self.group, own, firsts
        if key not in known:
            of_columns = known.get(key[1:])
            if of_columns is None:
                of_columns = known[key[1:]] = [
                    (column, [self.scale_of_column(column + own + v) for v in range(2)])
                    for column in firsts
                ]
            known[key] = {
                (number, column): ((row, first), (row, second))
                for number, row in enumerate(rows)
                for column, (first, second) in of_columns
            }
        found: dict[tuple[int, int], Any] = known[key]
        return found

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
        return scale_of(operand, index // per_scale, self.block, group)


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
            real(changed(pipeline, lane=lane), index)
    agent.tidx, agent.threads = tidx, threads
