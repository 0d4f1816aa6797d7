"""Drivers that share a store, on a clock that is simulated: the code of `screening`, `job_view` and
`leases` as it is.

Each driver is a greenlet that runs `Screen.run`; its calls of the store and of its worker take
simulated time, and in between the others run. A driver may be killed, stopped for a while or for
good, interrupted while its process goes on, or go down with its machine; its worker may be killed
from outside. Dates and monotonic clocks leap. What is drawn comes from a seed, so that a fault
repeats with it.

`run` raises ProtocolFault where a config is measured twice for no reason, two measure one at a
time, a config is branded, a trial is lost, a lease is left over, or the drivers wait for ever.
"""

import heapq
import itertools
import random
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import greenlet

from outblas.autotune.measure.isolated import Cancelled, WorkerDied
from outblas.autotune.measure.worker import Screened
from outblas.autotune.search import gpu
from outblas.autotune.store import leases, queries, sqlite
from outblas.autotune.store.leases import Holder, Observer, Owner
from outblas.autotune.store.records import Workload
from outblas.autotune.sweeps import screening
from outblas.autotune.sweeps.job_view import JobView
from outblas.autotune.sweeps.screening import Screen

GPU = gpu.imagined("h100")
WORKLOAD = Workload(16, 16, 16)
HOSTS = ("here", "there")
LONGEST = 90.0  # seconds of a measurement: of three leases
BRIEF_STOP = 15.0  # seconds that no observer takes for death
KILLED = "killed"  # the status of a worker that was killed from outside
END = 20_000.0  # simulated seconds after which drivers wait for ever


class ProtocolFault(AssertionError):
    """The model found what must not be."""


@dataclass(frozen=True)
class Faults:
    """What befalls the drivers of a run: how many of each."""

    kills: int = 0
    stops: int = 0  # for a while that is longer than a lease
    brief_stops: int = 0
    stops_for_good: int = 0
    interrupts: int = 0
    outages: int = 0  # of a machine, with all that runs on it
    worker_kills: int = 0

    @property
    def none_dies(self) -> bool:
        """Whether each config must be measured exactly once."""
        return not (
            self.kills or self.stops or self.stops_for_good or self.interrupts or self.outages
        )


@dataclass(eq=False)
class Machine:
    """A host: its processes by number, and which of its runs this is."""

    name: str
    boot: int = 0
    processes: dict[int, "Driver"] = field(default_factory=dict)


@dataclass
class Measurement:
    """A config in a driver's worker; `end` is None where it did not end."""

    config: str
    driver: "Driver"
    start: float
    end: float | None = None


class World:
    """The simulated time, the store's file, and who runs."""

    def __init__(self, seed, configs):
        self.dice = random.Random(seed)
        self.now, self._count = 0.0, 0
        self._events = []
        self.connection = sqlite.empty()
        self.machines = {name: Machine(name) for name in HOSTS}
        self.drivers = []
        self.configs = [f"number={i}" for i in range(configs)]
        self.measured = []
        self.faults_over = False
        self.scheduler = greenlet.getcurrent()
        self.observing = None  # the driver that looks at processes now

    def at(self, time, action):
        self._count += 1
        heapq.heappush(self._events, (time, self._count, action))

    def sleep(self, seconds):
        """Called in a driver's greenlet."""
        me = greenlet.getcurrent()
        me.driver.resume_at(self.now + seconds, me)
        self.scheduler.switch()
        if me.driver.interrupted and me is me.driver.main:
            me.driver.interrupted = False
            raise Cancelled

    def start(self, host):
        driver = Driver(self, self.machines[host])
        self.drivers.append(driver)
        return driver

    def play(self):
        """Until nothing is left to happen but beats, or for too long."""
        while self._events and not all(driver.done for driver in self.drivers):
            self.now, _, action = heapq.heappop(self._events)
            if self.now > END:
                raise ProtocolFault(
                    f"the drivers wait for ever: {[d.owner for d in self.drivers if not d.done]}"
                )
            action()

    def process(self, pid):
        """As `leases._process`: what the observer's machine says of a process."""
        driver = self.observing.machine.processes.get(pid)
        if driver is None:
            return "", ""
        return ("T" if driver.stopped_until > self.now else "S"), driver.started


