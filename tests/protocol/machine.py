"""A simulated GPU: threads that wait for each other, copies that land some time, and what can go
wrong between them.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from greenlet import getcurrent, greenlet

WARPGROUP = 128
MOST_EVENTS = 3_000_000


class ProtocolFault(Exception):
    """A run that went wrong. `kind` is one of "deadlock", "early read", "overwritten", "unreleased
    stage", "arrivals", "exit" and "wrong result".
    """

    def __init__(self, kind: str, text: str):
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Timing:
    """How long everything takes, in cycles: random, and adversarial by scale.

    Each kind of delay, and each kind at each place, draws a factor once, from 0 to 3000, so that in
    one run fetches take a thousand times as long as products, in another one consumer is asleep
    most of the time. Single delays are now and then fifty times as long as the others. Seed 0 has
    no delays: everything happens in the order of its start.
    """

    def __init__(self, seed: int, slow: dict[str, float] | None = None):
        self.seed, self.random = seed, random.Random(seed)
        self.scales: dict[Any, float] = dict(slow or {})

    def delay(self, kind: str, place: object) -> float:
        if self.seed == 0 and not self.scales:
            return 0.0
        if kind not in self.scales:
            self.scales[kind] = self.random.choice((0, 1, 1, 10, 100, 1000))
        if (kind, place) not in self.scales:
            self.scales[kind, place] = self.random.choice((1, 1, 1, 1, 3, 30))
        outlier = 50 if self.random.random() < 0.02 else 1
        return self.scales[kind] * self.scales[kind, place] * self.random.random() * outlier


class Waiting:
    """Agents that wait for a condition, which is looked at again whenever something has changed."""

    def __init__(self) -> None:
        self.agents: list[Agent] = []

    def wait(self, agent: "Agent", condition: Callable[[], bool], text: Callable[[], str]) -> None:
        while not condition():
            agent.waits_for = text
            self.agents.append(agent)
            agent.machine.hub.switch()
        agent.waits_for = None

    def changed(self) -> None:
        woken, self.agents = self.agents, []
        for agent in woken:
            agent.machine.after(agent.machine.timing.delay("wake", agent.name), agent.resume)


@dataclass
class Barrier(Waiting):
    """An mbarrier. A phase ends when all its arrivals have come and as many bytes have landed as
    were announced.
    """

    name: str
    expected: int = 0
    pending: int = 0
    bytes: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        super().__init__()

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
    """bar.sync and bar.arrive: the last of so many threads lets all go on that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = self.turn = 0
        self.members: list[Agent] = []

    def arrive(self, agent: "Agent", threads: int) -> int:
        """Returns the turn that must have ended for those who wait."""
        turn = self.turn
        self.arrived += agent.threads
        self.members.append(agent)
        if self.arrived > threads:
            raise ProtocolFault(
                "arrivals", f"{self.arrived} threads arrive at a named barrier of {threads}"
            )
        if self.arrived == threads:
            seen = set().union(*(member.observed for member in self.members))
            for member in self.members:
                member.observed = set(seen)
            self.arrived, self.members = 0, []
            self.turn += 1
            self.changed()
        return turn


@dataclass
class Write:
    """What an agent writes to shared memory; TMA may read it once the agent has fenced."""

    agent: str
    fenced: bool = False


@dataclass
class Region:
    low: int
    high: int
    tag: object
    write: "Write | None" = None  # by threads, not by TMA


class SharedMemory:
    """What lies where: tags of ranges of bytes, and who reads which range at the moment."""

    def __init__(self, name: str):
        self.name = name
        self.regions: list[Region] = []
        self.readers: dict[int, tuple[int, int, str]] = {}
        self.words: dict[int, object] = {}
        self.numbers = itertools.count()

    def write(self, low: int, high: int, tag: object, write: Write | None = None) -> None:
        self.check_unread(low, high, tag)
        kept = []
        for region in self.regions:
            if region.high <= low or high <= region.low:
                kept.append(region)
                continue
            if region.low < low:
                kept.append(Region(region.low, low, region.tag, region.write))
            if high < region.high:
                kept.append(Region(high, region.high, region.tag, region.write))
        kept.append(Region(low, high, tag, write))
        self.regions = kept

    def check_unread(self, low: int, high: int, tag: object) -> None:
        for start, end, who in self.readers.values():
            if start < high and low < end:
                raise ProtocolFault(
                    "overwritten", f"{self.name}: {tag} is written over what {who} still reads"
                )

    def read(self, low: int, high: int, who: str) -> list[Region]:
        """The regions of a range, all of it written."""
        found = sorted(
            (r for r in self.regions if r.low < high and low < r.high), key=lambda r: r.low
        )
        covered = sum(min(r.high, high) - max(r.low, low) for r in found)
        if covered < high - low:
            raise ProtocolFault(
                "early read", f"{self.name}: {who} reads bytes that nobody has written"
            )
        for region in found:
            if isinstance(region.tag, InFlight):
                raise ProtocolFault(
                    "early read", f"{self.name}: {who} reads where {region.tag.tag} has not landed"
                )
        return found

    def in_range(self, low: int, high: int) -> list[object]:
        """Tags of the regions that a range meets."""
        return [r.tag for r in self.regions if r.low < high and low < r.high]

    def begin_read(self, low: int, high: int, who: str) -> int:
        number = next(self.numbers)
        self.readers[number] = low, high, who
        return number

    def end_read(self, number: int) -> None:
        del self.readers[number]


