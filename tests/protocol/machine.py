"""A simulated GPU: threads that wait for each other, copies that land some time, and what can go
wrong between them.
"""

import gc
import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

from greenlet import getcurrent, greenlet

from .fault import ProtocolFault
from .memory import Copy, SharedMemory, Write
from .scale_memory import Root, Scale

Operands = tuple[tuple[tuple[int, int], ...], ...]  # the ranges of bytes of each
WARPGROUP = 128
MOST_EVENTS = 3_000_000


def endless() -> ProtocolFault:
    return ProtocolFault("deadlock", f"{MOST_EVENTS} events and no end")


class Timing:
    """How long everything takes, in cycles: random, and adversarial by scale.

    Each kind of delay, and each kind at each place, draws a factor once, from 0 to 3000, so that in
    one run fetches take a thousand times as long as products, in another one consumer is asleep
    most of the time. Single delays are now and then fifty times as long as the others. Seed 0 has
    no delays: everything happens in the order of its start.
    """

    def __init__(self, seed: int, slow: dict[str, float] | None = None):
        self.random = random.Random(seed)
        self.draw = self.random.random
        self.of_kinds: dict[str, float] = dict(slow or {})
        self.of_places: dict[tuple[str, object], float] = {}  # both factors' product
        self.instant = seed == 0 and not slow

    def delay(self, kind: str, place: object) -> float:
        if self.instant:
            return 0.0
        scale = self.of_places.get((kind, place))
        if scale is None:
            scale = self._scale(kind, place)
        draw = self.draw
        return scale * draw() * 50 if draw() < 0.02 else scale * draw()

    def _scale(self, kind: str, place: object) -> float:
        if kind not in self.of_kinds:
            self.of_kinds[kind] = self.random.choice((0, 1, 1, 10, 100, 1000))
        scale = self.of_kinds[kind] * self.random.choice((1, 1, 1, 1, 3, 30))
        self.of_places[kind, place] = scale
        return scale


class Waiting:
    """Agents that wait for a condition, which is looked at again whenever something has changed."""

    __slots__ = ("agents",)

    def __init__(self) -> None:
        self.agents: list[Agent] = []

    def wait(self, agent: "Agent", condition: Callable[[], bool], text: Callable[[], str]) -> None:
        while not condition():
            agent.waits_for = text
            self.agents.append(agent)
            agent.machine.go_on(agent)
        agent.waits_for = None

    def changed(self) -> None:
        if not self.agents:
            return
        woken, self.agents = self.agents, []
        machine = woken[0].machine
        for agent in woken:
            machine.resume_after(machine.timing.delay("wake", agent.name), agent)


