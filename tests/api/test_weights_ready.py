"""`outblas.weights_ready()`: which calls may load their weights early, and what the kernel makes of
it.
"""

from typing import Any

import pytest
import torch
from support.gemm_problems import SMALL_TILE, gemm_config, record_launches

import outblas
from outblas.call import launcher
from outblas.call.context_flag import readiness
from outblas.call.problem import Launch, Problem, problem
from outblas.hopper import gemm
from outblas.hopper.parts import compile

Tensor = torch.Tensor
CONFIG = gemm_config(f"{SMALL_TILE},tile_n=16,gpc_local=False,swap_ab=True")
X, WEIGHT, BIAS = torch.randn(4, 16), torch.randn(8, 16), torch.randn(8)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """The problems that are planned, for which torch computes in a kernel's place. No context has
    been entered before.
    """
    problems: list[Problem] = []

    def planning(given: Problem, tune: str, *, no_product: bool) -> Launch:
        problems.append(given)

        def launch(a: Tensor, b: Tensor, c: Any, out: Tensor, *rest: Any) -> None:
            bias = rest[2] if len(rest) > 2 else None
            torch.matmul(a, b, out=out)
            if bias is not None:
                out += bias

        return launch

    monkeypatch.setattr(launcher, "no_kernel_reason", lambda problem: None)
    monkeypatch.setattr(launcher, "best_launcher", planning)
    monkeypatch.setattr(readiness, "ever", False)
    return problems


def promises(planned: list[Problem]) -> list[bool]:
    return [each.weights_ready for each in planned]


# ---- which calls
def test_linear_is_planned_apart_within_the_context(planned: list[Problem]) -> None:
    results = [outblas.linear(X, WEIGHT, BIAS)]
    with outblas.weights_ready():
        results += [outblas.linear(X, WEIGHT, BIAS) for _ in range(3)]
        outblas.matmul(X, WEIGHT.t())  # whose B may be what the previous kernel computes
    results += [outblas.linear(X, WEIGHT, BIAS) for _ in range(3)]

    assert promises(planned) == [False, True, False]
    assert all(torch.equal(each, results[0]) for each in results)


def test_a_layer_and_a_patched_layer_use_the_promise(planned: list[Problem]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), outblas.Linear(8, 4)).requires_grad_(False)
    outblas.patch(model)

    with outblas.weights_ready():
        model(X)

    assert promises(planned) == [True, True]


@pytest.mark.parametrize(("enabled", "is_early"), [(True, False), (False, True)])
def test_a_weight_that_needs_a_gradient_is_not_ready(
    enabled: bool, is_early: bool, planned: list[Problem]
) -> None:
    """An optimizer may just be writing it."""
    weight = torch.nn.Parameter(WEIGHT.clone())

    with torch.set_grad_enabled(enabled), outblas.weights_ready():
        outblas.linear(X, weight)

    assert promises(planned) == [is_early]


def test_contexts_nest_and_end(planned: list[Problem]) -> None:
    with outblas.weights_ready():
        with outblas.weights_ready(False):
            outblas.linear(X, WEIGHT)
        outblas.linear(X, WEIGHT)
    with pytest.raises(KeyError), outblas.weights_ready():
        raise KeyError
    outblas.linear(X, WEIGHT)

    assert promises(planned) == [False, True]


# ---- what the kernel makes of it
@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configs of the kernels that are loaded."""
    found: list[Any] = []
    record_launches(monkeypatch)
    load = compile.load

    def recording(variant: Any, made: Any) -> Any:
        found.append(variant.config)
        return load(variant, made)

    monkeypatch.setattr(compile, "load", recording)
    return found


def plan(rows: int, offset: int = 0, is_ready: bool = True) -> None:
    """Plans a product with a weight that begins so many elements past an address that TMA takes."""
    a, out = torch.empty(rows, 512), torch.empty(rows, 256)
    weight = torch.empty(256 * 512 + 8)[offset:][: 256 * 512].view(256, 512)
    gemm.plan(problem(a, weight.t(), out, weights_ready=is_ready), CONFIG)


@pytest.mark.parametrize(("rows", "is_early"), [(1, True), (64, True), (65, False)])
def test_few_rows_start_early(rows: int, is_early: bool, configs: list[Any]) -> None:
    plan(rows)

    assert [(config.pdl, config.weights_ready) for config in configs] == [(is_early, is_early)]


def test_a_weight_that_is_copied_first_is_not_loaded_early(configs: list[Any]) -> None:
    plan(1, offset=1)

    assert [config.weights_ready for config in configs] == [False]


# ---- on a GPU
@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_layers_in_a_row_have_the_bits_that_they_have_without_the_promise(rows: int) -> None:
    """Each reads what the one before has just written, eagerly and in a graph."""
    options: Any = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
    layers = [outblas.Linear(2048, 2048, **options) for _ in range(12)]
    given = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)

    def run() -> Tensor:
        x = given
        for layer in layers:
            x = layer(x)
        return x

    with torch.inference_mode():
        plain = run()
        with outblas.weights_ready():
            eager = [run() for _ in range(5)]
            outblas.warmup(run)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = run()
        assert all(torch.equal(each, plain) for each in eager)
        for _ in range(5):
            given.normal_()
            graph.replay()
            assert torch.equal(captured, run())
