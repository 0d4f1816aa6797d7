"""A patched model in the hands of torch's own tools: what traces, scripts, quantizes, prunes and
shards modules.
"""

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.ao import quantization
from torch.ao.quantization import quantize_fx
from torch.distributed import fsdp, tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import prune

import outblas
from outblas import Linear, patch, unpatch
from outblas.core.epilogue import ACTIVATIONS, Activation

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
    """Functions that a graph calls, and modules by name."""
    return [node.target for node in graph.nodes if node.op in ("call_function", "call_module")]


# ---- traces
def test_a_symbolic_trace_has_a_call_of_ours_for_a_layer(net: Net) -> None:
    net.up.register_forward_hook(lambda module, given, y: 3 * y)

    traced = torch.fx.symbolic_trace(net)

    assert [t for t in targets(traced.graph) if t is outblas.linear] == 2 * [outblas.linear]
    assert traced.state_dict().keys() == net.state_dict().keys()
    assert torch.equal(traced(X), net(X))
    traced(X).sum().backward()
    assert net.up.weight.grad is not None


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_symbolic_trace_keeps_the_activation(activation: Activation) -> None:
    layer = Linear(8, 6, activation=activation)

    traced = torch.fx.symbolic_trace(nn.Sequential(layer))

    assert targets(traced.graph) == [outblas.linear]
    assert torch.equal(traced(X), layer(X))


def test_a_tracer_that_names_the_layer_a_leaf_keeps_it(net: Net) -> None:
    """As torchvision's create_feature_extractor with `leaf_modules`."""

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, nn.Linear) or super().is_leaf_module(m, module_qualified_name)

    traced = torch.fx.GraphModule(net, Tracer().trace(net))

    assert targets(traced.graph) == ["up", torch.relu, "down"]
    assert torch.equal(traced(X), net(X))
    assert unpatch(traced).swapped == ("up", "down")


def test_unpatch_says_that_a_graph_calls_ours(net: Net) -> None:
    model = nn.ModuleDict({"traced": torch.fx.symbolic_trace(net)})

    report = unpatch(model)

    why = "its graph calls outblas.linear: trace the model after unpatch"
    assert report.kept == {"traced": why}


# ---- quantization
@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
def test_graph_mode_quantization_quantizes_a_layer(activation: Activation | None) -> None:
    torch.manual_seed(0)  # how near quantized numbers come depends on them
    layer, x = Linear(8, 16, activation=activation), torch.randn(3, 8)
    qconfigs = quantization.get_default_qconfig_mapping(torch.backends.quantized.engine)
    prepared = quantize_fx.prepare_fx(nn.Sequential(layer).eval(), qconfigs, (x,))
    prepared(x)

    converted = quantize_fx.convert_fx(prepared)

    assert torch.ops.quantized.linear in targets(converted.graph)
    want = layer(x)
    atol = 0.05 * want.abs().max().item() + 0.01
    torch.testing.assert_close(converted(x), want, rtol=0, atol=atol)


def test_dynamic_quantization_takes_a_layer_after_unpatch(net: Net) -> None:
    report = patch(net)

    assert any("quantize_dynamic" in note and "unpatch first" in note for note in report.notes)
    assert str(report).splitlines()[-len(report.notes) :] == list(report.notes)
    assert type(quantization.quantize_dynamic(net).up) is Linear
    unpatch(net)
    quantized = quantization.quantize_dynamic(net)
    assert type(quantized.up) is torch.ao.nn.quantized.dynamic.Linear


# ---- scripts and exported programs


def test_a_scripted_model_needs_no_operator_of_ours(net: Net) -> None:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(net), file)
    file.seek(0)

    assert b"outblas::" not in file.getvalue()
    torch.testing.assert_close(torch.jit.load(file)(X), net(X))
    assert type(net.up) is Linear


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_scripted_layer_has_its_activation(activation: Activation) -> None:
    layer = Linear(8, 6, activation=activation)
    torch.testing.assert_close(torch.jit.script(layer)(X), layer(X))


def test_an_exported_program_has_our_operators(net: Net) -> None:
    program = torch.export.export(net, (X,))

    operators = {node.target for node in program.graph.nodes}
    assert {torch.ops.outblas.gemm.default, torch.ops.outblas.matmul.default} < operators
    torch.testing.assert_close(program.module()(X), net(X))


# ---- hooks and wrappers
Hook = Callable[[nn.Module], Any]
computed_weights = pytest.mark.parametrize(
    ("put_on", "take_off"),
    [
        pytest.param(
            lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
            lambda layer: prune.remove(layer, "weight"),
            id="prune",
        ),
        pytest.param(nn.utils.weight_norm, nn.utils.remove_weight_norm, id="weight_norm"),
        pytest.param(nn.utils.spectral_norm, nn.utils.remove_spectral_norm, id="spectral_norm"),
    ],
)


@computed_weights
def test_hooks_that_compute_the_weight_hold_and_come_off(put_on: Hook, take_off: Hook) -> None:
    model = Net().eval()
    put_on(model.up)
    want = model(X)

    assert patch(model).swapped == ("up", "down")
    torch.testing.assert_close(model(X), want)
    unpatch(model)

    assert torch.equal(model(X), want)
    take_off(model.up)
    assert type(model.up) is nn.Linear
    assert dict(model.up.named_parameters()).keys() == {"bias", "weight"}


class TestSharded:
    """On one CPU process."""

    @pytest.fixture(scope="class", autouse=True)
    def mesh(self) -> Iterator[DeviceMesh]:
        """A mesh of one process, in a process group of its own."""
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        yield init_device_mesh("cpu", (1,))
        distributed.destroy_process_group()

    def test_a_sharded_weight_is_not_swapped(self, mesh: DeviceMesh) -> None:
        layer = tensor.distribute_module(nn.Linear(8, 6), mesh)

        assert patch(layer).kept == {"(root)": "its weight is a DTensor, which torch takes"}

    def test_a_weight_sharded_afterwards_goes_to_torch_whole(
        self, net: Net, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        want = net(X)
        tensor.distribute_module(net, mesh)
        weights: list[Tensor] = []
        by_torch = nn.functional.linear

        def recording_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            weights.append(weight)
            return by_torch(input, weight, bias)

        monkeypatch.setattr(nn.functional, "linear", recording_linear)

        y = net(tensor.distribute_tensor(X, mesh))

        torch.testing.assert_close(y.full_tensor(), want)
        assert len(weights) == 2
        assert weights[0] is net.up.weight
        assert weights[1] is net.down.weight

    def test_fully_shard_keeps_ours_and_unpatch_restores_it(
        self, net: Net, mesh: DeviceMesh
    ) -> None:
        want, other = net(X), Net()
        patch(other)
        for module in (net.up, net, other.up):
            fsdp.fully_shard(module, mesh=mesh)
        torch.testing.assert_close(net(X), want)
        assert patch(net).swapped == ("up", "down")

        assert unpatch(net) == outblas.nn.Report(("up", "down"), restored=True)

        assert not any(Linear in type(module).__mro__ for module in net.modules())
        assert isinstance(net.get_submodule("up"), fsdp.FSDPModule)
        assert Linear in type(other.up).__mro__
        y = net(X)
        y.sum().backward()
        torch.testing.assert_close(y, want)
        assert net.up.weight.grad is not None
