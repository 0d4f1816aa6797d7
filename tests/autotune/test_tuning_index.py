"""What a process knows of its GPU: choices are remembered for one workload each."""

import random
from pathlib import Path

import pytest

from outblas.autotune.lookup import TuningIndex
from outblas.autotune.search.gpu import imagined
from outblas.autotune.store.records import Workload


@pytest.fixture
def make_index():
    """Makes an index of an H100 from the tables that ship."""
    gpu = imagined("H100")
    return lambda: TuningIndex(gpu, Path("/nonexistent/tuning.sqlite"))


@pytest.mark.parametrize(
    "other",
    [Workload(4096, 4096, 4096, "float32"), Workload(4096, 4096, 4096, layout="nn")],
    ids=["dtype", "layout"],
)
def test_a_choice_for_one_workload_is_none_for_another_of_its_shape(make_index, other) -> None:
    index = make_index()
    index.choices(Workload(4096, 4096, 4096))

    assert index.choices(other) == make_index().choices(other)


def some_workloads(count: int, seed: int) -> list[Workload]:
    """Workloads near tuned shapes and far from them, of all layouts."""
    dice = random.Random(seed)

    def size() -> int:
        return dice.choice((1, 8, 64)) * int(2 ** dice.uniform(1, 8))

    return [
        Workload(size(), size(), size(), dice.choice(("bfloat16", "float32")), layout=layout)
        for _ in range(count)
        for layout in ("nt", "nn", "tn", "tt")
    ]


def test_a_choice_does_not_depend_on_what_was_looked_up_before(make_index) -> None:
    """What the model knows of a config is kept from one lookup to the next."""
    index = make_index()
    for before in some_workloads(30, seed=0):
        index.choices(before)

    for asked in some_workloads(3, seed=1):
        assert index.choices(asked) == make_index().choices(asked), asked
