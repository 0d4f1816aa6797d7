"""Training, compiling and capturing on a GPU, where every product must be ours
(OUTBLAS_STRICT=1).
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.gradients import COLD_THEN_WARM, stored_gradient
from torch import nn
from torch._dynamo.utils import counters

import outblas
from outblas import linear, matmul
from outblas.core.epilogue import ACTIVATIONS, GATED, Activation, apply
from outblas.kernels import activation as kernels
from outblas.runtime import dispatch
from outblas.torch_ops import ops

Tensor = torch.Tensor
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _ours(monkeypatch: pytest.MonkeyPatch, float32_by_kernels: None) -> Iterator[None]:
    """What torch would compute raises; nothing is compiled and counted yet."""
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
@dataclass(frozen=True)
class Layer:
    """A linear layer with an activation and a residual: its operands, which need gradients, and the
    gradient that arrives.
    """

    activation: Activation | None
    operands: list[Tensor]  # input, weight, bias, residual
    arriving: Tensor

    def by_us(self) -> list[Tensor]:
        """The output and the gradients."""
        *given, residual = self.operands
        y = linear(*given, activation=self.activation, residual=residual)
        return [y, *torch.autograd.grad(y, self.operands, self.arriving)]

    def by_torch(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Torch's output and gradients, in a dtype of their own if one is given."""
        given = self.operands
        if dtype is not None:
            given = [t.detach().to(dtype).requires_grad_() for t in given]
        x, w, bias, residual = given
        y = apply(nn.functional.linear(x, w, bias), self.activation or "", residual)
        return [y, *torch.autograd.grad(y, given, self.arriving.to(y.dtype))]


@pytest.fixture(params=[FP32, FP16, BF16], ids=str)
def layer(request: pytest.FixtureRequest, activation: Activation | None) -> Layer:
    """A layer of 256 features for a batch of 4 by 100, with a gradient that is not contiguous."""
    dtype = request.param
    columns = 256 * (2 if activation in GATED else 1)
    shapes = (4, 100, 264), (columns, 264), (columns,), (4, 100, 256)
    operands = [(normal(*shape) / shape[-1] ** 0.5).to(dtype).requires_grad_() for shape in shapes]
    return Layer(activation, operands, normal(256, 100, 4, dtype=dtype).permute(2, 1, 0))


activations = pytest.mark.parametrize("activation", [None, *ACTIVATIONS], ids=str)


@activations
def test_gradients_are_as_good_as_torchs(layer: Layer) -> None:
    """No further from float64's than twice torch's, or half a rounding. Calls without an epilogue
    are test_opinfo's.
    """
    truth, by_torch = layer.by_torch(torch.float64), layer.by_torch()
    half_a_rounding = torch.finfo(layer.arriving.dtype).eps / 2

    for call in COLD_THEN_WARM:
        for ours, theirs, want in zip(layer.by_us(), by_torch, truth, strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), f"call {call}"
            limit = 2 * distance(theirs, want) + half_a_rounding
            assert distance(ours, want) <= limit, f"call {call}"


@activations
def test_gradients_have_the_same_bits_each_time(layer: Layer) -> None:
    first = layer.by_us()

    for call in COLD_THEN_WARM:
        assert all(map(torch.equal, layer.by_us(), first)), f"call {call}"


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_gradient_of_a_weight_is_written_where_it_stays(
    compiled: bool, activation: Activation | None, dtype: torch.dtype
) -> None:
    """`.grad` is the tensor that reaches the leaf: autograd copies nothing, cold or warm."""
    x, w = normal(4, 100, 264, dtype=dtype), normal(256, 264, dtype=dtype).requires_grad_()
    reached: list[int] = []
    w.register_hook(lambda g: reached.append(g.data_ptr()))
    function = torch.compile(linear, fullgraph=True) if compiled else linear

    for call in COLD_THEN_WARM:
        reached.clear()
        w.grad = None
        function(x, w, activation=activation).float().sum().backward()
        assert [stored_gradient(w).data_ptr()] == reached, f"call {call}"
        assert stored_gradient(w).stride() == w.stride(), f"call {call}"


