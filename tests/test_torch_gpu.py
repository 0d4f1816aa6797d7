"""Training, compiling and capturing on a GPU, where every product must be ours (OUTBLAS_STRICT=1)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import outblas
from outblas import addmm, dispatch, linear, matmul, ops
from outblas.epilogue import ACTIVATIONS, GATED, apply
from outblas.gradients import formula

Tensor = torch.Tensor
DTYPES = torch.float32, torch.float16, torch.bfloat16
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OUTBLAS_STRICT", "1")
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, device="cuda")).to(dtype)


def distance(x: Tensor, y: Tensor) -> float:
    """Relative, Frobenius."""
    return float((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-30))


def as_good(ours: Callable[..., Tensor], torchs: Callable[..., Tensor], given: list[Tensor]) -> None:
    """Output and gradients are no further from float64's than twice torch's are, or half a rounding."""
    dtype = given[0].dtype
    truth = [t.detach().double().requires_grad_() for t in given]
    given = [t.detach().requires_grad_() for t in given]
    exact = torchs(*truth)
    weight = torch.randn_like(exact).to(dtype)

    def outcome(call: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
        y = call(*inputs)
        return [y, *torch.autograd.grad(y, inputs, weight.to(y.dtype))]

    for mine, theirs, want in zip(outcome(ours, given), outcome(torchs, given), outcome(torchs, truth), strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert distance(mine, want) <= 2 * distance(theirs, want) + torch.finfo(dtype).eps / 2


# ---- gradients ----
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((300, 264), (264, 520)),
        ((3, 300, 264), (264, 520)),
        ((300, 264), (3, 264, 520)),
        ((2, 1, 300, 264), (3, 264, 136)),
        ((264,), (264, 520)),
        ((3, 300, 264), (264,)),
        ((264,), (264,)),
        ((129, 67), (67, 33)),
    ],
)
def test_matmul(a: tuple[int, ...], b: tuple[int, ...], dtype: torch.dtype) -> None:
    for _ in range(3):  # by operators, and warm
        as_good(matmul, torch.matmul, [normal(*a, dtype=dtype), normal(*b, dtype=dtype)])
    if len(b) > 1:  # stored transposed
        as_good(
            lambda x, w: matmul(x, w.mT), lambda x, w: x @ w.mT, [normal(*a, dtype=dtype), normal(*b, dtype=dtype).mT]
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_addmm(dtype: torch.dtype) -> None:
    for shape in ((300, 520), (520,), (300, 1)):
        for scales in ({}, {"alpha": 0.5, "beta": -2.0}):
            as_good(
                lambda c, a, b, s=scales: addmm(c, a, b, **s),
                lambda c, a, b, s=scales: torch.addmm(c, a, b, **s),
                [normal(*shape, dtype=dtype), normal(300, 264, dtype=dtype), normal(264, 520, dtype=dtype)],
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_linear(activation: str | None, dtype: torch.dtype) -> None:
    columns = 256 * (2 if activation in GATED else 1)
    given = [normal(4, 100, 264, dtype=dtype), normal(columns, 264, dtype=dtype, scale=0.1)]
    given += [normal(columns, dtype=dtype), normal(4, 100, 256, dtype=dtype)]
    for _ in range(3):
        as_good(
            lambda x, w, bias, r: linear(x, w, bias, activation=activation, residual=r),
            lambda x, w, bias, r: apply(nn.functional.linear(x, w, bias), activation or "", r),
            given,
        )


def test_a_wide_product() -> None:
    a, b = normal(300, 264, dtype=torch.bfloat16).requires_grad_(), normal(264, 520, dtype=torch.bfloat16)
    y = matmul(a, b, out_dtype=torch.float32)
    (got,) = torch.autograd.grad(y.square().sum(), a)
    wide = a.detach().float().requires_grad_()
    (want,) = torch.autograd.grad((wide @ b.float()).square().sum(), wide)
    assert (y.dtype, got.dtype) == (torch.float32, torch.bfloat16)
    assert distance(got, want) < 2**-7


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_derivative(activation: str, dtype: torch.dtype) -> None:
    for rows, columns in ((1000, 520), (7, 33), (1, 1), (0, 8), (3, 4096)):
        x = normal(rows, columns * (2 if activation in GATED else 1), dtype=dtype, scale=3)
        buffer = normal(rows * columns + 1, dtype=dtype)
        for grad in (
            buffer[:-1].view(rows, columns),
            buffer[1:].view(rows, columns),
            normal(columns, rows, dtype=dtype).t(),
            normal(1, dtype=dtype).expand(rows, columns),
        ):
            want = formula(grad.double(), x.double(), activation)
            got = ops.activation_backward(grad, x, activation)
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(got.double(), want, rtol=2 * eps, atol=max(eps**1.5, 2e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    a, b, bias = (normal(*s, dtype=dtype).requires_grad_() for s in ((48, 64), (64, 32), (32,)))
    torch.library.opcheck(ops.matmul, (a, b))
    torch.library.opcheck(ops.addmm, (bias, a, b, 0.5, 2.0))
    torch.library.opcheck(ops.gemm, (a, b, None, bias, None, 1, 1, "gelu"))


# ---- compiled ----
class Perceptron(nn.Module):
    def __init__(self, dtype: torch.dtype, width: int = 512) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(*s, device="cuda", dtype=dtype) for s in ((width, 4 * width), (2 * width, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = linear(x, self.up.weight, self.up.bias, activation="swiglu")
        return linear(hidden, self.down.weight, self.down.bias, residual=x)


def trained(model: Callable[[Tensor], Tensor], x: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    y = model(x)
    return [t.clone() for t in (y, *torch.autograd.grad(y.float().square().mean(), parameters))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_training(mode: str, dtype: torch.dtype) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    model = Perceptron(dtype)
    parameters = list(model.parameters())
    compiled = torch.compile(model, mode=mode, fullgraph=True)
    for _ in range(5):  # warm, recorded, replayed
        x = normal(256, 512, dtype=dtype)
        torch.compiler.cudagraph_mark_step_begin()
        for got, want in zip(trained(compiled, x, parameters), trained(model, x, parameters), strict=True):
            assert distance(got, want) < 8 * torch.finfo(dtype).eps
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["inductor"]["cudagraph_skips"]


def test_compiled_once_for_all_sizes() -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    model = Perceptron(torch.bfloat16)
    compiled = torch.compile(model, dynamic=True, fullgraph=True)
    for rows in (256, 64, 1000):
        x = normal(rows, 512, dtype=torch.bfloat16)
        got, want = trained(compiled, x, list(model.parameters())), trained(model, x, list(model.parameters()))
        assert all(distance(*pair) < 0.05 for pair in zip(got, want, strict=True))
    assert counters["stats"]["unique_graphs"] == 1


# ---- captured ----
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_training_step_in_a_cuda_graph(dtype: torch.dtype) -> None:
    model = Perceptron(dtype)
    parameters, x = list(model.parameters()), normal(200, 512, dtype=dtype)

    def step() -> list[Tensor]:
        return trained(model, x, parameters)

    assert outblas.warmup(step) is None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    x.copy_(normal(200, 512, dtype=dtype))
    graph.replay()
    for got, want in zip(captured, step(), strict=True):
        assert torch.equal(got, want)


def test_a_capture_without_warmup_says_what_to_do() -> None:
    from outblas.kernels import activation

    dispatch.forget()
    activation._loaded.cache_clear()
    a, b, out = normal(333, 111), normal(111, 222), torch.zeros(333, 222, device="cuda")
    grad = normal(333, 222)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in (
            lambda: matmul(a, b, out=out),
            lambda: matmul(a, b, kernel="portable"),
            lambda: ops.activation_backward(grad, grad, "gelu"),
        ):
            with pytest.raises(RuntimeError, match=r"outblas\.warmup\(function"):
                call()
        with pytest.raises(RuntimeError, match="before, not inside"):
            outblas.warmup(matmul, a, b)
        assert matmul(a[:0], b).shape == (0, 222)  # needs no kernel
        out += 1
    graph.replay()
    assert (out == 1).all()
    outblas.warmup(matmul, a, b, out=out)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        matmul(a, b, out=out)


# ---- streams, autocast, checkpoints ----
def test_backward_passes_keep_to_the_stream() -> None:
    model, stream = Perceptron(torch.bfloat16), torch.cuda.Stream()
    parameters, x = list(model.parameters()), normal(512, 512, dtype=torch.bfloat16)
    for _ in range(3):
        want = trained(model, x, parameters)
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(x)
        got = trained(model, late, parameters)
    stream.synchronize()
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_training_under_autocast(dtype: torch.dtype) -> None:
    plain = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
    ours = copy.deepcopy(plain)
    outblas.patch(ours)
    x = normal(300, 512)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
    for model in (plain, ours):
        with torch.autocast("cuda", dtype=dtype):
            y = model(x)
        assert y.dtype == dtype
        scaler.scale(y.float().square().mean()).backward()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        assert distance(mine.grad, theirs.grad) < 4 * torch.finfo(dtype).eps


def test_checkpointed() -> None:
    model = Perceptron(torch.bfloat16)
    parameters, x = list(model.parameters()), normal(256, 512, dtype=torch.bfloat16)
    want = trained(model, x, parameters)
    got = trained(lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False), x, parameters)
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


def test_vmap_and_second_derivatives() -> None:
    x, w = normal(5, 128, 256), normal(384, 256, scale=0.1)

    def loss(layer: Any) -> Any:
        return lambda w, x: layer(x, w).square().mean()

    def torchs(x: Tensor, w: Tensor) -> Tensor:
        return nn.functional.silu(x @ w.t())

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return linear(x, w, activation="silu")

    got, want = (torch.vmap(torch.func.grad(loss(f)), (None, 0))(w, x) for f in (ours, torchs))
    assert distance(got, want) < 1e-5
    got, want = (
        torch.func.grad(lambda w, f=f: torch.func.grad(loss(f))(w, x[0]).square().sum())(w) for f in (ours, torchs)
    )
    assert distance(got, want) < 1e-4


# ---- a model that learns ----
class Block(nn.Module):
    """A transformer block: 4 heads, 256 features."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(256) for _ in range(2))
        self.qkv, self.project = nn.Linear(256, 768), nn.Linear(256, 256)
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 64)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def losses(model: nn.Module, dtype: torch.dtype, steps: int = 200) -> Tensor:
    seed = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(16, 64, 256, device="cuda", generator=seed).to(dtype)
    target = x.float().cumsum(1).tanh()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x).float() - target).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_transformer_block_learns_the_same(dtype: torch.dtype) -> None:
    """Patched, losses differ from torch's by no more than a few times what they do where weights begin one rounding
    off."""
    plain = Block().cuda().to(dtype)
    noisy, ours = copy.deepcopy(plain), copy.deepcopy(plain)
    with torch.no_grad():
        for p in noisy.parameters():
            p *= 1 + torch.finfo(dtype).eps * torch.randint_like(p, -1, 2)
    assert outblas.patch(ours).swapped == ("qkv", "project", "up", "down")
    by_torch, by_noise, by_us = (losses(model, dtype) for model in (plain, noisy, ours))
    assert by_torch[-10:].mean() < 0.5 * by_torch[0]
    noise = (by_noise - by_torch).abs() / by_torch
    apart = (by_us - by_torch).abs() / by_torch
    assert apart[0] < 4 * torch.finfo(dtype).eps
    assert apart.mean() < 4 * noise.mean() + torch.finfo(dtype).eps
    assert apart.max() < 4 * noise.max() + 4 * torch.finfo(dtype).eps
