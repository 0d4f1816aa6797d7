"""Stores on disks that are full, fill up, are freed or cannot be written: no success is claimed
that is not on disk.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outblas.autotune.store.records import to_record
from outblas.autotune.store.store import Store

from . import processes
from .episode import Episode, Setting
from .nursery import Child
from .world import SLOW_SECONDS, World, draw, fill, lost

NAME = "disks"
UNIT = "sweeps"
TARGET = 14
EPISODE = 1
JOBS = 4  # episodes side by side
CONFIGS = 40
DISK = 8 << 20  # bytes of the disk that fills up
TUNE = [
    "tune",
    "--kernels",
    "portable",
    "--gpus",
    "cpu",
    "--shapes",
    "16",
    "--dtype",
    "float32",
    "--layout",
    "nn",
]


def episode(setting: Setting) -> Episode:
    kinds = [
        _full_before,
        _fills_up,
        _is_freed,
        _limited,
        _read_only,
        _group_writable,
        _full_then_resumed,
    ]
    found = Episode(units=1)
    kind = kinds[setting.index % len(kinds)]
    world = World(setting, draw(setting.random, CONFIGS, [], slowest=20))
    for name in ("cwd", "home", "tmp"):
        (setting.folder / name).mkdir()
    world.environment |= {
        "HOME": str(setting.folder / "home"),
        "TMPDIR": str(setting.folder / "tmp"),
    }
    found.counts[kind.__name__.strip("_").replace("_", " ")] += 1
    kind(setting, world, found)
    return found


# What happens to the disk.


def _full_before(setting: Setting, world: World, found: Episode) -> None:
    with _disk(setting, world, found):
        fill(world.store.parent / "filler", 2 * DISK)
        driver = _tune(world)
        _await(world, driver, found)
        if any(note.what == "measure" for note in world.notes()):
            found.fail(
                "measures though nothing can be kept", "on a disk that is full from the beginning"
            )
        judge(world, driver, found)


def _fills_up(setting: Setting, world: World, found: Episode) -> None:
    with _disk(setting, world, found):
        driver = _tune(world)
        _await_trials(world, driver, setting.random.randrange(1, CONFIGS // 2))
        fill(world.store.parent / "filler", 2 * DISK)
        _await(world, driver, found)
        judge(world, driver, found)


def _is_freed(setting: Setting, world: World, found: Episode) -> None:
    with _disk(setting, world, found):
        driver = _tune(world)
        first = setting.random.randrange(1, CONFIGS // 2)
        _await_trials(world, driver, first)
        fill(world.store.parent / "filler", 2 * DISK)
        _await_trials(world, driver, first + setting.random.randrange(1, CONFIGS // 4))
        (world.store.parent / "filler").unlink()
        _await(world, driver, found)
        judge(world, driver, found)
        if driver.poll() not in (0, None):
            found.fail("no success though all could be kept", f"status {driver.poll()}")


def _limited(setting: Setting, world: World, found: Episode) -> None:
    """Files of this driver cannot grow beyond some size, as under a quota."""
    world.store.parent.mkdir()
    driver = _tune(
        world, file_limit=setting.random.choice([0, 4096, 40_000, 100_000, 200_000, 1_000_000])
    )
    _await(world, driver, found)
    judge(world, driver, found)


def _read_only(setting: Setting, world: World, found: Episode) -> None:
    with _disk(setting, world, found) as mounted:
        if not mounted:
            return
        _await(world, _tune(world, "--trials", "5"), found)
        subprocess.run(["mount", "-o", "remount,ro", str(world.store.parent)], check=True)
        measured = len(world.notes())
        driver = _tune(world)
        _await(world, driver, found)
        if len(world.notes()) > measured:
            found.fail(
                "measures though nothing can be kept",
                "on a disk that is read-only from the beginning",
            )
        judge(world, driver, found)
        child = world.command("cache", "ls", "--store", str(world.store))
        if child.wait(60) != 0:
            found.fail("a store that is read-only cannot be listed", child.said().splitlines()[-1:])


def _group_writable(setting: Setting, world: World, found: Episode) -> None:
    world.store.parent.mkdir()
    world.store.parent.chmod(0o775)
    driver = _tune(world, umask=0o002)
    _await(world, driver, found)
    judge(world, driver, found)
    if driver.poll() != 0:
        found.fail("a group-writable folder is refused", driver.said()[-200:])


def _full_then_resumed(setting: Setting, world: World, found: Episode) -> None:
    """Fills up, and is freed after the driver has gone: what is missing is measured or imported,
    and all is well.
    """
    with _disk(setting, world, found):
        _fill_once(setting, world, found)
        (world.store.parent / "filler").unlink(missing_ok=True)
        for file in _exports(world):
            child = world.command("cache", "import", str(file), "--store", str(world.store))
            if child.wait(60) != 0:
                found.fail("emergency export cannot be imported", child.said()[-300:])
        if found.failures:
            world.acknowledged.unlink()  # what is lost is known
        world.undisturbed(found, compiled=False)
        world.check_complete(found)


def _fill_once(setting: Setting, world: World, found: Episode) -> None:
    driver = _tune(world)
    _await_trials(world, driver, setting.random.randrange(1, CONFIGS // 2))
    fill(world.store.parent / "filler", 2 * DISK)
    _await(world, driver, found)
    judge(world, driver, found)


# What the driver has to make of it.


def judge(world: World, driver: Child, found: Episode) -> None:
    """Exit 0 says that all is in the file; after any other, what was measured is in the file or in
    an export.
    """
    said, status = driver.said(), driver.poll()
    if "Traceback" in said:
        found.fail("driver raises", said.splitlines()[-1])
    reported = _measured(world)
    missing = lost(reported, world.trials())
    if status == 0 and missing:
        found.fail(
            "success though trials are not kept",
            f"{len(missing)} of {len(reported)} are not in the file",
        )
        return
    if missing:
        exported = _imported(world, found)
        left = [
            record
            for record in reported
            if record not in exported and record not in _records(world)
        ]
        if left:
            found.fail("trials neither in the file nor exported", f"{len(left)} of {len(reported)}")
        found.counts["trials exported in an emergency"] += len(exported)
    found.counts[f"exit {status}"] += 1


def _measured(world: World) -> list[dict[str, Any]]:
    """What the driver's store has taken, in the file or not; the last of each config."""
    return list({record["config"]: record for record in world.reported("trial")}.values())


