"""The tables of a page on a shipped tuning table."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.stored import WORKLOAD, winner

from outblas.autotune.store.records import BestConfig, Workload
from outblas.autotune.store.tables import ship
from outblas.report.tuning import shipped

SUITE = WORKLOAD
BESIDE = Workload(4096, 4096, 4104)


def part(folder: Path, *winners: BestConfig) -> str:
    """The part of a page on a table of these winners."""
    (path,) = ship(winners, folder)
    return shipped.part(path, "")


def test_a_workload_has_a_row(tmp_path: Path) -> None:
    text = part(tmp_path, winner(workload=SUITE))

    assert "| shape | dtype | layout | × cuBLAS | kernel | config |" in text
    assert "| `4096` | bfloat16 | nt | 1.047 | `hopper.hilbert` | 1 |" in text


def test_the_fields_of_a_config_stand_in_a_table_of_their_own(tmp_path: Path) -> None:
    text = part(tmp_path, winner(workload=SUITE))

    assert "| `1` | `hopper.hilbert` | `sms=4` |" in text


def test_workloads_with_one_config_share_its_number(tmp_path: Path) -> None:
    other = replace(SUITE, layout="nn")

    text = part(tmp_path, winner(workload=SUITE), winner(workload=other))

    assert "| `2` |" not in text


def test_weights_and_epilogues_have_columns_where_they_vary(tmp_path: Path) -> None:
    workloads = SUITE, replace(SUITE, weights="cold"), replace(SUITE, epilogue="bias+gelu")

    text = part(tmp_path, *(winner(workload=workload) for workload in workloads))

    assert "| `4096` | bfloat16 | nt | warm | bias+gelu | 1.047 |" in text
    assert "| `4096` | bfloat16 | nt | cold | none | 1.047 |" in text


def test_shapes_beside_the_suite_are_summed_up(tmp_path: Path) -> None:
    text = part(tmp_path, winner(workload=SUITE), winner(workload=BESIDE))

    assert "| `bfloat16` | nt | 1 | 1.047 | 1.047 | 0 |" in text


def test_shapes_that_are_slower_than_cublas_are_listed(tmp_path: Path) -> None:
    slow = replace(winner(workload=BESIDE), ratio=0.95, ratio_low=0.94, ratio_high=0.96)

    text = part(tmp_path, winner(workload=SUITE), slow)

    assert "| `4096x4096x4104` | bfloat16 | nt | 0.950 |" in text


def test_the_part_takes_no_argument(tmp_path: Path) -> None:
    (path,) = ship([winner()], tmp_path)

    with pytest.raises(ValueError, match="the argument is 'nt', expected none"):
        shipped.part(path, "nt")
