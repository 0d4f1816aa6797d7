"""`outblas.Linear` in the hands of torch's own tools: what calls, traces, scripts, exports and
quantizes it.
"""

import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.ao.quantization import quantize_fx
from torch.nn.utils import prune

import outblas
from outblas import Linear, patch, unpatch
from outblas.call.epilogue import ACTIVATIONS, Activation, apply

pytestmark = [
    pytest.mark.filterwarnings("ignore::outblas.FallbackWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

Tensor = torch.Tensor
X = torch.randn(3, 8)


class Net(nn.Module):
    """Two layers, one without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


@pytest.fixture
def net() -> Net:
    """A patched model."""
    net = Net().eval()
    patch(net)
    return net


def targets(graph: torch.fx.Graph) -> list[Any]:
    """The functions that a graph calls, and its modules by name."""
    return [node.target for node in graph.nodes if node.op in ("call_function", "call_module")]


# ---- the layer
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS], ids=str)
def test_a_layer_is_torchs_and_an_activation(activation: Activation | None) -> None:
    layer = Linear(8, 6, bias=activation != "gelu", activation=activation)
    torchs = nn.Linear(8, 6, bias=activation != "gelu")
    torchs.load_state_dict(layer.state_dict())
    expected = apply(torchs(X), activation or "", None)

    traced = torch.fx.symbolic_trace(nn.Sequential(layer))

    assert targets(traced.graph) == [outblas.linear]
    for way, computed in (
        ("eager", layer),
        ("traced", traced),
        ("script", torch.jit.script(layer)),
    ):
        torch.testing.assert_close(computed(X), expected, msg=way)


def test_its_arguments_are_torchs_and_an_activation() -> None:
    *ours, last = inspect.signature(Linear).parameters.values()
    torchs = inspect.signature(nn.Linear).parameters.values()

    assert [(p.name, p.kind, p.default) for p in ours] == [
        (p.name, p.kind, p.default) for p in torchs
    ]
    assert last.name == "activation"


@pytest.mark.parametrize(
    ("columns", "activation", "message"),
    [
        (6, "tanh", "activation is 'tanh', expected None or one of relu"),
        (7, "geglu", "out_features is 7, expected an even number for activation 'geglu'"),
    ],
)
def test_an_activation_that_a_layer_cannot_have_is_refused(
    columns: int, activation: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Linear(8, columns, activation=activation)


# ---- what goes to torch whole
class Quantized(torch.Tensor):
    """A weight as torchao's: torch.nn.functional.linear takes it, and little else does."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            return func(*(t.as_subclass(torch.Tensor) for t in args))
        if func in (torch.Tensor.t, torch.matmul, torch.Tensor.dim):
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(("name", "activation"), [("weight", None), ("bias", "swiglu")])
def test_a_layer_that_is_quantized_later_goes_to_torch_whole(
    name: str, activation: Activation | None
) -> None:
    layer = Linear(8, 6, activation=activation)
    expected = layer(X)
    values = getattr(layer, name).detach().as_subclass(Quantized)

    setattr(layer, name, nn.Parameter(values, requires_grad=False))

    assert torch.equal(layer(X), expected)
    with outblas.batch_invariant(), pytest.raises(ValueError, match="tensor subclass Quantized"):
        layer(X)


# ---- traces, scripts and exported programs
def test_a_symbolic_trace_has_a_call_of_ours_for_a_layer(net: Net) -> None:
    net.up.register_forward_hook(lambda module, given, y: 3 * y)

    traced = torch.fx.symbolic_trace(net)

    assert targets(traced.graph).count(outblas.linear) == 2
    assert traced.state_dict().keys() == net.state_dict().keys()
    assert torch.equal(traced(X), net(X))
    traced(X).sum().backward()
    assert net.up.weight.grad is not None
    why = "its graph calls outblas.linear: trace the model after unpatch"
    assert unpatch(nn.ModuleDict({"traced": traced})).kept == {"traced": why}


def test_a_scripted_model_needs_no_operator_of_ours(net: Net) -> None:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(net), file)
    file.seek(0)

    assert b"outblas::" not in file.getvalue()
    torch.testing.assert_close(torch.jit.load(file)(X), net(X))
    assert type(net.up) is Linear


def test_an_exported_program_has_our_operators(net: Net) -> None:
    program = torch.export.export(net, (X,))

    operators = {node.target for node in program.graph.nodes}
    assert {torch.ops.outblas.gemm.default, torch.ops.outblas.matmul.default} < operators
    torch.testing.assert_close(program.module()(X), net(X))


def test_a_compiled_model_follows_patch_and_unpatch() -> None:
    torch._dynamo.reset()
    has_our_operator = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        has_our_operator.append(torch.ops.outblas.gemm.default in targets(graph.graph))
        return graph

    net = Net()
    expected = net(X)
    compiled: Any = torch.compile(net, backend=backend)
    compiled(X)

    report = patch(compiled)
    torch.testing.assert_close(compiled(X), expected)
    unpatch(compiled)

    assert report.swapped == ("_orig_mod.up", "_orig_mod.down")
    assert has_our_operator == [False, True]
    assert torch.equal(compiled(X), expected)


# ---- quantization
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_graph_mode_quantization_quantizes_a_layer(activation: Activation | None) -> None:
    torch.manual_seed(0)  # how near quantized numbers come depends on them
    layer, x = Linear(8, 16, activation=activation), torch.randn(3, 8)
    qconfigs = quantization.get_default_qconfig_mapping(torch.backends.quantized.engine)
    prepared = quantize_fx.prepare_fx(nn.Sequential(layer).eval(), qconfigs, (x,))
    prepared(x)

    converted = quantize_fx.convert_fx(prepared)

    assert torch.ops.quantized.linear in targets(converted.graph)
    expected = layer(x)
    atol = 0.05 * expected.abs().max().item() + 0.01
    torch.testing.assert_close(converted(x), expected, rtol=0, atol=atol)


def test_dynamic_quantization_takes_a_layer_after_unpatch(net: Net) -> None:
    report = patch(net)

    assert any("quantize_dynamic" in note and "unpatch first" in note for note in report.notes)
    assert str(report).splitlines()[-len(report.notes) :] == list(report.notes)
    assert type(quantization.quantize_dynamic(net).up) is Linear
    unpatch(net)
    quantized = quantization.quantize_dynamic(net)
    assert type(quantized.up) is torch.ao.nn.quantized.dynamic.Linear


# ---- hooks that compute the weight
Hook = Callable[[nn.Module], Any]


@pytest.mark.parametrize(
    ("put_on", "take_off"),
    [
        pytest.param(
            lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
            lambda layer: prune.remove(layer, "weight"),
            id="prune",
        ),
        pytest.param(nn.utils.weight_norm, nn.utils.remove_weight_norm, id="weight_norm"),
    ],
)
def test_hooks_that_compute_the_weight_hold_and_come_off(put_on: Hook, take_off: Hook) -> None:
    model = Net().eval()
    put_on(model.up)
    expected = model(X)

    assert patch(model).swapped == ("up", "down")
    torch.testing.assert_close(model(X), expected)
    unpatch(model)

    assert torch.equal(model(X), expected)
    take_off(model.up)
    assert type(model.up) is nn.Linear
    assert dict(model.up.named_parameters()).keys() == {"bias", "weight"}
