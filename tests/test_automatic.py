"""From a call to what was tuned for it: workloads, modes, bad arguments. No GPU needed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from known import A100, CONFIGS, H100, knowing, winner

import outblas
from outblas import dispatch, fallback
from outblas.autotune import automatic, choose
from outblas.autotune.choose import Choice, Knowledge
from outblas.autotune.records import Gpu, Workload
from outblas.configs import to_text
from outblas.hopper import gemm, hilbert
from outblas.operands import Problem, problem


@pytest.fixture
def know(tmp_path: Path) -> Callable[..., Knowledge]:
    return knowing(tmp_path)


# ---- from calls to workloads ----------------------------------------------------------------------------------------
def asked(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None, **more: Any) -> Problem:
    shape = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]) + (a.shape[-2:-1] + b.shape[-1:])
    return problem(a, b, torch.empty(shape, dtype=out_dtype or a.dtype, device="meta"), **more)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


WORKLOADS: dict[str, tuple[Callable[[], Problem], Workload | None]] = {
    "nn": (lambda: asked(empty(6, 8), empty(8, 4)), Workload(6, 4, 8, layout="nn")),
    "nt": (lambda: asked(empty(6, 8), empty(4, 8).t()), Workload(6, 4, 8, layout="nt")),
    "tn": (lambda: asked(empty(8, 6).t(), empty(8, 4)), Workload(6, 4, 8, layout="tn")),
    "tt": (lambda: asked(empty(8, 6).t(), empty(4, 8).t()), Workload(6, 4, 8, layout="tt")),
    "to fp32": (
        lambda: asked(empty(6, 8), empty(8, 4), torch.float32),
        Workload(6, 4, 8, out_dtype="float32", layout="nn"),
    ),
    "fp32": (
        lambda: asked(empty(6, 8, dtype=torch.float32), empty(8, 4, dtype=torch.float32)),
        Workload(6, 4, 8, "float32", layout="nn"),
    ),
    "tf32": (
        lambda: asked(empty(6, 8, dtype=torch.float32), empty(8, 4, dtype=torch.float32), tf32=True),
        Workload(6, 4, 8, "tf32", layout="nn"),
    ),
    "rows apart": (lambda: asked(empty(6, 16)[:, :8], empty(8, 16)[:, :4]), Workload(6, 4, 8, layout="nn")),
    "a batch that shares b": (lambda: asked(empty(3, 6, 8), empty(8, 4)), Workload(18, 4, 8, layout="nn")),
    "one row": (lambda: asked(empty(1, 8), empty(8, 4)), Workload(1, 4, 8, layout="nn")),
    "one column": (lambda: asked(empty(6, 8), empty(8, 1)), Workload(6, 1, 8, layout="nn")),
    "one term": (lambda: asked(empty(6, 1), empty(1, 4)), Workload(6, 4, 1, layout="nn")),
    "a batch": (lambda: asked(empty(3, 6, 8), empty(3, 8, 4)), None),
    "empty": (lambda: asked(empty(0, 8), empty(8, 4)), None),
    "no terms": (lambda: asked(empty(6, 0), empty(0, 4)), None),
    "no unit stride": (lambda: asked(empty(6, 16)[:, ::2], empty(8, 4)), None),
    "repeated": (lambda: asked(empty(1, 1).expand(6, 8), empty(8, 4)), None),
}


@pytest.mark.parametrize("case", WORKLOADS)
def test_workload_of_a_call(case: str) -> None:
    make, want = WORKLOADS[case]
    assert automatic.of_problem(make()) == want


# ---- what a call asks -----------------------------------------------------------------------------------------------
@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Problem:
    """A call on a GPU, as far as dispatch can tell."""
    monkeypatch.setattr(dispatch.choice, "kernel_for", lambda problem: "portable")
    monkeypatch.setattr(dispatch, "_capturing", lambda device: False)
    monkeypatch.setattr(dispatch, "lacks", lambda record, problem: None)
    monkeypatch.delenv("OUTBLAS_TUNE", raising=False)
    return replace(asked(empty(64, 64), empty(64, 64).t()), device=torch.device("cuda", 0))


AT = Workload(64, 64, 64)


def taken(call: Problem, monkeypatch: pytest.MonkeyPatch, known: Knowledge, tune: str = "", **plans: Any) -> Any:
    """What `matmul` would launch; `plans` maps a config's number to the error of its plan."""

    def launcher(kernel: str, config: str, problem: Problem, *, nothing: bool) -> Any:
        error = plans.get(f"c{CONFIGS.index(config)}") if config else None
        if error is not None:
            raise error
        return kernel, config

    monkeypatch.setattr(choose, "knowledge", lambda index: known)
    monkeypatch.setattr(dispatch, "_launcher", launcher)
    return dispatch._best_launcher(call, tune, nothing=False)


