"""What a sweep may spend, and whom it tells of its progress."""

from unittest.mock import Mock

import pytest
from support.sweeps import WORKLOAD

from outblas.autotune.measure.progress import Progress
from outblas.autotune.sweeps.engine import LEAST_SECONDS, Budget, one_at_a_time


def test_a_workload_gets_its_share_of_the_budget() -> None:
    """Two GPUs share six workloads: each has three of them in 100 seconds."""
    assert 30 < Budget(100.0, 6, 2).share() <= 100 / 3


def test_a_share_is_never_too_short_for_a_workload() -> None:
    assert Budget(0.1, 1, 1).share() == LEAST_SECONDS == 5.0


@pytest.mark.filterwarnings("ignore:.*progress is no longer reported")
def test_a_report_that_raises_is_not_called_again() -> None:
    report = Mock(side_effect=ValueError("no terminal"))
    tell = one_at_a_time(report)

    tell(Progress(WORKLOAD))
    tell(Progress(WORKLOAD))

    assert report.call_count == 1
