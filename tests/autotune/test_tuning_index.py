"""What a process knows of its GPU: choices are remembered for one workload each."""

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
