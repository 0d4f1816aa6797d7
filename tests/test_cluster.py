"""The Ray engine on a local cluster without GPUs, where the portable kernel is interpreted."""

import os
import secrets
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import tuned
from sweeps import soon

from outblas.autotune import Store, Subject, cluster, sweep
from outblas.autotune.progress import silent

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.timeout(400),
    pytest.mark.skipif(sys.platform != "linux", reason="kills processes"),
]
TUNED = Subject("tuned", "tuned")
SHAPES = [(32, 32, 32), (16, 32, 16), (32, 16, 16)]
TRIALS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A cluster, and where its workers look for what to do."""
    ray = pytest.importorskip("ray")
    found = tmp_path_factory.mktemp("tuned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(tuned.FOLDER, str(found))
        patch.setenv("PYTHONPATH", str(Path(tuned.__file__).parent))
        patch.setenv("RAY_worker_niceness", "0")  # else other tests starve it
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray keeps one in the home directory
        patch.setenv("RAY_AUTH_MODE", "")  # so that it is restored: Ray sets it where it is not set
        patch.delenv("RAY_AUTH_MODE")
        ray.init(
            address="local", num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False,
            logging_level="error", object_store_memory=80_000_000,
        )  # fmt: skip
        yield found
        ray.shutdown()


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "store.sqlite") as found:
        yield found


def run(store, report=silent, *, shapes=1, kernel=TUNED):
    return sweep(
        kernel, SHAPES[:shapes], dtype="float32", layout="nn", trials=TRIALS, top_k=2, engine="ray", store=store,
        progress=report,
    )  # fmt: skip


def test_a_worker_is_killed_in_the_middle_and_nothing_is_lost(folder, store):
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
    assert sorted(winner.workload for winner in store.winners()) == sorted(w.workload for w in found.winners)

    trials = store.trials()
    assert len(trials) == len(SHAPES) * TRIALS
    assert all(trial.ok for trial in trials)
    begun = {trial: store.begun(trial.gpu, *trial.identity[1:]) for trial in trials}
    assert Counter(begun.values()) == {1: len(trials) - 1, 2: 1}  # the one that ran was begun again
    assert next(trial for trial, times in begun.items() if times == 2).workload.shape == (32, 32, 32)

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


def test_a_workload_whose_workers_always_die_fails(folder, store, monkeypatch):
    monkeypatch.setattr(cluster, "RESTARTS", 1)
    (folder / "deadly").touch()
    try:
        found = run(store)
    finally:
        (folder / "deadly").unlink()
    assert not found.outcomes
    assert [failure.workload.shape for failure in found.failures] == SHAPES[:1]
    assert found.failures[0].reason.startswith("2 workers died in a row")


def test_an_interrupt_ends_the_workers(folder, store):
    (folder / "tuners").unlink(missing_ok=True)

    def interrupt(progress):
        if progress.stage == "screening":
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(store, interrupt)
    worker = Path("/proc") / (folder / "tuners").read_text().split()[-1]
    assert soon(lambda: not worker.exists())


@pytest.mark.usefixtures("folder")
def test_arguments_that_no_worker_can_take_are_the_callers_error(store):
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        run(store, kernel="hopper.hilbert")


def test_without_ray_it_says_what_to_install(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'outblas\[ray\]'"):
        run(store)


@pytest.mark.parametrize(
    ("address", "error"),
    [("127.0.0.1:1", ConnectionError), ("head", ValueError), ("ray://127.0.0.1:10001", ValueError)],
)
def test_a_wrong_address_is_named(address, error, store, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(error, match=address):
        sweep("portable", 32, dtype="float32", engine="ray", address=address, store=store)
