"""`cute.arch` and `cute.nvgpu.warpgroup` on the model: barriers, fences, what a thread asks about
itself.
"""

import re
from functools import cache, partial
from types import SimpleNamespace

from . import scale_memory, state
from .machine import NamedBarrier
from .values import Opaque

SYNC_WARP = 100  # of the first warp of a consumer: a number that no named barrier has


class Arch(Opaque):
    def thread_idx(self):
        return state.machine.agent.tidx, 0, 0

    def block_idx(self):
        return state.machine.agent.cta.index, 0, 0

    def block_idx_in_cluster(self):
        return state.machine.agent.cta.rank

    def warp_idx(self):
        return state.machine.agent.warp

    def make_warp_uniform(self, value):
        return value

    def elect_one(self):
        return state.machine.agent.alone

    def mbarrier_init(self, pointer, count):
        state.machine.agent.cta.barrier(pointer.address).init(count)

    def mbarrier_wait(self, pointer, parity):
        agent = state.machine.agent
        agent.pause()
        barrier = agent.cta.barrier(pointer.address)
        if not barrier.passes(parity):
            barrier.wait(
                agent,
                lambda: barrier.passes(parity),
                lambda: f"{barrier.name}, parity {parity} in phase {barrier.phase}",
            )
        agent.seen[barrier] = barrier.phase

    def mbarrier_arrive(self, pointer, rank=None):
        agent = state.machine.agent
        agent.pause()
        count = agent.threads
        if rank is None or int(rank) == agent.cta.rank:
            agent.cta.barrier(pointer.address).arrive(count)
            return
        cta = state.machine.peer(agent.cta, rank)

        agent.sent += 1

        def arrive():
            cta.check_present(f"an arrival of {agent.name}")
            cta.barrier(pointer.address).arrive(count)
            agent.sent -= 1
            agent.sent_performed.changed()

        state.machine.after(state.machine.timing.delay("remote arrival", agent.name), arrive)

    def mbarrier_arrive_and_expect_tx(self, pointer, count):
        agent = state.machine.agent
        agent.pause()
        agent.cta.barrier(pointer.address).arrive(agent.threads, int(count))

    def sync_warp(self):
        """Lanes that are agents of their own are of the first warp. Other warps are of one agent,
        whose threads do the same at the same time.
        """
        agent = state.machine.agent
        lanes = [a for a in agent.mates if a.tidx % 128 < 32 and a.threads == 1]
        if agent.tidx % 128 < 32 and len(lanes) > 1:
            self.barrier(SYNC_WARP + agent.tidx // 128, len(lanes))

    def griddepcontrol_launch_dependents(self):
        """Lets the next call start, which waits for this one."""

    def griddepcontrol_wait(self):
        previous = state.machine.previous
        previous.wait(
            state.machine.agent, lambda: previous.ended, lambda: "the previous call to end"
        )

    def barrier(self, barrier_id, number_of_threads):
        agent = state.machine.agent
        agent.pause()
        barrier = agent.cta.named[int(barrier_id)]
        turn = barrier.arrive(agent, number_of_threads)
        if barrier.turn > turn:
            return
        barrier.wait(agent, lambda: barrier.turn > turn, lambda: f"named barrier {barrier_id}")

    def barrier_arrive(self, barrier_id, number_of_threads):
        agent = state.machine.agent
        agent.pause()
        agent.cta.named[int(barrier_id)].arrive(agent, number_of_threads)

    def sync_threads(self):
        self.barrier(0, state.machine.agent.cta.threads)

    def cluster_arrive(self):
        """Releases: what the agent has sent is performed before."""
        agent = state.machine.agent
        agent.sent_performed.wait(
            agent, lambda: agent.sent == 0, lambda: "its arrivals to be performed"
        )
        self._cluster_arrive(orders=True)

    def cluster_arrive_relaxed(self):
        """Orders nothing that was written before, not even within the CTA."""
        self._cluster_arrive(orders=False)

    def _cluster_arrive(self, orders):
        agent = state.machine.agent
        agent.pause()
        first = agent.cta.index - agent.cta.rank
        barrier = state.machine.cluster_barriers.setdefault(first, NamedBarrier())
        ctas = state.machine.ctas[first : first + state.machine.cluster]
        threads = sum(cta.threads for cta in ctas)
        agent.cluster_turn = barrier.arrive(agent, threads, orders=orders)

    def cluster_wait(self):
        agent = state.machine.agent
        barrier = state.machine.cluster_barriers[agent.cta.index - agent.cta.rank]
        barrier.wait(
            agent, lambda: barrier.turn > agent.cluster_turn, lambda: "the cluster's barrier"
        )

    def fence_proxy(self, *_, **__):
        agent = state.machine.agent
        for write in agent.unfenced:
            write.fenced = True
        agent.unfenced = []
        copied, agent.cta.copied = agent.cta.copied, []
        for copy in copied:
            copy.fenced = agent.seen.get(copy.barrier, 0) > copy.phase
            if not copy.fenced:
                agent.cta.copied.append(copy)

    def cp_async_mbarrier_arrive_noinc(self, pointer):
        """Arrives when what the agent has copied so far has landed."""
        agent = state.machine.agent
        agent.pause()
        barrier = agent.cta.barrier(pointer.address)
        for copy in agent.copies:
            if copy.barrier is None:
                copy.barrier, copy.phase = barrier, barrier.phase
        on_their_way = [copy for copy in agent.copies if not copy.landed]
        agent.copies = on_their_way.copy()
        left = len(on_their_way)

        def landed():
            nonlocal left
            left -= 1
            if left <= 0:
                barrier.arrive(32)

        for copy in on_their_way:
            copy.then.append(landed)
        if not on_their_way:
            landed()

    def cp_async_commit_group(self):
        """All copies are of one group here."""

    def cp_async_wait_group(self, count):
        agent = state.machine.agent
        agent.copies_landed.wait(
            agent, lambda: all(copy.landed for copy in agent.copies), lambda: "its copies"
        )

    def fence_acq_rel_gpu(self):
        """What this agent has written, and what it learned of by barriers, is visible to all."""
        agent = state.machine.agent
        agent.pause("fence")
        for land in agent.observed:
            land()
        agent.observed = set()

    def atomic_add(self, pointer, value, sem, scope):
        if sem == "acq_rel":
            self.fence_acq_rel_gpu()
        state.machine.agent.pause("atomic")
        state.machine.previous.check_ended("a counter is changed")
        pointer.memory.check(pointer.index)
        before = pointer.memory.values.get(pointer.index, 0)
        pointer.memory.values[pointer.index] = before + value
        return before

    def cp_async_bulk_commit_group(self):
        agent = state.machine.agent
        agent.stores.append(agent.storing)
        agent.storing = []

    def cp_async_bulk_wait_group(self, count, read):
        agent = state.machine.agent
        agent.pause()

        def done():
            groups = agent.stores[: len(agent.stores) - count]
            return not any(store.reading for group in groups for store in group)

        agent.reads_done.wait(agent, done, lambda: "its TMA stores")

    def store_async_dsmem(self, pointer, vector, barrier, rank):
        agent = state.machine.agent
        agent.pause()
        cta, threads, values = state.machine.peer(agent.cta, rank), agent.threads, list(vector)

        def land():
            cta.check_present(f"a sum of {agent.name}")
            for i, value in enumerate(values):
                cta.memory.words[pointer.address + 4 * i] = value
            cta.barrier(barrier.address).landed(4 * len(values) * threads)

        state.machine.after(state.machine.timing.delay("dsmem", agent.name), land)

    def barrier_any(self, barrier_id, number_of_threads, condition):
        """bar.red.or: whether the condition is true for any thread that meets here."""
        barrier = state.machine.agent.cta.named[int(barrier_id)]
        turn = barrier.turn
        if condition:
            barrier.found.add(turn)
        self.barrier(barrier_id, number_of_threads)
        return turn in barrier.found

    def load(self, pointer, dtype, sem, scope):
        state.machine.agent.pause("global read")
        state.machine.previous.check_ended("a counter is read")
        pointer.memory.check(pointer.index)
        return pointer.memory.values.get(pointer.index, 0)

    def inline_ptx(self, text, *, write_only_types=(), read_only_args=()):
        if act := _instruction(text):
            return act(*read_only_args)
        return read_only_args[0] if write_only_types else None


@cache
def _instruction(text):
    """What an instruction does that makes a difference to a protocol; None where it makes none."""
    if "bar.red.or.pred" in text:
        return lambda *given: int(ARCH.barrier_any(*given))
    if meeting := re.fullmatch(r"barrier\.sync (\d+), (\d+);", text):
        return partial(ARCH.barrier, *map(int, meeting.groups()))
    return scale_memory.INSTRUCTIONS.get(text.split()[0])


ARCH = Arch()


class WarpgroupOps(Opaque):
    Field = SimpleNamespace(ACCUMULATE="accumulate")

    def make_smem_layout_atom(self, kind, dtype):
        return dtype

    def commit_group(self):
        agent = state.machine.agent
        agent.groups.append(agent.multiplied)

    def wait_group(self, count):
        agent = state.machine.agent
        agent.pause()
        if len(agent.groups) > count:
            wanted, group = agent.groups[len(agent.groups) - 1 - count], agent.warpgroup
            group.wait(agent, lambda: group.ended >= wanted, lambda: "its wgmma")