def test_matmul_takes_the_best_that_takes_the_call(
    on_gpu: Problem, monkeypatch: pytest.MonkeyPatch, know: Callable[..., Knowledge]
) -> None:
    other = to_text(hilbert.Config())
    known = know(
        winner(0, workload=AT, ratio=1.0),
        winner(workload=AT, kernel="hopper.hilbert", config=other, ratio=0.9),
        winner(1, workload=replace(AT, K=128)),
    )
    CONFIGS.append(other)
    try:
        assert taken(on_gpu, monkeypatch, known) == ("portable", CONFIGS[0])
        assert taken(on_gpu, monkeypatch, known, c0=ValueError("a field is gone")) == ("hopper.hilbert", other)
        with pytest.warns(RuntimeWarning, match=r"portable\[block_m=.*\], which was tuned for this call, fails: bad"):
            assert taken(on_gpu, monkeypatch, known, c0=RuntimeError("bad")) == ("hopper.hilbert", other)
        missing = ImportError("no DSL")
        assert taken(on_gpu, monkeypatch, known, c0=missing, c11=missing) == ("portable", "")
        assert taken(on_gpu, monkeypatch, known, "off") == ("portable", "")
        monkeypatch.setenv("OUTBLAS_TUNE", "off")
        assert taken(on_gpu, monkeypatch, known) == ("portable", "")
        assert taken(on_gpu, monkeypatch, known, "lookup") == ("portable", CONFIGS[0])
        monkeypatch.setenv("OUTBLAS_TUNE", "always")
        with pytest.raises(ValueError, match="OUTBLAS_TUNE is 'always', expected one of off, lookup, on"):
            taken(on_gpu, monkeypatch, known)
    finally:
        CONFIGS.pop()


@pytest.mark.parametrize("gpu", [H100, A100])
def test_a_c_stored_by_columns_is_looked_up_as_the_product_that_runs(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, know: Callable[..., Knowledge]
) -> None:
    """`hopper.gemm` computes C^T = B^T A^T there; `portable` does not, whose tiles are not turned."""
    a, b, out = empty(96, 64), empty(64, 128), empty(128, 96).t()
    call = replace(problem(a, b, out), device=torch.device("cuda", 0))
    given, other = Workload(96, 128, 64, layout="nn"), Workload(128, 96, 64, layout="tt")
    text = to_text(gemm.Config())
    known = know(
        winner(0, workload=given, gpu=gpu),
        winner(1, workload=other, gpu=gpu, ratio=0.9),
        winner(kernel="hopper.gemm", config=text, workload=other, gpu=gpu),
        of=gpu,
    )
    monkeypatch.setattr(choose, "knowledge", lambda index: known)
    found = list(automatic.choices(call))
    if gpu == H100:
        assert found[:2] == [("hopper.gemm", text), ("portable", "")]
    else:
        assert found[0] == ("portable", CONFIGS[0])


