"""The Ray engine on a local cluster without GPUs, where the portable kernel is interpreted.

A sweep takes seconds there: what tests only read is found once, by a fixture of the module.
"""

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import tuned
from support.paths import TESTS

from outblas.autotune import Progress, Store, Sweep, TuneTarget, sweep
from outblas.autotune.measure.progress import Report, silent

pytestmark = [
    pytest.mark.long,
    pytest.mark.interpreter,
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("ray"),  # one cluster, in one process of the tests
    pytest.mark.skipif(sys.platform != "linux", reason="kills processes"),
]
TUNED = TuneTarget("tuned", "support.tuned")
SHAPES = [(32, 32, 32), (16, 32, 16)]
TRIALS = 3  # that are asked for, of each shape


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


def test_a_killed_actor_costs_time_alone(folder: Path, path: Path) -> None:
    """That of the first shape is killed while it measures its third config. The strategy need not
    be importable there: the driver has it.
    """
    (folder / "kill-32x32x32").touch()
    snapshots: list[Progress] = []

    with Store(path) as store:
        result = run(store, snapshots.append, shapes=len(SHAPES), strategy=tuned.SameRows())
        trials = store.trials()

    assert not (folder / "kill-32x32x32").exists(), "no actor was killed"
    assert result.finished
    assert {winner.workload.shape for winner in result.winners} == set(SHAPES)
    assert {trial.status for trial in trials} == {"ok"}
    assert (folder / "victim").read_text() in {trial.config for trial in trials}
    for outcome in result.outcomes:
        assert outcome.new == len(outcome.plan.ranked) > 2
        assert len({candidate.footprint.tile_m for candidate in outcome.plan.ranked}) <= 2
    assert {snapshot.stage for snapshot in snapshots} >= {"waiting", "screening", "finals", "done"}


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
