"""A patched model in the hands of torch's own tools: what traces, scripts, quantizes, prunes and
shards modules.
"""

import io

import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.ao.quantization import quantize_fx
from torch.nn.utils import prune

import outblas
from outblas import Linear, patch, unpatch
from outblas.core.epilogue import ACTIVATIONS

pytestmark = [
    pytest.mark.filterwarnings("ignore::outblas.FallbackWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
X = torch.randn(3, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


@pytest.fixture
def net():
    net = Net().eval()
    patch(net)
    return net


def targets(graph):
    """Functions that a graph calls, and modules by name."""
    return [node.target for node in graph.nodes if node.op in ("call_function", "call_module")]


def test_a_symbolic_trace_has_a_call_of_ours_for_a_layer(net) -> None:
    traced = torch.fx.symbolic_trace(net)
    assert targets(traced.graph) == [outblas.linear, torch.relu, outblas.linear]
    assert traced.state_dict().keys() == net.state_dict().keys()
    assert torch.equal(traced(X), net(X))


def test_a_symbolic_trace_trains(net) -> None:
    traced = torch.fx.symbolic_trace(net)
    traced(X).sum().backward()
    assert net.up.weight.grad is not None


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_symbolic_trace_keeps_the_activation(activation) -> None:
    layer = Linear(8, 6, activation=activation)
    traced = torch.fx.symbolic_trace(nn.Sequential(layer))
    assert targets(traced.graph) == [outblas.linear]
    assert torch.equal(traced(X), layer(X))


def test_hooks_of_a_layer_are_traced_once(net) -> None:
    net.up.register_forward_hook(lambda module, given, y: 3 * y)
    assert torch.equal(torch.fx.symbolic_trace(net)(X), net(X))


def test_a_tracer_that_names_the_layer_a_leaf_keeps_it(net) -> None:
    """As torchvision's create_feature_extractor with `leaf_modules`."""

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m, name):
            return isinstance(m, nn.Linear) or super().is_leaf_module(m, name)

    traced = torch.fx.GraphModule(net, Tracer().trace(net))
    assert targets(traced.graph) == ["up", torch.relu, "down"]
    assert torch.equal(traced(X), net(X))
    assert unpatch(traced).swapped == ("up", "down")


def test_features_are_extracted_by_the_layers_names(net) -> None:
    """As torchvision's create_feature_extractor: the last node of a module is its output."""

    class Tracer(torch.fx.Tracer):
        def __init__(self):
            super().__init__()
            self.last = {}

        def create_node(self, *given, **how):
            node = super().create_node(*given, **how)
            self.last[self.scope.module_path] = node
            return node

    tracer = Tracer()
    graph = tracer.trace(net)
    output = next(node for node in graph.nodes if node.op == "output")
    output.args = ({name: tracer.last[name] for name in ("up", "down")},)
    features = torch.fx.GraphModule(net, graph)(X)
    assert torch.equal(features["up"], net.up(X))
    assert torch.equal(features["down"], net(X))


def test_unpatch_says_that_a_graph_calls_ours(net) -> None:
    model = nn.ModuleDict({"traced": torch.fx.symbolic_trace(net)})
    why = "its graph calls outblas.linear: trace the model after unpatch"
    assert unpatch(model).kept == {"traced": why}
    unpatch(net)
    assert unpatch(torch.fx.symbolic_trace(net)) == outblas.nn.Report()


@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
def test_graph_mode_quantization_quantizes_a_layer(activation: str | None) -> None:
    layer = Linear(8, 16, activation=activation)
    model = nn.Sequential(layer).eval()
    prepared = quantize_fx.prepare_fx(
        model, quantization.get_default_qconfig_mapping(torch.backends.quantized.engine), (X,)
    )
    prepared(X)
    converted = quantize_fx.convert_fx(prepared)
    assert torch.ops.quantized.linear in targets(converted.graph)
    torch.testing.assert_close(
        converted(X), layer(X), rtol=0, atol=0.05 * layer(X).abs().max().item() + 0.01
    )


def test_dynamic_quantization_leaves_a_layer_and_the_report_says_so(net) -> None:
    notes = patch(net).notes
    assert any("quantize_dynamic" in note and "unpatch first" in note for note in notes)
    assert str(patch(net)).splitlines()[-len(notes) :] == list(notes)
    assert type(quantization.quantize_dynamic(net).up) is Linear
    unpatch(net)
    assert type(quantization.quantize_dynamic(net).up) is torch.ao.nn.quantized.dynamic.Linear


def test_notes_are_of_swapped_layers_only() -> None:
    assert patch(nn.Sequential(nn.ReLU())).notes == ()


def test_a_scripted_model_computes_the_same(net) -> None:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(net), file)
    assert b"outblas::" not in file.getvalue()
    file.seek(0)
    torch.testing.assert_close(torch.jit.load(file)(X), net(X))
    assert type(net.up) is Linear


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_scripted_layer_has_its_activation(activation) -> None:
    layer = Linear(8, 6, activation=activation)
    torch.testing.assert_close(torch.jit.script(layer)(X), layer(X))


def test_a_jit_trace_computes_the_same(net) -> None:
    torch.testing.assert_close(torch.jit.trace(net, X)(X), net(X))


def test_an_exported_program_has_our_operators(net) -> None:
    program = torch.export.export(net, (X,))
    operators = {node.target for node in program.graph.nodes}
    assert {torch.ops.outblas.gemm.default, torch.ops.outblas.matmul.default} < operators
    torch.testing.assert_close(program.module()(X), net(X))


def test_a_functional_call_takes_other_weights(net) -> None:
    state = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    assert not torch.func.functional_call(net, state, (X,)).any()


@pytest.mark.parametrize(
    ("put_on", "take_off"),
    [
        (
            lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
            lambda m: prune.remove(m, "weight"),
        ),
        (nn.utils.weight_norm, nn.utils.remove_weight_norm),
        (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
    ],
    ids=["prune", "weight_norm", "spectral_norm"],
)
def test_hooks_that_compute_the_weight_hold(put_on, take_off) -> None:
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


def test_a_wrapper_with_a_base_layer_holds(net) -> None:
    """As LoRA's of peft."""

    class Lora(nn.Module):
        def __init__(self, base_layer):
            super().__init__()
            self.base_layer, self.a, self.b = (
                base_layer,
                nn.Linear(8, 2, bias=False),
                nn.Linear(2, 16, bias=False),
            )

        def forward(self, x):
            return self.base_layer(x) + self.b(self.a(x))

    net.up = Lora(net.up)
    want = net(X)
    assert patch(net).swapped == ("up.base_layer", "up.a", "up.b", "down")
    torch.testing.assert_close(net(X), want)
    assert unpatch(net).kept == {}
    torch.testing.assert_close(net(X), want)


class TestSharded:
    """On one CPU process."""

    @pytest.fixture(scope="class", autouse=True)
    def mesh(self):
        if not torch.distributed.is_available():
            pytest.skip("needs torch.distributed")
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        torch.distributed.destroy_process_group()

    def test_a_sharded_weight_is_not_swapped(self, mesh) -> None:
        layer = torch.distributed.tensor.distribute_module(nn.Linear(8, 6), mesh)
        assert patch(layer).kept == {"(root)": "its weight is a DTensor, which torch takes"}

    def test_a_weight_sharded_afterwards_goes_to_torch_whole(
        self, net, mesh, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        want = net(X)
        torch.distributed.tensor.distribute_module(net, mesh)
        weights, by_torch = [], nn.functional.linear

        def seen(input, weight, bias=None):
            weights.append(weight)
            return by_torch(input, weight, bias)

        monkeypatch.setattr(nn.functional, "linear", seen)
        y = net(torch.distributed.tensor.distribute_tensor(X, mesh))
        torch.testing.assert_close(y.full_tensor(), want)
        assert [
            weight is layer.weight
            for weight, layer in zip(weights, (net.up, net.down), strict=True)
        ] == [True] * 2

    def test_a_layer_of_fully_shard_is_restored(self, net, mesh) -> None:
        want = net(X)
        torch.distributed.fsdp.fully_shard(net.up, mesh=mesh)
        torch.distributed.fsdp.fully_shard(net, mesh=mesh)
        torch.testing.assert_close(net(X), want)
        assert patch(net).swapped == ("up", "down")
        assert unpatch(net) == outblas.nn.Report(("up", "down"))
        assert not any(Linear in type(module).__mro__ for module in net.modules())
        sharded = net.up
        assert isinstance(sharded, torch.distributed.fsdp.FSDPModule)
        y = net(X)
        torch.testing.assert_close(y, want)
        y.sum().backward()
        assert net.up.weight.grad is not None

    def test_other_models_of_fully_shard_stay_ours(self, net, mesh) -> None:
        other = Net()
        patch(other)
        for model in (net, other):
            torch.distributed.fsdp.fully_shard(model.up, mesh=mesh)
        unpatch(net)
        assert Linear in type(other.up).__mro__
