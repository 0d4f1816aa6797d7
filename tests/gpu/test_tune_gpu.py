"""Tuning on a GPU: configs that hang, stray or are wrong cost a trial each, and what wins is what
matmul takes.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import outblas
from outblas.autotune import automatic, lookup
from outblas.autotune.search import prune
from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store.records import BestConfig, Workload
from outblas.autotune.store.store import Store
from outblas.autotune.sweeps.sweep import sweep
from outblas.autotune.sweeps.outcome import Outcome
from outblas.base import machines
from outblas.base.configs import from_text
from outblas.core.problem import Problem, problem
from outblas.hopper import hilbert
from outblas.runtime import dispatch

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


def operands(
    shape: tuple[int, int, int] = SHAPE, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    M, N, K = shape
    return [
        torch.randn(M, K, device="cuda").to(dtype),
        torch.randn(N, K, device="cuda").to(dtype).t(),
    ]


# ---- groups
@pytest.mark.sm90
@pytest.mark.parametrize("text", ["8x2048x512x1024:zipf", "8x2048x512x1024:terms"])
def test_groups_are_tuned_and_found_again(text: str, fresh: Path) -> None:
    found = sweep("hopper.grouped", text, trials=6, top_k=3, store=fresh)

    (winner,) = found.winners
    assert found.failures == []
    assert all(trial.status == "ok" for trial in found.outcomes[0].trials)
    problem = prune.grouped_problem(winner.workload)
    lookup.clear_cache()
    on_gpu = replace(problem, device=torch.device("cuda", torch.cuda.current_device()))
    assert automatic.grouped_config(on_gpu) == winner.config


@pytest.mark.sm90
@pytest.mark.slow
def test_every_tile_of_the_space_is_right(fresh: Path) -> None:
    """The oracle of the sweep multiplies skewed groups, of which some are smaller than a tile."""
    options: dict[str, Any] = {"strategy": "grid", "top_k": 2, "store": fresh}
    found = sweep("hopper.grouped", "16x3000x768x640:zipf,16x3000x768x640:zipf:terms", **options)

    failed = [trial for outcome in found.outcomes for trial in outcome.trials if not trial.ok]
    assert failed == []


# ---- faults
FAULTY = TuneTarget("faulty", "support.faulty_hopper")
FAULTY_SHAPE = (4096, 4096, 256)  # the rung's own tile, which the faulty ones have, is good there


@pytest.fixture(scope="module")
def faulty_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The store of the sweep of faulty configs, without shipped tables."""
    folder = tmp_path_factory.mktemp("faulty")
    with pytest.MonkeyPatch.context() as patches:
        yield from tuned_in(folder, patches)


@pytest.fixture(scope="module")
def faulty(faulty_store: Path) -> Outcome:
    """A sweep of which three configs are faulty: one hangs, one strays and one is wrong."""
    found = sweep(FAULTY, FAULTY_SHAPE, trials=24, top_k=3, trial_seconds=5, store=faulty_store)
    (outcome,) = found.outcomes
    return outcome


def trial_with(fault: str, outcome: Outcome) -> Any:
    """The trial of the config that has a fault."""
    config_type = FAULTY.load().Config
    (trial,) = (t for t in outcome.trials if from_text(config_type, t.config).fault == fault)
    return trial


@pytest.mark.sm90
def test_a_config_that_hangs_is_given_up(faulty: Outcome) -> None:
    assert trial_with("hang", faulty).status == "hang"


@pytest.mark.sm90
def test_a_config_that_strays_loses_the_device(faulty: Outcome) -> None:
    trial = trial_with("illegal", faulty)

    assert trial.status == "device lost"
    assert "illegal" in trial.reason


@pytest.mark.sm90
def test_a_config_that_is_wrong_is_found_out(faulty: Outcome) -> None:
    assert trial_with("wrong", faulty).status == "wrong"


@pytest.mark.sm90
def test_faults_cost_a_trial_each(faulty: Outcome) -> None:
    statuses = Counter(trial.status for trial in faulty.trials)

    assert statuses["ok"] == len(faulty.trials) - 3
    assert faulty.winner is not None


@pytest.mark.sm90
def test_faulty_configs_are_not_measured_again(faulty: Outcome, faulty_store: Path) -> None:
    again = sweep(FAULTY, FAULTY_SHAPE, trials=24, top_k=3, store=faulty_store)

    assert again.outcomes[0].new == 0


# ---- cold weights
def test_calls_with_cold_weights_read_them_from_memory(fresh: Path) -> None:
    M, N, K = 16, 4096, 4096  # whose weights fit into L2

    found = sweep("portable", (M, N, K), trials=2, top_k=1, weights="cold", store=fresh)

    (winner,) = found.winners
    machine = machines.of_device(winner.gpu.name)
    if machine is None:
        pytest.skip(f"no bandwidth is known of {winner.gpu.name}")
    for us in (winner.us, winner.cublas_us):
        assert 2 * N * K / us / 1e3 <= machine.dram_gbs, f"{us} µs a call"


