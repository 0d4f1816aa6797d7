"""Calls whose operands lie on a GPU that is not the current one: their first call, warm calls, the
stream that they join, and graphs. Results are those of the other GPU.
"""

from collections.abc import Callable

import pytest
import torch
from support.fp8 import BY_ROW, SQUARE, block_scale, fp8_operands

import outblas

Tensor = torch.Tensor
Call = Callable[[], Tensor | tuple[Tensor, ...]]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.timeout(280),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

M, N, K = 200, 512, 256


def integers(*shape: int) -> Tensor:
    """Small integers, the same for every GPU, in bfloat16 on the CPU."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-2, 3, shape, generator=generator).bfloat16()


def matmul(device: str) -> Call:
    a, b = integers(M, K).to(device), integers(N, K).to(device).t()
    return lambda: outblas.matmul(a, b)


def matmul_out(device: str) -> Call:
    a, b = integers(M, K).to(device), integers(N, K).to(device).t()
    out = torch.empty(M, N, device=device, dtype=torch.bfloat16)
    return lambda: outblas.matmul(a, b, out=out)


def few_rows(device: str) -> Call:
    a, b = integers(8, 4096).to(device), integers(N, 4096).to(device).t()
    return lambda: outblas.matmul(a, b)


def linear(device: str) -> Call:
    x, weight, bias = (integers(*shape).to(device) for shape in ((M, K), (N, K), (N,)))
    return lambda: outblas.linear(x, weight, bias, activation="relu")


def training(device: str) -> Call:
    x, weight, bias = (
        integers(*shape).to(device).requires_grad_() for shape in ((M, K), (N, K), (N,))
    )

    def step() -> tuple[Tensor, ...]:
        y = outblas.linear(x, weight, bias)
        return y.detach(), *torch.autograd.grad(y.sum(), (x, weight, bias))

    return step


def float32(device: str) -> Call:
    a, b = integers(M, K).float().to(device), integers(K, N).float().to(device)
    return lambda: outblas.matmul(a, b, kernel="portable")


def portable(device: str) -> Call:
    a, b = integers(M, K).to(device), integers(K, N).to(device)
    return lambda: outblas.matmul(a, b, kernel="portable")


def batch_invariant(device: str) -> Call:
    a, b = integers(M, K).to(device), integers(N, K).to(device).t()
    return lambda: outblas.matmul(a, b, batch_invariant=True)


def aten(device: str) -> Call:
    """The operators that `enable` takes."""
    a, b, c = (integers(*shape).to(device) for shape in ((M, K), (K, N), (M, N)))
    batch = integers(3, M, K).to(device), integers(3, K, N).to(device)
    out = torch.empty(M, N, device=device, dtype=torch.bfloat16)

    def calls() -> tuple[Tensor, ...]:
        with outblas.enable():
            return (
                torch.mm(a, b),
                torch.addmm(c, a, b),
                torch.bmm(*batch),
                torch.mm(a, b, out=out).clone(),
                torch.nn.functional.linear(a, b.t()),
            )

    return calls


def scaled(device: str) -> Call:
    a, b = fp8_operands(M, N, K, most=1)
    of_a = block_scale(M, K, BY_ROW, "by columns", device)
    of_b = block_scale(N, K, SQUARE, device=device)
    given = a.to(device), b.to(device), of_a, of_b.t()
    return lambda: outblas.scaled_mm(*given)


def quantized(device: str) -> Call:
    a = integers(M, K).to(device)
    return lambda: outblas.quantize(a, "1x128")


def groups(device: str) -> Call:
    a, b = integers(M, K).to(device), integers(4, N, K).to(device).mT
    offs = torch.tensor([20, 20, 120, M], dtype=torch.int32, device=device)
    return lambda: outblas.grouped_mm(a, b, offs=offs)


def experts(device: str) -> Call:
    x, gate_up, down = integers(M, K), integers(4, 2 * N, K) / 16, integers(4, K, N) / 16
    weights, chosen = torch.rand(M, 4, generator=torch.Generator().manual_seed(0)).topk(2)
    given = [t.to(device) for t in (x, gate_up, down, chosen, weights)]
    given[1:3] = (t.mT for t in given[1:3])
    return lambda: outblas.moe_mlp(*given)


MADE = (
    matmul,
    matmul_out,
    few_rows,
    linear,
    training,
    float32,
    portable,
    batch_invariant,
    aten,
    scaled,
    quantized,
    groups,
    experts,
)


def results(call: Call) -> tuple[Tensor, ...]:
    found = call()
    return tuple(t.clone() for t in (found if isinstance(found, tuple) else (found,)))


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8).cpu()


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("made", MADE)
def test_results_are_those_of_the_other_gpu(made: Callable[[str], Call], current: int) -> None:
    """The first call of a process on a GPU, and warm ones."""
    other = 1 - current
    with torch.cuda.device(current):
        wanted = results(made(f"cuda:{current}"))
        call = made(f"cuda:{other}")

        for _ in range(3):
            for got, want in zip(results(call), wanted, strict=True):
                assert got.device == torch.device("cuda", other)
                assert torch.equal(bits(got), bits(want))
        assert torch.cuda.current_device() == current


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("how", ["matmul", "linear", "enable", "groups"])
def test_a_call_joins_the_current_stream_of_its_operands(how: str, warm: bool) -> None:
    """A stream of the other GPU is current there, and has work that the operands wait for."""
    a = torch.zeros(M, K, device="cuda:1", dtype=torch.bfloat16)
    b, known = integers(N, K).to("cuda:1"), integers(M, K).to("cuda:1")
    offs = torch.tensor([M], dtype=torch.int32, device="cuda:1")

    def call() -> Tensor:
        if how == "matmul":
            return outblas.matmul(a, b.t())
        if how == "linear":
            return outblas.linear(a, b)
        if how == "groups":
            return outblas.grouped_mm(a, b.t()[None], offs=offs)
        with outblas.enable():
            return torch.mm(a, b.t())

    wanted = known.float() @ b.float().t()
    if warm:
        for _ in range(3):
            call()
    side = torch.cuda.Stream("cuda:1")
    torch.cuda.synchronize(1)

    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        a.copy_(known)
        with torch.cuda.device(0):
            got = call()
        side.synchronize()

        assert torch.equal(got.float(), wanted.bfloat16().float())


@pytest.mark.parametrize("made", [matmul, linear, groups, scaled])
def test_graphs_of_the_second_gpu(made: Callable[[str], Call]) -> None:
    call = made("cuda:1")
    wanted = results(call)

    with torch.cuda.device(1):
        outblas.warmup(call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = call()
        graph.replay()
        torch.cuda.synchronize()

    assert isinstance(got, Tensor)
    assert torch.equal(got, wanted[0])
