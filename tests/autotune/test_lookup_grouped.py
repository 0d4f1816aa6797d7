"""What a grouped product takes from what was tuned: the nearest numbers of rows, in the order of
the places. No GPU needed.
"""

import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.known import H200, SQUARE, Know, knowing, winner

from outblas.autotune import automatic, lookup
from outblas.autotune.search import prune
from outblas.autotune.store.records import BestConfig, Workload
from outblas.base.configs import to_text
from outblas.call.epilogue import Epilogue
from outblas.call.grouped import GroupedProblem
from outblas.call.grouped_scales import GroupScales
from outblas.hopper.gemm import group_rule

ROWS = Workload(4096, 1536, 2048, grouping="128")
TERMS = Workload(2048, 1536, 4096, layout="tn", grouping="128:terms")
PROBLEM = prune.grouped_problem(ROWS)
TEXTS = [to_text(config) for config in group_rule.candidates(PROBLEM)]


@pytest.fixture
def know(tmp_path: Path) -> Know:
    """Makes the knowledge of a GPU from winners in its store, and from those that were shipped."""
    return knowing(tmp_path)


def won(i: int, workload: Workload = ROWS, **changes: Any) -> BestConfig:
    """A winner of hopper.grouped with the config of that number."""
    return winner(kernel="hopper.grouped", config=TEXTS[i], workload=workload, **changes)


SCALES = GroupScales((0, 16, 1), (256, 1, 16), 128, ("e4m3",) * 2, torch.float8_e4m3fn, (16, 16))


def asked(workload: Workload = ROWS, **changes: Any) -> GroupedProblem:
    return dataclasses.replace(prune.grouped_problem(workload), **changes)


def config(know: Know, *here: BestConfig, of: GroupedProblem = PROBLEM, **more: Any) -> int | None:
    """The number of the config that a problem takes; None for none."""
    text = know(*here, **more).grouped_config(of)
    return TEXTS.index(text) if text else None


NEAR, FAR = (dataclasses.replace(ROWS, M=M) for M in (8192, 1500))
SKEWED = dataclasses.replace(ROWS, grouping="128:zipf")


@pytest.mark.parametrize(
    ("here", "shipped", "taken"),
    [
        pytest.param((won(1, FAR), won(2, NEAR)), (), 2, id="the nearest number of rows"),
        pytest.param((won(1, SKEWED), won(2)), (), 2, id="balanced groups"),
        pytest.param((won(1, SKEWED),), (), 1, id="skewed groups where there is nothing else"),
        pytest.param((won(1, NEAR),), (won(2, gpu=H200),), 1, id="this model of GPU"),
        pytest.param((), (won(2, gpu=H200),), 2, id="another model where there is nothing else"),
    ],
)
def test_the_winner_that_is_taken(
    know: Know, here: tuple[BestConfig, ...], shipped: tuple[BestConfig, ...], taken: int
) -> None:
    assert config(know, *here, shipped=shipped) == taken


def test_results_that_wait_for_dram_take_nothing_from_another_model(know: Know) -> None:
    many = dataclasses.replace(TERMS, K=1 << 20)

    for workload, taken in ((TERMS, None), (many, 2)):
        assert config(know, shipped=(won(2, workload, gpu=H200),), of=asked(workload)) == taken
        assert config(know, won(1, workload), of=asked(workload)) == 1


@pytest.mark.parametrize(
    "workload",
    [
        None,
        dataclasses.replace(ROWS, M=65536),
        dataclasses.replace(ROWS, grouping="64"),
        dataclasses.replace(ROWS, N=2048),
        dataclasses.replace(ROWS, K=768),
        dataclasses.replace(ROWS, out_dtype="float32"),
        TERMS,
    ],
    ids=["nothing", "rows", "groups", "N", "K", "result", "form"],
)
def test_other_products_say_nothing(workload: Workload | None, know: Know) -> None:
    assert config(know, *([won(1, workload)] if workload else [])) is None


def test_a_config_that_the_kernel_does_not_take_is_passed_over_with_a_warning(know: Know) -> None:
    broken = dataclasses.replace(won(1), config="tile_m=64,no_such_field=1")
    near = dataclasses.replace(ROWS, M=4097)

    with pytest.warns(RuntimeWarning, match="a tuned config of hopper.grouped is not used: config"):
        assert config(know, broken, won(2, near)) == 2


def test_products_take_nothing_from_groups(know: Know) -> None:
    known = know(won(1), won(2, dataclasses.replace(ROWS, M=4096, N=4096, K=4096)))

    assert known.entries == ()
    assert known.choices(SQUARE) == ()
    assert known.measured_gains(SQUARE) == {}


# ---- the hook
@pytest.fixture
def tuned(know: Know, monkeypatch: pytest.MonkeyPatch) -> None:
    """Knowledge of one winner, on every device."""
    known = know(won(3))
    monkeypatch.setattr(lookup, "tuning_index", lambda device: known)
    monkeypatch.delenv("OUTBLAS_TUNE", raising=False)


CUDA = torch.device("cuda", 0)


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize("zero_tail", [False, True])
def test_a_call_on_a_gpu_takes_what_was_tuned(zero_tail: bool) -> None:
    assert automatic.grouped_config(asked(device=CUDA, zero_tail=zero_tail)) == TEXTS[3]


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize(
    "changes",
    [
        {"epilogue": Epilogue("relu")},
        {"gathers": True},
        {"scatters": True},
        {"scales": SCALES},
        {"device": torch.device("cpu")},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_sweeps_do_not_measure_takes_nothing(changes: dict[str, Any]) -> None:
    assert automatic.grouped_config(asked(**{"device": CUDA} | changes)) == ""


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize(("capacity", "taken"), [(512, TEXTS[3]), (4096, "")])
def test_with_counts_as_many_rows_are_looked_up_as_are_likely(capacity: int, taken: str) -> None:
    """The winner had 32 rows a group. Where there is room for 512, 64 are likely; of 4096 all."""
    given = asked(device=CUDA, M=128 * capacity, capacity=capacity)

    assert automatic.grouped_config(given) == taken


def test_nothing_is_taken_where_tuning_is_off_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "tuning_index", Mock(side_effect=OSError("no disk")))
    monkeypatch.setenv("OUTBLAS_TUNE", "off")
    assert automatic.grouped_config(asked(device=CUDA)) == ""

    monkeypatch.delenv("OUTBLAS_TUNE")
    with pytest.warns(Warning, match="no tuning result of groups is used: no disk"):
        assert automatic.grouped_config(asked(device=CUDA)) == ""
