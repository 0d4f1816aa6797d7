"""From a call to what was tuned for it: workloads, modes, bad arguments. No GPU needed."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.known import A100, CONFIGS, H100, Know, knowing, winner

import outblas
from outblas.autotune import automatic, lookup
from outblas.autotune.store.records import Gpu, Workload
from outblas.autotune.store.store import StoreError
from outblas.autotune.sweeps import outcome
from outblas.autotune.sweeps import sweep as sweeping
from outblas.core.configs import to_text
from outblas.core.problem import Problem, problem
from outblas.hopper import gemm, hilbert
from outblas.runtime import default_kernel, dispatch, fallback, launcher

AT = Workload(64, 64, 64)
OWN = ("portable", "")  # what the rule says, and the kernel's own config


@pytest.fixture
def know(tmp_path: Path) -> Know:
    return knowing(tmp_path)


def asked(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None, **more: Any
) -> Problem:
    return problem(a, b, (a @ b).to(out_dtype or a.dtype), **more)


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


WORKLOADS = {
    "nn": (asked(empty(6, 8), empty(8, 4)), "6x4x8 bfloat16 nn"),
    "nt": (asked(empty(6, 8), empty(4, 8).t()), "6x4x8 bfloat16 nt"),
    "tn": (asked(empty(8, 6).t(), empty(8, 4)), "6x4x8 bfloat16 tn"),
    "tt": (asked(empty(8, 6).t(), empty(4, 8).t()), "6x4x8 bfloat16 tt"),
    "to fp32": (asked(empty(6, 8), empty(8, 4), torch.float32), "6x4x8 bfloat16 to float32 nn"),
    "fp32": (asked(empty(6, 8).float(), empty(8, 4).float()), "6x4x8 float32 nn"),
    "tf32": (asked(empty(6, 8).float(), empty(8, 4).float(), tf32=True), "6x4x8 tf32 nn"),
    "rows apart": (asked(empty(6, 16)[:, :8], empty(8, 16)[:, :4]), "6x4x8 bfloat16 nn"),
    "a batch that shares b": (asked(empty(3, 6, 8), empty(8, 4)), "18x4x8 bfloat16 nn"),
    "one row": (asked(empty(1, 8), empty(8, 4)), "1x4x8 bfloat16 nn"),
    "one column": (asked(empty(6, 8), empty(8, 1)), "6x1x8 bfloat16 nn"),
    "one term": (asked(empty(6, 1), empty(1, 4)), "6x4x1 bfloat16 nn"),
    "a batch": (asked(empty(3, 6, 8), empty(3, 8, 4)), None),
    "empty": (asked(empty(0, 8), empty(8, 4)), None),
    "no terms": (asked(empty(6, 0), empty(0, 4)), None),
    "no unit stride": (asked(empty(6, 16)[:, ::2], empty(8, 4)), None),
    "repeated": (asked(empty(1, 1).expand(6, 8), empty(8, 4)), None),
}


@pytest.mark.parametrize("case", WORKLOADS)
def test_workload_of_a_call(case: str) -> None:
    call, expected = WORKLOADS[case]
    found = automatic.of_problem(call)
    assert (found and str(found)) == expected


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Problem:
    """A call on a GPU, as far as dispatch can tell."""
    monkeypatch.setattr(default_kernel, "kernel_for", lambda problem: "portable")
    monkeypatch.setattr(launcher, "unsupported_reason", lambda record, problem: None)
    monkeypatch.delenv("OUTBLAS_TUNE", raising=False)
    return replace(asked(empty(64, 64), empty(64, 64).t()), device=torch.device("cuda", 0))


@pytest.fixture
def taken(on_gpu: Problem, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What `matmul` would launch, where the plans of some configs fail."""

    def taken(known: Any, tune: str = "", failing: dict[str, Exception] | None = None) -> Any:
        def named(kernel: str, config: str, problem: Problem, *, no_product: bool) -> Any:
            if failing and config in failing:
                raise failing[config]
            return kernel, config

        monkeypatch.setattr(lookup, "tuning_index", lambda index: known)
        monkeypatch.setattr(launcher, "named_launcher", named)
        return launcher.best_launcher(on_gpu, tune, no_product=False)

    return taken