@dataclass(frozen=True)
class InFlight:
    """What will land here."""

    tag: object


class Cta:
    def __init__(self, machine: "Machine", index: int, rank: int):
        self.machine, self.index, self.rank = machine, index, rank
        self.name = f"CTA {index}"
        self.memory = SharedMemory(self.name)
        self.barriers: dict[int, Barrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.warpgroups: dict[int, Warpgroup] = {}
        self.agents: list[Agent] = []
        self.left = 0
        self.ended = False

    def barrier(self, address: int) -> Barrier:
        if address not in self.barriers:
            self.barriers[address] = Barrier(f"{self.name}, mbarrier at {address}")
        return self.barriers[address]

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


class Warpgroup(Waiting):
    """Four warps that multiply together: a wgmma starts when all of them have issued it, and reads
    shared memory until it ends; groups end in their order.
    """

    def __init__(self, cta: Cta, number: int):
        super().__init__()
        self.cta, self.name = cta, f"{cta.name}, warpgroup {number}"
        self.issued: list[
            list
        ] = []  # of each wgmma: threads that have issued it, accumulators, operands
        self.ended = 0
        self.tensor_core_free = 0.0

    def issue(self, agent: "Agent", number: int, accumulator, operands, overwrite: bool) -> None:
        if number == len(self.issued):
            self.issued.append([0, [], operands, overwrite])
        entry = self.issued[number]
        if entry[2] != operands or entry[3] != overwrite:
            raise ProtocolFault(
                "wrong result", f"{self.name}: warps issue different wgmma: {entry[2]}, {operands}"
            )
        entry[0] += agent.threads
        entry[1].append(accumulator)
        accumulator.running += 1
        if entry[0] == WARPGROUP:
            self._start(entry)

    def _start(self, entry) -> None:
        machine = self.cta.machine
        tags, numbers = [], []
        for low, high in entry[2]:
            who = f"wgmma of {self.name}"
            tags.append(machine.content(self.cta.memory.read(low, high, who)))
            numbers.append(self.cta.memory.begin_read(low, high, who))
        begin = max(machine.now, self.tensor_core_free)
        self.tensor_core_free = begin + machine.timing.delay("wgmma", self.name)
        machine.after(self.tensor_core_free - machine.now, lambda: self._end(entry, tags, numbers))

    def _end(self, entry, tags, numbers) -> None:
        for number in numbers:
            self.cta.memory.end_read(number)
        for accumulator in entry[1]:
            accumulator.multiplied(tags, entry[3])
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
        self.observed: set = set()  # writes to global memory that a fence of this agent publishes

    @property
    def warpgroup(self) -> Warpgroup:
        number = self.tidx // WARPGROUP
        return self.cta.warpgroups.setdefault(number, Warpgroup(self.cta, number))

    @property
    def ordinal(self) -> tuple[int, int]:
        """Which of the warpgroup's agents this is, and of how many."""
        mates = [
            agent for agent in self.cta.agents if agent.tidx // WARPGROUP == self.tidx // WARPGROUP
        ]
        return mates.index(self), len(mates)

    def resume(self) -> None:
        self.thread.switch()

    def pause(self, kind: str = "step") -> None:
        """Some time passes."""
        delay = self.machine.timing.delay(kind, self.name)
        if delay:
            self.machine.after(delay, self.resume)
            self.machine.hub.switch()

    @contextmanager
    def alone(self):
        """One of its threads acts."""
        threads, self.threads = self.threads, 1
        yield
        self.threads = threads


@dataclass
class Store:
    """A TMA store: it reads shared memory for some time."""

    reading: bool = True


@dataclass
class GlobalMemory:
    """So many 32-bit words, which outlive a launch. What is written is visible to others some time,
    or by a fence.
    """

    words: int
    values: dict[int, object] = field(default_factory=dict)

    def check(self, index: int) -> None:
        if not 0 <= index < self.words:
            raise ProtocolFault("wrong result", f"word {index} of a workspace of {self.words}")


class Machine:
    """One launch: all clusters run at once."""

    def __init__(self, timing: Timing, *, content: Callable):
        self.timing, self.content = timing, content
        self.now, self.heap, self.numbers = 0.0, [], itertools.count()
        self.hub = getcurrent()
        self.ctas: list[Cta] = []
        self.cluster = 1
        self.cluster_barriers: dict[int, NamedBarrier] = {}

    @property
    def agent(self) -> Agent:
        return getcurrent().agent

    def after(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (self.now + delay, next(self.numbers), action))

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
        for events in itertools.count():
            if not self.heap:
                break
            if events == MOST_EVENTS:
                raise ProtocolFault("deadlock", f"{MOST_EVENTS} events and no end")
            self.now, _, action = heapq.heappop(self.heap)
            action()
        self._check_end()

    def _begin(
        self, cta: Cta, warpgroup: int, lane: int, threads: int, body: Callable[[], None]
    ) -> None:
        agent = Agent(self, cta, warpgroup, lane, threads)
        cta.agents.append(agent)

        def run() -> None:
            body()
            cta.leave()

        agent.thread = greenlet(run, parent=self.hub)
        agent.thread.agent = agent
        self.after(
            self.timing.delay("start", cta.name) + self.timing.delay("step", agent.name),
            agent.resume,
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
