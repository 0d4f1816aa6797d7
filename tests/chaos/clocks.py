"""The clock of the day jumps by an hour or a year while sweeps run: no verdict and no wait may
depend on it.
"""

import shutil
import struct
import subprocess
import time
from pathlib import Path

from outblas.autotune.store.store import Store

from . import processes
from .episode import Episode, Setting
from .nursery import Child
from .world import World, draw

NAME = "clocks"
UNIT = "jumps"
TARGET = 30
EPISODE = 5  # jumps
JOBS = 4  # episodes side by side
HOUR, YEAR = 3600, 365 * 24 * 3600
SHIFTS = (0, HOUR, -HOUR, YEAR, -YEAR)
TRIAL_SECONDS = 4.0
FAULTS = ["hang", "segfault", "wrong", "compile-hang"]


class Clock:
    """The file that says by how much the clock is wrong, and the library that makes it so."""

    def __init__(self, folder: Path) -> None:
        self.file, library = folder / "clock", folder / "clock.so"
        self.set(0)
        source = Path(__file__).with_name("clock.c")
        command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
        subprocess.run(command, check=True, capture_output=True)
        self.environment = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(self.file)}

    def set(self, seconds: int) -> None:
        """In place: processes have it mapped."""
        if not self.file.exists():
            self.file.write_bytes(bytes(8))
        with open(self.file, "r+b") as file:
            file.write(struct.pack("l", seconds))


def episode(setting: Setting) -> Episode:
    found = Episode(units=min(EPISODE, setting.units))
    if shutil.which("cc") is None:
        found.counts["left out, for want of a C compiler"] += 1
        return found
    clock = Clock(setting.folder)
    with setting.nursery_with(clock.environment) as nursery:
        world = World(setting, draw(setting.random, 12, FAULTS), nursery)
        _check_clock(world, clock, found)
        drivers = [world.drive(trial_seconds=TRIAL_SECONDS) for _ in range(1 + setting.index % 2)]
        _jump(setting, world, clock, drivers, found)
        for driver in drivers:
            ended = world.await_end(found, driver)
            world.check_ended(found, driver, disturbed=not ended)
        world.undisturbed(found, trial_seconds=TRIAL_SECONDS)
        world.check_complete(found)
        clock.set(0)
        _check_winner_is_replaced(world, found)
    return found


def _check_clock(world: World, clock: Clock, found: Episode) -> None:
    """That the clock which is under test can be set at all."""
    clock.set(YEAR)
    child = world.nursery.start("say_time", {})
    child.wait(20)
    clock.set(0)
    if abs(child.answer().get("time", 0) - time.time() - YEAR) > HOUR:
        found.fail("fault of the campaign", f"the clock does not jump: {child.said()}")


def _jump(
    setting: Setting, world: World, clock: Clock, drivers: list[Child], found: Episode
) -> None:
    """Jumps while configs are measured; the last is a year ahead, where winners get their date."""
    numbers = setting.random
    for number in range(found.units):
        before = world.signs_of_life()
        processes.soon(lambda before=before: world.signs_of_life() != before, 10)  # type: ignore[misc]
        time.sleep(numbers.uniform(0, 0.3))
        shift = YEAR if number == found.units - 1 else numbers.choice(SHIFTS)
        clock.set(shift)
        found.counts[f"to {shift:+} s"] += 1
        if all(driver.poll() is not None for driver in drivers):
            break


def _check_winner_is_replaced(world: World, found: Episode) -> None:
    """A sweep by the right clock, after one by a clock that was a year ahead."""
    before = len(world.reported("winner"))
    world.undisturbed(found, trial_seconds=TRIAL_SECONDS, resume=False)
    reported = world.reported("winner")[before:]
    with Store(world.store, read_only=True) as store:
        there = [(winner.config, winner.us, winner.when) for winner in store.winners()]
    for winner in reported:
        if (winner["config"], winner["us"], winner["when"]) not in there:
            dates = ", ".join(when for _, _, when in there)
            found.fail(
                "later winner does not replace one of the future",
                f"{winner['when']} lost to {dates}",
            )
