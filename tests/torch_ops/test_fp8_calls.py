"""What `scaled_mm` asks of the kernel, and what its fake says of the output."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import outblas
from outblas.torch_ops import scaled_mm as module

FP8 = torch.float8_e4m3fn


def operands(device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """A and B of fp8, and a scale of each."""
    a, b = torch.zeros(16, 32, device=device), torch.zeros(24, 32, device=device)
    one = torch.ones((), device=device)
    return a.to(FP8), b.to(FP8).t(), one, one


@pytest.mark.parametrize(("fast", "formats"), [(True, "e4m3 e4m3"), (False, "e4m3 e4m3 promoted")])
def test_sums_are_promoted_unless_fast_ones_are_asked_for(
    fast: bool, formats: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def run(call: Any) -> torch.Tensor:
        calls.append(call)
        return torch.empty(16, 24, dtype=call.out_dtype)

    monkeypatch.setattr(module, "_no_kernel_reason", lambda a: None)
    monkeypatch.setattr(module.dispatch, "run", run)

    outblas.scaled_mm(*operands(), use_fast_accum=fast)

    assert [call.formats for call in calls] == [formats]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_fake_has_the_dtype_that_is_asked_for(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        assert outblas.scaled_mm(*operands(), out_dtype=dtype).dtype is dtype
