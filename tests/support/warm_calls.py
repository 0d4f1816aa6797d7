"""Calls that are made until they are warm, what stands for a kernel, and a look at whether they
took the short way.
"""

from collections.abc import Callable
from typing import Any

import torch

from outblas import addmm, linear, matmul
from outblas.call.epilogue import apply
from outblas.call.problem import Launch, Problem
from outblas.kernels import portable

Tensor = torch.Tensor

CONFIG = portable.Config(block_m=32)
A, B, C = (torch.randint(-8, 9, shape).float() for shape in ((6, 5), (5, 4), (4,)))
W = B.t().contiguous()
NARROW_A, NARROW_B = A.bfloat16(), B.bfloat16()


def product() -> Tensor:
    return matmul(A, B)


def _new_out() -> Tensor:
    """An output on the CPU, whatever the default device is."""
    return torch.full((6, 4), torch.nan, device="cpu")


# Calls that take the short way when warm, and what torch makes of them.
SHORT_WAY_CALLS: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
    "matmul": (product, lambda: A @ B),
    "vector": (lambda: matmul(A[0], B), lambda: A[0] @ B),
    "batch": (lambda: matmul(A.expand(3, 6, 5), B), lambda: A.expand(3, 6, 5) @ B),
    "out": (lambda: matmul(A, B, out=_new_out()), lambda: A @ B),
    "linear out": (lambda: linear(A, W, out=_new_out()), lambda: A @ B),
    "aux out": (lambda: [aux := _new_out(), matmul(A, B, aux=aux)][0], lambda: A @ B),
    "addmm": (
        lambda: addmm(C, A, B, alpha=0.5, beta=2),
        lambda: torch.addmm(C, A, B, alpha=0.5, beta=2),
    ),
    "addmm beta 0": (lambda: addmm(C, A, B, beta=0), lambda: A @ B),
    "addmm out": (lambda: addmm(C, A, B, out=_new_out()), lambda: torch.addmm(C, A, B)),
    "named kernel": (lambda: matmul(A, B, kernel="portable"), lambda: A @ B),
    "config": (lambda: matmul(A, B, kernel="portable", config=CONFIG), lambda: A @ B),
    "equal configs": (
        lambda: matmul(A, B, kernel="portable", config=portable.Config(block_m=32)),
        lambda: A @ B,
    ),
    "mode": (lambda: matmul(A, B, tune="off"), lambda: A @ B),
    "dtype": (lambda: matmul(NARROW_A, NARROW_B, out_dtype=torch.float32), lambda: A @ B),
    "named kernel of addmm": (
        lambda: addmm(C, A, B, beta=2, kernel="portable"),
        lambda: torch.addmm(C, A, B, beta=2),
    ),
    "named kernel of linear": (
        lambda: linear(A, W, C, kernel="portable", config=CONFIG),
        lambda: torch.nn.functional.linear(A, W, C),
    ),
    "parameter": (lambda: matmul(A, torch.nn.Parameter(B, requires_grad=False)), lambda: A @ B),
}


def stand_in_launcher(problem: Problem, *_: object, no_product: bool) -> Launch:
    """A launcher of what has a kernel's place, as the interpreter takes milliseconds. It calls no
    product of torch, which a test may have overridden.
    """

    def launch(
        a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: Any, beta: Any, *epilogue: Any
    ) -> None:
        x = alpha * (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)
        x = x if c is None else x + beta * c
        bias, residual, aux = epilogue or (None, None, None)
        x = x if bias is None else x + bias
        if aux is not None:
            aux.copy_(x)
        out.copy_(apply(x, problem.epilogue.activation, residual))

    return launch


def warm(call: Callable[[], object]) -> None:
    """Calls often enough for the short way to be known."""
    for _ in range(3):
        call()


def assert_short_way(call: Callable[[], object], operators: list[str]) -> None:
    """A call that is warm goes through none of the operators that a fixture records."""
    warm(call)
    operators.clear()

    call()

    assert operators == []
