"""What a large store costs, in steps of SQLite's machine and in memory, and how a file that is in
use is seen and locked.
"""

import contextlib
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import stored
from support.stored import BARE, H100, trial, winner

from outblas.autotune.store import sqlite
from outblas.autotune.store.store import Store

WORKLOADS, TRIALS = 20, 300  # and the trials of each
ONE = stored.Workload(32, 4096, 4096)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 20 workloads with 300 trials and a winner each."""
    path = tmp_path_factory.mktemp("large") / "tuning.sqlite"
    with Store(path) as store:
        for i in range(WORKLOADS):
            place = {"workload": stored.Workload(16 * (i + 1), 4096, 4096)}
            trials = [trial(j, reason="x" * 1000, **place) for j in range(TRIALS)]
            store.merge(trials, [winner(**place)])
    return path


class Work:
    """What connections do that are opened while a test watches.

    `steps` of SQLite's machine, in thousands; the text of the `statements`.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.statements: list[str] = []

    def count(self) -> None:
        self.steps += 1

    def of(self, operation: Callable[[], object]) -> int:
        """The steps that an operation takes."""
        self.steps = 0
        operation()
        return self.steps


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    """Watches every connection that is opened from now on."""
    found, connect = Work(), sqlite3.connect

    def watched(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        connection.set_progress_handler(found.count, 1000)
        connection.set_trace_callback(found.statements.append)
        return connection

    monkeypatch.setattr(sqlite3, "connect", watched)
    return found


# Work.


def check(path: Path) -> None:
    with Store(path, read_only=True) as store:
        assert store.verify() == []


def look_up(path: Path) -> None:
    with Store(path, read_only=True) as store:
        assert len(store.tuned(H100)) == WORKLOADS


def test_a_full_check_looks_at_all_rows(large: Path, work: Work) -> None:
    """So that a test can tell who does not."""
    assert work.of(lambda: check(large)) > 100


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda path: Store(path, read_only=True).close(), id="opening to read"),
        pytest.param(lambda path: Store(path).close(), id="opening to write"),
        pytest.param(look_up, id="looking winners up"),
    ],
)
def test_opening_and_looking_up_do_not_look_at_trials(
    large: Path, work: Work, operation: Callable[[Path], None]
) -> None:
    assert work.of(lambda: operation(large)) <= 5


@pytest.fixture
def watched(large: Path, work: Work) -> Iterator[Store]:
    """The large store, opened, whose work is counted."""
    with Store(large) as store:
        yield store


@pytest.mark.parametrize(
    ("operation", "most"),
    [
        pytest.param(
            lambda store: store.find(trial().gpu, ONE, *trial(7).identity[2:]), 1, id="find"
        ),
        pytest.param(lambda store: store.add(trial(1000, workload=ONE)), 1, id="add"),
        pytest.param(lambda store: store.trials(workload=ONE), 40, id="trials of a workload"),
        pytest.param(lambda store: store.winners(workload=ONE), 2, id="winners of a workload"),
        pytest.param(lambda store: store.kernels(), 1, id="kernels"),
    ],
)
def test_reading_by_workload_uses_an_index(
    watched: Store, work: Work, operation: Callable[[Store], object], most: int
) -> None:
    assert work.of(lambda: operation(watched)) <= most


def test_counting_trials_reads_an_index_alone(watched: Store, work: Work, large: Path) -> None:
    work.statements.clear()
    watched.summaries()

    counts = [statement for statement in work.statements if "FROM trials" in statement]
    with contextlib.closing(sqlite3.connect(large)) as connection:
        plans = [connection.execute(f"EXPLAIN QUERY PLAN {count}").fetchall() for count in counts]
    details = [row[-1] for plan in plans for row in plan]
    assert details == ["SCAN trials USING COVERING INDEX trials_by_workload"]


# Memory.


def test_the_memory_of_a_reader_does_not_grow_with_the_file(large: Path) -> None:
    code = f"""{BARE}
import resource
from pathlib import Path
from outblas.autotune.store.store import Store
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
Store(Path(sys.argv[1]) / "none", read_only=True).close()
before = peak()
with Store(Path(sys.argv[1]), read_only=True) as store:
    assert len(store.summaries()) == {WORKLOADS}
    assert store.browse(limit=5)[1] >= {WORKLOADS * TRIALS}
    assert len(store.kernels()) == 1
print(peak() - before)
"""
    command = [sys.executable, "-c", code, str(large)]

    run = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert run.returncode == 0, run.stderr
    assert large.stat().st_size > 8 << 20
    assert int(run.stdout) < 4 << 10  # KiB; SQLite's own cache has 2 MiB


# A file that is in use.


# Whether another process can write to a file now.
PROBE = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], timeout=0.01, isolation_level=None)
try:
    connection.execute("BEGIN IMMEDIATE")
    print("free")
except sqlite3.OperationalError as error:
    print(error)
"""


def test_a_lock_survives_a_reader_of_the_same_process(path: Path) -> None:
    """Closing any descriptor of a file drops all locks that the process has on it: none is opened
    beside a writer's.
    """
    with Store(path), contextlib.closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")

        with Store(path, read_only=True) as reader:
            assert reader.trials() == []

        probe = [sys.executable, "-S", "-c", PROBE, str(path)]
        assert subprocess.check_output(probe, text=True) == "database is locked\n"


def test_another_process_leaves_the_log_of_a_store_that_was_read_here_too(path: Path) -> None:
    """The last to close a file removes its log: who has it open is told by a lock on the file."""
    with Store(path) as store:
        store.add(trial(0))
        with Store(path, read_only=True) as reader:
            assert reader.trials() == [trial(0)]

        probe = [sys.executable, "-S", "-c", PROBE, str(path)]
        assert subprocess.check_output(probe, text=True) == "free\n"

        assert path.with_name(f"{path.name}-wal").exists()


def test_the_log_is_there_as_soon_as_a_store_is_open(path: Path) -> None:
    """By it others in the process see that the file is in use."""
    with Store(path):
        *_, in_use = sqlite.state(path) or ()

        assert path.with_name(f"{path.name}-wal").exists()
        assert in_use