class Driver:
    """A process with a store and a sweep, whose process goes on after it was interrupted."""

    numbers = iter(range(100, 10**9))

    def __init__(self, world, machine):
        self.world, self.machine = world, machine
        self.pid = self._free_number()
        self.started = str(next(self.numbers))
        machine.processes[self.pid] = self
        boot = f"{machine.name}-{machine.boot}"
        self.owner = Owner(
            machine.name, boot, f"pid-{machine.name}", self.pid, self.started, self.started
        )
        offset = world.dice.uniform(0, 1e6)
        leaps = sorted(
            world.dice.uniform(0, 500) for _ in range(2)
        )  # a machine was suspended, or is wrong
        clock = lambda: offset + world.now + 3600 * sum(leap < world.now for leap in leaps)  # noqa: E731
        self.holder = Holder(self.owner, Observer(clock))
        self.dead = self.finished = self.interrupted = False
        self.stopped_until = -1.0
        self.stops = []
        self.kills_of_worker = 0
        self.main = self._greenlet(self._run)
        self.heart = self._greenlet(self._beat)
        world.at(world.now + world.dice.uniform(0, 5), lambda: self._switch(self.main))
        world.at(world.now + leases.BEAT_SECONDS, lambda: self._switch(self.heart))

    def _free_number(self):
        """Numbers are few, so that they come again."""
        return next(n for n in range(1, 1000) if n not in self.machine.processes)

    def _greenlet(self, body):
        made = greenlet.greenlet(body, parent=self.world.scheduler)
        made.driver = self
        return made

    @property
    def done(self):
        return self.dead or self.finished or self.stopped_until > END

    def resume_at(self, time, who):
        self.world.at(time, lambda: self._switch(who))

    def _switch(self, who):
        if self.dead or who.dead:
            return
        if self.stopped_until > self.world.now:
            self.resume_at(self.stopped_until, who)
        else:
            who.switch()

    def kill(self):
        self.dead = True
        self.machine.processes.pop(self.pid, None)

    def stop(self, seconds):
        self.stopped_until = self.world.now + seconds
        self.stops.append((self.world.now, self.stopped_until))

    def was_stopped_long(self, start, end):
        return any(
            until - since > BRIEF_STOP and since < end and until > start
            for since, until in self.stops
        )

    def _run(self):
        view = JobView(self, WORKLOAD)
        configs = list(self.world.configs)
        if self.world.dice.random() < 0.5:
            self.world.dice.shuffle(configs)
        queue = [(candidate(config), None) for config in configs]
        screen = Screen(
            view,
            self,  # type: ignore[arg-type]
            None,
            GPU,
            WORKLOAD,
            best_us=lambda: None,
            taken=lambda trial, new: None,
            left_out=lambda unmeasured: None,
            waiting=lambda count: None,
            stopped=lambda: False,
        )
        with suppress(Cancelled):
            screen.run(queue, None)
        self.finished = True  # its process goes on, and so does its heart

    def _beat(self):
        while self.holder.held or not self.finished:
            if self.holder.held:
                self._at_once(self.holder.beating())
            self.world.sleep(leases.BEAT_SECONDS + self.world.dice.uniform(0, 2))

    # As a store.
    def _at_once(self, operation):
        self.world.observing = self
        return sqlite.at_once(self.world.connection, [operation])

    def _taking_time(self, operation):
        self.world.sleep(self.world.dice.choice((0.0, 0.001, 0.5)))
        found = self._at_once(operation)
        return found

    def trials(self, *, workload):
        return []

    def winners(self, *, workload):
        return []

    def record_best(self, winner):
        raise NotImplementedError

    def claim(self, *facts, again=False):
        identity = queries.identity(*facts)
        found = self._taking_time(self.holder.claiming(identity, again=again))
        if found.granted:
            self.holder.held[leases.key_of(identity)] = identity
        return found

    def release(self, *facts):
        identity = queries.identity(*facts)
        if self.holder.held.pop(leases.key_of(identity), None) is not None:
            self._at_once(self.holder.releasing(identity))

    def add(self, trial, *, replace=False):
        added = self._taking_time(queries.adding(trial, replace=replace))
        self.holder.held.pop(leases.key_of(queries.identity(trial.gpu, *trial.identity[1:])), None)
        return added

    # As a worker.
    def open(self, workload):
        return 100.0

    def screen(self, workload, entry, best_us):
        found = Measurement(entry[1], self, self.world.now)
        self.world.measured.append(found)
        self.world.sleep(self.world.dice.choice((0.1, 1.0, 10.0, LONGEST)))
        if self.kills_of_worker:
            self.kills_of_worker -= 1
            self.world.measured.remove(found)
            raise WorkerDied(KILLED, "the worker died: signal SIGKILL")
        found.end = self.world.now
        return Screened("ok", us=50.0, ratio=2.0, ratio_low=2.0, ratio_high=2.0)


