"""Ten drivers on one store: each config is measured once while none dies, and nobody is branded
when some do.
"""

import random
import signal
import time
from collections import Counter

from . import processes
from .episode import Episode, Setting
from .kernel import Config
from .nursery import Child
from .world import World, draw

NAME = "sharing"
UNIT = "drivers"
TARGET = 25
EPISODE = 10  # drivers
JOBS = 1  # episodes side by side
DRIVERS = 10
CONFIGS = 60
PATIENT_DRIVERS = 5  # that wait for one slow config
SLOW_MS = 36_000
DEADLY_SECONDS = 25.0  # in which drivers and workers are killed
MOST_KILLS = 12


def episode(setting: Setting) -> Episode:
    kinds = [_calm, _deadly, _slow]
    found = Episode()
    kind = kinds[setting.index % len(kinds)]
    found.counts[f"{kind.__name__.strip('_')} episodes"] += 1
    kind(setting, found)
    return found


def _calm(setting: Setting, found: Episode) -> None:
    """Nobody dies."""
    world = World(setting, draw(setting.random, CONFIGS, ["raise", "refuse"], slowest=200))
    drivers = _drivers(world, found, min(DRIVERS, max(2, setting.units)))
    _await_all(world, drivers, found)
    _check_once(world, drivers, found)
    world.check_complete(found)


def _deadly(setting: Setting, found: Episode) -> None:
    """Drivers and their workers are killed at random; those that are dead are started again."""
    numbers = setting.random
    world = World(setting, draw(numbers, CONFIGS, ["raise", "segfault"]))
    drivers = _drivers(world, found, min(DRIVERS, max(2, setting.units)))
    ended = _kill_some(world, drivers, found, numbers)
    for driver in drivers:
        world.await_end(found, driver)
    for driver in [*drivers, *ended]:
        world.check_ended(found, driver, disturbed=True)
    world.undisturbed(found, compiled=False)
    world.check_complete(found)


def _slow(setting: Setting, found: Episode) -> None:
    """All are done but one, which measures for longer than anyone's patience."""
    configs = [*draw(setting.random, 8, [], slowest=100), Config(99, SLOW_MS)]
    world = World(setting, configs)
    drivers = _drivers(world, found, PATIENT_DRIVERS, trial_seconds=3 * SLOW_MS / 1000)
    _await_all(world, drivers, found)
    _check_once(world, drivers, found)
    world.check_complete(found)


def _drivers(world: World, found: Episode, count: int, **options: object) -> list[Child]:
    found.units += count
    return [world.drive(compiled=False, **options) for _ in range(count)]


def _await_all(world: World, drivers: list[Child], found: Episode) -> None:
    for driver in drivers:
        ended = world.await_end(found, driver)
        world.check_ended(found, driver, disturbed=not ended)


def _check_once(world: World, drivers: list[Child], found: Episode) -> None:
    """What was measured before a driver's finals; each config, by one driver, once."""
    racing: set[str] = set()
    counts: Counter[str] = Counter()
    by_driver: Counter[str] = Counter()
    for note in world.notes():
        if note.what == "finals":
            racing.add(note.driver)
        elif note.what == "measure" and note.driver not in racing:
            counts[note.config] += 1
            by_driver[note.driver] += 1
    for config, count in counts.items():
        if count > 1:
            found.fail(
                "measured more than once", f"{count} times, though no driver died ({config})"
            )
    new = sum(int(driver.answer().get("new", 0)) for driver in drivers)
    if new != len(world.configs):
        found.fail(
            "drivers count other trials than there are",
            f"{new} new trials of {len(world.configs)} configs",
        )
    shares = [by_driver[driver.mark] / max(1, counts.total()) for driver in drivers]
    found.shares["configs of the busiest driver"] = max(shares)
    found.shares["configs of the idlest driver"] = min(shares)


def _kill_some(
    world: World, drivers: list[Child], found: Episode, numbers: random.Random
) -> list[Child]:
    """Kills at random moments; replaces dead drivers in the list, and returns these."""
    ended: list[Child] = []
    until = time.monotonic() + DEADLY_SECONDS
    kills = 0
    while (
        kills < MOST_KILLS
        and time.monotonic() < until
        and any(driver.poll() is None for driver in drivers)
    ):
        before = world.signs_of_life()
        processes.soon(lambda before=before: world.signs_of_life() != before, 3)  # type: ignore[misc]
        time.sleep(numbers.uniform(0, 1.0))
        place = numbers.randrange(len(drivers))
        driver = drivers[place]
        family = processes.descendants(driver.pid)
        if numbers.random() < 0.5 and family:
            victim = numbers.choice(family)
            kills += processes.send(victim.pid, signal.SIGKILL)
            found.counts[f"{world.kind_of(victim)} killed"] += 1
        elif driver.send(signal.SIGKILL):
            driver.wait(10)
            kills += 1
            found.counts["driver killed"] += 1
            ended.append(driver)
            drivers[place] = world.drive(compiled=False)
    return ended