@pytest.fixture(params=[torch.complex64, torch.complex128], ids=str)
def complex_operands(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    """Two complex matrices that need gradients, whose products torch may take."""
    monkeypatch.delenv("OUTBLAS_STRICT")
    return [
        torch.randn(*shape, dtype=request.param, device="cuda").requires_grad_()
        for shape in ((64, 32), (32, 48))
    ]


def test_products_with_complex_gradients_warn(complex_operands: list[Tensor]) -> None:
    with pytest.warns(outblas.FallbackWarning, match="gradients of complex"):
        matmul(*complex_operands)


@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
def test_complex_gradients_are_torchs(complex_operands: list[Tensor]) -> None:
    a, b = complex_operands
    arriving = torch.randn(64, 48, dtype=a.dtype, device="cuda")
    want = torch.autograd.grad(a @ b, (a, b), arriving)

    for _ in COLD_THEN_WARM:
        got = torch.autograd.grad(matmul(a, b), (a, b), arriving)
        torch.testing.assert_close(got, want)


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


@pytest.fixture
def nothing_loaded() -> None:
    """No plan is made and no kernel of a backward pass is loaded."""
    dispatch.clear_cache()
    kernels._PASSES._loaded.clear()


@pytest.mark.usefixtures("nothing_loaded")
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda a, b, out: matmul(a, b, out=out), id="matmul"),
        pytest.param(lambda a, b, out: matmul(a, b, kernel="portable"), id="portable"),
        pytest.param(lambda a, b, out: ops.activation_backward(out, out, "gelu"), id="backward"),
    ],
)
def test_a_capture_without_warmup_says_what_to_do(call: Callable[..., Tensor]) -> None:
    a, b, out = normal(333, 111), normal(111, 222), torch.zeros(333, 222, device="cuda")
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match=r"outblas\.warmup\(function"):
            call(a, b, out)
        out += 1
    graph.replay()

    assert (out == 1).all(), "the capture went on"


@pytest.mark.usefixtures("nothing_loaded")
def test_warmup_is_refused_in_a_capture() -> None:
    a, b, out = normal(333, 111), normal(111, 222), torch.zeros(333, 222, device="cuda")
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="before, not inside"):
            outblas.warmup(matmul, a, b)
        out += 1
    graph.replay()

    assert (out == 1).all(), "the capture went on"


@pytest.mark.usefixtures("nothing_loaded")
def test_an_empty_product_is_captured_without_warmup() -> None:
    a, b, out = normal(333, 111), normal(111, 222), torch.zeros(333, 222, device="cuda")
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph):
        empty = matmul(a[:0], b)
        out += 1

    assert empty.shape == (0, 222)


def test_backward_passes_keep_to_the_stream() -> None:
    model, x, stream = Perceptron(BF16), normal(512, 512, dtype=BF16), torch.cuda.Stream()
    for _ in COLD_THEN_WARM:
        want = trained(model, x)
    late = torch.zeros_like(x)
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
    plain, eps = Block().cuda().to(dtype), torch.finfo(dtype).eps
    x = normal(16, 64, 256, dtype=dtype)
    noisy, ours = copy.deepcopy(plain), copy.deepcopy(plain)
    with torch.no_grad():
        for p in noisy.parameters():
            p.mul_(1 + eps * torch.randint_like(p, -1, 2))
    assert outblas.patch(ours).swapped == ("qkv", "project", "up", "down")

    by_torch, by_noise, by_us = (losses(model, x) for model in (plain, noisy, ours))

    assert by_torch[-10:].mean() < 0.5 * by_torch[0], "torch's model learns"
    noise, apart = ((found - by_torch).abs() / by_torch for found in (by_noise, by_us))
    assert apart[0] < 4 * eps
    assert apart.mean() < 4 * noise.mean() + eps
    assert apart.max() < 4 * noise.max() + 4 * eps
