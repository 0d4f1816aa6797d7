"""`patch(model, fuse=True)` and others that use the memory of weights: they see every update, and
so does the model.
"""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed import fsdp, tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.multiprocessing import reductions
from torch.nn.parallel import DistributedDataParallel

import outblas
from outblas import patch, unpatch
from outblas.base.compat import torch_private

pytestmark = pytest.mark.filterwarnings("ignore")

Tensor = torch.Tensor
X = torch.randn(5, 8)


class Mlp(nn.Module):
    """A gated MLP with names of its own."""

    def __init__(self) -> None:
        super().__init__()
        # In this order, gate and up are not side by side in buffers of all parameters.
        self.w1, self.w2, self.w3 = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.w3(x) * self.act(self.w1(x)))


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(Mlp(), nn.Linear(8, 8), nn.GELU(), Mlp())


# ---- memory that others write to
def flat(model: Any) -> list[Tensor]:
    """A buffer of all parameters, as optimizers make it."""
    parameters = list(model.parameters())
    buffer = torch.cat([p.detach().flatten() for p in parameters])
    pieces = buffer.split([p.numel() for p in parameters])
    for p, piece in zip(parameters, pieces, strict=True):
        p.data = piece.view(p.shape)
    return [buffer]


def aliases(model: Any) -> list[Tensor]:
    return [p.detach() for p in model.parameters()]


def arrays(model: Any) -> list[Any]:
    """Memory of numpy, which may be that of another process in its turn."""
    memory = [p.detach().numpy().copy() for p in model.parameters()]
    for p, array in zip(model.parameters(), memory, strict=True):
        p.data = torch.from_numpy(array)
    return memory


def shared_memory(model: Any) -> list[Tensor]:
    model.share_memory()
    return [rebuild(*given) for rebuild, given in map(reductions.reduce_tensor, model.parameters())]


OWNERS: dict[str, Callable[[Any], list[Any]]] = {
    "a flat buffer": flat,
    "other tensors": aliases,
    "numpy": arrays,
    "shared memory": shared_memory,
}


@torch.no_grad()
def doubled(model: Any) -> Any:
    """A copy that is not fused, with weights twice as large."""
    plain = copy.deepcopy(model)
    for p in plain.parameters():
        p.mul_(2)
    return plain