def test_matmul_takes_the_best_that_takes_the_call(
    taken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, know: Know
) -> None:
    best, second = ("portable", CONFIGS[0]), ("hopper.hilbert", to_text(hilbert.Config()))
    known = know(
        winner(0, workload=AT, ratio=1.0),
        winner(workload=AT, kernel=second[0], config=second[1], ratio=0.9),
        winner(1, workload=replace(AT, K=128)),
    )
    assert taken(known) == best
    assert taken(known, failing={best[1]: ValueError("a field is gone")}) == second
    with pytest.warns(
        RuntimeWarning, match=r"portable\[block_m=.*\], which was tuned for this call, fails: bad"
    ):
        assert taken(known, failing={best[1]: RuntimeError("bad")}) == second
    assert taken(known, failing=dict.fromkeys((best[1], second[1]), ImportError("no DSL"))) == OWN
    assert taken(known, "off") == OWN
    monkeypatch.setenv("OUTBLAS_TUNE", "off")
    assert taken(known) == OWN
    assert taken(known, "lookup") == best
    monkeypatch.setenv("OUTBLAS_TUNE", "always")
    with pytest.raises(
        ValueError, match="OUTBLAS_TUNE is 'always', expected one of off, lookup, on"
    ):
        taken(known)


@pytest.mark.parametrize("gpu", [H100, A100])
def test_a_c_stored_by_columns_is_looked_up_as_the_product_that_runs(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, know: Know
) -> None:
    """`hopper.gemm` computes C^T = B^T A^T there; `portable` does not, whose tiles are not
    turned.
    """
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
    monkeypatch.setattr(lookup, "tuning_index", lambda index: known)
    expected = [("hopper.gemm", text), OWN] if gpu == H100 else [("portable", CONFIGS[0])]
    assert list(automatic.choices(call))[: len(expected)] == expected


