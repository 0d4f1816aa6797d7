"""Batch invariance of sampled layers on a GPU: the rows of every batch of 1 to 512 rows, and of
larger ones, have the bits that they have among 8,192 others, in eager calls, under `enable`, in
compiled programs and in CUDA graphs, whichever of them came first.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional as F

import outblas

Tensor = torch.Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

MOST = 8192
LAYERS = 200
ROWS = range(1, 513)
# Layers of Llama-3-8B, Llama-3-70B and Qwen3-32B, one of tensor-parallel parts each; others are
# drawn.
KNOWN = ((6144, 4096), (4096, 14336), (1280, 8192), (8192, 3584), (1280, 5120), (5120, 3200))


@dataclass(frozen=True)
class Layer:
    N: int
    K: int
    dtype: torch.dtype
    bias: bool

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """8,192 rows, the weight and the bias."""
        generator = torch.Generator("cuda").manual_seed(self.N + self.K)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda").to(self.dtype)

        return normal(MOST, self.K), normal(self.N, self.K), normal(self.N) if self.bias else None


def sampled() -> list[Layer]:
    rng = random.Random(0)
    found = [Layer(N, K, torch.bfloat16, bias=False) for N, K in KNOWN]
    while len(found) < LAYERS:
        step = rng.choice((1, 8, 64, 128))
        N, K = (step * rng.randint(1, max(1, 2 ** rng.randint(4, 12) // step)) for _ in range(2))
        dtype = rng.choice((torch.bfloat16, torch.bfloat16, torch.float16))
        found.append(Layer(N, K, dtype, rng.random() < 0.5))
    return found


def rows_of(rng: random.Random, count: int) -> tuple[int, int]:
    """Where so many rows begin and end among all."""
    begin = rng.choice((0, rng.randint(0, MOST - count)))
    return begin, begin + count


def check(
    layer: Layer, call: Callable[[Tensor], Tensor], x: Tensor, expected: Tensor, counts: list[int]
) -> None:
    rng = random.Random(1)
    wrong = []
    for count in counts:
        begin, end = rows_of(rng, count)
        if not torch.equal(call(x[begin:end]), expected[begin:end]):
            wrong.append((begin, end))
    assert not wrong, f"{layer}: rows {wrong[:5]} of {len(wrong)} batches differ"


@pytest.mark.parametrize("number", range(LAYERS))
def test_rows_of_every_batch_have_the_same_bits(number: int) -> None:
    """Half of the layers are called with few rows first, half with all."""
    layer = sampled()[number]
    x, weight, bias = layer.tensors()

    def call(rows: Tensor) -> Tensor:
        return outblas.linear(rows, weight, bias, batch_invariant=True)

    if number % 2:
        call(x[:1])
    counts = [*ROWS, *random.Random(number).sample(range(513, MOST), 12)]
    check(layer, call, x, call(x), counts)


@pytest.fixture
def enabled() -> Iterator[None]:
    outblas.enable(batch_invariant=True)
    yield
    outblas.disable()


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("number", range(0, LAYERS, 8))
def test_torchs_own_products_have_the_same_bits_compiled_and_in_graphs(number: int) -> None:
    layer = sampled()[number]
    x, weight, bias = layer.tensors()

    def call(rows: Tensor) -> Tensor:
        return F.linear(rows, weight, bias)

    def by_graph(rows: Tensor) -> Tensor:
        call(rows)  # so that its kernel is there
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = call(rows)
        y.zero_()
        graph.replay()
        return y

    torch.compiler.reset()
    compiled = torch.compile(call, dynamic=True)
    counts = [1, 2, 3, 16, 17, 64, 100, 128, 200, 256, 300, 512, 1000, 4096]
    expected = call(x)
    check(layer, call, x, expected, counts)
    check(layer, compiled, x, expected, counts)
    check(layer, by_graph, x, expected, counts)
