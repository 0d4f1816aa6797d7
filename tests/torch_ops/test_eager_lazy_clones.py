"""Lazy clones share memory until one is written: reading an operand, or the address of an output
without elements, must not copy it.
"""

from collections.abc import Callable

import pytest
import torch
from support.gradients import COLD_THEN_WARM
from support.tensor_types import C, W, X

from outblas import addmm, linear, matmul

pytestmark = [
    pytest.mark.filterwarnings("ignore::outblas.FallbackWarning"),
    pytest.mark.skipif(
        not hasattr(torch.Tensor, "const_data_ptr"), reason="reading an address would copy"
    ),
]

Tensor = torch.Tensor


def is_lazy_clone(t: Tensor) -> bool:
    return torch._C._is_cow_tensor(t)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda x, w, c: matmul(x, w.t()), id="matmul"),
        pytest.param(lambda x, w, c: addmm(c, x, w.t()), id="addmm"),
        pytest.param(lambda x, w, c: linear(x, w, residual=c), id="linear"),
        pytest.param(lambda x, w, c: matmul(x, w.t(), out=torch.empty(6, 4)), id="matmul out"),
        pytest.param(lambda x, w, c: addmm(c, x, w.t(), out=torch.empty(6, 4)), id="addmm out"),
    ],
)
def test_inputs_stay_lazy_clones(call: Callable[..., Tensor]) -> None:
    operands = {"x": torch._lazy_clone(X), "w": torch._lazy_clone(W), "c": torch._lazy_clone(C)}

    for _ in COLD_THEN_WARM:
        call(**operands)

    for name, operand in operands.items():
        assert is_lazy_clone(operand), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda c, a, b, out: matmul(a, b, out=out), id="matmul"),
        pytest.param(lambda c, a, b, out: addmm(c, a, b, out=out), id="addmm"),
        pytest.param(lambda c, a, b, out: addmm(out, a, b, out=out), id="addmm in place"),
    ],
)
def test_lazy_clones_without_elements_stay_lazy(
    call: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype
) -> None:
    shared = torch.zeros(30, dtype=dtype)
    a, b, c = torch.empty(0, 5, dtype=dtype), W.t().to(dtype), torch.zeros(4, dtype=dtype)
    out = torch._lazy_clone(shared)[:0].view(0, 4)

    for _ in COLD_THEN_WARM:
        call(c, a, b, out)

    assert is_lazy_clone(out)


def test_a_lazy_clone_that_is_written_has_memory_of_its_own() -> None:
    c = C.clone()
    out = torch._lazy_clone(c)

    addmm(c, X, W.t(), out=out)

    assert torch.equal(c, C)
    assert torch.equal(out, torch.addmm(C, X, W.t()))
