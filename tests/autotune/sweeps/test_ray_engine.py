"""The Ray engine on a local cluster without GPUs, where the portable kernel is interpreted.

A sweep takes seconds there: what tests only read is found once, by a fixture of the module.
"""

import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support import tuned
from support.paths import TESTS
from support.sweeps import soon

from outblas.autotune import Progress, Store, StrategyError, Sweep, TuneTarget, sweep
from outblas.autotune.measure.progress import Report, silent
from outblas.autotune.store.records import BestConfig, Trial
from outblas.autotune.sweeps import ray_engine

pytest_plugins = ("support.sweep_fixtures",)

pytestmark = [
    pytest.mark.long,
    pytest.mark.interpreter,
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("ray"),  # one cluster, in one process of the tests
    pytest.mark.skipif(sys.platform != "linux", reason="kills processes"),
]
TUNED = TuneTarget("tuned", "support.tuned")
SHAPES = [(32, 32, 32), (16, 32, 16)]
TRIALS = 4  # that are asked for, of each shape
MEASURED = TRIALS + 1  # the config that the kernel chooses itself is measured too
KILL_ONCE, KILL_AGAIN = "kill-32x32x32", "kill-again"  # what tests/support/tuned.py looks for


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder where the workers of a cluster of two CPUs look for what to do."""
    ray = pytest.importorskip("ray")
    found = tmp_path_factory.mktemp("tuned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(tuned.FOLDER, str(found))
        patch.setenv("PYTHONPATH", str(TESTS))
        patch.setenv("RAY_worker_niceness", "0")  # else other tests starve it
        # Without a token Ray would keep one in the home directory.
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # Ray sets the mode where it is not set; set here first, it is restored at the end.
        patch.setenv("RAY_AUTH_MODE", "")
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


def run(
    store: Store,
    report: Report = silent,
    *,
    shapes: int = 1,
    kernel: str | TuneTarget = TUNED,
    **options,
) -> Sweep:
    """A sweep of the first `shapes` of `SHAPES` on the cluster."""
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


def leased(path: Path, trials: list[Trial]) -> list[str]:
    """The configs among these that another process could not begin to measure now."""
    with Store(path) as other:
        claims = {
            trial.config: other.claim(
                trial.gpu, trial.workload, trial.kernel, trial.source, trial.config, again=True
            )
            for trial in trials
        }
    return [config for config, claim in claims.items() if not claim.granted]


@dataclass(frozen=True)
class Ended:
    """A sweep that has ended, what was heard of it, and what its store held then.

    `victim` is the config at whose measurement the worker was killed. `began` and `ended` are on
    the clock of `time.monotonic`.
    """

    sweep: Sweep
    heard: list[Progress]
    began: float
    ended: float
    path: Path
    trials: list[Trial]
    winners: list[BestConfig]
    victim: str


def ended_sweep(folder: Path, path: Path, *, kills: tuple[str, ...], shapes: int) -> Ended:
    """Runs a sweep in whose course workers are killed."""
    (folder / "victim").unlink(missing_ok=True)
    for name in kills:
        (folder / name).touch()
    heard: list[Progress] = []
    began = time.monotonic()
    with Store(path) as store:
        found = run(store, heard.append, shapes=shapes)
        ended = time.monotonic()
        trials, winners = store.trials(), store.winners()
    assert not [name for name in kills if (folder / name).exists()], "a worker was not killed"
    victim = (folder / "victim").read_text()
    return Ended(found, heard, began, ended, path, trials, winners, victim)


# A worker that is killed.


@pytest.fixture(scope="module")
def survived(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A sweep of all shapes; the worker of the first is killed while it measures its third
    config.
    """
    path = tmp_path_factory.mktemp("survived") / "store.sqlite"
    return ended_sweep(folder, path, kills=(KILL_ONCE,), shapes=len(SHAPES))


def test_a_sweep_outlives_a_killed_worker(survived: Ended) -> None:
    found = survived.sweep

    assert found.finished
    assert {winner.workload.shape for winner in found.winners} == set(SHAPES)
    assert [outcome.new for outcome in found.outcomes] == [MEASURED] * len(SHAPES)
    assert [len(outcome.trials) for outcome in found.outcomes] == [MEASURED] * len(SHAPES)


def test_a_killed_worker_costs_no_trial(survived: Ended) -> None:
    assert len(survived.trials) == len(SHAPES) * MEASURED
    assert {trial.status for trial in survived.trials} == {"ok"}
    assert {trial.gpu for trial in survived.trials} == {o.gpu for o in survived.sweep.outcomes}


def test_the_winners_of_a_sweep_are_stored(survived: Ended) -> None:
    stored = sorted(winner.workload for winner in survived.winners)

    assert stored == sorted(winner.workload for winner in survived.sweep.winners)


def test_the_config_at_which_a_worker_was_killed_is_put_off_to_the_end(survived: Ended) -> None:
    measured = [trial.config for trial in survived.trials if trial.workload.shape == SHAPES[0]]

    assert measured[-1] == survived.victim


def test_a_finished_sweep_leaves_no_lease(survived: Ended) -> None:
    assert leased(survived.path, survived.trials) == []


def test_a_death_is_reported_and_the_trials_before_it_count_as_known(survived: Ended) -> None:
    snapshots = [each for each in survived.heard if each.workload.shape == SHAPES[0]]

    assert any("died" in each.message for each in snapshots)
    assert (snapshots[-1].stage, snapshots[-1].known) == ("done", 2)


def test_snapshots_are_on_the_clock_of_the_caller(survived: Ended) -> None:
    """Machines share none."""
    started = [each.started for each in survived.heard]

    assert survived.began - 1 < min(started)
    assert max(started) < survived.ended + 1


