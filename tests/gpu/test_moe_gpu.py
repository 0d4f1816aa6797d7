"""`outblas.moe_mlp` on a GPU, beside experts that are computed one by one in float32: sampled
layers, forward and backward.
"""

import random
from typing import NamedTuple, get_args

import pytest
import torch

import outblas
from outblas.call.epilogue import GATED, Activation, apply
from outblas.kernels import moe as kernels
from outblas.torch_ops import moe_passes as passes

Tensor = torch.Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


class Layer(NamedTuple):
    """A layer of experts, with matrices as checkpoints store them."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    routes: Tensor
    weights: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: Activation

    @property
    def differentiable(self) -> list[Tensor]:
        return [t for t in self if isinstance(t, Tensor) and t.is_floating_point()]

    def call(self) -> Tensor:
        return outblas.moe_mlp(
            self.x,
            self.gate_up.mT,
            self.down.mT,
            self.routes,
            self.weights,
            activation=self.activation,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
        )

    def one_by_one(self) -> Tensor:
        """Computes the experts one after the other in float32."""
        x, out = self.x.float(), torch.zeros_like(self.x, dtype=torch.float32)
        for e in range(self.gate_up.shape[0]):
            token, j = torch.where(self.routes == e)
            inner = x[token] @ self.gate_up[e].float().mT
            if self.gate_up_bias is not None:
                inner = inner + self.gate_up_bias[e].float()
            result = apply(inner, self.activation, None) @ self.down[e].float().mT
            if self.down_bias is not None:
                result = result + self.down_bias[e].float()
            shares = self.weights[token, j].float().unsqueeze(1)
            out = out.index_add(0, token, result * shares)
        return out


def draw(rng: random.Random) -> Layer:
    """Some experts do not exist, and some have most of the tokens."""
    tokens, k = rng.choice([1, 5, 128, 1000, 3000]), rng.choice([1, 2, 6, 8])
    experts, H = rng.choice([k, 8, 60, 200]), rng.choice([64, 200, 512, 1024])
    experts, F = max(experts, k), rng.choice([32, 72, 256])
    activation: Activation = rng.choice([*get_args(Activation), "swiglu", "swiglu"])
    dtype = rng.choice([torch.bfloat16, torch.bfloat16, torch.float16])
    W = F * (1 + (activation in GATED))

    def normal(*shape: int, scale: float = 1) -> Tensor:
        return (torch.randn(shape, device="cuda") * scale).to(dtype).requires_grad_()

    skew = torch.arange(experts, device="cuda") * rng.choice([0.0, 0.3])
    weights, index = (torch.rand(tokens, experts, device="cuda") - skew).topk(k)
    index[torch.rand(index.shape, device="cuda") < 0.1] = rng.choice([-1, experts])
    has_bias = rng.random() < 0.4
    return Layer(
        normal(tokens, H),
        normal(experts, W, H, scale=H**-0.5),
        normal(experts, H, F, scale=F**-0.5),
        index.to(rng.choice([torch.int32, torch.int64])),
        weights.softmax(-1).to(rng.choice([dtype, torch.float32])).detach().requires_grad_(),
        normal(experts, W) if has_bias else None,
        normal(experts, H) if has_bias else None,
        activation,
    )


@pytest.mark.parametrize("part", range(10))
def test_sampled_layers(part: int) -> None:
    rng = random.Random(part)
    torch.manual_seed(part)

    for _ in range(4):
        layer = draw(rng)
        grad = torch.randn(layer.x.shape, device="cuda").to(layer.x.dtype)

        result = layer.call()
        gradients = torch.autograd.grad(result, layer.differentiable, grad)

        expected = layer.one_by_one()
        theirs = torch.autograd.grad(expected, layer.differentiable, grad.float())
        for one, other in zip((result, *gradients), (expected, *theirs), strict=True):
            distance = (one.float() - other.float()).norm() / other.float().norm().clamp(min=1e-6)
            assert distance < 6 * torch.finfo(layer.x.dtype).eps


@pytest.mark.parametrize("experts", [1, 7, 128, 1024])
def test_routing_is_that_of_torchs_functions(experts: int) -> None:
    torch.manual_seed(experts)
    for slots in ((1, 1), (127, 1), (128, 1), (129, 1), (5000, 8), (70000, 3)):
        index = torch.randint(-1, experts + 1, slots, device="cuda")
        ours, theirs = kernels.route(index, experts), passes.route(index, experts)
        assert all(map(torch.equal, ours, theirs)), slots
