"""Signals to drivers, measuring workers and compilers at random moments; the sweep is resumed until
it is done.
"""

import random
import signal
import time

from . import processes
from .episode import Episode, Setting
from .kernel import Config
from .nursery import Child
from .world import SLOW_SECONDS, World, draw

NAME = "kills"
UNIT = "signals"
TARGET = 300
EPISODE = 50  # signals, before the sweep may run to its end
JOBS = 4  # episodes side by side
FEW = 10  # signals
DRIVER_SHARE = 0.3
AIMED_SHARE = 0.6  # of the signals come just after something has begun to be measured or compiled
LONGEST_PAUSE = 1.0  # seconds between two signals
AIMED_PAUSE = 0.3  # of those
START_SECONDS = 20.0  # that they wait at most: processes take seconds to start
FREEZE_SECONDS = 0.7  # that a stopped process stays stopped: less than a trial may take
# Faults of an episode: those that cost nothing, one after which a process is started again, and one
# that takes seconds or ends a driver that does not bear it.
CHEAP = ["raise", "refuse", "compile-raise"]
RESTARTING = ["segfault", "exit", "wrong", "abort", "compile-segfault", "compile-exit"]
SEVERE = ["unprintable", "gil", "child", "base", "hang", "compile-hang"]
WEIGHTS = {
    "worker": 8,
    "compiler": 8,
    "starting": 2,
    "supervisor": 2,
}  # of descendants to be struck; 1 of others
SIGNALS = {signal.SIGKILL: 80, signal.SIGTERM: 8, signal.SIGINT: 6, signal.SIGSTOP: 6}


def episode(setting: Setting) -> Episode:
    numbers, found = setting.random, Episode()
    wanted = min(EPISODE, setting.units)
    world = World(setting, _configs(setting, wanted))
    for _ in range(4 * wanted):
        if found.units >= wanted:
            break
        driver = world.drive()
        struck = _strike_until_ended(world, driver, found, wanted, numbers)
        world.check_ended(found, driver, disturbed=struck)
        world.check_compiling(found, driver)
        found.counts["drivers"] += 1
        if driver.poll() == 0:
            break
    world.undisturbed(found)
    world.check_complete(found)
    return found


def _configs(setting: Setting, wanted: int) -> list[Config]:
    """Few for a few signals, so that a smoke run is over soon."""
    if wanted < FEW:
        return draw(setting.random, 5, CHEAP, slowest=100)
    faults = [*CHEAP, setting.random.choice(RESTARTING), SEVERE[setting.index % len(SEVERE)]]
    return draw(setting.random, 45, faults)


def _strike_until_ended(
    world: World, driver: Child, found: Episode, wanted: int, numbers: random.Random
) -> bool:
    """Whether anything was struck before the driver ended. It is killed when enough was struck, or
    nothing moves.
    """
    before, moved, struck = world.signs_of_life(), time.monotonic(), False
    while driver.poll() is None:
        _pause(world, driver, numbers)
        if driver.poll() is not None:
            break
        if (now := world.signs_of_life()) != before:
            before, moved = now, time.monotonic()
        if time.monotonic() - moved > SLOW_SECONDS:
            found.fail("endless wait", f"nothing is measured or compiled for {SLOW_SECONDS:.0f} s")
            driver.send(signal.SIGKILL)
        elif found.units >= wanted:
            driver.send(signal.SIGKILL)
            found.counts["driver SIGKILL"] += 1
            struck = True
        elif _strike(world, driver, found, numbers):
            found.units += 1
            struck = True
            moved = time.monotonic()
    return struck


def _pause(world: World, driver: Child, numbers: random.Random) -> None:
    """Any time, or until just after the next measurement or compile has begun."""
    longest = LONGEST_PAUSE
    if numbers.random() < AIMED_SHARE:
        before = world.signs_of_life()
        processes.soon(
            lambda: driver.poll() is not None or world.signs_of_life() != before, START_SECONDS
        )
        longest = AIMED_PAUSE
    driver.wait(numbers.uniform(0, longest))


def _strike(world: World, driver: Child, found: Episode, numbers: random.Random) -> bool:
    """Sends a signal to the driver or to one of its descendants; whether there was one to
    get it.
    """
    number = numbers.choices(list(SIGNALS), list(SIGNALS.values()))[0]
    if numbers.random() < DRIVER_SHARE:
        pid, kind = driver.pid, "driver"
    else:
        family = processes.descendants(driver.pid)
        if not family:
            return False
        kinds = [world.kind_of(process) for process in family]
        process, kind = numbers.choices(
            list(zip(family, kinds, strict=True)), [WEIGHTS.get(kind, 1) for kind in kinds]
        )[0]
        pid = process.pid
    if not processes.send(pid, number):
        return False
    found.counts[f"{kind} {number.name}"] += 1
    if number == signal.SIGSTOP:
        time.sleep(numbers.uniform(0, FREEZE_SECONDS))
        processes.send(pid, signal.SIGCONT)
    return True