@pytest.fixture
def tried(survived: Ended, tmp_path: Path) -> Iterator[Store]:
    """A copy of the store that the sweep with the killed worker has filled."""
    with Store(Path(shutil.copy(survived.path, tmp_path / "tried.sqlite"))) as found:
        yield found


@pytest.mark.usefixtures("folder")
def test_what_was_measured_is_not_measured_again(survived: Ended, tried: Store) -> None:
    again = run(tried, shapes=len(SHAPES))

    assert again.finished
    assert [outcome.new for outcome in again.outcomes] == [0] * len(SHAPES)
    assert len(again.winners) == len(SHAPES)
    assert tried.trials() == survived.trials


# A config that workers do not survive. Ray takes half a minute for it, so these tests run by name.


@pytest.fixture(scope="module")
def given_up(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A sweep of one shape; two workers are killed while they measure the same config."""
    path = tmp_path_factory.mktemp("given_up") / "store.sqlite"
    return ended_sweep(folder, path, kills=(KILL_ONCE, KILL_AGAIN), shapes=1)


@pytest.mark.slow
def test_a_config_with_which_two_workers_die_is_left_unmeasured(given_up: Ended) -> None:
    """Their deaths say nothing about it."""
    (outcome,) = given_up.sweep.outcomes

    assert [left.reason for left in outcome.unmeasured] == [
        "2 workers of the cluster died while they measured it"
    ]
    assert given_up.victim not in {trial.config for trial in given_up.trials}
    assert (given_up.sweep.failures, given_up.sweep.finished) == ([], False)


@pytest.mark.slow
def test_the_other_configs_are_measured_all_the_same(given_up: Ended) -> None:
    (outcome,) = given_up.sweep.outcomes

    assert len(given_up.trials) == outcome.new == MEASURED - 1
    assert {trial.status for trial in given_up.trials} == {"ok"}
    assert len(given_up.sweep.winners) == 1


@pytest.mark.slow
def test_the_config_that_was_left_has_no_lease(given_up: Ended) -> None:
    left = replace(given_up.trials[0], config=given_up.victim)

    assert leased(given_up.path, [*given_up.trials, left]) == []


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_the_next_sweep_measures_the_config_that_was_left(given_up: Ended, tmp_path: Path) -> None:
    with Store(Path(shutil.copy(given_up.path, tmp_path / "store.sqlite"))) as store:
        again = run(store)

    assert again.finished
    assert [outcome.new for outcome in again.outcomes] == [1]


@pytest.mark.slow
def test_a_workload_whose_workers_always_die_fails(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "RESTARTS", 1)
    (folder / "deadly").touch()

    try:
        found = run(store)
    finally:
        (folder / "deadly").unlink()

    assert not found.outcomes
    assert [failure.workload.shape for failure in found.failures] == SHAPES[:1]
    assert found.failures[0].reason.startswith("2 workers died in a row")


# What is measured anew.


@pytest.fixture
def with_a_failure(tried: Store) -> Store:
    """A store where a config of the first shape has failed."""
    nothing = dict.fromkeys(("us", "ratio", "ratio_low", "ratio_high", "clock_mhz"))
    fine = next(trial for trial in tried.trials() if trial.workload.shape == SHAPES[0])
    broken = replace(fine, status="out of memory", reason="no luck", **nothing)
    tried.add(broken, replace=True)
    return tried


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("options", "new"),
    [
        pytest.param({}, 0, id="by default nothing", marks=pytest.mark.slow),
        pytest.param(
            {"retry_failed": True}, 1, id="retry_failed: what has failed", marks=pytest.mark.slow
        ),
        pytest.param(
            {"resume": False}, MEASURED, id="no resume: everything", marks=pytest.mark.slow
        ),
    ],
)
def test_the_options_say_what_is_measured_anew(
    with_a_failure: Store, options: dict[str, Any], new: int
) -> None:
    found = run(with_a_failure, **options)

    statuses = {trial.status for trial in with_a_failure.trials()}
    assert found.outcomes[0].new == new
    assert statuses == ({"ok"} if options else {"ok", "out of memory"})


# Strategies.


@pytest.mark.usefixtures("folder")
def test_a_strategy_of_ones_own_works_on_a_cluster(store: Store) -> None:
    """Its object travels to the workers, which hear of the results there."""
    found = run(store, strategy=tuned.SameRows())

    (outcome,) = found.outcomes
    assert found.finished
    assert isinstance(outcome.job.strategy, tuned.SameRows)
    assert len({candidate.footprint.tile_m for candidate in outcome.plan.ranked}) <= 2
    assert outcome.new == len(outcome.plan.ranked) > 1


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_an_error_of_a_strategy_on_a_worker_is_the_callers(store: Store) -> None:
    with pytest.raises(StrategyError, match="strategy Lost proposed 7, expected a list"):
        run(store, strategy=tuned.Lost())


# Interrupts and errors of the caller.


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
def test_a_kernel_that_no_worker_can_run_is_the_callers_error(store: Store) -> None:
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        run(store, kernel="hopper.hilbert")


def test_without_ray_the_error_says_what_to_install(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(ImportError, match=r"pip install 'outblas\[ray\]'"):
        run(store)


@pytest.mark.parametrize(
    ("address", "error"),
    [
        pytest.param("127.0.0.1:1", ConnectionError, id="nobody listens"),
        pytest.param("head", ValueError, id="no port"),
        pytest.param("ray://127.0.0.1:10001", ValueError, id="address of a Ray client"),
    ],
)
def test_a_wrong_address_is_named(
    address: str, error: type[Exception], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    # A process that is connected already, as this one may be, needs no address.
    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    with pytest.raises(error, match=address):
        sweep("portable", 32, dtype="float32", engine="ray", address=address, store=store)
