"""Training, compiling and capturing on a GPU, where every product must be ours
(OUTBLAS_STRICT=1).
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.gradients import (
    COLD_THEN_WARM,
    GRADIENT_KINDS,
    assert_gradients_of_a_kind_are_torchs,
    stored_gradient,
)
from torch import nn
from torch._dynamo.utils import counters

import outblas
from outblas import linear, matmul
from outblas.call import dispatch
from outblas.call.epilogue import ACTIVATIONS, GATED, Activation, apply
from outblas.kernels import activation as kernels
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
def by_us(operands: list[Tensor], activation: Activation | None, arriving: Tensor) -> list[Tensor]:
    """The output of a layer and its gradients. `operands`: input, weight, bias, residual."""
    *of_linear, residual = operands
    y = linear(*of_linear, activation=activation, residual=residual)
    return [y, *torch.autograd.grad(y, operands, arriving)]


def by_torch(
    operands: list[Tensor], activation: Activation | None, arriving: Tensor
) -> list[Tensor]:
    x, w, bias, residual = operands
    y = apply(nn.functional.linear(x, w, bias), activation or "", residual)
    return [y, *torch.autograd.grad(y, operands, arriving.to(y.dtype))]


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS], ids=str)
def test_gradients_are_as_good_as_torchs(activation: Activation | None, dtype: torch.dtype) -> None:
    """No further from float64's than twice torch's, or half a rounding, and the same bits each
    time: for a batch of 4 by 100, with a gradient that is not contiguous.
    """
    columns = 256 * (2 if activation in GATED else 1)
    shapes = (4, 100, 264), (columns, 264), (columns,), (4, 100, 256)
    operands = [(normal(*shape) / shape[-1] ** 0.5).to(dtype).requires_grad_() for shape in shapes]
    wide = [t.detach().double().requires_grad_() for t in operands]
    arriving = normal(256, 100, 4, dtype=dtype).permute(2, 1, 0)

    first = by_us(operands, activation, arriving)

    peers = zip(
        first,
        by_torch(operands, activation, arriving),
        by_torch(wide, activation, arriving),
        strict=True,
    )
    for ours, theirs, truth in peers:
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        limit = 2 * distance(theirs, truth) + torch.finfo(dtype).eps / 2
        assert distance(ours, truth) <= limit
    for call in COLD_THEN_WARM:
        assert all(map(torch.equal, by_us(operands, activation, arriving), first)), f"call {call}"


def integers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-1, 2, shape, device="cuda").to(dtype)


def one_by_one(a: Tensor, b: Tensor) -> Tensor:
    """What `grouped` computes, each group by a product of its own."""
    return torch.cat((a[:5] @ b[0], a[5:] @ b[2]))


def grouped(a: Tensor, b: Tensor) -> Tensor:
    offs = torch.tensor([5, 5, 24], dtype=torch.int32, device="cuda")
    return outblas.grouped_mm(a, b, offs=offs)


OF_KINDS: dict[str, tuple[Any, Any, tuple[tuple[int, ...], ...]]] = {
    "linear": (linear, nn.functional.linear, ((4, 6, 64), (32, 64), (32,))),
    "grouped_mm": (grouped, one_by_one, ((24, 64), (3, 64, 32))),
}


@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
@pytest.mark.parametrize("kind", GRADIENT_KINDS)
@pytest.mark.parametrize("name", OF_KINDS)
def test_a_gradient_may_be_of_any_kind(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUTBLAS_STRICT")
    ours, theirs, shapes = OF_KINDS[name]
    tensors = [integers(*shape, dtype=BF16).requires_grad_() for shape in shapes]

    assert_gradients_of_a_kind_are_torchs(kind, ours, theirs, tensors)


# ---- gradients that are added in place
@pytest.mark.parametrize("other_stream", [False, True])
@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "dtype"),
    [
        (64, 128, 192, BF16),
        (200, 1024, 512, FP16),
        (1000, 264, 1288, BF16),
        (96, 33, 65, FP16),
        (4096, 4096, 1024, BF16),
    ],
    ids=str,
)
def test_micro_batches_add_up(
    tokens: int, rows: int, columns: int, dtype: torch.dtype, other_stream: bool
) -> None:
    """On a stream of its own autograd adds."""
    layer = outblas.Linear(columns, rows, device="cuda", dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(integers(*parameter.shape, dtype=dtype))
    batches = [
        (integers(tokens, columns, dtype=dtype), integers(tokens, rows, dtype=dtype))
        for _ in range(3)
    ]
    stream = torch.cuda.Stream() if other_stream else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())

    with outblas.accumulate_gradients(), torch.cuda.stream(stream):
        sums = []
        for x, g in batches:
            layer(x).backward(g)
            sums.append((stored_gradient(layer.weight), stored_gradient(layer.weight).clone()))

    torch.cuda.synchronize()
    expected = torch.zeros(rows, columns, dtype=dtype, device="cuda")
    for (x, g), (gradient, total) in zip(batches, sums, strict=True):
        product = g.double().t() @ x.double()
        if other_stream:
            product = product.to(dtype).double()
        expected = (expected.double() + product).to(dtype)  # rounded once for each
        assert torch.equal(total, expected)
        assert other_stream or gradient is sums[0][0], "it is written in place"


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
    gradients = torch.autograd.grad(y.float().square().mean(), list(model.parameters()))
    return [t.clone() for t in (y, *gradients)]


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_training_is_one_graph(mode: str, dtype: torch.dtype) -> None:
    model = Perceptron(dtype)
    compiled = torch.compile(model, mode=mode, fullgraph=True)

    for _ in range(5):  # warm, recorded, replayed
        x = normal(256, 512, dtype=dtype)
        torch.compiler.cudagraph_mark_step_begin()
        for ours, eager in zip(trained(compiled, x), trained(model, x), strict=True):
            assert distance(ours, eager) < 8 * torch.finfo(dtype).eps

    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["inductor"]["cudagraph_skips"]


NO_WARMUP = r"outblas\.warmup\(function"
UNPREPARED: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Any], str]] = {
    "matmul": (lambda a, b, out: matmul(a, b, out=out), NO_WARMUP),
    "portable": (lambda a, b, out: matmul(a, b, kernel="portable"), NO_WARMUP),
    "backward": (lambda a, b, out: ops.activation_backward(out, out, "gelu"), NO_WARMUP),
    "warmup": (lambda a, b, out: outblas.warmup(matmul, a, b), "before, not inside"),
}


@pytest.mark.parametrize("name", UNPREPARED)
def test_a_capture_without_warmup_says_what_to_do(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No plan is made and no kernel of a backward pass is loaded. The capture goes on."""
    dispatch.clear_cache()
    monkeypatch.setattr(kernels._PASSES, "_loaded", {})
    call, message = UNPREPARED[name]
    a, b, out = normal(333, 111), normal(111, 222), torch.zeros(333, 222, device="cuda")
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match=message):
            call(a, b, out)
        empty = matmul(a[:0], b)  # which needs no kernel
        out += 1
    graph.replay()

    assert empty.shape == (0, 222)
    assert (out == 1).all()


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
