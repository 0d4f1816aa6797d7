"""What sweeps with warm and with cold weights, with and without an epilogue, learn from each other,
with a worker that is played.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
from support import faulty_kernel
from support.fake_bench import FakeWorker
from support.faulty_kernel import Config
from support.sweeps import WORKLOAD

from outblas.autotune.store.records import Workload
from outblas.autotune.store.store import Store
from outblas.autotune.sweeps.outcome import Outcome
from outblas.base.configs import to_text

pytest_plugins = ("support.sweep_fixtures",)

pytestmark = pytest.mark.usefixtures("faulty_log")

COLD = replace(WORKLOAD, weights="cold")
Tune = Callable[..., Outcome]
BOTH_WAYS = pytest.mark.parametrize(
    ("before", "now"), [(WORKLOAD, COLD), (COLD, WORKLOAD)], ids=["warm to cold", "cold to warm"]
)


def win(tune: Tune, store: Store, workload: Workload, number: int) -> None:
    """Has a config of ten win at a workload."""
    winner = tune(FakeWorker(), 10, top_k=1, workload=workload).winner
    assert winner is not None
    store.record_best(replace(winner, config=to_text(Config(number=number))))


@BOTH_WAYS
def test_what_won_with_the_other_weights_is_measured_whatever_is_proposed(
    tune: Tune, store: Store, before: Workload, now: Workload
) -> None:
    win(tune, store, before, 9)
    bench = FakeWorker()

    tune(bench, 10, trials=2, top_k=1, workload=now)

    assert sorted(bench.configs("screen")) == [0, 1, 9]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Workload:
    """A workload with an epilogue, which the kernel takes."""
    monkeypatch.setattr(faulty_kernel, "EPILOGUES", True, raising=False)
    return replace(WORKLOAD, epilogue="bias+gelu")


def test_what_won_without_the_epilogue_is_in_the_finals(
    tune: Tune, store: Store, fused: Workload
) -> None:
    win(tune, store, WORKLOAD, 9)
    bench = FakeWorker()

    tune(bench, 10, trials=1, top_k=1, workload=fused)

    assert set(bench.configs("race")) == {0, 9}


def test_what_won_with_an_epilogue_says_nothing_of_the_bare_product(
    tune: Tune, store: Store, fused: Workload
) -> None:
    win(tune, store, fused, 9)
    bench = FakeWorker()

    tune(bench, 10, trials=1, top_k=1)

    assert set(bench.configs("race")) == {0}
