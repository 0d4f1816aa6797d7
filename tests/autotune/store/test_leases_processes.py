"""Leases among real processes: killed, stopped, and many at a time."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.clocks import Clock
from support.leased import CONFIG, leases_of, watched
from support.stored import BARE
from support.sweeps import soon

from outblas.autotune.store import leases
from outblas.autotune.store.leases import Claim, Holder, Observer
from outblas.autotune.store.store import Store

pytestmark = pytest.mark.long

linux = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")

CLAIM = f"""{BARE}
from pathlib import Path
from outblas.autotune.store.records import Gpu, Workload
from outblas.autotune.store.store import Store
store = Store(Path(sys.argv[1]))
print(store.claim(*eval(sys.argv[2])), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has taken the lease of `CONFIG`, and waits."""
    command = [sys.executable, "-c", CLAIM, str(path), repr(CONFIG)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert "granted=True" in process.stdout.readline()
        yield process
        process.kill()


@linux
def test_the_lease_of_a_process_that_lives_is_held(
    other: subprocess.Popen[str], path: Path
) -> None:
    with Store(path) as store:
        assert store.claim(*CONFIG) == Claim(held=True)


@linux
def test_the_lease_of_a_killed_process_is_free_at_once(
    other: subprocess.Popen[str], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "LEASE_SECONDS", 1e9)

    other.kill()
    other.wait()

    with Store(path) as store:
        assert store.claim(*CONFIG) == Claim(granted=True, taken_over=True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the stores that this process opens, by which they watch others' leases."""
    found = Clock()
    monkeypatch.setattr(leases, "Holder", lambda: Holder(observer=Observer(found.monotonic)))
    return found


def stop(process: subprocess.Popen[str]) -> None:
    """Stops a process, as Ctrl-Z does: it may never go on."""
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


@linux
def test_the_lease_of_a_process_outlasts_what_a_stopped_ones_does_not(
    other: subprocess.Popen[str], path: Path, clock: Clock
) -> None:
    with Store(path) as store:
        assert watched(path, store, clock, 100).held  # it lives, whenever its heart beats

        stop(other)

        assert watched(path, store, clock, 100) == Claim(granted=True, taken_over=True)


@linux
def test_a_process_that_goes_on_gives_back_only_its_own_lease(
    other: subprocess.Popen[str], path: Path, clock: Clock
) -> None:
    stop(other)
    with Store(path) as store:
        assert watched(path, store, clock, 100).taken_over

        os.kill(other.pid, signal.SIGCONT)
        assert other.stdin is not None
        other.stdin.close()
        other.wait(20)

        assert store.claim(*CONFIG).held  # by this one


# Many drivers.

CONFIGS = 40
DRIVER = f"""{BARE}
import time
from pathlib import Path
from outblas.autotune.store.records import Gpu, Trial, Workload, now
from outblas.autotune.store.store import Store
gpu, workload, kernel, source, _ = eval(sys.argv[2])
store, log = Store(Path(sys.argv[1])), open(sys.argv[3], "a", buffering=1)
left = [f"x={{i}}" for i in range({CONFIGS})]
while left:
    for config in list(left):
        claim = store.claim(gpu, workload, kernel, source, config)
        if claim.granted:
            log.write(config + "\\n")
            time.sleep(0.02)
            store.add(Trial(gpu=gpu, workload=workload, kernel=kernel, source=source,
                            config=config, status="failed", when=now()))
        if not claim.held:
            left.remove(config)
    time.sleep(0.01)
store.close()
"""


@dataclass(frozen=True)
class Drivers:
    """Processes that share a store, and note in `log` each config that they begin to measure."""

    processes: list[subprocess.Popen[bytes]]
    log: Path

    def measured(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []

    def have_measured(self, count: int) -> Callable[[], bool]:
        """Whether so many configs are in the log, asked when it is called."""
        return lambda: len(self.measured()) >= count


def drive(path: Path, count: int) -> Drivers:
    log = path.with_name("log")
    path.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-c", DRIVER, str(path), repr(CONFIG), str(log)]
    return Drivers([subprocess.Popen(command) for _ in range(count)], log)


def trials_of(path: Path) -> int:
    with Store(path, read_only=True) as store:
        return len(store.trials())


ALL = {f"x={i}" for i in range(CONFIGS)}


@pytest.mark.parametrize("count", [5, pytest.param(10, marks=pytest.mark.slow)])
def test_many_drivers_measure_each_config_once(path: Path, count: int) -> None:
    drivers = drive(path, count)

    assert [process.wait(60) for process in drivers.processes] == [0] * count

    assert sorted(drivers.measured()) == sorted(ALL)
    assert trials_of(path) == CONFIGS
    assert leases_of(path) == []


@linux
def test_drivers_that_are_killed_cost_no_config(path: Path) -> None:
    drivers = drive(path, 5)
    victims, survivors = drivers.processes[:3], drivers.processes[3:]

    for victim, begun in zip(victims, (3, 13, 23), strict=True):
        assert soon(drivers.have_measured(begun))
        victim.kill()
    assert [process.wait(60) for process in survivors] == [0] * len(survivors)
    assert [process.wait(60) for process in victims] == [-signal.SIGKILL] * len(victims)

    assert set(drivers.measured()) == ALL
    assert len(drivers.measured()) <= CONFIGS + len(victims)
    assert trials_of(path) == CONFIGS
    assert leases_of(path) == []