def candidate(config):
    target = SimpleNamespace(name="model", fingerprint="abc")
    return SimpleNamespace(target=target, text=config, predicted_us=1.0)


def run(seed, faults, *, configs=4, drivers=4):
    """One run; returns the world as it ended. Raises ProtocolFault."""
    world = World(seed, configs)
    dates = [f"{year}-01-01T00:00:00+00:00" for year in (1970, 2026, 2999)]
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(leases, "_process", world.process))
        patches.enter_context(mock.patch.object(leases, "_is_hidden", return_value=False))
        patches.enter_context(mock.patch.object(leases, "now", side_effect=itertools.cycle(dates)))
        patches.enter_context(mock.patch.object(screening, "POLL_SECONDS", 1.0))
        simulated = SimpleNamespace(monotonic=lambda: world.now, sleep=world.sleep)
        patches.enter_context(mock.patch.object(screening, "time", simulated))
        for i in range(drivers):
            world.start(HOSTS[i % 2])
        _plan(world, faults)
        world.play()
        if not faults.none_dies:  # whoever comes later finds what is left to do
            world.faults_over = True
            world.start(HOSTS[0])
            world.start(HOSTS[1])
            world.play()
        _check(world, faults)
    return world


def run_many(seeds, faults):
    """Raises ProtocolFault with the seed."""
    for seed in seeds:
        try:
            run(seed, faults)
        except ProtocolFault as fault:
            raise ProtocolFault(f"seed {seed}, {faults}: {fault}") from None


def _plan(world, faults):
    """Draws when each fault happens, and to whom."""
    dice = world.dice

    def someone():
        there = [driver for driver in world.drivers if not (driver.done or world.faults_over)]
        return dice.choice(there or [None])

    def happen(count, action):
        for _ in range(count):
            world.at(dice.uniform(0, 200), lambda: (driver := someone()) and action(driver))

    happen(faults.kills, _killed_and_its_number_reused)
    happen(faults.stops, lambda driver: _stopped_long(driver))
    happen(faults.brief_stops, lambda driver: driver.stop(dice.uniform(1, BRIEF_STOP)))
    happen(faults.stops_for_good, lambda driver: driver.stop(10 * END))
    happen(faults.interrupts, lambda driver: setattr(driver, "interrupted", True))
    happen(faults.outages, lambda driver: _outage(driver.machine))
    happen(faults.worker_kills, lambda driver: setattr(driver, "kills_of_worker", 1))


def _stopped_long(driver):
    """As Ctrl-Z does; some are then interrupted."""
    driver.stop(driver.world.dice.uniform(leases.LEASE_SECONDS, 300))
    driver.interrupted = driver.world.dice.random() < 0.4


def _killed_and_its_number_reused(driver):
    driver.kill()
    if driver.world.dice.random() < 0.5:
        stranger = SimpleNamespace(stopped_until=-1.0, started="another")
        driver.machine.processes[driver.pid] = stranger


def _outage(machine):
    for driver in list(machine.processes.values()):
        if isinstance(driver, Driver):
            driver.kill()
    machine.processes.clear()
    machine.boot += 1


def _check(world, faults):
    """Raises ProtocolFault for what must not be."""
    found = [dict(row) for row in queries.select(world.connection, "trials")]
    statuses = {row["config"]: row["status"] for row in found}
    if set(statuses) != set(world.configs):
        raise ProtocolFault(f"trials are missing: {set(world.configs) - set(statuses)}")
    branded = {config: status for config, status in statuses.items() if status != "ok"}
    if branded and faults.outages < screening.MOST_MACHINE_LOSSES:
        raise ProtocolFault(f"innocent configs are branded: {branded}")
    left = [dict(row) for row in queries.select(world.connection, "leases")]
    if left:
        raise ProtocolFault(f"leases of configs that are measured are left over: {left}")
    times = Counter(each.config for each in world.measured if each.end is not None)
    if any(times[config] < 1 for config in world.configs if config not in branded):
        raise ProtocolFault(f"a config has a trial and was not measured: {times}")
    if faults.none_dies and any(count != 1 for count in times.values()):
        raise ProtocolFault(f"measured more than once though nobody died: {times}")
    _check_overlaps(world)


def _check_overlaps(world):
    """Two measure one config at a time only where the first was stopped for long."""
    ended = [each for each in world.measured if each.end is not None]
    for first in ended:
        for second in ended:
            if (
                first is second
                or first.config != second.config
                or not first.start <= second.start < first.end
            ):
                continue
            if not first.driver.was_stopped_long(first.start, first.end):
                raise ProtocolFault(f"{first.config} is measured by two at {second.start:.1f}")
