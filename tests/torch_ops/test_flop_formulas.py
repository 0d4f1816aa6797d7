"""torch's counter of FLOP counts our products as it counts its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import outblas
from outblas.torch_ops.flop_formulas import product_flops

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

Tensor = torch.Tensor
A, B, C = torch.randn(6, 5), torch.randn(5, 4), torch.randn(6, 4)
BATCH = torch.randn(3, 6, 5)
BIAS = torch.randn(4)


@pytest.fixture(autouse=True)
def _formulas() -> None:
    """torch's counter knows the formulas once a function of outblas was called under a counter."""
    with FlopCounterMode(display=False):
        outblas.matmul(A, B)


def flops(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    found: int = counter.get_total_flops()
    return found


def trained(function: Callable[..., Tensor], *given: Any) -> Callable[[], object]:
    operands = [t.clone().requires_grad_() for t in given]
    return lambda: function(*operands).sum().backward()


PAIRS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "matmul": (lambda: outblas.matmul(A, B), lambda: torch.matmul(A, B)),
    "matmul out": (
        lambda: outblas.matmul(A, B, out=torch.empty(6, 4)),
        lambda: torch.matmul(A, B, out=torch.empty(6, 4)),
    ),
    "batch": (lambda: outblas.matmul(BATCH, B), lambda: torch.matmul(BATCH, B)),
    "vector": (lambda: outblas.matmul(A, B[:, 0]), lambda: A @ B[:, :1]),
    "addmm": (lambda: outblas.addmm(C, A, B), lambda: torch.addmm(C, A, B)),
    "addmm out": (
        lambda: outblas.addmm(C, A, B, out=torch.empty(6, 4)),
        lambda: torch.addmm(C, A, B, out=torch.empty(6, 4)),
    ),
    "linear": (
        lambda: outblas.linear(A, B.t(), BIAS, activation="gelu"),
        lambda: F.gelu(F.linear(A, B.t(), BIAS)),
    ),
    "epilogue out": (
        lambda: outblas.matmul(A, B, bias=BIAS, out=torch.empty(6, 4)),
        lambda: A @ B + BIAS,
    ),
    "operator": (lambda: torch.ops.outblas.matmul(A, B), lambda: A @ B),
    "matmul, forward and backward": (
        trained(outblas.matmul, A, B),
        trained(torch.matmul, A, B),
    ),
    "linear, forward and backward": (
        trained(outblas.linear, A, B.t().contiguous(), BIAS),
        trained(F.linear, A, B.t().contiguous(), BIAS),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_call_has_the_flop_that_torch_counts(name: str) -> None:
    ours, theirs = PAIRS[name]

    assert flops(ours) == flops(theirs) > 0


@pytest.mark.parametrize("name", PAIRS)
def test_a_warm_call_is_counted(name: str) -> None:
    ours, theirs = PAIRS[name]
    for _ in range(2):
        ours()

    assert flops(ours) == flops(theirs)


def test_a_patched_model_has_the_flop_of_the_model() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    expected = flops(lambda: model(BATCH).sum().backward())
    outblas.patch(model, fuse=True)

    assert flops(lambda: model(BATCH).sum().backward()) == expected


@pytest.mark.filterwarnings("ignore")
def test_a_product_of_fp8_is_counted() -> None:
    a, b = torch.randn(16, 32).to(torch.float8_e4m3fn), torch.randn(64, 32).to(torch.float8_e4m3fn)
    one = torch.ones(())

    assert flops(lambda: outblas.scaled_mm(a, b.t(), one, one)) == 2 * 16 * 32 * 64


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((6, 5), (5, 4), 2 * 6 * 5 * 4),
        ((5,), (5,), 2 * 5),
        ((3, 1, 6, 5), (2, 5, 4), 2 * 3 * 2 * 6 * 5 * 4),
        ((0, 5), (5, 4), 0),
    ],
)
def test_a_product_has_two_operations_a_term(a: Any, b: Any, expected: int) -> None:
    assert product_flops(a, b) == expected
