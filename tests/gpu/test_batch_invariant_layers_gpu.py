"""Batch invariance of sampled layers on a GPU, with epilogues and without: the rows of every batch
of 1 to 512 rows, and of larger ones, have the bits that they have among 8,192 others, in eager
calls, under `enable`, in compiled programs and in CUDA graphs, whichever of them came first.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional as F

import outblas
from outblas.call.epilogue import Activation, glu_split

Tensor = torch.Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

MOST = 8192
LAYERS = 64
ROWS = range(1, 513)
# Layers of Llama-3-8B, Llama-3-70B and Qwen3-32B, one of tensor-parallel parts each; others are
# drawn.
KNOWN = ((6144, 4096), (4096, 14336), (1280, 8192), (8192, 3584), (1280, 5120), (5120, 3200))


@dataclass(frozen=True)
class Layer:
    """A linear layer; `by_columns`: its weight lies transposed in memory."""

    N: int
    K: int
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    activation: Activation | None = None
    residual: bool = False
    by_columns: bool = False

    def normal(self, *shape: int) -> Tensor:
        generator = torch.Generator("cuda").manual_seed(self.N + self.K + sum(shape))
        return torch.randn(shape, generator=generator, device="cuda").to(self.dtype)

    def weight(self) -> Tensor:
        weight = self.normal(self.N * glu_split(self.activation or ""), self.K)
        return weight.t().contiguous().t() if self.by_columns else weight


def sampled() -> list[Layer]:
    rng = random.Random(0)
    layers = [Layer(N, K) for N, K in KNOWN]
    while len(layers) < LAYERS:
        step = rng.choice((1, 8, 64, 128))
        N, K = (step * rng.randint(1, max(1, 2 ** rng.randint(4, 12) // step)) for _ in range(2))
        dtype = rng.choice((torch.bfloat16, torch.bfloat16, torch.float16))
        activation: Activation | None = rng.choice((None, None, None, "gelu", "silu", "swiglu"))
        bias, residual, by_columns = (rng.random() < share for share in (0.5, 0.3, 0.3))
        layers.append(Layer(N, K, dtype, bias, activation, residual, by_columns))
    return layers


Call = Callable[[int, int], Tensor]  # the layer's results for the rows from one number to another


def check(layer: Layer, call: Call, expected: Tensor, counts: list[int]) -> None:
    rng = random.Random(1)
    wrong = []
    for count in counts:
        begin = rng.choice((0, MOST - count, rng.randint(0, MOST - count)))
        if not torch.equal(call(begin, begin + count), expected[begin : begin + count]):
            wrong.append((begin, begin + count))
    assert not wrong, f"{layer}: rows {wrong[:5]} of {len(wrong)} batches differ"


@pytest.mark.parametrize("number", range(LAYERS))
def test_rows_of_every_batch_have_the_same_bits(number: int) -> None:
    """Half of the layers are called with few rows first, half with all."""
    layer = sampled()[number]
    x, weight = layer.normal(MOST, layer.K), layer.weight()
    bias = layer.normal(len(weight)) if layer.bias else None
    residual = layer.normal(MOST, layer.N) if layer.residual else None

    def call(begin: int, end: int) -> Tensor:
        return outblas.linear(
            x[begin:end],
            weight,
            bias,
            activation=layer.activation,
            residual=None if residual is None else residual[begin:end],
            batch_invariant=True,
        )

    if number % 2:
        call(0, 1)
    counts = [*ROWS, *random.Random(number).sample(range(513, MOST), 12)]
    check(layer, call, call(0, MOST), counts)


@pytest.fixture
def enabled() -> Iterator[None]:
    outblas.enable(batch_invariant=True)
    yield
    outblas.disable()


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("number", range(0, LAYERS, 8))
def test_torchs_own_products_have_the_same_bits_compiled_and_in_graphs(number: int) -> None:
    layer = sampled()[number]
    x, weight = layer.normal(MOST, layer.K), layer.weight()
    bias = layer.normal(len(weight)) if layer.bias else None

    def linear(rows: Tensor) -> Tensor:
        return F.linear(rows, weight, bias)

    torch.compiler.reset()
    compiled = torch.compile(linear, dynamic=True)

    def by_graph(rows: Tensor) -> Tensor:
        linear(rows)  # so that its kernel is there
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = linear(rows)
        y.zero_()
        graph.replay()
        return y

    counts = [1, 2, 3, 16, 17, 64, 100, 128, 200, 256, 300, 512, 1000, 4096]
    expected = linear(x)
    for function in (linear, compiled, by_graph):
        check(layer, of_rows(function, x), expected, counts)


def of_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Call:
    return lambda begin, end: function(x[begin:end])
