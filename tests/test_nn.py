"""`outblas.Linear`, `patch` and `unpatch`: the same model, of another class."""

import copy
import io

import pytest
import torch
from torch import nn

from outblas import Linear, patch, unpatch
from outblas.epilogue import apply

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
X = torch.randn(3, 8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.tied = self.up
        self.back = nn.Linear(16, 8)
        self.back.weight = self.down.weight

    def forward(self, x):
        return self.back(torch.relu(self.up(self.down(torch.relu(self.tied(x))))))


def test_a_linear_layer():
    for activation, bias in ((None, True), ("gelu", False), ("swiglu", True)):
        layer, torchs = Linear(8, 6, bias, activation=activation), nn.Linear(8, 6, bias)
        torchs.load_state_dict(layer.state_dict())
        torch.testing.assert_close(layer(X), apply(torchs(X), activation or "", None))
        assert (f"bias={bias}, activation={activation!r})" in repr(layer)) == (activation is not None)


def test_only_the_class_changes():
    net = Net()
    held, want, state = net.up, net(X), {k: v.clone() for k, v in net.state_dict().items()}
    parameters = [id(p) for p in net.parameters()]
    seen = []
    net.up.register_forward_hook(lambda module, given, y: seen.append(y))
    step = torch.optim.SGD(net.parameters(), lr=0.1)
    report = patch(net)
    assert report.swapped == ("up", "down", "back")
    assert patch(net) == report
    assert (type(held), held, net.tied) == (Linear, net.up, net.up)
    assert [id(p) for p in net.parameters()] == parameters
    assert net.back.weight is net.down.weight
    assert net.state_dict().keys() == state.keys()
    torch.testing.assert_close(net(X), want)
    assert len(seen) == 2
    net(X).sum().backward()
    step.step()
    assert not torch.equal(net(X), want)
    net.load_state_dict(state)
    assert unpatch(net).swapped == ("up", "down", "back")
    assert type(held) is nn.Linear
    assert torch.equal(net(X), want)


def test_copies_files_and_compilers_keep_it():
    torch._dynamo.reset()
    net = Net()
    patch(net)
    want = net(X)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), torch.load(file, weights_only=False), net.share_memory()):
        assert type(other.up) is Linear
        torch.testing.assert_close(other(X), want)
    torch.testing.assert_close(torch.compile(net, backend="aot_eager", fullgraph=True)(X), want)
    assert net.double()(X.double()).dtype == torch.float64


def test_what_is_not_swapped_says_why():
    class Lora(nn.Linear):
        pass

    model = nn.ModuleDict({
        "plain": nn.Linear(8, 8), "attention": nn.MultiheadAttention(8, 2), "lazy": nn.LazyLinear(8),
        "lora": Lora(8, 8), "parametrized": nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        "wide": nn.Linear(8, 8, dtype=torch.float64), "replaced": nn.Linear(8, 8),
        "meta": nn.Linear(8, 8, device="meta"), "ours": Linear(8, 8, activation="gelu"),
    })  # fmt: skip
    model["replaced"].forward = lambda x: x
    report = patch(model)
    assert report.swapped == ("plain", "meta", "ours")
    assert report.kept == {
        "attention.out_proj": "is a NonDynamicallyQuantizableLinear",
        "lazy": "has no weight before its first call",
        "lora": "is a Lora",
        "parametrized": "its parameters are computed (parametrized)",
        "wide": "has a weight of torch.float64, which no kernel takes",
        "replaced": "its forward was replaced",
    }
    assert report.remarks["plain"] == "on cpu: torch takes it until it moves to an NVIDIA GPU"
    assert str(report).splitlines()[:2] == [
        "3 swapped, 6 kept",
        f"{'plain':18}  swapped  on cpu: torch takes it until it moves to an NVIDIA GPU",
    ]
    assert unpatch(model).kept == {"ours": "has the activation 'gelu', which torch.nn.Linear has not"}
    assert type(model["plain"]) is nn.Linear
    root = nn.Linear(8, 8)
    assert patch(root).swapped == ("(root)",)
    assert type(root) is Linear
    with pytest.raises(ValueError, match="activation is 'tanh', expected None or one of relu, gelu"):
        Linear(8, 6, activation="tanh")
    with pytest.raises(ValueError, match="out_features is 7, expected an even number for activation 'geglu'"):
        Linear(8, 7, activation="geglu")
    with pytest.raises(TypeError, match=r"model is dict, expected a torch\.nn\.Module"):
        patch({})
