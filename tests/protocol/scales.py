"""What stands for the scales of fp8 operands that vary along K (`gemm.block_scales`): a stage has a
tag that says of which rows, columns, matrix and terms they are, and sums are added only if they are
of the same.
"""

from typing import Any

from . import state
from .dsl import ARCH, content
from .fault import ProtocolFault
from .memory import Copy, InFlight

WARP = 32
SYNC_WARP = 100  # of the first warp of a consumer: a number that no named barrier has


def row_addresses(cta, work):
    """Whose rows, and from which word of K on."""
    state.machine.agent.pause("global read")
    return work.first_row(cta.config.tile_m), getattr(work, "first_term", 0)


def column_addresses(cta, work):
    state.machine.agent.pause("global read")
    return work.column, work.matrix


def copy_stage(cta, work, rows, columns, k_tile, stage):
    """The warp copies the scales of a k tile, which land some time."""
    agent, machine = state.machine.agent, state.machine
    agent.pause("issue")
    (row, first), (low, high) = rows, scale_bytes(cta, stage)
    tag = ("scales", (row, *columns, first + k_tile * cta.config.tile_k))
    copy, in_flight, memory = Copy(agent.name), InFlight(tag), agent.cta.memory
    memory.write(low, high, in_flight, copy)

    def land():
        agent.cta.check_present(f"a copy of {agent.name}")
        if memory.in_range(low, high) != [in_flight]:
            raise ProtocolFault("overwritten", f"{tag} lands where something else is")
        memory.write(low, high, tag, copy)
        copy.landed = True
        for then in copy.then:
            then()
        agent.copies_landed.changed()

    agent.copies.append(copy)
    machine.after(machine.timing.delay("copy", agent.name), land)


def scale_bytes(cta, stage) -> tuple[int, int]:
    """Where the scales of a stage lie in shared memory."""
    words: Any = cta.scales.shared
    size = words.count // cta.config.stages * 4
    low = words.address + stage * size
    return low, low + size


def read_stage(cta, stage):
    """The threads of an agent read the scales of a stage, which takes a while."""
    agent = state.machine.agent
    low, high = scale_bytes(cta, stage)
    memory = agent.cta.memory
    found = content(memory.read(low, high, agent.name))
    number = memory.begin_read(low, high, agent.name)
    agent.pause()
    memory.end_read(number)
    return found


def factor_count(cta, width):
    return 1  # all scales of a stage


def read_factors(cta, consumer, width, stage, factors):
    factors[0] = read_stage(cta, stage)


def add_by_blocks(cta, sums, factors, boundaries):
    add(cta, sums, factors[0])


def add_by_columns(cta, consumer, sums, stage):
    add(cta, sums, read_stage(cta, stage))


def add(cta, sums, factors):
    """Adds the sums of 64 rows of a stage to those of the tile, of which all rows have the same in
    the model.
    """
    acc, partial = sums.mma.fragments.acc, sums.mma.partial.acc
    for product in partial[0].products:
        (_, (row, k)), of_b = product
        _, (column, k_of_b, *rest) = of_b[0] if isinstance(of_b[0], tuple) else of_b
        is_batched = cta.traits.form == "ragged_m"
        own = row, column, rest[-1] if is_batched else factors[1][2], k
        if factors != ("scales", own) or k != k_of_b or len(partial[0].products) != 1:
            raise ProtocolFault("wrong result", f"{product} is multiplied by {factors}")
    if sums.group == 0:
        for i in range(acc.count):
            acc[i] = acc[i] + partial[i]


def consumer_release(self, index):
    """Each warp arrives for itself when all of its lanes have read. Those that are agents of their
    own are the first warp, the agent of all other threads is the other three.
    """
    agent = state.machine.agent
    lane, threads = agent.tidx % 128, agent.threads
    if lane < WARP and self.cluster > 1:
        ARCH.barrier(SYNC_WARP + agent.tidx // 128, self.cluster)
    ranks = [lane] if lane < WARP else [*range(self.cluster)] * 3
    agent.threads = 1
    for rank in ranks:
        if rank < self.cluster:
            ARCH.mbarrier_arrive(
                self.empty + index, None if self.cluster == 1 else self.first_rank + rank
            )
    agent.threads = threads