# ---- epilogues
@pytest.mark.sm90
@pytest.mark.parametrize("epilogue", ["bias+gelu+residual", "swiglu"])
def test_a_call_takes_what_won_with_its_epilogue(fresh: Path, epilogue: str) -> None:
    found = sweep(["hopper.gemm", "portable"], SHAPE, trials=4, epilogue=epilogue, store=fresh)

    (outcome,) = found.outcomes
    assert {trial.status for trial in outcome.trials} == {"ok"}, [t.reason for t in outcome.trials]
    (winner,) = found.winners
    lookup.clear_cache()
    choice = lookup.tuning_index(0).choices(winner.workload)[0]
    assert (choice.kernel, choice.config) == (winner.kernel, winner.config)


# ---- what matmul takes
@dataclass(frozen=True)
class Tuned:
    """Operands that were tuned, and the winner."""

    a: torch.Tensor
    b: torch.Tensor
    winner: BestConfig

    def problem(self) -> Problem:
        return problem(self.a, self.b, torch.empty(SHAPE[:2], dtype=self.a.dtype, device="cuda"))


@pytest.fixture
def tuned(fresh: Path) -> Tuned:
    """A product for which hopper.hilbert alone was tuned."""
    a, b = operands()
    return Tuned(a, b, outblas.tune(a, b, kernels=["hopper.hilbert"], trials=4, top_k=2))


@pytest.mark.sm90
def test_the_winner_is_the_choice_for_its_shape(tuned: Tuned) -> None:
    assert tuned.winner.workload == Workload(*SHAPE)

    choice = next(automatic.choices(tuned.problem()))

    assert choice == ("hopper.hilbert", tuned.winner.config)


@pytest.mark.sm90
def test_matmul_takes_the_winner(tuned: Tuned) -> None:
    config = from_text(hilbert.Config, tuned.winner.config)

    got = outblas.matmul(tuned.a, tuned.b)

    by_name = outblas.matmul(tuned.a, tuned.b, kernel="hopper.hilbert", config=config)
    assert torch.equal(got, by_name)


@pytest.mark.sm90
def test_matmul_takes_no_winner_where_tuning_is_off(tuned: Tuned) -> None:
    assert list(automatic.choices(tuned.problem(), "off")) == []

    got = outblas.matmul(tuned.a, tuned.b, tune="off")

    assert torch.equal(got, outblas.matmul(tuned.a, tuned.b, kernel="portable"))


@pytest.mark.sm90
def test_unaligned_operands_that_the_winner_cannot_take_go_to_portable(tuned: Tuned) -> None:
    base = torch.randn(SHAPE[0] * SHAPE[2] + 1, device="cuda").bfloat16()
    shifted = base[1:].view(SHAPE[0], SHAPE[2])

    got = outblas.matmul(shifted, tuned.b)

    assert torch.equal(got, outblas.matmul(shifted, tuned.b, kernel="portable"))


@pytest.mark.sm90
def test_an_addend_that_the_winner_cannot_take_is_added(tuned: Tuned) -> None:
    c = torch.randn(SHAPE[:2], device="cuda").bfloat16()

    got = outblas.addmm(c, tuned.a, tuned.b)

    want = torch.addmm(c, tuned.a, tuned.b)
    torch.testing.assert_close(got, want, atol=0.5, rtol=0.02)


# ---- captures, first use, damage
@pytest.mark.usefixtures("fresh")
def test_capture_neither_tunes_nor_looks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = operands((256, 256, 256))
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


def stored_trials(path: Path) -> list[Any]:
    with Store(path, read_only=True) as store:
        return list(store.trials())


@pytest.fixture
def tunes_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """OUTBLAS_TUNE=on, with three trials a shape."""
    monkeypatch.setenv("OUTBLAS_TUNE", "on")
    monkeypatch.setattr(automatic, "FIRST_TRIALS", 3)


@pytest.mark.usefixtures("tunes_on_first_use")
def test_only_the_first_use_of_a_shape_tunes_it(fresh: Path) -> None:
    a, b = operands((320, 256, 192))

    torch.testing.assert_close(outblas.matmul(a, b), a @ b)
    trials = stored_trials(fresh)
    outblas.matmul(a, b)

    assert len(trials) >= 3
    assert stored_trials(fresh) == trials


def test_a_broken_store_is_not_the_callers_concern(fresh: Path) -> None:
    fresh.write_bytes(b"no database" * 1000)
    a, b = operands((128, 128, 128))

    with pytest.warns(UserWarning, match="damaged|store"):
        product = outblas.matmul(a, b)

    torch.testing.assert_close(product, a @ b)


@pytest.mark.usefixtures("fresh")
def test_a_shape_is_looked_up_once() -> None:
    known, workload = lookup.tuning_index(0), Workload(4096, 4096, 4096)

    first = known.choices(workload)

    assert known.choices(workload) is first
    assert lookup.tuning_index(0) is known
