"""Tracers, compilers, fake tensors and function modes see a call of ours as one call."""

import warnings
from typing import Any

import pytest
import torch
from support.recording_modes import RecordingFunctions
from support.tensor_types import C, Plain, Quantized, W, X
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import outblas
from outblas import FallbackWarning, addmm, linear, matmul
from outblas.core import invariance

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
strict_warning = pytest.mark.filterwarnings("error::outblas.FallbackWarning")


# ---- torch.fx
def targets_of(graph: torch.fx.GraphModule) -> list[Any]:
    """The functions that a graph calls."""
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def model(x: torch.Tensor, w: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Calls linear, then matmul, then addmm."""
    y = linear(x, w, c[0], activation="gelu", residual=c)
    return addmm(c, matmul(y, w), w.t(), beta=0.5)


@strict_warning
def test_symbolic_trace_records_our_functions() -> None:
    targets = targets_of(torch.fx.symbolic_trace(model))

    ours = [target for target in targets if getattr(target, "__module__", "") == "outblas.api"]
    assert ours == [linear, matmul, addmm]


def test_a_traced_graph_computes_what_the_function_does() -> None:
    graph = torch.fx.symbolic_trace(model)

    assert torch.equal(graph(X, W, C), model(X, W, C))


@strict_warning
def test_symbolic_trace_records_a_layer_as_one_call() -> None:
    layer = outblas.Linear(5, 4, activation="relu")

    graph = torch.fx.symbolic_trace(torch.nn.Sequential(layer))

    assert targets_of(graph) == [linear]


def test_a_traced_layer_computes_what_the_layer_does() -> None:
    layer = outblas.Linear(5, 4, activation="relu")

    graph = torch.fx.symbolic_trace(torch.nn.Sequential(layer))

    assert torch.equal(graph(X), layer(X))


def test_a_traced_call_keeps_what_it_was_given() -> None:
    graph = torch.fx.symbolic_trace(
        lambda a, b: matmul(a, b, kernel="portable", batch_invariant=True)
    )

    (node,) = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert node.kwargs == {"kernel": "portable", "batch_invariant": True}


def test_a_traced_graph_has_code_that_runs() -> None:
    graph = torch.fx.symbolic_trace(lambda a, b: matmul(a, b))

    copy = torch.fx.GraphModule({}, graph.graph)

    assert torch.equal(copy(X, W.t()), X @ W.t())


# ---- torch.compile
def test_compiled_calls_of_a_plain_subclass_are_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        invariance.flag, "ever", False
    )  # or the graph breaks to look at the context
    compiled = torch.compile(
        lambda x, w: linear(x, w), backend=EagerAndRecordGraphs(), fullgraph=True
    )

    got = compiled(X, W.as_subclass(Plain))

    assert type(got) is Plain
    assert torch.equal(got.as_subclass(torch.Tensor), X @ W.t())


def test_compiled_calls_under_a_default_device_keep_the_operator() -> None:
    backend = EagerAndRecordGraphs()
    compiled = torch.compile(
        lambda x, w: linear(x, w, activation="relu"), backend=backend, fullgraph=True
    )

    with torch.device("cpu"):
        got = compiled(X, W)

    assert torch.equal(got, torch.relu(X @ W.t()))
    (graph,) = backend.graphs
    assert torch.ops.outblas.gemm.default in targets_of(graph)


# ---- fake and functional tensors
def test_fake_tensors_reach_our_operators() -> None:
    with FakeTensorMode() as mode, warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        got = linear(mode.from_tensor(X), mode.from_tensor(W))

    assert isinstance(got, FakeTensor)


def test_functionalized_calls_reach_our_operators() -> None:
    functional = torch.func.functionalize(lambda x, w: linear(x, w))

    graph = make_fx(functional)(X, W)

    assert torch.ops.outblas.matmul.default in targets_of(graph)


def test_functional_tensors_stay_functional() -> None:
    with FunctionalTensorMode():
        x = FunctionalTensor.to_functional(X)

        assert isinstance(linear(x, W), FunctionalTensor)


def test_a_fake_out_that_negates_is_written() -> None:
    with FakeTensorMode() as mode:
        x, w = mode.from_tensor(X), mode.from_tensor(W)
        out = torch._neg_view(torch.empty(13, 8)[1::2, 1::2])

        assert matmul(x, w.t(), out=out) is out


# ---- function modes
class Replacing(TorchFunctionMode):
    """Has another answer for matmul."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return "replaced" if func is matmul else func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, id="plain"),
        pytest.param({"activation": "gelu"}, id="activation"),
        pytest.param({"out": torch.empty(6, 4)}, id="out"),
        pytest.param({"kernel": "portable"}, id="kernel"),
    ],
)
def test_a_function_mode_sees_one_call(given: dict[str, Any]) -> None:
    with RecordingFunctions() as mode:
        linear(X, W, **given)

    assert mode.seen == [linear]


def test_a_function_mode_sees_the_call_of_a_quantized_weight() -> None:
    w = Quantized(W)

    with RecordingFunctions() as mode:
        got = linear(X, w)

    assert mode.seen[0] is linear
    assert torch.equal(got, F.linear(X, W / 2))


def test_a_missing_operand_is_a_type_error_under_a_function_mode() -> None:
    message = r"input is NoneType, expected a torch\.Tensor"
    with RecordingFunctions(), pytest.raises(TypeError, match=message):
        addmm(None, X, W.t())


def test_a_function_mode_may_replace_our_function() -> None:
    with Replacing():
        assert matmul(X, W.t()) == "replaced"


def test_a_default_device_keeps_quantized_weights_whole() -> None:
    with torch.device("meta"):
        assert torch.equal(linear(X, Quantized(W)), F.linear(X, W / 2))
