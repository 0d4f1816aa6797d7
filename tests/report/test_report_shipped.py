"""README's table of a shipped tuning table."""

from dataclasses import replace
from pathlib import Path

from support.stored import WORKLOAD, winner

from outblas.autotune.store.tables import ship
from outblas.report.tuning import shipped


def test_results_of_other_weights_and_epilogues_have_columns_of_their_own(tmp_path: Path) -> None:
    workloads = (
        WORKLOAD,
        replace(WORKLOAD, weights="cold"),
        replace(WORKLOAD, epilogue="bias+gelu"),
    )
    (path,) = ship([winner(workload=workload) for workload in workloads], tmp_path)

    head = shipped.table(path).splitlines()[0]

    assert head == ("| shape | bfloat16 nt, cold weights | bfloat16 nt | bfloat16 nt, bias+gelu |")
