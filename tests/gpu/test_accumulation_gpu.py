"""`outblas.accumulate_gradients` on a GPU: sums of small integers, which are exact, in the layouts
that layers have; and the streams on which autograd adds.
"""

import pytest
import torch

import outblas

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

Tensor = torch.Tensor
CUDA = torch.device("cuda")


def integers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randint(-1, 2, shape, device=CUDA).to(dtype)


def layer_of(columns: int, rows: int, dtype: torch.dtype) -> outblas.Linear:
    layer = outblas.Linear(columns, rows, device=CUDA, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(integers(*parameter.shape, dtype=dtype))
    return layer


def gradient(layer: outblas.Linear, inputs: list[Tensor], grads: list[Tensor]) -> Tensor:
    for x, g in zip(inputs, grads, strict=True):
        layer(x).backward(g)
    assert layer.weight.grad is not None
    return layer.weight.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"),
    [(64, 128, 192), (200, 1024, 512), (1000, 264, 1288), (96, 33, 65), (4096, 4096, 1024)],
)
def test_micro_batches_add_up(tokens: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    layer = layer_of(columns, rows, dtype)
    inputs = [integers(tokens, columns, dtype=dtype) for _ in range(3)]
    grads = [integers(tokens, rows, dtype=dtype) for _ in range(3)]
    with outblas.accumulate_gradients():
        before = gradient(layer, inputs[:1], grads[:1])
        first = before.clone()

        got = gradient(layer, inputs[1:], grads[1:])

    assert got is before, "it is written in place"
    wanted = first
    for x, g in zip(inputs[1:], grads[1:], strict=True):  # rounded once for each
        wanted = (wanted.double() + g.double().t() @ x.double()).to(dtype)
    assert torch.equal(got, wanted)


def test_another_stream_is_left_to_autograd() -> None:
    layer = layer_of(512, 256, torch.bfloat16)
    x, g = integers(128, 512), integers(128, 256)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    with outblas.accumulate_gradients(), torch.cuda.stream(stream):
        got = gradient(layer, [x] * 3, [g] * 3)

    torch.cuda.synchronize()
    exact = g.float().t() @ x.float()
    wanted = exact.bfloat16()
    for _ in range(2):
        wanted = (wanted.float() + exact.bfloat16().float()).bfloat16()
    assert torch.equal(got, wanted)
