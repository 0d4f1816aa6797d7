"""A worker that is killed, goes down or fails under its driver, and what is measured anew then."""

from collections import Counter
from collections.abc import Callable

import pytest
from support.fake_bench import FakeWorker, number
from support.jobs import ONE, FakeCompilers, facts

from outblas.autotune.store.claims import Owner
from outblas.autotune.store.store import Store
from outblas.autotune.sweeps.outcome import Outcome

pytest_plugins = ("support.sweep_fixtures",)

pytestmark = pytest.mark.usefixtures("faulty_log")


def killed_times(count):
    """A worker that is killed from outside whenever it measures config 1, so many times."""
    bench = FakeWorker(("screen", 1), status="killed")
    bench.dies = count
    return bench


def test_a_killed_worker_is_tried_again_at_once(tune: Callable[..., Outcome]) -> None:
    bench = killed_times(2)
    found = tune(bench)

    assert bench.configs("screen") == [0, 1, 1, 1, 2]
    assert [trial.status for trial in found.trials] == ["ok"] * 3
    assert (found.finished, found.unmeasured) == (True, [])


def test_what_is_killed_again_and_again_is_left_unmeasured(
    tune: Callable[..., Outcome], store: Store
) -> None:
    bench = killed_times(9)

    found = tune(bench)

    (left,) = found.unmeasured

    assert bench.configs("screen") == [0, 1, 1, 1, 2]
    assert (left.kernel, left.config) == ("faulty", ONE)
    assert left.reason == "killed from outside 3 times: a bad day"
    assert {number(trial) for trial in store.trials()} == {0, 2}


def test_a_killed_compile_is_tried_again(tune: Callable[..., Outcome]) -> None:
    bench = FakeWorker()
    compilers = FakeCompilers(bench, seconds=1.5, killed=1)

    found = tune(bench, compilers=compilers)

    assert found.finished
    assert len(compilers.futures) == 4
    assert bench.configs("screen") == [0, 2, 1]


def test_what_is_killed_at_every_compile_is_left_unmeasured(
    tune: Callable[..., Outcome], store: Store
) -> None:
    tune(FakeWorker())
    bench = FakeWorker()

    found = tune(bench, 4, compilers=FakeCompilers(bench, seconds=1.5, killed=99))

    (left,) = found.unmeasured

    assert left.reason == (
        "its compile process was killed from outside repeatedly: the compiler was killed"
    )
    assert len(store.trials()) == 3


@pytest.mark.parametrize(
    ("call", "times", "left"),
    [
        ("enter", 1, [0, 1, 2]),
        ("race", 1, [0, 1, 2]),
        ("race", 2, [0, 1, 2]),
        ("enter", 2, [0, 2]),
        ("race", 4, [0, 2]),
    ],
)
def test_a_killed_finalist_is_not_out_at_once(
    tune: Callable[..., Outcome], call: str, times: int, left
) -> None:
    bench = killed_times(times)
    bench.down = (call, 1)

    assert sorted(map(number, tune(bench).winner.finalists)) == left


def test_what_a_driver_died_with_is_measured_at_the_end(
    tune: Callable[..., Outcome], store: Store
) -> None:
    store.claim(*facts(ONE))
    dead = str(Owner.here()._replace(started="1"))
    store.write(lambda connection: connection.execute("UPDATE claims SET owner = ?", [dead]))
    bench = FakeWorker()

    assert tune(bench).finished
    assert bench.configs("screen") == [0, 2, 1]


@pytest.fixture
def failed(tune: Callable[..., Outcome]) -> None:
    """Of four configs that were tuned, 1 was out of memory and 3 was refused."""
    tune(FakeWorker(("screen", 1), status="out of memory"))
    tune(FakeWorker(("screen", 3), status="refused"), 4)


def statuses(store: Store) -> Counter[str]:
    return Counter(trial.status for trial in store.trials())


@pytest.mark.usefixtures("failed")
def test_what_has_failed_is_measured_anew_on_request(
    tune: Callable[..., Outcome], store: Store
) -> None:
    """But for what was refused: that has nothing to do with the day."""
    bench = FakeWorker()

    found = tune(bench, 4, retry_failed=True)

    assert bench.configs("screen") == [1]
    assert (found.new, found.finished) == (1, True)
    assert statuses(store) == {"ok": 3, "refused": 1}


def test_a_workload_that_goes_down_is_said_to_fail(tune: Callable[..., Outcome]) -> None:
    found = tune(FakeWorker(("open", None)))

    assert (found.finished, found.trials, found.winner) == (False, [], None)


@pytest.mark.parametrize(("call", "spared"), [("enter", 0), ("race", 0), ("race", 1)])
def test_a_finalist_that_fails_takes_nobody_along(
    tune: Callable[..., Outcome], call: str, spared: int
) -> None:
    """It passed its screen, and takes the worker down in the finals, and with it all that had
    entered.
    """
    found = tune(FakeWorker((call, 1), spared))

    assert found.finished
    assert number(found.winner) == 0
    assert list(map(number, found.winner.finalists)) == [0, 2]
