"""Tuning on a GPU: configs that hang, stray or are wrong cost a trial each, and what wins is what
matmul takes.
"""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import outblas
from outblas.autotune import automatic, lookup
from outblas.autotune.search import prune
from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store.store import Store
from outblas.autotune.sweeps.sweep import sweep
from outblas.base import machines
from outblas.base.configs import from_text
from outblas.call import dispatch
from outblas.call.problem import problem
from outblas.hopper import hilbert

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SHAPE = (512, 768, 256)


def tuned_in(folder: Path, patches: pytest.MonkeyPatch) -> Iterator[Path]:
    """A store in a folder, which `matmul` reads, and no shipped tables."""
    patches.setenv("OUTBLAS_CACHE_DIR", str(folder))
    patches.setattr(lookup, "TABLES", folder)
    lookup.clear_cache()
    dispatch.clear_cache()
    yield folder / "tuning.sqlite"
    lookup.clear_cache()
    dispatch.clear_cache()


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A store of the test's own, which `matmul` reads, and no shipped tables."""
    yield from tuned_in(tmp_path, monkeypatch)


def operands(M: int, N: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = (torch.randn(rows, K, device="cuda").bfloat16() for rows in (M, N))
    return a, b.t()


def stored_trials(path: Path) -> list[Any]:
    with Store(path, read_only=True) as store:
        return list(store.trials())


# ---- groups
@pytest.mark.sm90
@pytest.mark.parametrize("text", ["8x2048x512x1024:zipf", "8x2048x512x1024:terms"])
def test_groups_are_tuned_and_found_again(text: str, fresh: Path) -> None:
    result = sweep("hopper.grouped", text, trials=6, top_k=3, store=fresh)

    (winner,) = result.winners
    assert result.failures == []
    assert all(trial.status == "ok" for trial in result.outcomes[0].trials)
    problem = prune.grouped_problem(winner.workload)
    lookup.clear_cache()
    on_gpu = replace(problem, device=torch.device("cuda", torch.cuda.current_device()))
    assert automatic.grouped_config(on_gpu) == winner.config


@pytest.mark.sm90
@pytest.mark.slow
def test_every_tile_of_the_space_is_right(fresh: Path) -> None:
    """The oracle of the sweep multiplies skewed groups, of which some are smaller than a tile."""
    options: dict[str, Any] = {"strategy": "grid", "top_k": 2, "store": fresh}
    result = sweep("hopper.grouped", "16x3000x768x640:zipf,16x3000x768x640:zipf:terms", **options)

    failed = [trial for outcome in result.outcomes for trial in outcome.trials if not trial.ok]
    assert failed == []


# ---- faults
FAULTY = TuneTarget("faulty", "support.faulty_hopper")
FAULTY_SHAPE = (4096, 4096, 256)  # the rung's own tile, which the faulty ones have, is good there
STATUSES = {"hang": "hang", "illegal": "device lost", "wrong": "wrong"}


@pytest.mark.sm90
def test_a_config_that_hangs_strays_or_is_wrong_costs_a_trial(fresh: Path) -> None:
    how: dict[str, Any] = {"trials": 24, "top_k": 3, "trial_seconds": 5, "store": fresh}
    config_type = FAULTY.load().Config

    (outcome,) = sweep(FAULTY, FAULTY_SHAPE, **how).outcomes
    again = sweep(FAULTY, FAULTY_SHAPE, **how)

    faults = [(from_text(config_type, t.config).fault, t) for t in outcome.trials]
    trials = {fault: trial for fault, trial in faults if fault}
    assert {fault: trial.status for fault, trial in trials.items()} == STATUSES
    assert "illegal" in trials["illegal"].reason
    assert Counter(t.status for t in outcome.trials)["ok"] == len(outcome.trials) - len(STATUSES)
    assert outcome.winner is not None
    assert again.outcomes[0].new == 0, "faulty configs are not measured again"


SWEEP = f"""
from outblas.autotune.sweeps.sweep import sweep
(winner,) = sweep("portable", {SHAPE}, trials=8, top_k=2).winners
print(winner.config)
"""


def test_two_sweeps_on_one_gpu_take_turns(fresh: Path) -> None:
    """They share a store, and have one winner."""
    processes = [
        subprocess.Popen([sys.executable, "-c", SWEEP], stdout=subprocess.PIPE) for _ in range(2)
    ]

    outputs = [process.communicate(timeout=240)[0].decode() for process in processes]

    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0].splitlines()[-1] == outputs[1].splitlines()[-1]
    assert {trial.status for trial in stored_trials(fresh)} == {"ok"}


