"""Calls share a plan only where it is right for both: what tells them apart is in the keys of both
caches, that of eager calls and that of the operators.

A stand-in for the kernels fills an output with the number of the plan that ran.
"""

import functools
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

import outblas
from outblas.kernels import portable
from outblas.runtime import dispatch

WARM = 4  # calls after which the eager cache has a plan


@pytest.fixture(autouse=True)
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every plan has a number, which its launches write."""
    numbers = itertools.count(1)

    def plan(*_: object, no_product: bool) -> Callable[..., object]:
        number = next(numbers)
        return lambda a, b, c, out, *_: out.fill_(number)

    monkeypatch.setattr(dispatch.launcher, "no_kernel_reason", lambda problem: None)
    monkeypatch.setattr(dispatch.launcher, "unsupported_reason", lambda kernel, problem: None)
    monkeypatch.setattr(dispatch.launcher, "best_launcher", plan)
    monkeypatch.setattr(dispatch.launcher, "named_launcher", plan)
    dispatch.clear_cache()
    yield
    dispatch.clear_cache()


@functools.cache
def matrix(rows: int, columns: int, offset: int = 0, by_columns: bool = False) -> torch.Tensor:
    """A matrix that begins so many elements past a cache line."""
    memory = torch.zeros(rows * columns + 128)
    start = (-memory.data_ptr() % 128) // 4 + offset
    flat = memory[start : start + rows * columns]
    return flat.view(columns, rows).t() if by_columns else flat.view(rows, columns)


def matmul(a=0, b=0, out=None, **arguments) -> torch.Tensor:
    """A product whose operands, and whose output if it is given, begin at these offsets."""
    given = None if out is None else matrix(16, 24, out)
    return outblas.matmul(matrix(16, 32, a), matrix(32, 24, b), out=given, **arguments)


def addmm(c=0, **arguments) -> torch.Tensor:
    """A product with an addend that begins at this offset."""
    return outblas.addmm(matrix(16, 24, c), matrix(16, 32), matrix(32, 24), **arguments)


def fused(residual=0, activation="relu") -> torch.Tensor:
    """A product with an epilogue."""
    return matmul(activation=activation, residual=matrix(16, 24, residual))


def linear(x=0, weight=0, bias=None, residual=None, out=None, **arguments) -> torch.Tensor:
    """A layer whose tensors begin at these offsets."""
    return outblas.linear(
        matrix(16, 32, x),
        matrix(24, 32, weight),
        None if bias is None else matrix(1, 24, bias)[0],
        residual=None if residual is None else matrix(16, 24, residual),
        out=None if out is None else matrix(16, 24, out),
        **arguments,
    )


def by_columns() -> torch.Tensor:
    """A product of an A that lies by columns."""
    return outblas.matmul(matrix(16, 32, by_columns=True), matrix(32, 24))


def narrow(out_dtype: torch.dtype) -> torch.Tensor:
    """A product of 16-bit operands."""
    a = matrix(16, 32).view(torch.bfloat16)
    return outblas.matmul(a, a.mT, out_dtype=out_dtype)


PAIRS: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]] = {
    "address of A": (matmul, lambda: matmul(a=1)),
    "address of B": (matmul, lambda: matmul(b=4)),
    "address of C": (addmm, lambda: addmm(c=1)),
    "address of the output": (lambda: matmul(out=0), lambda: matmul(out=1)),
    "address of the residual": (fused, lambda: fused(residual=1)),
    "strides": (matmul, by_columns),
    "beta of 0": (lambda: addmm(beta=2), lambda: addmm(beta=0)),
    "alpha of 1": (lambda: addmm(alpha=2), lambda: addmm(alpha=1)),
    "alpha of 0": (lambda: addmm(alpha=2), lambda: addmm(alpha=0)),
    "activation": (fused, lambda: fused(activation="gelu")),
    "epilogue": (matmul, fused),
    "batch invariance": (matmul, lambda: matmul(batch_invariant=True)),
    "named kernel": (matmul, lambda: matmul(kernel="portable")),
    "name of the kernel": (
        lambda: matmul(kernel="simt.naive"),
        lambda: matmul(kernel="portable"),
    ),
    "config of a named kernel": (
        lambda: matmul(kernel="portable"),
        lambda: matmul(kernel="portable", config=portable.Config(block_m=32)),
    ),
    "mode": (matmul, lambda: matmul(tune="off")),
    "address of a layer's input": (linear, lambda: linear(x=1)),
    "address of a weight": (linear, lambda: linear(weight=4)),
    "bias": (linear, lambda: linear(bias=0)),
    "address of a bias": (lambda: linear(bias=0), lambda: linear(bias=1)),
    "address of a layer's residual": (lambda: linear(residual=0), lambda: linear(residual=1)),
    "address of a layer's output": (lambda: linear(out=0), lambda: linear(out=1)),
    "bias or residual": (lambda: linear(bias=0), lambda: linear(residual=0)),
    "activation of a layer": (
        lambda: linear(activation="relu"),
        lambda: linear(activation="gelu"),
    ),
    "batch invariance of a layer": (linear, lambda: linear(batch_invariant=True)),
    "named kernel of a layer": (linear, lambda: linear(kernel="portable")),
    "mode of a layer": (linear, lambda: linear(tune="off")),
    "dtype of the output": (lambda: narrow(torch.bfloat16), lambda: narrow(torch.float32)),
}


def number_of(call: Callable[[], torch.Tensor]) -> float:
    """The plan that a call takes, cold and warm."""
    numbers = {float(call().flatten()[0]) for _ in range(WARM)}
    assert len(numbers) == 1, f"plans {numbers} serve one call"
    return numbers.pop()


@pytest.mark.parametrize("what", PAIRS)
def test_calls_that_differ_have_plans_of_their_own(what: str) -> None:
    one, other = PAIRS[what]

    first, second, again = number_of(one), number_of(other), number_of(one)

    assert first != second
    assert again == first
