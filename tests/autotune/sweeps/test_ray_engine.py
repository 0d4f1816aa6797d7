"""The Ray engine on a local cluster without GPUs, where the portable kernel is interpreted."""

import os
import secrets
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support import tuned
from support.paths import TESTS
from support.sweeps import soon

from outblas.autotune import Progress, Store, StrategyError, Sweep, TuneTarget, sweep
from outblas.autotune.measure.progress import Report, silent
from outblas.autotune.sweeps import ray_engine

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.timeout(400),
    pytest.mark.skipif(sys.platform != "linux", reason="kills processes"),
]
TUNED = TuneTarget("tuned", "support.tuned")
SHAPES = [(32, 32, 32), (16, 32, 16), (32, 16, 16)]
TRIALS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cluster, and where its workers look for what to do."""
    ray = pytest.importorskip("ray")
    found = tmp_path_factory.mktemp("support.tuned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(tuned.FOLDER, str(found))
        patch.setenv("PYTHONPATH", str(TESTS))
        patch.setenv("RAY_worker_niceness", "0")  # else other tests starve it
        patch.setenv(
            "RAY_AUTH_TOKEN", secrets.token_hex(32)
        )  # else Ray keeps one in the home directory
        patch.setenv("RAY_AUTH_MODE", "")  # so that it is restored: Ray sets it where it is not set
        patch.delenv("RAY_AUTH_MODE")
        ray.init(
            address="local",
            num_cpus=2,
            num_gpus=0,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=80_000_000,
        )
        yield found
        ray.shutdown()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store.sqlite") as found:
        yield found


def run(
    store: Store,
    report: Report = silent,
    *,
    shapes: int = 1,
    kernel: str | TuneTarget = TUNED,
    **options,
) -> Sweep:
    return sweep(
        kernel,
        SHAPES[:shapes],
        dtype="float32",
        layout="nn",
        trials=TRIALS,
        top_k=2,
        engine="ray",
        store=store,
        progress=report,
        **options,
    )


def test_a_worker_is_killed_in_the_middle_and_nothing_is_lost(folder: Path, store: Store) -> None:
    (folder / "kill-32x32x32").touch()
    heard = []
    began = time.monotonic()
    found = run(store, heard.append, shapes=3)
    ended = time.monotonic()
    assert not (folder / "kill-32x32x32").exists()
    assert found.finished
    assert {winner.workload.shape for winner in found.winners} == set(SHAPES)
    assert all(outcome.new == len(outcome.trials) == TRIALS for outcome in found.outcomes)
    assert {outcome.gpu for outcome in found.outcomes} == {trial.gpu for trial in store.trials()}
    assert sorted(winner.workload for winner in store.winners()) == sorted(
        w.workload for w in found.winners
    )

    trials = store.trials()
    assert len(trials) == len(SHAPES) * TRIALS
    assert all(trial.ok for trial in trials)
    victim = (folder / "victim").read_text()
    assert [trial.config for trial in trials if trial.workload.shape == (32, 32, 32)][
        -1
    ] == victim  # it was put off
    assert rows_of(store, "leases") == []

    mine = [progress for progress in heard if progress.workload.shape == (32, 32, 32)]
    assert any("died" in progress.message for progress in mine)
    assert mine[-1].stage == "done"
    assert mine[-1].known == 2
    assert all(began - 1 < progress.started < ended + 1 for progress in heard)

    again = run(store, shapes=3)
    assert again.finished
    assert [outcome.new for outcome in again.outcomes] == [0, 0, 0]
    assert len(again.winners) == len(SHAPES)
    assert store.trials() == trials


def rows_of(store, table):
    with sqlite3.connect(store.path) as connection:
        return connection.execute(f"SELECT config FROM {table}").fetchall()


def test_a_config_with_which_two_workers_die_is_left_unmeasured(folder: Path, store: Store) -> None:
    """Their deaths say nothing about it; the others are measured meanwhile, and the next sweep
    measures it too.
    """
    for name in ("kill-32x32x32", "kill-again"):
        (folder / name).touch()
    found = run(store)
    (outcome,) = found.outcomes
    assert [left.reason for left in outcome.unmeasured] == [
        "2 workers of the cluster died while they measured it"
    ]
    assert (found.failures, found.finished) == ([], False)
    assert {trial.status for trial in store.trials()} == {"ok"}
    assert len(store.trials()) == outcome.new == TRIALS - 1
    assert len(found.winners) == 1
    assert (folder / "victim").read_text() not in {trial.config for trial in store.trials()}
    assert rows_of(store, "leases") == []

    again = run(store)
    assert again.finished
    assert [outcome.new for outcome in again.outcomes] == [1]


def test_what_has_failed_is_measured_anew_on_a_cluster(folder: Path, store: Store) -> None:
    run(store)
    fine = store.trials()
    broken = replace(
        fine[0],
        status="out of memory",
        reason="no luck",
        us=None,
        ratio=None,
        ratio_low=None,
        ratio_high=None,
        clock_mhz=None,
    )
    store.add(broken, replace=True)
    assert run(store).outcomes[0].new == 0
    assert run(store, retry_failed=True).outcomes[0].new == 1
    assert {trial.status for trial in store.trials()} == {"ok"}
    assert run(store, resume=False).outcomes[0].new == TRIALS


def test_a_strategy_of_ones_own_works_on_a_cluster(folder, store):
    """Its object travels to the workers, which hear of the results there."""
    found = run(store, strategy=tuned.SameRows())
    (outcome,) = found.outcomes
    assert found.finished
    assert isinstance(outcome.job.strategy, tuned.SameRows)
    assert len({candidate.footprint.tile_m for candidate in outcome.plan.ranked}) <= 2
    assert outcome.new == len(outcome.plan.ranked) > 1
    with pytest.raises(StrategyError, match="strategy Lost proposed 7, expected a list"):
        run(store, strategy=tuned.Lost())


def test_a_workload_whose_workers_always_die_fails(folder, store, monkeypatch):
    monkeypatch.setattr(ray_engine, "RESTARTS", 1)
    (folder / "deadly").touch()
    try:
        found = run(store)
    finally:
        (folder / "deadly").unlink()
    assert not found.outcomes
    assert [failure.workload.shape for failure in found.failures] == SHAPES[:1]
    assert found.failures[0].reason.startswith("2 workers died in a row")


def test_an_interrupt_ends_the_workers(folder: Path, store: Store) -> None:
    (folder / "tuners").unlink(missing_ok=True)

    def interrupt(progress: Progress) -> None:
        if progress.stage == "screening":
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(store, interrupt)
    worker = Path("/proc") / (folder / "tuners").read_text().split()[-1]
    assert soon(lambda: not worker.exists())


@pytest.mark.usefixtures("folder")
def test_arguments_that_no_worker_can_take_are_the_callers_error(store: Store) -> None:
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        run(store, kernel="hopper.hilbert")


def test_without_ray_it_says_what_to_install(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'outblas\[ray\]'"):
        run(store)


@pytest.mark.parametrize(
    ("address", "error"),
    [("127.0.0.1:1", ConnectionError), ("head", ValueError), ("ray://127.0.0.1:10001", ValueError)],
)
def test_a_wrong_address_is_named(
    address: str, error: type[Exception], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(error, match=address):
        sweep("portable", 32, dtype="float32", engine="ray", address=address, store=store)