def _records(world: World) -> list[dict[str, Any]]:
    return [to_record(trial) for trial in world.trials()]


def _exports(world: World) -> list[Path]:
    """Exports in the places where a driver may leave one."""
    found = []
    for name in ("cwd", "home", "tmp"):
        for file in (world.folder / name).rglob("*"):
            if file.is_file() and b'"outblas-tuning' in file.read_bytes()[:1000]:
                found.append(file)
    return found


def _imported(world: World, found: Episode) -> list[dict[str, Any]]:
    """The trials of all emergency exports, imported into a fresh store by the command line."""
    target = world.folder / "imported.sqlite"
    for file in _exports(world):
        child = world.command("cache", "import", str(file), "--store", str(target))
        if child.wait(60) != 0:
            found.fail("emergency export cannot be imported", child.said()[-300:])
    if not target.exists():
        return []
    with Store(target, read_only=True) as store:
        return [to_record(trial) for trial in store.trials()]


# Drivers and disks.


def _tune(world: World, *options: str, **settings: Any) -> Child:
    place, environment = world.folder / "cwd", world.environment
    command = [*TUNE, "--top-k", "2", "--json", "--store", str(world.store), *options]
    return world.command(*command, folder=place, environment=environment, **settings)


def _await(world: World, driver: Child, found: Episode) -> None:
    world.await_end(found, driver)
    for orphan in processes.orphans(driver.mark):
        found.fail(
            "orphan", f"{orphan.command[:100]} runs {processes.ORPHAN_SECONDS:g} s after its driver"
        )


def _await_trials(world: World, driver: Child, count: int) -> None:
    processes.soon(
        lambda: driver.poll() is not None or len(world.reported("trial")) >= count, SLOW_SECONDS
    )


@contextlib.contextmanager
def _disk(setting: Setting, world: World, found: Episode) -> Iterator[bool]:
    """A small disk of its own for the store; whether it can be had, which takes root."""
    place = setting.folder / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=700", "none", str(place)]
    if (
        os.getuid() != 0
        or not shutil.which("mount")
        or subprocess.run(command, capture_output=True).returncode
    ):
        found.counts["left out, for want of a small disk"] += 1
        yield False
        return
    world.store = place / "tuning.sqlite"
    try:
        yield True
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)
