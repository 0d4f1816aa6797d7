"""Training, compiling and capturing on a GPU, where every product must be ours
(OUTBLAS_STRICT=1).
"""

import copy
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import outblas
from outblas import linear, matmul
from outblas.core.epilogue import ACTIVATIONS, GATED, apply
from outblas.kernels import activation as kernels
from outblas.runtime import dispatch
from outblas.torch_ops import ops

Tensor = torch.Tensor
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OUTBLAS_STRICT", "1")
    torch.manual_seed(0)
    counters.clear()
    yield
    torch._dynamo.reset()


def normal(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def distance(x: Tensor, y: Tensor) -> float:
    """Relative, Frobenius."""
    return float((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-30))


# ---- gradients
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_gradients_are_as_good_as_torchs(activation: str | None, dtype: torch.dtype) -> None:
    """No further from float64's than twice torch's, or half a rounding; the same bits each time.
    Calls without an epilogue are test_opinfo's.
    """
    columns = 256 * (2 if activation in GATED else 1)
    shapes = (4, 100, 264), (columns, 264), (columns,), (4, 100, 256)
    given = [(normal(*shape) / shape[-1] ** 0.5).to(dtype).requires_grad_() for shape in shapes]
    weight = normal(256, 100, 4, dtype=dtype).permute(2, 1, 0)

    def torchs(x: Tensor, w: Tensor, bias: Tensor, r: Tensor) -> list[Tensor]:
        y = apply(nn.functional.linear(x, w, bias), activation or "", r)
        return [y, *torch.autograd.grad(y, (x, w, bias, r), weight.to(y.dtype))]

    truth = torchs(*(t.detach().double().requires_grad_() for t in given))
    first = None
    for _ in range(3):  # by operators, and warm
        y = linear(*given[:3], activation=activation, residual=given[3])
        ours = [y, *torch.autograd.grad(y, given, weight)]
        first = first or ours
        assert all(map(torch.equal, ours, first))
        for mine, theirs, want in zip(ours, torchs(*given), truth, strict=True):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            assert distance(mine, want) <= 2 * distance(theirs, want) + torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_the_gradient_of_a_weight_is_written_where_it_stays(activation: str | None, dtype) -> None:
    """`.grad` is the tensor that reaches the leaf: autograd copies nothing, eager, warm or
    compiled.
    """
    x, w = normal(4, 100, 264, dtype=dtype), normal(256, 264, dtype=dtype).requires_grad_()
    reached = []
    w.register_hook(lambda g: reached.append(g.data_ptr()))
    layers = (linear, torch.compile(linear, fullgraph=True))
    for layer in layers:
        for _ in range(3):
            reached.clear()
            w.grad = None
            layer(x, w, activation=activation).float().sum().backward()
            assert [cast(torch.Tensor, w.grad).data_ptr()] == reached
            assert cast(torch.Tensor, w.grad).stride() == w.stride()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_gradients_are_torchs(dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTBLAS_STRICT")
    a, b = (
        torch.randn(*s, dtype=dtype, device="cuda").requires_grad_() for s in ((64, 32), (32, 48))
    )
    g = torch.randn(64, 48, dtype=dtype, device="cuda")
    want = torch.autograd.grad(a @ b, (a, b), g)
    with pytest.warns(outblas.FallbackWarning, match="gradients of complex"):
        matmul(a, b)
    for _ in range(3):
        torch.testing.assert_close(torch.autograd.grad(matmul(a, b), (a, b), g), want)


# ---- compiled and captured
class Perceptron(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(*s, device="cuda", dtype=dtype) for s in ((512, 2048), (1024, 512))
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = linear(x, self.up.weight, self.up.bias, activation="swiglu")
        return linear(hidden, self.down.weight, self.down.bias, residual=x)


def trained(model: Any, x: Tensor) -> list[Tensor]:
    y = model(x)
    return [
        t.clone()
        for t in (y, *torch.autograd.grad(y.float().square().mean(), list(model.parameters())))
    ]


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_training_is_one_graph(mode: str, dtype: torch.dtype) -> None:
    model = Perceptron(dtype)
    compiled = torch.compile(model, mode=mode, fullgraph=True)
    for _ in range(5):  # warm, recorded, replayed
        x = normal(256, 512, dtype=dtype)
        torch.compiler.cudagraph_mark_step_begin()
        for got, want in zip(trained(compiled, x), trained(model, x), strict=True):
            assert distance(got, want) < 8 * torch.finfo(dtype).eps
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["inductor"]["cudagraph_skips"]


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_a_training_step_in_a_cuda_graph(dtype: torch.dtype) -> None:
    model, x = Perceptron(dtype), normal(200, 512, dtype=dtype)
    outblas.warmup(trained, model, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = trained(model, x)
    x.copy_(normal(200, 512, dtype=dtype))
    graph.replay()
    assert all(map(torch.equal, captured, trained(model, x)))


def test_a_capture_without_warmup_says_what_to_do() -> None:
    dispatch.clear_cache()
    kernels._loaded.cache_clear()
    a, b, out, graph = (
        normal(333, 111),
        normal(111, 222),
        torch.zeros(333, 222, device="cuda"),
        torch.cuda.CUDAGraph(),
    )
    with torch.cuda.graph(graph):
        for call in (
            lambda: matmul(a, b, out=out),
            lambda: matmul(a, b, kernel="portable"),
            lambda: ops.activation_backward(out, out, "gelu"),
        ):
            with pytest.raises(RuntimeError, match=r"outblas\.warmup\(function"):
                call()
        with pytest.raises(RuntimeError, match="before, not inside"):
            outblas.warmup(matmul, a, b)
        assert matmul(a[:0], b).shape == (0, 222)  # needs no kernel
        out += 1
    graph.replay()
    assert (out == 1).all()


def test_backward_passes_keep_to_the_stream() -> None:
    model, x, stream = Perceptron(BF16), normal(512, 512, dtype=BF16), torch.cuda.Stream()
    late, want = torch.zeros_like(x), [trained(model, x) for _ in range(3)][-1]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(x)
        got = trained(model, late)
    stream.synchronize()
    assert all(map(torch.equal, got, want))


# ---- models that learn
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_training_under_autocast(dtype: torch.dtype) -> None:
    plain = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
    ours, x = copy.deepcopy(plain), normal(300, 512)
    outblas.patch(ours)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is FP16)
    for model in (plain, ours):
        with torch.autocast("cuda", dtype=dtype):
            y = model(x)
        assert y.dtype == dtype
        scaler.scale(y.float().square().mean()).backward()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert mine.grad.dtype == FP32
        assert distance(mine.grad, theirs.grad) < 4 * torch.finfo(dtype).eps


class Block(nn.Module):
    """A transformer block: 4 heads, 256 features."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(256) for _ in range(2))
        self.qkv, self.project = nn.Linear(256, 768), nn.Linear(256, 256)
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (4, 64)).transpose(1, 2)
            for t in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def losses(model: nn.Module, x: Tensor, steps: int = 200) -> Tensor:
    target, found = x.float().cumsum(1).tanh(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x).float() - target).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_transformer_block_learns_the_same(dtype: torch.dtype) -> None:
    """Patched, its losses are no further from torch's than a few times those of weights that begin
    one rounding off.
    """
    plain, x, eps = (
        Block().cuda().to(dtype),
        normal(16, 64, 256, dtype=dtype),
        torch.finfo(dtype).eps,
    )
    noisy, ours = copy.deepcopy(plain), copy.deepcopy(plain)
    with torch.no_grad():
        for p in noisy.parameters():
            p *= 1 + eps * torch.randint_like(p, -1, 2)
    assert outblas.patch(ours).swapped == ("qkv", "project", "up", "down")
    by_torch, by_noise, by_us = (losses(model, x) for model in (plain, noisy, ours))
    assert by_torch[-10:].mean() < 0.5 * by_torch[0]
    noise, apart = ((found - by_torch).abs() / by_torch for found in (by_noise, by_us))
    assert apart[0] < 4 * eps
    assert apart.mean() < 4 * noise.mean() + eps
    assert apart.max() < 4 * noise.max() + 4 * eps
