"""Sweeps without a GPU: what a config does costs its own trial, and whoever is killed loses the trial that ran."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import faulty_kernel
import pytest
import torch
from faulty_kernel import COMPILED, MEASURED, Config, notes
from pebble import ProcessFuture

from outblas.autotune import ahead, compilers, finals, gpu, isolated, racing, sweeping, tuning, worker
from outblas.autotune.compilers import Compilers, outcome
from outblas.autotune.isolated import Bench, Down
from outblas.autotune.progress import Progress
from outblas.autotune.records import Gpu, Status, Trial, Workload, now
from outblas.autotune.store import Store
from outblas.autotune.subjects import Subject
from outblas.autotune.sweeping import Budget, Sweep, sweep, visible_gpus
from outblas.autotune.tuning import Job, Outcome
from outblas.autotune.worker import Entry, Screened
from outblas.configs import from_text, to_text

SUBJECT = Subject("faulty", "faulty_kernel")
WORKLOAD = Workload(16, 16, 16, "float32", layout="nn")
H100 = gpu.imagined("h100")
OPTIONS: dict[str, Any] = {"dtype": "float32", "layout": "nn", "gpus": "cpu"}

SCRIPT = f"""
import json, os, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from faulty_kernel import notes
from multiprocessing import active_children
from pathlib import Path
from outblas.autotune.store import Store
from outblas.autotune.subjects import Subject
from outblas.autotune.sweeping import sweep

def run(path, **options):
    options = dict(dtype="float32", layout="nn", gpus="cpu", top_k=2) | options
    return sweep(Subject("faulty", "faulty_kernel"), 16, store=path, **options)
