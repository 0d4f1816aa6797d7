"""A store, configs that are known to be sound or guilty, and what is promised while drivers come
and go.
"""

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outblas.autotune.store.records import Trial, to_record
from outblas.autotune.store.store import Store
from outblas.core.configs import from_text, to_text

from . import kernel, processes
from .episode import Episode, Setting
from .kernel import Config
from .nursery import Child, Nursery

# A status that may be the circumstances' doing: a sound result may take the place of such a trial.
CIRCUMSTANCE = {
    "compile timeout",
    "compile crash",
    "hang",
    "crash",
    "device lost",
    "out of memory",
    "failed",
}
MOST_UNCOMPILED = 4  # configs of one driver that a few kills keep from being compiled ahead
SLOW_SECONDS = 90.0  # without any sign of life of a driver, after which it is said to wait for ever


@dataclass(frozen=True)
class Note:
    """A line of the kernel's notes: "measure", "compile" or "finals"."""

    what: str
    config: str
    process: int
    driver: str


class World:
    """The folder of an episode, its configs and store; drivers are started in it and judged when
    they have ended.
    """

    def __init__(
        self,
        setting: Setting,
        configs: list[Config],
        nursery: Nursery | None = None,
        folder: Path | None = None,
    ) -> None:
        self.folder = folder or setting.folder
        self.nursery = nursery or setting.nursery
        self.configs = {to_text(config): config for config in configs}
        self.store = self.folder / "store" / "tuning.sqlite"
        self.acknowledged = self.folder / "acknowledged"
        self.notes_file = self.folder / "notes"
        self.environment = {
            kernel.CONFIGS: ";".join(self.configs),
            kernel.NOTES: str(self.notes_file),
            "OUTBLAS_CACHE_DIR": str(self.folder / "cache"),
            "HOME": str(self.folder),
        }

    # Drivers.

    def drive(self, **options: Any) -> Child:
        """Starts a sweep of all configs."""
        arguments = {"store": str(self.store), "acknowledged": str(self.acknowledged), **options}
        return self.nursery.start(
            "sweep", arguments, environment=self.environment, folder=self.folder
        )

    def command(self, *arguments: str, **options: Any) -> Child:
        """Starts the command line."""
        given = {"arguments": list(arguments), "acknowledged": str(self.acknowledged)}
        surroundings: dict[str, Any] = {"environment": self.environment, "folder": self.folder}
        return self.nursery.start("command", given, **(surroundings | options))

    def signs_of_life(self) -> tuple[int, ...]:
        """Changes when something is measured, compiled or stored."""
        return tuple(
            path.stat().st_size if path.exists() else 0
            for path in (self.notes_file, self.acknowledged)
        )

    def await_end(self, episode: Episode, driver: Child, quiet: float = SLOW_SECONDS) -> bool:
        """Waits until a driver has ended; one that does nothing for so many seconds is killed, and
        False returned.
        """
        before, moved = self.signs_of_life(), time.monotonic()
        while driver.wait(0.5) is None:
            if (now := self.signs_of_life()) != before:
                before, moved = now, time.monotonic()
            elif time.monotonic() - moved > quiet:
                last = [note for note in self.notes() if note.driver == driver.mark][-1:]
                episode.fail(
                    "endless wait",
                    f"nothing for {quiet:.0f} s after {last[0].config if last else 'the start'}",
                )
                driver.send(signal.SIGKILL)
                driver.wait(10)
                return False
        return True

    def undisturbed(self, episode: Episode, **options: Any) -> Child:
        """A sweep that runs to its end."""
        driver = self.drive(**options)
        ended = self.await_end(episode, driver)
        self.check_ended(episode, driver, disturbed=not ended)
        return driver

    # What is known.

    def notes(self) -> list[Note]:
        text = self.notes_file.read_text() if self.notes_file.exists() else ""
        parts = (line.split(" ") for line in text.splitlines())
        return [Note(what, config, int(process), driver) for what, config, process, driver in parts]

    def reported(self, kind: str) -> list[dict[str, Any]]:
        """The records of this kind that drivers said are stored, in order."""
        text = self.acknowledged.read_text() if self.acknowledged.exists() else ""
        found = []
        for line in text.splitlines():
            with contextlib.suppress(ValueError):  # a driver that was killed while it wrote
                found.append(json.loads(line))
        return [each[kind] for each in found if kind in each]

    def trials(self) -> list[Trial]:
        if not self.store.exists():
            return []
        with Store(self.store, read_only=True) as store:
            return store.trials()

    # Promises.

    def check_ended(self, episode: Episode, driver: Child, *, disturbed: bool) -> None:
        """After a driver's end: nothing runs on, nothing is lost, nobody is branded, and it did not
        end by itself.
        """
        status = driver.poll()
        for orphan in processes.orphans(driver.mark):
            episode.fail(
                "orphan",
                f"{self._describe(orphan)} runs {processes.ORPHAN_SECONDS:g} s after its driver",
            )
        said = driver.said()
        if status == 1 and "Traceback" in said and "KeyboardInterrupt" not in said.splitlines()[-1]:
            episode.fail("driver raises", said.splitlines()[-1])
        if not disturbed and status != 0:
            episode.fail("driver does not finish", f"status {status}: {said.splitlines()[-1:]}")
        self.check_store(episode)

    def check_store(self, episode: Episode) -> None:
        """What was acknowledged is there as it was, and no sound config is called guilty."""
        try:
            trials = self.trials()
        except Exception as error:
            episode.fail("store cannot be read", repr(error))
            return
        for problem in lost(self.reported("trial"), trials):
            episode.fail("acknowledged trial lost", problem)
        for trial in trials:
            fault = from_text(Config, trial.config).fault
            if trial.status in kernel.STATUS[fault]:
                continue
            if kernel.sound(fault):
                episode.fail("innocent branded", f"{trial.status}: {trial.reason}")
            else:
                expected = " or ".join(kernel.STATUS[fault])
                episode.fail(
                    "wrong verdict",
                    f"{fault} is {trial.status}, expected {expected}: {trial.reason}",
                )

    def check_complete(self, episode: Episode) -> None:
        """After a sweep that ran undisturbed: each config has its trial, and the store verifies
        clean.
        """
        there = {trial.config for trial in self.trials()}
        missing = [text for text in self.configs if text not in there]
        if missing:
            episode.fail(
                "config without a trial",
                f"{len(missing)} of {len(self.configs)}, such as {missing[0]}",
            )
        winners = self.reported("winner")
        with Store(self.store, read_only=True) as store:
            if winners and not store.winners():
                episode.fail(
                    "acknowledged winner lost", f"{len(winners)} were stored, and there is none"
                )
        self.check_verify(episode)

    def check_compiling(self, episode: Episode, driver: Child) -> None:
        """A compile that is killed costs that one; compiling ahead does not end, or the driver says
        that it does.
        """
        late = [
            note.config
            for note in self.notes()
            if note.what == "uncompiled" and note.driver == driver.mark
        ]
        episode.counts["measured without their compile"] += len(late)
        if len(late) > MOST_UNCOMPILED and "no compile process" not in driver.said():
            episode.fail(
                "compiling ahead ends silently",
                f"{len(late)} of {len(self.configs)} configs were not compiled ahead",
            )

    def check_verify(self, episode: Episode) -> None:
        """`outblas cache verify` finds nothing amiss."""
        child = self.command("cache", "verify", "--store", str(self.store))
        if child.wait(60) != 0:
            episode.fail("store does not verify", f"status {child.poll()}: {child.said()[-300:]}")

    def kind_of(self, process: processes.Process) -> str:
        """What a process has done so far, by the notes."""
        if "resource_tracker" in process.command:
            return "tracker"
        if "supervisor" in process.command:
            return "supervisor"
        if process.command.startswith("sleep"):
            return "child of a config"
        done = {note.what for note in self.notes() if note.process == process.pid}
        return "worker" if "measure" in done else "compiler" if "compile" in done else "starting"

    def _describe(self, process: processes.Process) -> str:
        last = [note.config for note in self.notes() if note.process == process.pid][-1:]
        fault = from_text(Config, last[0]).fault if last else ""
        at = f" at a config with the fault {fault}" if fault else ""
        return f"{self.kind_of(process)}{at}"


