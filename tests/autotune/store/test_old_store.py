"""A tuning store that was written before fields of configs were renamed is read as it was."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.paths import DATA

from outblas.autotune import lookup
from outblas.autotune.store.records import BestConfig, Workload
from outblas.autotune.store.store import Store
from outblas.core import configs, registry

SQL = DATA / "store_before_renames.sql"
SQUARE = Workload(4096, 4096, 4096)
FEW_ROWS = Workload(16, 4096, 4096, layout="nn")

# Configs of its trials as people wrote them then: what differs from the kernels' own.
GEMM = [
    (SQUARE, "", "ok", 190.0),
    (SQUARE, "tile_n=192,slots=5,elastic=True", "ok", 195.5),
    (SQUARE, "tile_m=64,pingpong=True", "wrong", None),
]
FEW = (
    "tile_m=64,tile_n=16,consumers=1,producer_registers=0,consumer_registers=0,cluster_m=1,"
    "store_buffers=1,swap=True,cluster_k=2"
)
GEMM_FEW_ROWS = [
    (FEW_ROWS, f"{FEW},slots=16", "ok", 14.25),
    (FEW_ROWS, f"{FEW},slots=12", "hang", None),
]
HILBERT = [(SQUARE, "", "ok", 201.0), (SQUARE, "slots=3,store_buffers=2", "ok", 204.0)]


@pytest.fixture
def old_store(tmp_path: Path) -> Path:
    """A store's file as outblas wrote it before fields were renamed."""
    path = tmp_path / "tuning.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SQL.read_text(encoding="utf-8"))
    return path


def config_of(kernel: str, text: str) -> Any:
    """The config that a text means now."""
    return configs.from_text(registry.load(kernel).Config, text)


@pytest.mark.parametrize("read_only", [True, False], ids=["to read", "to write"])
@pytest.mark.parametrize(
    ("kernel", "expected"), [("hopper.gemm", GEMM + GEMM_FEW_ROWS), ("hopper.hilbert", HILBERT)]
)
def test_its_trials_are_read(
    old_store: Path, kernel: str, expected: list[Any], read_only: bool
) -> None:
    with Store(old_store, read_only=read_only) as store:
        trials = [trial for trial in store.trials() if trial.kernel == kernel]
        warning = store.warning

    assert warning is None
    assert [(t.workload, config_of(kernel, t.config), t.status, t.us) for t in trials] == [
        (workload, config_of(kernel, text), status, us) for workload, text, status, us in expected
    ]


@pytest.fixture
def winners(old_store: Path) -> dict[Workload, BestConfig]:
    """Its winners of hopper.gemm, by their workload."""
    with Store(old_store, read_only=True) as store:
        return {w.workload: w for w in store.winners() if w.kernel == "hopper.gemm"}


@pytest.mark.parametrize(
    ("workload", "text"), [(SQUARE, ""), (FEW_ROWS, GEMM_FEW_ROWS[0][1])], ids=str
)
def test_its_winners_are_read(
    winners: dict[Workload, BestConfig], workload: Workload, text: str
) -> None:
    found = config_of("hopper.gemm", winners[workload].config)

    assert found == config_of("hopper.gemm", text)


def test_a_winner_is_read_with_the_next_best(winners: dict[Workload, BestConfig]) -> None:
    found = config_of("hopper.gemm", winners[SQUARE].runner_up)

    assert found == config_of("hopper.gemm", GEMM[1][1])


def test_a_winner_is_read_with_its_finalists(winners: dict[Workload, BestConfig]) -> None:
    finalists = winners[SQUARE].finalists

    assert [config_of(f.kernel, f.config) for f in finalists] == [
        config_of("hopper.gemm", ""),
        config_of("hopper.gemm", GEMM[1][1]),
        config_of("hopper.hilbert", ""),
    ]


def test_lookups_choose_its_configs(
    old_store: Path, winners: dict[Workload, BestConfig], tmp_path: Path
) -> None:
    """What `matmul` asks for at a workload that was tuned then."""
    index = lookup.TuningIndex(winners[SQUARE].gpu, old_store, tables=tmp_path / "no tables")

    choice = index.choices(FEW_ROWS)[0]

    assert choice.kernel == "hopper.gemm"
    assert config_of(choice.kernel, choice.config) == config_of("hopper.gemm", GEMM_FEW_ROWS[0][1])