class Barrier(Waiting):
    """An mbarrier. A phase ends when all its arrivals have come and as many bytes have landed as
    were announced.
    """

    __slots__ = ("bytes", "expected", "name", "pending", "phase")

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self.expected = self.pending = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.expected = self.pending = int(count)

    def arrive(self, count: int, announced: int = 0) -> None:
        if self.expected == 0:
            raise ProtocolFault("arrivals", f"{self.name} is arrived at before it is initialised")
        if count > self.pending:
            raise ProtocolFault(
                "arrivals", f"{self.name} gets {count} arrivals and awaits {self.pending}"
            )
        self.pending -= count
        self.bytes += announced
        self._end_phase()

    def landed(self, count: int) -> None:
        self.bytes -= count
        self._end_phase()

    def _end_phase(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.expected
            self.changed()

    def passes(self, parity: int) -> bool:
        """PTX's try_wait.parity: true once the phase of this parity has ended, and the next one has
        not.
        """
        return self.phase & 1 != parity

    @property
    def idle(self) -> bool:
        return self.pending == self.expected and self.bytes == 0


class NamedBarrier(Waiting):
    """bar.sync and bar.arrive: the last of so many threads lets all go on that wait. `found`: the
    turns in which a condition was true for a thread, of bar.red.
    """

    __slots__ = ("arrived", "found", "members", "turn")

    def __init__(self) -> None:
        super().__init__()
        self.arrived = self.turn = 0
        self.found: set[int] = set()
        self.members: list[Agent] = []

    def arrive(self, agent: "Agent", threads: int, *, orders: bool = True) -> int:
        """Returns the turn that must have ended for those who wait. `orders`: what those who meet
        wrote to shared memory before is visible to all of them after.
        """
        turn = self.turn
        self.arrived += agent.threads
        self.members.append(agent)
        if self.arrived > threads:
            raise ProtocolFault(
                "arrivals", f"{self.arrived} threads arrive at a named barrier of {threads}"
            )
        if self.arrived == threads:
            if seen := set().union(*[member.observed for member in self.members]):
                for member in self.members:
                    member.observed = set(seen)
            if orders:
                for member in self.members:
                    member.show_words()
            self.arrived, self.members = 0, []
            self.turn += 1
            self.changed()
        return turn


class Cta:
    def __init__(self, machine: "Machine", index: int, rank: int):
        self.machine, self.index, self.rank = machine, index, rank
        self.name = f"CTA {index}"
        self.memory = SharedMemory(self.name)
        self.barriers: dict[int, Barrier] = {}
        self.named: defaultdict[int, NamedBarrier] = defaultdict(NamedBarrier)
        self.warpgroups: dict[int, Warpgroup] = {}
        self.agents: list[Agent] = []
        self.copied: list[Copy] = []  # which has landed, and nobody has fenced
        self.threads = 0
        self.left = 0
        self.ended = False

    def barrier(self, address: int) -> Barrier:
        barrier = self.barriers.get(address)
        if barrier is None:
            barrier = self.barriers[address] = Barrier(f"{self.name}, mbarrier at {address}")
        return barrier

    def check_present(self, what: str) -> None:
        if self.ended:
            raise ProtocolFault("exit", f"{what} reaches {self.name}, which has ended")

    def leave(self) -> None:
        self.left += 1
        if self.left == len(self.agents):
            if self.memory.readers:
                _, _, who = next(iter(self.memory.readers.values()))
                raise ProtocolFault("exit", f"{self.name} ends while {who} reads its shared memory")
            self.ended = True


class Product:
    """A wgmma: how many threads have issued it, their accumulators, and its operands' ranges."""

    __slots__ = ("accumulators", "operands", "overwrite", "threads")

    def __init__(self, operands: Operands, overwrite: bool):
        self.operands, self.overwrite = operands, overwrite
        self.threads = 0
        self.accumulators: list[Any] = []


class Warpgroup(Waiting):
    """Four warps that multiply together: a wgmma starts when all of them have issued it, and reads
    shared memory until it ends; groups end in their order.
    """

    __slots__ = ("cta", "ended", "issued", "name", "tensor_core_free")

    def __init__(self, cta: Cta, number: int):
        super().__init__()
        self.cta, self.name = cta, f"{cta.name}, warpgroup {number}"
        self.issued: list[Product] = []
        self.ended = 0
        self.tensor_core_free = 0.0

    def issue(
        self, agent: "Agent", number: int, accumulator: Any, operands: Operands, overwrite: bool
    ) -> None:
        if number == len(self.issued):
            self.issued.append(Product(operands, overwrite))
        product = self.issued[number]
        if product.operands != operands or product.overwrite != overwrite:
            raise ProtocolFault(
                "wrong result",
                f"{self.name}: warps issue different wgmma: {product.operands}, {operands}",
            )
        product.threads += agent.threads
        product.accumulators.append(accumulator)
        accumulator.running += 1
        if product.threads == WARPGROUP:
            self._start(product)

    def _start(self, product: Product) -> None:
        machine, memory = self.cta.machine, self.cta.memory
        tags, numbers = [], []
        who = f"wgmma of {self.name}"
        for ranges in product.operands:
            found = []
            for part in ranges:
                for region in memory.read(*part, who):
                    if region.write is not None and not region.write.fenced:
                        raise ProtocolFault(
                            "early read", f"{who} reads what {region.write.agent} has not fenced"
                        )
                    found.append(region)
            tags.append(machine.content(found))
            numbers += [memory.begin_read(*part, who) for part in ranges]
        begin = max(machine.now, self.tensor_core_free)
        self.tensor_core_free = begin + machine.timing.delay("wgmma", self.name)

        def end() -> None:
            self._end(product, tuple(tags), numbers)

        machine.after(self.tensor_core_free - machine.now, end)

    def _end(self, product: Product, tags: tuple[object, ...], numbers: list[int]) -> None:
        for number in numbers:
            self.cta.memory.end_read(number)
        for accumulator in product.accumulators:
            accumulator.multiplied(tags, product.overwrite)
        self.ended += 1
        self.changed()


class Agent:
    """Threads of a warpgroup that do the same at the same time: a warp, a lane that acts alone, or
    what is left.
    """

    cluster_turn: int  # the turn of the cluster's barrier at which it has arrived

    def __init__(self, machine: "Machine", cta: Cta, warpgroup: int, lane: int, threads: int):
        self.machine, self.cta, self.threads = machine, cta, threads
        self.tidx = warpgroup * WARPGROUP + lane
        self.warp, self.lane = self.tidx // 32, self.tidx % 32
        self.name = f"{cta.name}, warpgroup {warpgroup}, lane {lane}"
        self.waits_for: Callable[[], str] | None = None
        self.thread: greenlet | None = None
        self.alone = Alone(self)
        self._warpgroup: Warpgroup | None = None
        self._ordinal: tuple[int, int] | None = None
        self.allocated = 0
        self.multiplied = 0  # wgmma issued
        self.groups: list[
            int
        ] = []  # of each committed group, the number of wgmma issued by its end
        self.storing: list = []  # TMA stores not committed, and
        self.stores: list = []  # those of committed groups
        self.reads_done = Waiting()
        self.sent = 0  # arrivals at other CTAs' barriers that are on their way
        self.sent_performed = Waiting()
        self.unfenced: list[Write] = []
        self.wrote: list[int] = []  # words of shared memory since the last barrier
        self.copies: list[Copy] = []  # of cp.async
        self.copies_landed = Waiting()
        self.copying: dict[int, Scale] = {}  # scales that it has begun to copy, by their places
        self.additions: Any = None  # what it adds of a row group (`scales`), and
        self.lanes: Any = None  # the state of its CTA as its lanes have it, and
        self.reading: Any = None  # as it reads scales
        self.seen: dict[
            Barrier, int
        ] = {}  # of the mbarriers it has waited at, how many phases ended
        self.observed: set = set()  # writes to global memory that a fence of this agent publishes

    @property
    def warpgroup(self) -> Warpgroup:
        if self._warpgroup is None:
            number = self.tidx // WARPGROUP
            self._warpgroup = self.cta.warpgroups.setdefault(number, Warpgroup(self.cta, number))
        return self._warpgroup

    @property
    def ordinal(self) -> tuple[int, int]:
        """Which of the warpgroup's agents this is, and of how many."""
        if self._ordinal is None:
            self._ordinal = self.mates.index(self), len(self.mates)
        return self._ordinal

    @cached_property
    def mates(self) -> "list[Agent]":
        """The warpgroup's agents."""
        number = self.tidx // WARPGROUP
        return [agent for agent in self.cta.agents if agent.tidx // WARPGROUP == number]

    def show_words(self) -> None:
        """What it wrote to shared memory, a word at a time, is visible to its CTA."""
        for address in self.wrote:
            self.cta.memory.unordered.pop(address, None)
        self.wrote = []

    def pause(self, kind: str = "step") -> None:
        """Some time passes for the agent that runs, which is this one."""
        machine = self.machine
        delay = machine.timing.delay(kind, self.name)
        if not delay:
            return
        time, number, heap = machine.now + delay, next(machine.numbers), machine.heap
        if heap and heap[0][0] <= time:
            heappush(heap, (time, number, self, None))
            machine.go_on(self)
        else:  # nothing happens before
            if number > MOST_EVENTS:
                raise endless()
            machine.now = time


class Alone:
    """The time in which one thread of an agent acts."""

    def __init__(self, agent: Agent):
        self.agent, self.threads = agent, agent.threads

    def __enter__(self) -> None:
        self.agent.threads = 1

    def __exit__(self, *_: object) -> None:
        self.agent.threads = self.threads


class PreviousCall(Waiting):
    """The call before this one on its stream, which has ended before unless a case says that it
    still runs. Until it ends, it may write all but the weights, and read what this call writes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ended = True

    def run(self, machine: "Machine") -> None:
        """It still runs when this call begins."""
        self.ended = False
        machine.after(machine.timing.delay("previous call", "the GPU"), self._end)

    def _end(self) -> None:
        self.ended = True
        self.changed()

    def check_ended(self, what: str) -> None:
        if not self.ended:
            raise ProtocolFault("too early", f"{what} while the previous call still runs")


class Store:
    """A TMA store: it reads shared memory for some time."""

    reading = True


class Machine:
    """One launch: all clusters run at once."""

    def __init__(self, timing: Timing, *, content: Callable):
        self.timing, self.content = timing, content
        self.now = 0.0
        # Time, number, and either the agent that goes on then or what happens.
        self.heap: list[tuple[float, int, Agent | None, Callable[[], None] | None]] = []
        self.numbers = itertools.count()
        self.hub = getcurrent()
        self.agent: Agent | None = None  # which runs
        self.ctas: list[Cta] = []
        self.cluster = 1
        self.cluster_barriers: dict[int, NamedBarrier] = {}
        self.previous = PreviousCall()
        self.scales: dict[int, Root] = {}  # scales of fp8 operands, by their operand's number
        self.known_scales: dict[int, Scale] = {}  # by their addresses
        self.factors: dict[Any, Any] = {}  # by which sums are multiplied (`scales`)

    def after(self, delay: float, action: Callable[[], None]) -> None:
        heappush(self.heap, (self.now + delay, next(self.numbers), None, action))

    def resume_after(self, delay: float, agent: Agent) -> None:
        heappush(self.heap, (self.now + delay, next(self.numbers), agent, None))

    def go_on(self, until: Agent | None = None) -> None:
        """Lets happen what is to happen until an agent goes on. It is called in that agent's
        thread, which switches to others itself; without an agent, in the hub, until nothing
        happens any more.
        """
        heap = self.heap
        while heap:
            self.now, number, agent, action = heappop(heap)
            if number > MOST_EVENTS:
                raise endless()
            if agent is None:
                action()
                continue
            self.agent = agent
            if agent is not until:
                agent.thread.switch()
            if until is not None:
                return
        if until is not None:
            self.hub.switch()  # and never back

    def peer(self, cta: Cta, rank: int) -> Cta:
        return self.ctas[cta.index - cta.rank + int(rank)]

    def launch(
        self, grid: int, cluster: int, warpgroups: int, lanes: int, body: Callable[[], None]
    ) -> None:
        """Runs `body` for every agent. Of a consumer warpgroup so many lanes are agents of their
        own; of the first warpgroup every warp is one. Raises ProtocolFault.
        """
        self.cluster = cluster
        for index in range(grid):
            cta = Cta(self, index, index % cluster)
            self.ctas.append(cta)
            for warpgroup in range(warpgroups):
                if warpgroup == 0:
                    parts = [(32 * warp, 32) for warp in range(4)]
                else:
                    parts = [*((lane, 1) for lane in range(lanes)), (32, WARPGROUP - lanes)]
                for lane, threads in parts:
                    self._begin(cta, warpgroup, lane, threads, body)
        collects = gc.isenabled()
        gc.disable()  # threads are cycles, of which none is garbage before the end
        try:
            self.go_on()
            self._check_end()
            self._let_go()
        finally:
            if collects:
                gc.enable()

    def _let_go(self) -> None:
        """Cuts the cycles of a launch that has ended, which the collector of garbage is slow to
        find.
        """
        self.agent = None
        self.factors = {}
        for cta in self.ctas:
            for agent in cta.agents:
                vars(agent).clear()
            cta.agents = []
            cta.warpgroups = {}
            vars(cta).pop("machine")

    def _begin(
        self, cta: Cta, warpgroup: int, lane: int, threads: int, body: Callable[[], None]
    ) -> None:
        agent = Agent(self, cta, warpgroup, lane, threads)
        cta.agents.append(agent)
        cta.threads += threads

        def run() -> None:
            self.hub.switch()  # begun there, or its depth of calls would add to another thread's
            body()
            cta.leave()

        agent.thread = greenlet(run, parent=self.hub)
        agent.thread.switch()
        self.resume_after(
            self.timing.delay("start", cta.name) + self.timing.delay("step", agent.name), agent
        )

    def _check_end(self) -> None:
        waiting = [agent for cta in self.ctas for agent in cta.agents if not agent.thread.dead]
        if waiting:
            text = "; ".join(
                f"{a.name} waits for {a.waits_for() if a.waits_for else 'nothing'}"
                for a in waiting[:6]
            )
            raise ProtocolFault("deadlock", f"{len(waiting)} agents wait: {text}")
        for cta in self.ctas:
            for barrier in cta.barriers.values():
                if not barrier.idle:
                    raise ProtocolFault(
                        "arrivals",
                        f"{barrier.name} is left inside of a phase: {barrier.pending} of "
                        f"{barrier.expected} arrivals "
                        f"and {barrier.bytes} bytes are to come",
                    )