@pytest.mark.parametrize("name", OWNERS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_others_write_arrives(name: str, when: str, fused_gemms: list[str | None]) -> None:
    model = net()
    expected = doubled(model)(X)
    owned = OWNERS[name](model) if when == "before" else []

    report = patch(model, fuse=True)
    model(X)
    fused = 0 if when == "before" else 2
    assert len(fused_gemms) == fused
    assert len(report.fused) == 1 + fused
    assert len([why for why in report.remarks.values() if "Mlp computes as without" in why]) == (
        2 - fused
    )
    if when == "after":
        owned = OWNERS[name](model)
        model(X)
    with torch.no_grad():
        for memory in owned:
            memory *= 2

    torch.testing.assert_close(model(X), expected)
    unpatch(model)
    torch.testing.assert_close(model(X), expected)


def test_tied_weights_stay_tied(fused_gemms: list[str | None]) -> None:
    model = net()
    model[3].w1.weight = model[0].w1.weight

    patch(model, fuse=True)
    with torch.no_grad():
        model[0].w1.weight.mul_(2)

    plain = copy.deepcopy(model)
    unpatch(plain)
    torch.testing.assert_close(model(X), plain(X))
    assert model[3].w1.weight is model[0].w1.weight


def test_a_weight_of_a_storage_that_was_sent_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those on a GPU, of which torch notes what it sends to other processes."""
    model = net()
    sent = reductions.StorageWeakRef(model[0].w3.weight.untyped_storage())
    monkeypatch.setattr(torch_private, "_sent", {"handle": sent})

    report = patch(model, fuse=True)

    assert report.remarks["0"] == (
        "w3.weight is shared with other processes: Mlp computes as without patch"
    )
    assert list(report.fused) == ["1", "3"]
    assert re.search(r"^0 +not fused  w3.weight is shared", str(report), re.MULTILINE)


# ---- training in groups of processes
def trained(model: Any, optimizer: Any, steps: int = 3, x: Tensor = X) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - x.sin()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def sharded(*modules: Any) -> Any:
    mesh = init_device_mesh("cpu", (1,))
    for module in modules:
        fsdp.fully_shard(module, mesh=mesh)
    return modules[-1]


def of_layers(model: Any) -> Any:
    return sharded(model[0].w1, model[1], model)


def ddp(model: Any) -> Any:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def zero(model: Any) -> Any:
    return ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, parameters_as_bucket_view=True, lr=0.5
    )


# What is made of a model, its optimizer, and how many MLPs are fused in each step.
WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], int]] = {
    "fully_shard of layers": (of_layers, sgd, 0),
    "DDP": (ddp, sgd, 2),
    "ZeRO": (lambda model: model, zero, 0),
}


class TestInOneProcess:
    """Process groups of one CPU process."""

    @pytest.fixture(scope="class", autouse=True)
    def group(self) -> Iterator[None]:
        """A process group."""
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        yield
        distributed.destroy_process_group()

    @pytest.mark.parametrize("name", WAYS)
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_a_fused_model_trains_as_any_other(
        self, name: str, when: str, fused_gemms: list[str | None]
    ) -> None:
        wrap, optimizer, fused = WAYS[name]
        plain = wrap(net())
        expected = trained(plain, optimizer(plain))
        model = net()

        if when == "before":
            patch(model, fuse=True)
        wrapped = wrap(model)
        steps = optimizer(wrapped)
        addresses = [
            p.data_ptr() for p in steps.param_groups[0]["params"] if type(p) is nn.Parameter
        ]
        if when == "after":
            patch(model, fuse=True)
        losses = trained(wrapped, steps)

        assert losses == pytest.approx(expected, rel=1e-5)
        assert len(fused_gemms) == 3 * fused
        if not fused:
            parameters = [p for p in wrapped.parameters() if type(p) is nn.Parameter]
            assert [p.data_ptr() for p in parameters] == addresses, "the optimizer has other memory"
        for got, p in zip(wrapped.parameters(), plain.parameters(), strict=True):
            full = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in (got, p)]
            torch.testing.assert_close(*full, rtol=1e-4, atol=1e-5)
        unpatch(model)
        assert torch.equal(wrapped(X), wrapped(X))
        torch.testing.assert_close(wrapped(X), plain(X), rtol=1e-4, atol=1e-5)

    def test_a_model_that_was_sharded_trains_by_kernels_as_any_other(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain, model = of_layers(net()), of_layers(net())
        kinds = [type(module) for module in model.modules()]
        expected = trained(plain, sgd(plain))
        weights: list[type] = []

        def linear(x: Tensor, w: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
            weights.append(type(w))
            return outblas.linear(x, w, bias, **options)

        monkeypatch.setattr("outblas.nn.linear", linear)
        report = patch(model, fuse=True)

        assert trained(model, sgd(model)) == pytest.approx(expected, rel=1e-5)
        assert set(weights) == {nn.Parameter}
        assert len(weights) == 3 * len(report.swapped)
        assert not report.kept
        assert isinstance(model[0].w1, fsdp.FSDPModule)
        unpatch(model)
        assert [kind.__mro__[-3:] for kind in map(type, model.modules())] == [
            kind.__mro__[-3:] for kind in kinds
        ]

    def test_a_sharded_weight_is_not_swapped(self) -> None:
        layer = tensor.distribute_module(nn.Linear(8, 6), init_device_mesh("cpu", (1,)))

        with pytest.warns(UserWarning, match="swapped nothing"):
            assert patch(layer).kept == {"(root)": "its weight is a DTensor"}

    def test_a_weight_sharded_after_patch_goes_to_torch_whole(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, mesh = nn.Linear(8, 6), init_device_mesh("cpu", (1,))
        expected = model(X)
        patch(model)
        tensor.distribute_module(model, mesh)
        weights: list[Tensor] = []
        by_torch = nn.functional.linear

        def recording(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            weights.append(weight)
            return by_torch(input, weight, bias)

        monkeypatch.setattr(nn.functional, "linear", recording)

        y: Any = model(tensor.distribute_tensor(X, mesh))

        torch.testing.assert_close(y.full_tensor(), expected)
        assert len(weights) == 1
        assert weights[0] is model.weight
