"""Calls on a GPU whose kernels are compiled beside them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import outblas
from outblas.base import compile_worker, pack
from outblas.base.compile_worker import CompileWorker
from outblas.call import dispatch
from outblas.call.epilogue import Activation, EpilogueArgs
from outblas.hopper.parts import compile

pytestmark = [pytest.mark.sm90, pytest.mark.own_compile]

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileWorker]:
    """A process that has loaded nothing, with an empty cache and no pack."""
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("OUTBLAS_COMPILE", "background")
    monkeypatch.setattr(compile, "_loaded", {})
    monkeypatch.setattr(pack, "packed_code", lambda facts: None)
    monkeypatch.setattr(compile_worker, "_worker", worker := CompileWorker())
    dispatch.clear_cache()
    yield worker
    worker.close()
    dispatch.clear_cache()


def integers(*shape: int) -> Tensor:
    return torch.randint(-4, 5, shape, device="cuda").bfloat16()


def wait() -> None:
    """Until everything is compiled that calls want, one kernel after the other."""
    compile_worker.await_all(lambda left: None)
    assert compile_worker.failures() == {}


@pytest.mark.parametrize("activation", [None, "relu", "swiglu"])
def test_a_call_is_torchs_and_then_its_kernels(activation: Activation | None) -> None:
    x, weight, bias = integers(256, 512), integers(384, 512), integers(384)
    results = []
    for _ in range(4):  # a product may need a probe of the GPU besides its kernel
        results.append(outblas.linear(x, weight, bias, activation=activation))
        wait()

    extra = EpilogueArgs(activation or "", bias, None, None)
    call = dispatch.Call(x, weight.t(), None, None, None, 1, 0, "", "", extra=extra)
    plan = dispatch.find_plan(call)
    assert dispatch.parts_of(dispatch.at_rows(plan, x.shape)) is not None, "it is torch's still"
    expected = results[0].double()
    for result in results:
        torch.testing.assert_close(result.double(), expected, rtol=0.02, atol=0.5)


def test_a_graph_captures_no_call_that_is_torchs() -> None:
    a, b = integers(256, 512), integers(512, 384)
    outblas.matmul(a, b)

    refused = pytest.raises(RuntimeError, match=r"outblas\.warmup")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        outblas.matmul(a, b)

    outblas.warmup(outblas.matmul, a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = outblas.matmul(a, b)
    graph.replay()
    assert torch.equal(out, a @ b)


def test_a_prepared_model_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = torch.nn.Sequential(
        torch.nn.Linear(512, 768), torch.nn.ReLU(), torch.nn.Linear(768, 512, bias=False)
    )
    mlp = mlp.to("cuda", torch.bfloat16)
    outblas.patch(mlp, fuse=True).prepare(rows=200)
    monkeypatch.setenv("OUTBLAS_COMPILE", "never")
    monkeypatch.setenv("OUTBLAS_STRICT", "1")

    with torch.no_grad():
        for rows in (1, 2, 3, 17, 64, 65, 100, 131, 199, 200):
            assert mlp(integers(rows, 512)).shape == (rows, 512)


def test_torch_computes_products_in_fp8_meanwhile() -> None:
    a, b = (integers(256, 512).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    recipe = torch.nn.functional.ScalingType.TensorWise
    results = []
    for _ in range(3):
        results.append(outblas.scaled_mm(a, b.t(), one, recipe, one, recipe))
        wait()

    expected = (a.double() @ b.double().t()).bfloat16()
    for result in results:
        torch.testing.assert_close(result.double(), expected.double(), rtol=0.01, atol=0.5)
