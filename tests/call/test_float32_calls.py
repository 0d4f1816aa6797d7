"""Which float32 calls that name no kernel go to torch, because it is faster, and how they do."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.imagined_gpu import DEVICE, ImaginedGpu, imagine
from support.known import CONFIGS, H100, winner

import outblas
from outblas.autotune import lookup
from outblas.autotune.store.records import Workload
from outblas.call import launcher
from outblas.call.default_kernel import Mode
from outblas.call.epilogue import EpilogueArgs
from outblas.call.problem import Problem, problem
from outblas.torch_ops import aten
from outblas.torch_ops.aten_rules import Rules

FLOAT32 = Workload(64, 64, 64, "float32")
TF32 = replace(FLOAT32, dtype="tf32")
FASTER = winner(workload=FLOAT32, ratio=1.01)


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def posed(*batch: int, addend: bool = False, **how: Any) -> Problem:
    """The problem of a float32 call on the imagined GPU."""
    a, b, out = empty(*batch, 64, 64), empty(*batch, 64, 64).mT, empty(*batch, 64, 64)
    given = problem(a, b, out, empty(64, 64) if addend else None, scaled=addend, **how)
    return replace(given, device=DEVICE)


@pytest.fixture
def h100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ImaginedGpu]:
    """An H100 for which nothing was tuned."""
    yield imagine(H100, tmp_path, monkeypatch)
    lookup.clear_cache()


def test_a_kernel_that_was_faster_at_this_product_computes_it(h100: ImaginedGpu) -> None:
    h100.tune(winner(1, workload=FLOAT32, ratio=1.01), winner(workload=TF32, ratio=0.5))

    for tune in ("", "lookup"):
        assert launcher.slower_reason(posed(), tune) is None
        assert h100.launched(posed(), tune) == ("portable", CONFIGS[1])


BIAS = EpilogueArgs("", empty(64))
SLOWER = {
    "nothing was measured": ([], posed()),
    "as fast": ([winner(workload=FLOAT32, ratio=1.0)], posed()),
    "slower": ([winner(workload=FLOAT32, ratio=0.97)], posed()),
    "another shape": ([winner(workload=replace(FLOAT32, K=128), ratio=1.5)], posed()),
    "another layout": ([winner(workload=replace(FLOAT32, layout="nn"), ratio=1.5)], posed()),
    "IEEE, for tf32": ([FASTER], posed(tf32=True)),
    "tf32, for IEEE": ([winner(workload=TF32, ratio=1.5)], posed()),
    "16-bit": ([winner(workload=Workload(64, 64, 64), ratio=1.5)], posed()),
    "a batch": ([FASTER], posed(3)),
    "an addend": ([FASTER], posed(addend=True)),
    "an epilogue": ([FASTER], posed(extra=BIAS)),
    "x is stored too": ([FASTER], posed(extra=EpilogueArgs("", aux=empty(64, 64)))),
}


@pytest.mark.parametrize(("winners", "call"), SLOWER.values(), ids=SLOWER)
def test_torch_computes_what_was_not_measured_to_be_faster(
    h100: ImaginedGpu, winners: list[Any], call: Problem
) -> None:
    h100.tune(*winners)

    assert launcher.no_kernel_reason(call) is None
    assert launcher.slower_reason(call, "") == launcher.SLOWER


KEPT = {
    "a promise of bits": (posed(batch_invariant=True), ""),
    "tuned at first": (posed(), "on"),
    "no terms": (replace(posed(), K=0), ""),
    "no rows": (replace(posed(), M=0), ""),
    "16-bit": (replace(posed(), dtype=torch.float16, out_dtype=torch.float16), ""),
    "16-bit to float32": (replace(posed(), dtype=torch.bfloat16), ""),
}


@pytest.mark.usefixtures("h100")
@pytest.mark.parametrize(("call", "tune"), KEPT.values(), ids=KEPT)
def test_other_calls_keep_their_kernel(call: Problem, tune: Mode) -> None:
    assert launcher.slower_reason(call, tune) is None


def test_the_mode_of_the_environment_counts(
    h100: ImaginedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    h100.tune(FASTER)

    monkeypatch.setenv("OUTBLAS_TUNE", "off")
    assert launcher.slower_reason(posed(), "") == launcher.SLOWER
    assert launcher.slower_reason(posed(), "lookup") is None
    monkeypatch.setenv("OUTBLAS_TUNE", "on")
    assert launcher.slower_reason(posed(2), "") is None


def test_rows_were_tuned_of_what_kernels_multiply_alone(h100: ImaginedGpu) -> None:
    h100.tune(FASTER)

    assert launcher.tuned_rows(posed(), "") == {64}
    for dtype in (torch.float64, torch.complex64, torch.int8, torch.bool, torch.float8_e5m2):
        call = replace(posed(), dtype=dtype, out_dtype=dtype)
        assert launcher.no_kernel_reason(call) is not None
        assert launcher.tuned_rows(call, "") == frozenset()


# ---- what becomes of such a call
A, B, BATCH = torch.randn(6, 5), torch.randn(5, 4), torch.randn(3, 6, 5)
C, ROW, RESIDUAL = torch.randn(6, 4), torch.randn(4), torch.randn(6, 4)
CALLS: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]] = {
    "matmul": (lambda: outblas.matmul(A, B), lambda: A @ B),
    "batched": (lambda: outblas.matmul(BATCH, B), lambda: BATCH @ B),
    "vector": (lambda: outblas.matmul(A, B[:, 0]), lambda: A @ B[:, 0]),
    "out": (lambda: outblas.matmul(A, B, out=torch.empty(6, 4)), lambda: A @ B),
    "addmm": (
        lambda: outblas.addmm(C, A, B, alpha=0.5, beta=2),
        lambda: torch.addmm(C, A, B, alpha=0.5, beta=2),
    ),
    "linear": (
        lambda: outblas.linear(A, B.t(), ROW, activation="relu", residual=RESIDUAL),
        lambda: torch.nn.functional.linear(A, B.t(), ROW).relu() + RESIDUAL,
    ),
}


@pytest.fixture
def slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels support all calls, and torch is faster. None is planned."""
    monkeypatch.setattr(launcher, "no_kernel_reason", lambda problem: None)
    monkeypatch.setattr(launcher, "slower_reason", lambda problem, tune: launcher.SLOWER)
    monkeypatch.setattr(launcher, "best_launcher", None)


@pytest.mark.usefixtures("slower")
@pytest.mark.parametrize(("call", "by_torch"), CALLS.values(), ids=CALLS)
def test_torch_computes_it_without_a_warning_or_an_error(
    call: Callable[[], torch.Tensor],
    by_torch: Callable[[], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OUTBLAS_STRICT", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = [call() for _ in range(3)]

    assert all(torch.equal(got, by_torch()) for got in results)


@pytest.mark.usefixtures("slower")
@pytest.mark.parametrize("first", [True, False], ids=["after matmul", "alone"])
def test_enable_leaves_it_to_torch_and_says_why(first: bool) -> None:
    if first:
        outblas.matmul(A, B)

    with aten._enable(Rules((torch.float32,), 0, 1.0, None, key="CPU")) as enabled:
        assert torch.equal(torch.mm(A, B), outblas.matmul(A, B))

    assert enabled.decisions == {"mm 6x4x5 float32": launcher.SLOWER}