"""


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FAULTY_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuning.sqlite"


def run(path: Path, **options: Any) -> Sweep:
    return sweep(SUBJECT, 16, store=path, **({"top_k": 2} | OPTIONS | options))


def stored(path: Path) -> list[Trial]:
    with Store(path, read_only=True) as store:
        return store.trials()


def start(code: str, path: Path) -> subprocess.Popen[str]:
    """Runs a script that has no `if __name__ == "__main__"`, with a store's path; each run leaves a line in "ran"."""
    script = path.with_name("script.py")
    script.write_text(f"open({str(path.with_name('ran'))!r}, 'a').write('ran\\n')\n{SCRIPT}{code}")
    command = [sys.executable, str(script), str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def gone(process: int) -> bool:
    """Whether a process has ended, reaped by somebody or not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def soon(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()


# ---- whole sweeps, in processes of their own -------------------------------------------------------------------------
def test_a_killed_sweep_goes_on_where_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_CONFIGS", "9")
    monkeypatch.setenv("FAULTY_SLEEP", "100")
    code = "run(sys.argv[1], progress=lambda p: print(p.stage, p.screened, flush=True))"
    with start(code, path) as first:
        assert first.stdout
        for line in first.stdout:
            if line == "screening 4\n":
                first.kill()
    assert first.returncode == -signal.SIGKILL
    (process,) = {note.process for note in notes()}
    assert soon(lambda: gone(process))
    before, begun = stored(path), len(notes())
    assert 4 <= len(before) <= begun <= len(before) + 1

    screened: list[int] = []
    found = run(path, progress=lambda p: screened.append(len(notes())) if p.stage == "finals" else None)
    (outcome,) = found.outcomes
    after = stored(path)
    assert [trial for trial in after if trial in before] == before
    assert len({trial.config for trial in after}) == len(after) == 9
    assert outcome.new == 9 - len(before)
    counts = Counter(note.config for note in notes()[: screened[0]])
    assert {config for config, times in counts.items() if times > 1} <= {notes()[begun - 1].config}
    assert all(counts[trial.config] == 1 for trial in before)
    assert outcome.winner in found.winners
    with Store(path) as store:
        assert store.winners() == found.winners


def test_faults_cost_a_trial_each(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_FAULTS", " ".join(MEASURED))
    found = run(path, trial_seconds=5.0)
    (outcome,) = found.outcomes
    trials = {from_text(Config, trial.config): trial for trial in outcome.trials}
    assert outcome.new == len(trials) == len(outcome.trials) == 3 + len(MEASURED)
    for config, trial in trials.items():
        assert trial.status == MEASURED.get(config.fault, "ok"), trial
        assert (trial.us is None) == (trial.reason != "") == bool(config.fault)
    reasons = {config.fault: trial.reason for config, trial in trials.items()}
    assert re.fullmatch(r"not done in [5-9] s: the worker was killed", reasons["hang"])
    assert reasons["segfault"] == "the worker died: signal SIGSEGV"
    assert reasons["exit"] == "the worker died: exit status 3"
    assert "1 of 256 elements" in reasons["wrong"]
    assert reasons["raise"] == "RuntimeError: no luck today"
    assert reasons["refuse"] == "fault is refuse, expected another"
    assert found.finished
    assert found.failures == []
    assert outcome.winner is not None
    assert from_text(Config, outcome.winner.config).fault == ""

    measured = len(notes())
    again = run(path)
    assert again.outcomes[0].new == 0
    assert {from_text(Config, note.config).fault for note in notes()[measured:]} <= {""}
    assert len(stored(path)) == len(trials)


def test_compiles_that_fail_cost_a_trial_each(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled as for an H100, and measured in the interpreter."""
    monkeypatch.setenv("FAULTY_FAULTS", " ".join(COMPILED))
    job = Job((SUBJECT,), WORKLOAD, top_k=1)
    with Bench("cpu") as bench, Compilers(2, timeout=5.0, memory=6 << 30) as compilers, Store(path) as store:
        outcome = tuning.tune(job, H100, bench, compilers, store)
        processes = {note.process for note in notes(".compiled")}
        measuring = {note.process for note in notes()}
    trials = {from_text(Config, trial.config): trial for trial in outcome.trials}
    assert outcome.new == len(trials) == 3 + len(COMPILED)
    for config, trial in trials.items():
        assert trial.status == COMPILED.get(config.fault, "ok"), trial
        assert (trial.compile_s is None) == (trial.reason != "") == bool(config.fault)
    reasons = {config.fault: trial.reason for config, trial in trials.items()}
    assert reasons["compile-segfault"] == "the compiler's process ended with -11"
    assert reasons["compile-memory"] == "the compiler reached its memory bound"
    assert reasons["compile-raise"] == "RuntimeError: no luck today"
    assert outcome.winner is not None
    assert outcome.winner.screened == 4  # those that a hang or a crash of the compiler took are not
    assert {note.visible for note in notes(".compiled")} == {""}
    assert not processes & measuring
    assert soon(lambda: all(map(gone, processes | measuring)))
    assert Counter(note.config for note in notes()).keys() == {to_text(config) for config in trials if not config.fault}


def test_two_sweeps_share_a_store(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_CONFIGS", "8")
    monkeypatch.setenv("FAULTY_SLEEP", "100")
    code = """
screened = None
def report(p):
    global screened
    if p.stage in ("finals", "done") and screened is None:
        mine = {child.pid for child in active_children()}
        screened = [note.config for note in notes() if note.process in mine]
found = run(sys.argv[1], progress=report)
print(json.dumps([found.finished, len(found.outcomes[0].trials), found.outcomes[0].new, screened, len(found.winners)]))
"""
    both = [start(code, path) for _ in range(2)]
    said = [json.loads(process.communicate(timeout=200)[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert path.with_name("ran").read_text() == "ran\n" * 2  # and not once more by every worker
    assert len({trial.config for trial in stored(path)}) == len(stored(path)) == 8
    assert sum(new for _, _, new, _, _ in said) == 8
    for finished, trials, _, screened, winners in said:
        assert finished
        assert trials == 8
        assert winners == 1
        assert len(set(screened)) == len(screened)
    times = Counter(config for _, _, _, screened, _ in said for config in screened)
    assert times.keys() == {trial.config for trial in stored(path)}
    assert times.total() <= 8 + 2  # what both are at when they have nothing else left


def test_interrupt_ends_everything(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C does to a program that goes on, and had opened the store itself."""
    monkeypatch.setenv("FAULTY_CONFIGS", "1000")
    code = """
with Store(Path(sys.argv[1])) as store:
    try:
        run(store, progress=lambda p: print(p.screened, flush=True))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    began = time.monotonic()
    while active_children() and time.monotonic() - began < 20:
        time.sleep(0.05)
    print("ended", len(active_children()), len(store.trials()), flush=True)
    time.sleep(1)
    print("and then", len(store.trials()), flush=True)
"""
    with start(code, path) as process:
        assert process.stdout
        for line in process.stdout:
            if line == "3\n":
                process.send_signal(signal.SIGINT)
            if line == "interrupted\n":
                break
        rest = process.stdout.read().split("\n")
    assert process.returncode == 0
    said = [line for line in rest if not line.isdecimal()]
    children, trials = said[0].removeprefix("ended ").split()
    assert children == "0"
    assert said[1] == f"and then {trials}"
    assert int(trials) == len(stored(path)) < 100


def test_interrupted_program_leaves_nothing_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_FAULTS", "hang")
    with start("run(sys.argv[1])", path) as process:
        assert soon(lambda: any("hang" in note.config for note in notes()), 120)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        process.wait(60)
    assert time.monotonic() - began < 20
    assert process.returncode != 0
    assert soon(lambda: all(gone(note.process) for note in notes()))
    assert [trial.status for trial in stored(path)] == ["ok"]


def test_a_workload_that_cannot_be_had_fails_alone(path: Path) -> None:
    """fp32 cannot hold the sums of so long a K, which the worker says when it makes its operands."""
    found = sweep(SUBJECT, [(1, 1, 1 << 24), (16, 16, 16)], store=path, top_k=1, **OPTIONS)
    (failure,) = found.failures
    assert failure.workload.K == 1 << 24
    assert "expected K < 2**24" in failure.reason
    assert [winner.workload.K for winner in found.winners] == [16]
    assert not found.finished


# ---- the worker and the compilers ------------------------------------------------------------------------------------
def test_what_else_befalls_a_worker() -> None:
    """A config that ends its process in Python's own way, and one whose end comes when nothing is asked."""
    with Bench("cpu") as bench:
        left = bench.screen(WORKLOAD, _entry(Config(fault="quit")), None)
        assert (left.status, left.reason) == ("failed", "SystemExit: 3")
        assert bench.screen(WORKLOAD, _entry(Config(fault="exit-idle")), None).status == "ok"
        assert bench.restarts == 0
        time.sleep(1.5)
        assert bench.screen(WORKLOAD, _entry(Config()), None).status == "ok"
        assert bench.restarts == 1


def test_errors_that_cannot_be_pickled_cost_their_own_compile() -> None:
    with Compilers(1, timeout=60) as compilers:
        odd, sound = (_submit(compilers, Config(fault=fault)) for fault in ("compile-odd", ""))
        assert outcome(odd) == ("failed", "OddError: cannot be unpickled")
        assert outcome(sound) is None
        assert outcome(_submit(compilers, Config(number=1))) is None


def test_compilers_that_cannot_start_are_no_configs_fault() -> None:
    with Compilers(1, memory=1 << 20) as compilers:
        assert outcome(_submit(compilers, Config())) is None
        assert compilers.submit(SUBJECT, WORKLOAD, to_text(Config()), 90) is not None


class FakePool:
    """Stands for pebble's pool of one worker. `deaths`: whether its process dies before it takes up the next call; what
    is `stuck` never ends, and nobody hears of it when the pool does."""

    deaths: ClassVar[list[bool]] = []
    stuck: ClassVar[bool] = False
    calls: ClassVar[list[Any]] = []
    active = True

    def __init__(self, **_: object) -> None:
        self.opened = False

    def schedule(self, function: Any, *, args: tuple[Any, ...], timeout: float) -> Future[Any]:
        self.calls.append(function)
        if self.stuck:
            return StuckFuture()
        future: Future[Any] = Future()
        if self.deaths and self.deaths.pop(0):
            future.set_exception(BrokenProcessPool("All workers expired"))
        elif function is worker.open_bench:
            self.opened = True
            future.set_result(100.0)
        elif function is worker.describe:
            future.set_result(H100)
        elif self.opened:
            future.set_result(Screened("ok"))
        else:
            future.set_exception(worker.NotOpen())
        return future

    def stop(self) -> None:
        """Whoever waits goes on waiting."""

    join = stop


class StuckFuture(ProcessFuture[Any]):
    """Running, and yet to be cancelled, as pebble's futures are."""

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> type[FakePool]:
    for module in (isolated, compilers):
        monkeypatch.setattr(module, "ProcessPool", FakePool)
    monkeypatch.setattr(FakePool, "deaths", [])
    monkeypatch.setattr(FakePool, "stuck", False)
    monkeypatch.setattr(FakePool, "calls", [])
    return FakePool


def test_a_worker_that_dies_unnoticed(pool: type[FakePool]) -> None:
    """Pebble says that all workers expired, of a call that none has taken up."""
    bench = Bench("0")
    pool.deaths += [True, False, False, True]
    assert bench.describe() == H100
    assert bench.screen(WORKLOAD, _entry(Config()), None).status == "ok"
    assert bench.restarts == 2
    assert [call for call in pool.calls if call is worker.open_bench] == [worker.open_bench] * 2


def test_a_worker_that_cannot_be_started(pool: type[FakePool], path: Path) -> None:
    pool.deaths += [True] * 100
    with pytest.raises(Down):
        Bench("0").describe()
    (failure,) = run(path).failures
    assert failure.workload == WORKLOAD


def test_who_waits_for_a_worker_is_released(pool: type[FakePool]) -> None:
    pool.stuck = True
    bench = Bench("0")
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            bench.describe()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert soon(lambda: len(pool.calls) == 1)
    bench.abandon()
    thread.join(5)
    assert [type(error) for error in raised] == [isolated.Abandoned]


def test_who_waits_for_compilers_is_released(pool: type[FakePool]) -> None:
    pool.stuck = True
    with Compilers(1) as several:
        future = several.submit(SUBJECT, WORKLOAD, to_text(Config()), 90)
        threading.Timer(0.2, several.close).start()
        assert wait([future], 5).done == {future}


def _entry(config: Config) -> Entry:
    return SUBJECT, to_text(config)


def _submit(compilers: Compilers, config: Config) -> Future[float]:
    future = compilers.submit(SUBJECT, WORKLOAD, to_text(config), 90)
    future.exception(timeout=60)
    return future


# ---- the driver alone ------------------------------------------------------------------------------------------------
@dataclass
class FakeBench:
    """Stands for a worker: µs by a config's number, 100 for cuBLAS; `down` may raise before any call."""

    down: Callable[[str, Config | None], None] = lambda call, config: None
    seconds: float = 0.0
    sleep: Callable[[float], None] = time.sleep
    calls: list[tuple[str, Any]] = field(default_factory=list)
    restarts: int = 0
    trial_seconds: float = 0.5
    entered: set[Entry] = field(default_factory=set)

    def open(self, workload: Workload) -> float:
        self._called("open", None)
        return 100.0

    def screen(self, workload: Workload, entry: Entry, best_us: float | None) -> Screened:
        config = self._called("screen", entry)
        us = 50.0 + config.number
        return Screened("ok", us=us, ratio=100 / us, ratio_low=100 / us, ratio_high=100 / us)

    def enter(self, workload: Workload, entry: Entry) -> Screened:
        self._called("enter", entry)
        self.entered.add(entry)
        return Screened("ok")

    def race(self, entries: Sequence[Entry], rounds: int) -> tuple[list[float], list[list[float]]]:
        configs = [self._called("race", entry) for entry in entries]
        if not self.entered >= set(entries):
            raise Down("crash", "the worker is another one")
        return [100.0] * rounds, [[50.0 + config.number] * rounds for config in configs]

    def forget(self, entries: Sequence[Entry]) -> None:
        self._called("forget", None)

    def _called(self, call: str, entry: Entry | None) -> Any:
        config = from_text(Config, entry[1]) if entry else None
        self.sleep(self.seconds)
        self.calls.append((call, config))
        try:
            self.down(call, config)
        except Down:
            self.restarts += 1
            self.entered.clear()
            raise
        return config

    def configs(self, call: str) -> list[int]:
        return [config.number for name, config in self.calls if name == call]


def tune(store: Store, bench: FakeBench, *, compilers: Any = None, on: Gpu = H100, **options: Any) -> Outcome:
    job = Job(options.pop("subjects", (SUBJECT,)), WORKLOAD, **options)
    return tuning.tune(job, on, bench, compilers, store)  # type: ignore[arg-type]


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store(path) as store:
        yield store


def test_three_sweeps_share_a_store(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What two measure is not what two died of."""
    monkeypatch.setenv("FAULTY_CONFIGS", "12")
    benches = [FakeBench(seconds=0.02) for _ in range(3)]
    found: list[Outcome] = []
    threads = [threading.Thread(target=lambda b=bench: found.append(tune(store, b, top_k=1))) for bench in benches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert Counter(trial.status for trial in store.trials()) == {"ok": 12}
    assert sum(outcome.new for outcome in found) == 12
    assert sum(len(bench.configs("screen")) for bench in benches) <= 12 + 3


def test_the_fastest_reach_the_finals(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_CONFIGS", "10")
    bench = FakeBench()
    found = tune(store, bench, top_k=3)
    assert sorted(bench.configs("screen")) == list(range(10))
    assert sorted(set(bench.configs("race"))) == [0, 1, 2]
    assert found.winner is not None
    assert from_text(Config, found.winner.config).number == 0
    assert from_text(Config, found.winner.runner_up).number == 1
    assert (found.winner.screened, found.winner.valid) == (10, 10)
    assert found.winner.separated
    assert found.winner.lead == pytest.approx(51 / 50)
    assert found.winner.ratio == 2.0
    assert [from_text(Config, f.config).number for f in found.winner.finalists] == [0, 1, 2]
    assert store.winners() == [found.winner]


def test_winners_of_before_race_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_CONFIGS", "5")
    winner = tune(store, FakeBench(), top_k=1).winner
    assert winner is not None
    store.crown(replace(winner, config=to_text(Config(number=4)), when="2999-01-01T00:00:00+00:00"))
    monkeypatch.setenv("FAULTY_CONFIGS", "6")
    bench = FakeBench()
    tune(store, bench, top_k=1)
    assert bench.configs("screen") == [5]
    assert set(bench.configs("race")) == {0, 4}
    other = FakeBench()
    tune(store, other, top_k=1, on=replace(H100, driver="1"))
    assert set(other.configs("race")) == {0}
    assert len(other.configs("screen")) == 6


def test_a_sweep_with_nothing_new_keeps_its_winners(store: Store) -> None:
    first, bench = tune(store, FakeBench()), FakeBench()
    found = tune(store, bench)
    assert bench.calls == []
    assert found.new == 0
    assert found.finished
    assert found.winners == first.winners
    assert found.trials == first.trials
    anew = FakeBench()
    assert tune(store, anew, resume=False).new == 3
    assert set(anew.configs("race")) == {0, 1, 2}


def test_each_kernel_has_a_winner(store: Store) -> None:
    other = Subject("other", "faulty_kernel")
    found = tune(store, FakeBench(), top_k=1, subjects=(SUBJECT, other))
    assert {winner.kernel for winner in found.winners} == {"faulty", "other"}
    assert len({winner.finalists for winner in found.winners}) == 1


def test_what_a_sweep_began_twice_and_never_ended_is_given_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "PATIENCE", 1.0)
    source = SUBJECT.fingerprint
    for _ in range(2):
        store.begin(H100, WORKLOAD, "faulty", source, to_text(Config(number=1)))
    bench = FakeBench()
    found = tune(store, bench)
    by_number = {from_text(Config, trial.config).number: trial for trial in found.trials}
    assert by_number[1].status == "crash"
    assert "2 sweeps ended while they measured it" in by_number[1].reason
    assert 1 not in bench.configs("screen")
    assert [by_number[i].status for i in (0, 2)] == ["ok", "ok"]


def test_what_others_measure_right_now_is_not_given_up(store: Store) -> None:
    """As `begun`, a config that two sweeps measure looks like one that two sweeps died of."""
    source, config = SUBJECT.fingerprint, to_text(Config(number=1))
    for _ in range(2):
        store.begin(H100, WORKLOAD, "faulty", source, config)
    theirs = Trial(
        gpu=H100, workload=WORKLOAD, kernel="faulty", source=source, config=config, status="ok", us=1.0, when=now()
    )
    threading.Timer(0.3, store.add, [theirs]).start()
    bench = FakeBench()
    found = tune(store, bench)
    assert 1 not in bench.configs("screen")
    assert [trial.status for trial in found.trials] == ["ok"] * 3


def test_measuring_anew(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for us in (0, 1, 2, 3):
        bench = FakeBench()
        monkeypatch.setattr(bench, "screen", lambda *_, us=us: Screened("ok", us=90.0 + us, ratio=1.0))
        found = tune(store, bench, resume=False)
        assert [trial.status for trial in found.trials] == ["ok"] * 3
        assert found.new == 3
        assert {trial.us for trial in store.trials()} == {90.0 + us}


def test_a_workload_that_goes_down_is_said_to_fail(store: Store) -> None:
    def down(call: str, config: Config | None) -> None:
        if call == "open":
            raise Down("crash", "no operands")

    found = tune(store, FakeBench(down))
    assert not found.finished
    assert found.trials == []
    assert found.winner is None


def test_a_finalist_that_fails_takes_nobody_along(store: Store) -> None:
    """It passed its screen, and takes the worker down in the finals, and with it all that had entered."""

    def down(call: str, config: Config | None) -> None:
        if call == "enter" and config and config.number == 1:
            raise Down("crash", "a bad day")

    found = tune(store, FakeBench(down))
    assert found.finished
    assert found.winner is not None
    assert [from_text(Config, f.config).number for f in found.winner.finalists] == [0, 2]


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_race_that_goes_down(store: Store, when: str) -> None:
    """Some rival takes the worker down as soon as it races; the others go on."""
    raced = Counter[int]()

    def down(call: str, config: Config | None) -> None:
        if call == "race" and config and config.number == 1:
            raced[1] += 1
            if when == "at once" or raced[1] > 1:
                raise Down("device lost", "an illegal access")

    bench = FakeBench(down)
    found = tune(store, bench)
    assert found.finished
    assert found.winner is not None
    assert from_text(Config, found.winner.config).number == 0
    assert [from_text(Config, f.config).number for f in found.winner.finalists] == [0, 2]


def test_a_worker_that_goes_down_at_forgetting(store: Store) -> None:
    def down(call: str, config: Config | None) -> None:
        if call == "forget":
            raise Down("crash", "gone")

    assert tune(store, FakeBench(down)).winner is not None


class Clock:
    """Stands for `time` where only calls of a worker take any."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_budget_ends_a_screen_and_leaves_time_for_finals(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_CONFIGS", "1000")
    clock = Clock()
    for module in (tuning, ahead, racing):
        monkeypatch.setattr(module, "time", clock)
    bench = FakeBench(seconds=0.01, sleep=clock.sleep)
    found = tune(store, bench, seconds=1.0, top_k=2)
    assert 0.75 < clock.now - 1000 < 1.1
    assert not found.finished
    assert 30 < found.new == len(bench.configs("screen")) < 40  # each opens its worker first
    assert found.winner is not None
    assert found.winner.valid == 1000
    assert found.winner.rounds >= finals.BATCH
    assert tune(store, FakeBench(), top_k=2).new == 1000 - found.new


class SlowCompilers:
    """Whose compiles never end."""

    workers = 1

    def __init__(self) -> None:
        self.futures: list[Future[float]] = []

    def submit(self, *_: object) -> Future[float]:
        self.futures.append(Future())
        return self.futures[-1]


@pytest.mark.timeout(15)
def test_budget_ends_compiles_too(store: Store) -> None:
    began = time.monotonic()
    compilers = SlowCompilers()
    found = tune(store, FakeBench(), compilers=compilers, seconds=1.0)
    assert time.monotonic() - began < 10
    assert all(future.cancelled() for future in compilers.futures)
    assert not found.finished


def test_few_are_compiled_ahead(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_CONFIGS", "20")
    futures: list[Future[float]] = []
    bench = FakeBench()

    class Eager:
        workers = 2

        def submit(self, subject: Subject, workload: Workload, config: str, arch: int) -> Future[float]:
            futures.append(Future())
            futures[-1].set_result(1.5)
            assert len(futures) - len(bench.configs("screen")) <= ahead.AHEAD * self.workers
            return futures[-1]

    found = tune(store, bench, compilers=Eager())
    assert len(futures) == found.new == 20
    assert {trial.compile_s for trial in found.trials} == {1.5}


def test_configs_that_share_a_compile(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = faulty_kernel.space
    monkeypatch.setenv("FAULTY_CONFIGS", "6")
    monkeypatch.setattr(
        faulty_kernel,
        "space",
        lambda *_: replace(whole(None, None), compiled_as=lambda c: replace(c, number=c.number % 2)),  # type: ignore[arg-type]
    )
    futures: list[Future[float]] = []

    class Eager:
        workers = 2

        def submit(self, *_: object) -> Future[float]:
            futures.append(Future())
            futures[-1].set_result(1.0)
            return futures[-1]

    found = tune(store, FakeBench(), compilers=Eager())
    assert len(futures) == 2
    assert found.new == 6


# ---- around it -------------------------------------------------------------------------------------------------------
def test_a_report_that_raises_is_not_heard_again() -> None:
    heard: list[Progress] = []

    def report(progress: Progress) -> None:
        heard.append(progress)
        raise ValueError("no terminal")

    tell = sweeping._serial(report)
    with pytest.warns(UserWarning, match=r"progress is no longer reported: ValueError\('no terminal'\)"):
        tell(Progress(WORKLOAD))
    tell(Progress(WORKLOAD))
    assert len(heard) == 1


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "trials": ({"trials": 0}, "trials is 0, expected an integer of at least 1"),
    "top_k": ({"top_k": 1.5}, "top_k is 1.5"),
    "workers": ({"compile_workers": -1}, "compile_workers is -1"),
    "budget": ({"budget": 0}, "budget is 0, expected seconds above 0"),
    "nan": ({"budget": float("nan")}, "budget is nan"),
    "trial_seconds": ({"trial_seconds": -1.0}, r"trial_seconds is -1.0"),
    "engine": ({"engine": "slurm"}, "engine is 'slurm', expected one of local, ray"),
    "ranker": ({"ranker": "luck"}, "ranker is 'luck', expected one of model, heuristics"),
    "dtype": ({"dtype": "float64"}, "dtype is 'float64'"),
    "out_dtype": ({"out_dtype": "bfloat16"}, "out_dtype is 'bfloat16'"),
    "layout": ({"layout": "nm"}, "layout is 'nm'"),
    "shapes": ({"shapes": [(16, 16)]}, "shapes is"),
    "size": ({"shapes": (16, 0, 16)}, "N is 0"),
    "text": ({"shapes": "16x16"}, "shapes is '16x16'"),
    "no kernels": ({"kernels": []}, "kernels is empty"),
    "kernel": ({"kernels": "hopper.nothing"}, "kernel is 'hopper.nothing', expected one of"),
    "gpus": ({"gpus": "9"}, "gpus is '9'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case: str, path: Path) -> None:
    changed, message = BAD[case]
    arguments: dict[str, Any] = {"kernels": SUBJECT, "shapes": 16, "store": path, **OPTIONS, **changed}
    with pytest.raises(ValueError, match=message):
        sweep(arguments.pop("kernels"), arguments.pop("shapes"), **arguments)
    assert notes() == []


def test_names_that_no_store_takes_are_refused_at_once(path: Path) -> None:
    with pytest.raises(ValueError, match="My kernel"):
        sweep(Subject("My kernel", "faulty_kernel"), 16, store=path, **OPTIONS)
    assert notes() == []


def test_modules_that_are_not_there(path: Path) -> None:
    with pytest.raises(ImportError, match="no_such_module is not installed"):
        sweep(Subject("mine", "no_such_module"), 16, store=path, **OPTIONS)


def test_budget_is_shared() -> None:
    budget = Budget(100.0, 6, 2)
    first = budget.share()
    assert first is not None
    assert 30 < first <= 100 / 3
    for _ in range(4):
        budget.share()
    last = budget.share()
    assert last is not None
    assert 99 < last <= 100
    assert Budget(None, 3, 1).share() is None
    assert Budget(0.1, 1, 1).share() == 5.0


def test_gpus_as_cuda_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus("all") == visible_gpus("0,1") == visible_gpus([0, 1]) == ["0", "1"]
    assert visible_gpus(1) == visible_gpus("1,1") == ["1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, MIG-b")
    assert visible_gpus("all") == ["GPU-a", "MIG-b"]
    assert visible_gpus(1) == ["MIG-b"]
    for wrong in ("2", "-1", "", [], True, "0;1"):
        with pytest.raises(ValueError, match="gpus is"):
            visible_gpus(wrong)  # type: ignore[arg-type]


def test_statuses_of_faults_are_statuses() -> None:
    known = set(Status.__args__)  # type: ignore[attr-defined]
    assert {*MEASURED.values(), *COMPILED.values()} <= known
    assert os.environ["FAULTY_LOG"]
