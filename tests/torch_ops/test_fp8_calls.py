"""What `scaled_mm` asks of the kernel, and what its fake says of the output."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import outblas
from outblas.torch_ops import scaled_operator as module

FP8 = torch.float8_e4m3fn


def operands(device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """A and B of fp8, and a scale of each."""
    a, b = torch.zeros(16, 32, device=device), torch.zeros(24, 32, device=device)
    one = torch.ones((), device=device)
    return a.to(FP8), b.to(FP8).t(), one, one


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that the kernel is asked for from now on."""
    calls: list[Any] = []

    def run(call: Any) -> torch.Tensor:
        calls.append(call)
        return torch.empty(call.a.shape[0], call.b.shape[1], dtype=call.out_dtype)

    monkeypatch.setattr(module, "unsupported_reason", lambda device: None)
    monkeypatch.setattr(module.dispatch, "run", run)
    return calls


@pytest.mark.parametrize(("fast", "formats"), [(True, "e4m3 e4m3"), (False, "e4m3 e4m3 promoted")])
def test_sums_are_promoted_unless_fast_ones_are_asked_for(
    fast: bool, formats: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = recorded(monkeypatch)

    outblas.scaled_mm(*operands(), use_fast_accum=fast)

    assert [call.formats for call in calls] == [formats]


# For 200 rows and 300 columns: K, the shapes of the scales, and the formats that are asked for.
BLOCKS = {
    "rows by squares": (400, (200, 4), (4, 3), "e4m3 e4m3 promoted 1x128 128x128"),
    "rows by columns": (400, (200, 4), (4, 300), "e4m3 e4m3 promoted 1x128 1x128"),
    "squares by columns": (400, (2, 4), (4, 300), "e4m3 e4m3 promoted 128x128 1x128"),
    "squares": (400, (2, 4), (4, 3), "e4m3 e4m3 promoted 128x128 128x128"),
    "one block of terms": (100, (200, 1), (1, 3), "e4m3 e4m3 promoted 1x128 128x128"),
    "one block of terms of each": (100, (200, 1), (1, 300), "e4m3 e4m3 promoted"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_kernel_is_asked_for_the_recipes_of_blocks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    K, shape_a, shape_b, formats = BLOCKS[name]
    calls = recorded(monkeypatch)
    a, b = torch.zeros(200, K).to(FP8), torch.zeros(300, K).to(FP8).t()
    scale_a, scale_b = torch.ones(shape_a), torch.ones(shape_b[::-1]).t()

    outblas.scaled_mm(a, b, scale_a, scale_b)

    assert [call.formats for call in calls] == [formats]
    assert calls[0].scales[0] is scale_a
    assert calls[0].scales[1] is scale_b


def test_one_block_keeps_both_dimensions_of_its_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded(monkeypatch)
    a, b = torch.zeros(100, 64).to(FP8), torch.zeros(300, 64).to(FP8).t()

    outblas.scaled_mm(a, b, torch.ones(1, 1), torch.ones(1, 3))

    assert [tuple(scale.shape) for scale in calls[0].scales] == [(1, 1), (1, 3)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_fake_has_the_dtype_that_is_asked_for(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        assert outblas.scaled_mm(*operands(), out_dtype=dtype).dtype is dtype