def test_a_capture_takes_the_plan_of_operands_elsewhere_in_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No kernel can be compiled there, nor its tiles ordered."""
    prepared = []
    monkeypatch.setattr(
        dispatch, "_prepare", lambda call: prepared.append(call) or (lambda *_: call.a)
    )
    monkeypatch.setattr(dispatch, "_plans", {})
    buffer = torch.empty(1024)
    buffer = buffer[-buffer.data_ptr() % 128 // 4 :]

    def product(*starts: int) -> Any:
        a, b = (buffer[start : start + 64].view(8, 8) for start in starts)
        return dispatch.run(dispatch.Call(a, b, None, None, None, 1, 0, "", ""))

    product(0, 128 + 4)
    monkeypatch.setattr(dispatch, "capturing", lambda device: True)
    for starts in ((0, 132), (4, 128), (0, 128), (8, 140)):
        assert product(*starts).data_ptr() == buffer.data_ptr()
    assert len(prepared) == 1
    product(1, 132)  # at 4 bytes
    assert len(prepared) == 2


def test_what_cannot_be_looked_up_is_not_the_callers_concern(taken: Callable[..., Any]) -> None:
    broken = Mock(gpu=H100)
    broken.choices.side_effect = KeyError("a bug")
    with pytest.warns(RuntimeWarning, match="a bug"):
        assert taken(broken) == OWN


def test_batches_and_empty_calls_ask_nothing(
    on_gpu: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automatic, "choices", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr(launcher, "named_launcher", lambda *_, no_product: no_product)
    for changed in ({"batch": (2,)}, {"M": 0}, {"device": torch.device("cpu")}):
        launcher.best_launcher(replace(on_gpu, **changed), "on", no_product=False)
    assert launcher.best_launcher(on_gpu, "on", no_product=True) is True


def test_tuning_when_first_met(
    on_gpu: Problem, monkeypatch: pytest.MonkeyPatch, know: Know
) -> None:
    """Once for a shape, with what the environment grants; a failure is said once, and then
    forgotten.
    """
    swept = []
    known = [know()]

    def sweep(workload, index, kernels, *, budget, trials, allow_unsaved):
        assert (trials, allow_unsaved) == (automatic.FIRST_TRIALS, True)
        swept.append((workload, budget))
        if budget == 1.5:
            raise RuntimeError("the GPU is on fire")
        known[0] = know(winner(3, workload=AT))

    def choices(tune: str = "on") -> list[tuple[str, str]]:
        return list(automatic.choices(on_gpu, tune))

    def fails(budget: str, message: str) -> None:
        monkeypatch.setattr(automatic, "_given_up", set())
        monkeypatch.setenv("OUTBLAS_TUNE_BUDGET", budget)
        with pytest.warns(RuntimeWarning, match=message):
            assert choices() == []

    monkeypatch.setattr(automatic, "_sweep", sweep)
    monkeypatch.setattr(lookup, "tuning_index", lambda index: known[0])
    assert choices("") == []
    assert swept == []
    fails("1.5", "64 bfloat16 nt could not be tuned: the GPU is on fire")
    assert choices() == []
    assert swept == [(AT, 1.5)]
    fails("soon", "OUTBLAS_TUNE_BUDGET is .soon., expected a number")
    monkeypatch.setattr(automatic, "_given_up", set())
    monkeypatch.delenv("OUTBLAS_TUNE_BUDGET")
    assert choices() == choices() == [("portable", CONFIGS[3])]
    assert swept == [(AT, 1.5), (AT, automatic.FIRST_SECONDS)]


def test_a_store_that_keeps_nothing_is_no_callers_concern(
    on_gpu: Problem, monkeypatch: pytest.MonkeyPatch, know: Know
) -> None:
    """A shape is tuned once, and not at every call, where the winner cannot be looked up
    afterwards.
    """
    swept = []
    monkeypatch.setattr(automatic, "_given_up", set())
    monkeypatch.setattr(automatic, "_sweep", lambda *facts, **options: swept.append(options))
    monkeypatch.setattr(lookup, "tuning_index", lambda index: know())
    for _ in range(3):
        assert list(automatic.choices(on_gpu, "on")) == []
    assert [options["allow_unsaved"] for options in swept] == [True]


@pytest.mark.parametrize(("options", "refused"), [({}, True), ({"allow_unsaved": True}, False)])
def test_tune_refuses_a_store_that_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options, refused: bool
) -> None:
    """Before it measures; what OUTBLAS_TUNE=on does inside of a program goes on in memory."""
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(sweeping, "visible_gpus", lambda gpus: ["0"])
    measured = Mock(return_value=outcome.Sweep())
    monkeypatch.setattr(sweeping.local_engine, "run", measured)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError) as error:
            automatic._sweep(AT, 0, ["portable"], budget=1.0, trials=1, **options)
    assert isinstance(error.value, StoreError) == refused
    assert measured.called != refused


def test_modes() -> None:
    assert lookup.mode(None, None) == lookup.mode("", "") == lookup.mode(None, "") == "lookup"
    assert lookup.mode("on", "off") == "on"
    assert lookup.mode(None, "off") == "off"
    with pytest.raises(ValueError, match="tune is 'yes', expected one of off, lookup, on"):
        lookup.mode("yes", "on")
    with pytest.raises(ValueError, match="OUTBLAS_TUNE is '1'"):
        lookup.mode("", "1")


A, B = torch.randn(6, 5), torch.randn(5, 4)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (
            ValueError,
            "tune is 'yes', expected one of off, lookup, on",
            lambda: outblas.matmul(A, B, tune="yes"),
        ),
        (ValueError, "tune is ''", lambda: outblas.matmul(A, B, tune="")),
        (
            TypeError,
            "tune is bool, expected a str: off, lookup, on",
            lambda: outblas.matmul(A, B, tune=True),
        ),
        (ValueError, "tune is 'yes'", lambda: outblas.addmm(torch.zeros(4), A, B, tune="yes")),
        (ValueError, "a is on cpu, expected an NVIDIA GPU", lambda: outblas.tune(A, B)),
        (TypeError, "a is list, expected a torch.Tensor", lambda: outblas.tune([1.0], B)),
        (ValueError, r"a.shape\[1\] is 5 but b.shape\[0\] is 4", lambda: outblas.tune(A, B[:4])),
        (
            ValueError,
            "out_dtype is torch.float16",
            lambda: outblas.tune(A, B, out_dtype=torch.float16),
        ),
    ],
)
def test_bad_arguments(error: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("tune", ["off", "lookup", "on"])
def test_calls_without_a_gpu_look_nothing_up(tune, monkeypatch):
    monkeypatch.setattr(lookup, "tuning_index", lambda index: pytest.fail("looked up"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fallback.FallbackWarning)
        assert torch.equal(outblas.matmul(A, B, tune=tune), A @ B)
    assert torch.allclose(outblas.matmul(A, B, tune=tune, kernel="portable"), A @ B, atol=1e-5)