def lost(reported: list[dict[str, Any]], stored: list[Trial]) -> list[str]:
    """Which acknowledged trials are not there, or not as they were; an improvement of a
    circumstance's doing may be.
    """
    by_identity = {_identity(to_record(trial)): to_record(trial) for trial in stored}
    last = {_identity(record): record for record in reported}
    problems = []
    for identity, record in last.items():
        found = by_identity.get(identity)
        if found is None:
            problems.append(f"{record['config']} ({record['status']}) is gone")
        elif found != record and not (
            record["status"] in CIRCUMSTANCE and found["status"] in ("ok", "wrong")
        ):
            fields = [name for name in record if record[name] != found[name]]
            problems.append(f"{record['config']} has another {', '.join(fields)}")
    return problems


def _identity(record: dict[str, Any]) -> str:
    return json.dumps(
        [record[name] for name in ("gpu", "workload", "kernel", "source", "config")], sort_keys=True
    )


def draw(numbers: random.Random, sound: int, faults: list[str], slowest: int = 300) -> list[Config]:
    """So many sound configs of random length, and one for each fault, in a random order; the first
    is sound.
    """
    made = [
        Config(number, numbers.randrange(0, slowest), numbers.randrange(0, slowest), fault)
        for number, fault in enumerate([""] * sound + faults)
    ]
    first, *others = made
    numbers.shuffle(others)
    return [first, *others]


def verdicts(trials: list[Trial]) -> Counter[str]:
    """How many trials there are of each status."""
    return Counter(trial.status for trial in trials)


def fill(path: Path, size: int) -> None:
    """A file of so many bytes, or as many as there is room for."""
    with contextlib.suppress(OSError), open(path, "ab", buffering=0) as file:
        while size > 0:
            size -= file.write(os.urandom(min(size, 4096)))
