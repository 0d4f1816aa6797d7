"""Kernels that are compiled before a patched model is called: some while `patch` returns, all of
them by `Report.prepare`.
"""

import gc
from typing import Any

import pytest
import torch

import outblas
from outblas.base import compile_worker, compiling, machines
from outblas.base.compiling import CompilePending
from outblas.call import default_kernel, launcher
from outblas.call.artifact import example
from outblas.call.problem import Problem
from outblas.hopper.gemm import heuristic
from outblas.hopper.gemm.variant import Variant, example_variant
from outblas.patching import preparing


class Planned:
    """What is planned in the place of calls on a GPU: kernels that the worker compiles."""

    def __init__(self) -> None:
        self.ahead: list[Problem] = []
        self.loaded: list[Problem] = []
        self.awaited = 0

    def launcher(self, problem: Problem, *_: object, **options: object) -> Any:
        if compiling.defers():
            assert compiling.is_ahead(), "a call would be planned so"
            self.ahead.append(problem)
            raise CompilePending("a_kernel")
        self.loaded.append(problem)
        return lambda a, b, c, out, *rest: out.fill_(7)

    def await_all(self, tell: Any) -> None:
        self.awaited += 1
        tell(3)
        compiling.end_generation()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    planned = Planned()
    monkeypatch.setenv("OUTBLAS_COMPILE", "background")
    monkeypatch.setattr(preparing, "is_on_gpu", lambda t: True)
    monkeypatch.setattr(launcher, "no_kernel_reason", lambda problem: None)
    monkeypatch.setattr(launcher, "best_launcher", planned.launcher)
    monkeypatch.setattr(compile_worker, "await_all", planned.await_all)
    return planned


def sizes(problems: list[Problem]) -> list[tuple[int, int]]:
    return sorted({(problem.N, problem.K) for problem in problems})


def model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16),
        torch.nn.ReLU(),
        torch.nn.Linear(16, 16, bias=False),
        torch.nn.Linear(16, 16, bias=False),
    )


# ---- patch
def test_patch_begins_to_compile_each_product_once(planned: Planned) -> None:
    outblas.patch(model())

    rows: dict[tuple[int, int], list[int]] = {(p.N, p.K): [] for p in planned.ahead}
    for problem in planned.ahead:
        rows[problem.N, problem.K].append(problem.M)
    assert sorted(rows) == [(16, 8), (16, 16)]
    assert all(set(numbers) == {*preparing.ROWS, 2} for numbers in rows.values())
    assert planned.loaded == []


def test_patch_begins_to_compile_subclasses(planned: Planned) -> None:
    outblas.patch(type("Named", (torch.nn.Linear,), {})(8, 16))

    assert {(p.N, p.K) for p in planned.ahead} == {(16, 8)}


def test_what_is_fused_is_compiled_as_it_is_called(planned: Planned) -> None:
    outblas.patch(model(), fuse=True)

    functions = {(p.N, p.K, p.epilogue.function) for p in planned.ahead}
    assert (16, 8, "relu") in functions


@pytest.mark.parametrize("variable", ["OUTBLAS_COMPILE=block", "OUTBLAS_COMPILE=never", "TUNE=on"])
def test_patch_compiles_nothing_where_calls_wait(
    variable: str, planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, value = variable.replace("TUNE=", "OUTBLAS_TUNE=").partition("=")
    monkeypatch.setenv(name, value)
    outblas.patch(model())
    outblas.patch(model(), dry_run=True)

    assert planned.ahead == planned.loaded == []


def test_a_record_has_calls_alone(planned: Planned) -> None:
    with outblas.record_shapes() as recorded:
        outblas.patch(model())

    assert recorded.lines == []


# ---- prepare
@pytest.mark.parametrize("mode", ["background", "block"])
def test_all_is_compiled_at_once_and_then_loaded(
    mode: str, planned: Planned, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    layers = model()
    report = outblas.patch(layers)
    planned.ahead.clear()
    monkeypatch.setenv("OUTBLAS_COMPILE", mode)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)

    report.prepare(rows=100)

    expected = {2, *preparing.row_numbers(100)}
    assert planned.awaited == 1
    assert {p.M for p in planned.loaded} == expected
    assert sizes(planned.loaded) == [(16, 8), (16, 16)]
    assert "3 kernels to compile" in capsys.readouterr().err


def test_what_cannot_be_prepared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = model()
    report = outblas.patch(layers)

    for rows, error in ((1.0, TypeError), (True, TypeError), (0, ValueError)):
        with pytest.raises(error, match=f"rows is {rows if error is ValueError else ''}"):
            report.prepare(rows)  # type: ignore[arg-type]
    for other in (outblas.patch(layers, dry_run=True), outblas.unpatch(layers)):
        with pytest.raises(ValueError, match="expected one of patch"):
            other.prepare()
    monkeypatch.setenv("OUTBLAS_COMPILE", "never")
    with pytest.raises(RuntimeError, match="OUTBLAS_COMPILE is never"):
        report.prepare()
    del layers
    gc.collect()
    with pytest.raises(ReferenceError, match="the patched model is gone"):
        report.prepare()


@pytest.mark.parametrize(("N", "K"), [(4096, 14336), (28672, 4096), (768, 3072), (3072, 768)])
def test_the_numbers_of_rows_meet_every_kernel(N: int, K: int) -> None:
    rates = heuristic.rates(machines.find("H100"))
    problem = example(torch.bfloat16, None, "nt", (2, N, K))
    configs: dict[int, Any] = {}

    def variant(rows: int) -> Variant:
        chosen = default_kernel.rows_of_choice(rows)
        if chosen not in configs:
            configs[chosen] = heuristic.config(problem.resized(M=chosen), rates)
        return example_variant(problem.resized(M=rows), configs[chosen])

    met = {variant(rows) for rows in preparing.row_numbers(8192)}

    assert {variant(rows) for rows in range(1, 8193)} == met