def test_a_capture_takes_the_plan_of_operands_elsewhere_in_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan made in a capture could not order its tiles."""
    prepared = []
    monkeypatch.setattr(dispatch, "_prepare", lambda call: prepared.append(call) or (lambda *_: call.a))
    monkeypatch.setattr(dispatch, "_plans", {})
    buffer = torch.empty(1024)
    buffer = buffer[-buffer.data_ptr() % 128 // 4 :]

    def product(start_a: int, start_b: int) -> Any:
        a, b = (buffer[start : start + 64].view(8, 8) for start in (start_a, start_b))
        return dispatch.run(dispatch.Call(a, b, None, None, None, 1, 0, "", ""))

    product(0, 128 + 4)
    monkeypatch.setattr(dispatch, "_capturing", lambda device: True)
    for starts in ((0, 132), (4, 128), (0, 128), (8, 140)):
        assert product(*starts).data_ptr() == buffer.data_ptr()
    assert len(prepared) == 1
    product(1, 132)  # at 4 bytes
    assert len(prepared) == 2
    assert len(dispatch._plans) == 1


def test_what_cannot_be_looked_up_is_not_the_callers_concern(
    on_gpu: Problem, monkeypatch: pytest.MonkeyPatch, know: Callable[..., Knowledge]
) -> None:
    class Broken:
        gpu = H100

        def choices(self, workload: Workload) -> tuple[Choice, ...]:
            raise KeyError("a bug")

    with pytest.warns(RuntimeWarning, match="a bug"):
        assert taken(on_gpu, monkeypatch, Broken()) == ("portable", "")  # type: ignore[arg-type]


def test_batches_and_empty_calls_ask_nothing(on_gpu: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "choices", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr(dispatch, "_launcher", lambda *_, nothing: nothing)
    for changed in ({"batch": (2,)}, {"M": 0}, {"device": torch.device("cpu")}):
        dispatch._best_launcher(replace(on_gpu, **changed), "on", nothing=False)  # type: ignore[arg-type]
    assert dispatch._best_launcher(on_gpu, "on", nothing=True) is True
    monkeypatch.setattr(dispatch, "_capturing", lambda device: True)
    dispatch._best_launcher(on_gpu, "on", nothing=False)


def test_tuning_when_first_met(
    on_gpu: Problem, monkeypatch: pytest.MonkeyPatch, know: Callable[..., Knowledge]
) -> None:
    """Once for a shape, with what the environment grants; a failure is said once, and then forgotten."""
    swept: list[tuple[Workload, float | None]] = []
    before, after = know(), know(winner(3, workload=AT))
    now = [before]

    def sweep(workload: Workload, index: int, kernels: Any, budget: float | None, trials: int, top_k: int) -> None:
        swept.append((workload, budget))
        if budget == 1.5:
            raise RuntimeError("the GPU is on fire")
        now[0] = after

    monkeypatch.setattr(automatic, "_sweep", sweep)
    monkeypatch.setattr(automatic, "_given_up", set())
    monkeypatch.setattr(choose, "knowledge", lambda index: now[0])
    assert list(automatic.choices(on_gpu)) == []
    assert swept == []
    monkeypatch.setenv("OUTBLAS_TUNE_BUDGET", "1.5")
    with pytest.warns(RuntimeWarning, match="64 bfloat16 nt could not be tuned: the GPU is on fire"):
        assert list(automatic.choices(on_gpu, "on")) == []
    assert list(automatic.choices(on_gpu, "on")) == []
    assert swept == [(AT, 1.5)]
    monkeypatch.setattr(automatic, "_given_up", set())
    monkeypatch.setenv("OUTBLAS_TUNE_BUDGET", "soon")
    with pytest.warns(RuntimeWarning, match="could not convert"):
        assert list(automatic.choices(on_gpu, "on")) == []
    monkeypatch.setattr(automatic, "_given_up", set())
    monkeypatch.delenv("OUTBLAS_TUNE_BUDGET")
    assert list(automatic.choices(on_gpu, "on")) == [("portable", CONFIGS[3])]
    assert list(automatic.choices(on_gpu, "on")) == [("portable", CONFIGS[3])]
    assert swept == [(AT, 1.5), (AT, automatic.FIRST_SECONDS)]


def test_modes() -> None:
    assert choose.mode(None, None) == choose.mode("", "") == choose.mode(None, "") == "lookup"
    assert choose.mode("on", "off") == "on"
    assert choose.mode(None, "off") == "off"
    with pytest.raises(ValueError, match="tune is 'yes', expected one of off, lookup, on"):
        choose.mode("yes", "on")
    with pytest.raises(ValueError, match="OUTBLAS_TUNE is '1'"):
        choose.mode("", "1")


A, B = torch.randn(6, 5), torch.randn(5, 4)

BAD: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "word": (ValueError, "tune is 'yes', expected one of off, lookup, on", lambda: outblas.matmul(A, B, tune="yes")),
    "empty word": (ValueError, "tune is ''", lambda: outblas.matmul(A, B, tune="")),
    "type": (TypeError, "tune is bool, expected a str: off, lookup, on", lambda: outblas.matmul(A, B, tune=True)),  # type: ignore[arg-type]
    "addmm": (ValueError, "tune is 'yes'", lambda: outblas.addmm(torch.zeros(4), A, B, tune="yes")),
    "tune on the CPU": (ValueError, "a is on cpu, expected an NVIDIA GPU", lambda: outblas.tune(A, B)),
    "tune of a list": (TypeError, "a is list, expected a torch.Tensor", lambda: outblas.tune([1.0], B)),  # type: ignore[arg-type]
    "tune of other sizes": (ValueError, r"a.shape\[1\] is 5 but b.shape\[0\] is 4", lambda: outblas.tune(A, B[:4])),
    "tune to fp16": (ValueError, "out_dtype is torch.float16", lambda: outblas.tune(A, B, out_dtype=torch.float16)),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error, message, call = BAD[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("tune", ["off", "lookup", "on"])
def test_calls_without_a_gpu_look_nothing_up(tune: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "knowledge", lambda index: pytest.fail("looked up"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fallback.FallbackWarning)
        assert torch.equal(outblas.matmul(A, B, tune=tune), A @ B)
    assert torch.allclose(outblas.matmul(A, B, tune=tune, kernel="portable"), A @ B, atol=1e-5)
