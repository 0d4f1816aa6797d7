"""How the measuring worker checks and times configs of a kernel of groups, in this process and
without a GPU.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.grouped_kernel import Config

from outblas.autotune.measure import worker
from outblas.autotune.measure.worker import Screened
from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store.records import Workload
from outblas.core.configs import to_text

TARGET = TuneTarget("grouped", "support.grouped_kernel")
ROWS = Workload(100, 32, 16, "float32", grouping="8:zipf")
TERMS = Workload(16, 32, 100, "float32", layout="tn", grouping="8:zipf:terms")


def screened(workload: Workload, fault: str = "") -> Screened:
    """What the worker finds of a config with a fault at a workload."""
    worker.open_bench(workload, on_gpu=False)
    return worker.screen((TARGET, to_text(Config(fault=fault))), None)


@pytest.mark.parametrize(
    "workload",
    [
        ROWS,
        TERMS,
        replace(ROWS, layout="nn"),
        replace(ROWS, dtype="bfloat16", out_dtype=""),
        replace(ROWS, grouping="8"),
        replace(ROWS, weights="cold"),
    ],
    ids=str,
)
def test_a_config_is_timed_beside_torch(workload: Workload) -> None:
    found = screened(workload)

    assert (found.status, found.reason) == ("ok", "")
    assert found.us is not None
    assert found.ratio is not None


@pytest.mark.parametrize("workload", [ROWS, TERMS], ids=str)
@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("wrong", "wrong", "wrong: "),
        ("leave-out", "wrong", "wrong: "),
        ("refuse", "refused", "fault is refuse"),
    ],
)
def test_a_config_with_a_fault_is_found_out(
    workload: Workload, fault: str, status: str, reason: str
) -> None:
    assert screened(workload).status == "ok"  # and leaves its result in memory

    found = screened(workload, fault)

    assert found.status == status
    assert found.reason.startswith(reason)


def test_the_base_is_torchs_grouped_mm(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    function = torch.nn.functional.grouped_mm

    def recording(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append(tuple(options["offs"].tolist()))
        return function(a, b, **options)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", recording)
    worker.open_bench(ROWS, on_gpu=False)

    worker.race([], 1)

    assert ROWS.grouped is not None
    assert set(calls) == {ROWS.grouped.ends}
