"""Tuning on a GPU: configs that hang, stray or are wrong cost a trial each, and what wins is what
matmul takes.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import outblas
from outblas.autotune import automatic, lookup
from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store.records import Workload
from outblas.autotune.store.store import Store
from outblas.autotune.sweeps.sweep import sweep
from outblas.core.configs import from_text
from outblas.core.problem import problem
from outblas.hopper import hilbert
from outblas.runtime import dispatch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SHAPE = (512, 768, 256)


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A store of the test's own, which `matmul` reads, and no shipped tables."""
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(lookup, "TABLES", tmp_path)
    lookup.clear_cache()
    dispatch.clear_cache()
    yield tmp_path / "tuning.sqlite"
    lookup.clear_cache()
    dispatch.clear_cache()


def operands(
    shape: tuple[int, int, int] = SHAPE, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    M, N, K = shape
    return [
        torch.randn(M, K, device="cuda").to(dtype),
        torch.randn(N, K, device="cuda").to(dtype).t(),
    ]


@pytest.mark.sm90
def test_faults_cost_a_trial_each(fresh):
    target = TuneTarget("faulty", "support.faulty_hopper")
    shape = (
        4096,
        4096,
        256,
    )  # where the rung's own tile, which the faulty ones have, is among the best
    found = sweep(target, shape, trials=24, top_k=3, trial_seconds=5, store=fresh)
    (outcome,) = found.outcomes
    by_fault = {
        from_text(target.load().Config, trial.config).fault: trial for trial in outcome.trials
    }
    assert by_fault["hang"].status == "hang"
    assert by_fault["illegal"].status == "device lost"
    assert "illegal" in by_fault["illegal"].reason
    assert by_fault["wrong"].status == "wrong"
    counts = Counter(trial.status for trial in outcome.trials)
    assert counts["ok"] == len(outcome.trials) - 3
    assert outcome.winner is not None
    again = sweep(target, shape, trials=24, top_k=3, store=fresh)
    assert again.outcomes[0].new == 0


@pytest.mark.sm90
def test_matmul_takes_the_winner(fresh: Path) -> None:
    a, b = operands()
    winner = outblas.tune(a, b, kernels=["hopper.hilbert"], trials=6, top_k=2)
    assert winner.workload == Workload(*SHAPE)
    asked = problem(a, b, torch.empty(SHAPE[:2], dtype=a.dtype, device="cuda"))
    assert next(automatic.choices(asked)) == ("hopper.hilbert", winner.config)
    config = from_text(hilbert.Config, winner.config)
    assert torch.equal(
        outblas.matmul(a, b), outblas.matmul(a, b, kernel="hopper.hilbert", config=config)
    )
    assert list(automatic.choices(asked, "off")) == []
    off = outblas.matmul(a, b, tune="off")
    assert torch.equal(off, outblas.matmul(a, b, kernel="portable"))


@pytest.mark.sm90
def test_a_call_that_the_winner_cannot_take(fresh: Path) -> None:
    """Unaligned operands of the same shape go to another kernel, and addmm too."""
    a, b = operands()
    outblas.tune(a, b, kernels=["hopper.hilbert"], trials=4, top_k=2)
    base = torch.randn(SHAPE[0] * SHAPE[2] + 1, device="cuda").bfloat16()
    shifted = base[1:].view(SHAPE[0], SHAPE[2])
    assert torch.equal(outblas.matmul(shifted, b), outblas.matmul(shifted, b, kernel="portable"))
    c = torch.randn(SHAPE[:2], device="cuda").bfloat16()
    torch.testing.assert_close(outblas.addmm(c, a, b), torch.addmm(c, a, b), atol=0.5, rtol=0.02)


def test_capture_neither_tunes_nor_looks_up(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_tune_on_first_use(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_TUNE", "on")
    monkeypatch.setattr(automatic, "FIRST_TRIALS", 3)
    a, b = operands((320, 256, 192))
    torch.testing.assert_close(outblas.matmul(a, b), a @ b)
    with Store(fresh, read_only=True) as store:
        before = store.trials()
    assert len(before) >= 3
    outblas.matmul(a, b)
    with Store(fresh, read_only=True) as store:
        assert store.trials() == before


def test_a_broken_store_is_not_the_callers_concern(fresh: Path) -> None:
    fresh.write_bytes(b"no database" * 1000)
    a, b = operands((128, 128, 128))
    with pytest.warns(UserWarning, match="damaged|store"):
        product = outblas.matmul(a, b)
    torch.testing.assert_close(product, a @ b)


def test_a_shape_is_looked_up_once(fresh):
    known, workload = lookup.tuning_index(0), Workload(4096, 4096, 4096)

    first = known.choices(workload)

    assert known.choices(workload) is first
    assert lookup.tuning_index(0) is known