# ---- cold weights, epilogues
def test_calls_with_cold_weights_read_them_from_memory(fresh: Path) -> None:
    M, N, K = 16, 4096, 4096  # whose weights fit into L2

    (winner,) = sweep("portable", (M, N, K), trials=2, top_k=1, weights="cold", store=fresh).winners

    machine = machines.of_device(winner.gpu.name)
    if machine is None:
        pytest.skip(f"no bandwidth is known of {winner.gpu.name}")
    for us in (winner.us, winner.cublas_us):
        assert 2 * N * K / us / 1e3 <= machine.dram_gbs, f"{us} µs a call"


@pytest.mark.sm90
@pytest.mark.parametrize("epilogue", ["bias+gelu+residual", "swiglu"])
def test_a_call_takes_what_won_with_its_epilogue(fresh: Path, epilogue: str) -> None:
    result = sweep(["hopper.gemm", "portable"], SHAPE, trials=4, epilogue=epilogue, store=fresh)

    (outcome,), (winner,) = result.outcomes, result.winners
    assert {trial.status for trial in outcome.trials} == {"ok"}, [t.reason for t in outcome.trials]
    lookup.clear_cache()
    choice = lookup.tuning_index(0).choices(winner.workload)[0]
    assert (choice.kernel, choice.config) == (winner.kernel, winner.config)


# ---- what matmul takes
@pytest.mark.sm90
@pytest.mark.usefixtures("fresh")
def test_matmul_takes_the_winner_where_it_can() -> None:
    """Not where tuning is off, for unaligned operands, or with an addend."""
    a, b = operands(*SHAPE)
    c = torch.randn(SHAPE[:2], device="cuda").bfloat16()
    shifted = torch.randn(SHAPE[0] * SHAPE[2] + 1, device="cuda").bfloat16()[1:].view(a.shape)

    winner = outblas.tune(a, b, kernels=["hopper.hilbert"], trials=4, top_k=2)

    call = problem(a, b, torch.empty_like(c))
    assert next(automatic.choices(call)) == ("hopper.hilbert", winner.config)
    assert list(automatic.choices(call, "off")) == []
    config = from_text(hilbert.Config, winner.config)
    by_name = outblas.matmul(a, b, kernel="hopper.hilbert", config=config)
    assert torch.equal(outblas.matmul(a, b), by_name)
    by_portable = [outblas.matmul(t, b, kernel="portable") for t in (a, shifted)]
    assert torch.equal(outblas.matmul(a, b, tune="off"), by_portable[0])
    assert torch.equal(outblas.matmul(shifted, b), by_portable[1])
    added = outblas.addmm(c, a, b)
    torch.testing.assert_close(added, torch.addmm(c, a, b), atol=0.5, rtol=0.02)


@pytest.mark.usefixtures("fresh")
def test_capture_neither_tunes_nor_looks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = operands(256, 256, 256)
    out = torch.empty(256, 256, dtype=a.dtype, device="cuda")
    outblas.warmup(outblas.matmul, a, b, out=out)
    monkeypatch.setattr(automatic, "choices", lambda *_: pytest.fail("asked in a capture"))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()

    with torch.cuda.graph(graph):
        outblas.matmul(a, b, out=out)
        with pytest.raises(RuntimeError, match="captured"):
            outblas.matmul(a, b, out=out, tune="on")
        with pytest.raises(RuntimeError, match="captured"):
            outblas.tune(a, b)
    graph.replay()
    torch.cuda.synchronize()

    torch.testing.assert_close(out, a @ b)


def test_only_the_first_use_of_a_shape_tunes_it(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBLAS_TUNE", "on")
    monkeypatch.setattr(automatic, "FIRST_TRIALS", 3)
    a, b = operands(320, 256, 192)

    torch.testing.assert_close(outblas.matmul(a, b), a @ b)
    trials = stored_trials(fresh)
    outblas.matmul(a, b)

    assert len(trials) >= 3
    assert stored_trials(fresh) == trials
