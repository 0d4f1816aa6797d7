"""A tuning store that was written before fields of configs were renamed is read as it was."""

import sqlite3
from contextlib import closing

import pytest
from support.paths import DATA

from outblas.autotune import lookup
from outblas.autotune.store.records import Workload
from outblas.autotune.store.store import Store
from outblas.core import configs, registry

DATA = DATA / "store_before_renames.sql"
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
def old_store(tmp_path):
    path = tmp_path / "tuning.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(DATA.read_text(encoding="utf-8"))
    return path


def config_of(kernel, text):
    return configs.from_text(registry.load(kernel).Config, text)


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize(
    ("kernel", "expected"), [("hopper.gemm", GEMM + GEMM_FEW_ROWS), ("hopper.hilbert", HILBERT)]
)
def test_its_trials_are_read(old_store, kernel, expected, read_only):
    with Store(old_store, read_only=read_only) as store:
        trials = [trial for trial in store.trials() if trial.kernel == kernel]
        assert store.warning is None
    found = [(t.workload, config_of(kernel, t.config), t.status, t.us) for t in trials]
    assert found == [
        (workload, config_of(kernel, text), status, us) for workload, text, status, us in expected
    ]


def test_its_winners_are_read_with_their_finalists(old_store):
    with Store(old_store, read_only=True) as store:
        winners = {(w.kernel, w.workload): w for w in store.winners()}
    best = winners["hopper.gemm", SQUARE]
    assert config_of("hopper.gemm", best.config) == config_of("hopper.gemm", "")
    assert config_of("hopper.gemm", best.runner_up) == config_of("hopper.gemm", GEMM[1][1])
    assert [config_of(f.kernel, f.config) for f in best.finalists] == [
        config_of("hopper.gemm", ""),
        config_of("hopper.gemm", GEMM[1][1]),
        config_of("hopper.hilbert", ""),
    ]
    few_rows = winners["hopper.gemm", FEW_ROWS]
    assert config_of("hopper.gemm", few_rows.config) == config_of(
        "hopper.gemm", GEMM_FEW_ROWS[0][1]
    )


def test_lookups_choose_its_configs(old_store, tmp_path):
    """What `matmul` asks for at a workload that was tuned then."""
    with Store(old_store, read_only=True) as store:
        gpu = store.winners()[0].gpu
    choice = lookup.TuningIndex(gpu, old_store, tables=tmp_path / "no tables").choices(FEW_ROWS)[0]
    assert choice.kernel == "hopper.gemm"
    assert config_of(choice.kernel, choice.config) == config_of("hopper.gemm", GEMM_FEW_ROWS[0][1])
