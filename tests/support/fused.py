"""Calls with an epilogue on guarded operands, judged against float64: for the tests of every kernel
that has one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import outblas
from outblas.call.epilogue import GATED, apply, glu_split
from outblas.verify.guards import Guarded
from outblas.verify.oracle import ulp

EXACT_ACTIVATIONS = None, "relu", "reglu"  # which make integers of integers
UNIT = 2.0**-24  # roundoff of fp32
STEEPEST_SLOPE = 1.13  # of any activation, at most
OUTPUTS = "out", "aux"


def run(
    a: Any, b: Any, c: Any, out: Any, alpha: float, beta: float, kernel: str | None, **extra: Any
) -> None:
    """The call through the public API: matmul without an addend, addmm with one."""
    if c is None:
        outblas.matmul(a, b, out=out, out_dtype=out.dtype, kernel=kernel, **extra)
    else:
        outblas.addmm(c, a, b, alpha=alpha, beta=beta, out=out, kernel=kernel, **extra)


class Reference(NamedTuple):
    """An output in float64, and by how much a kernel's fp32 sums may differ from it before they are
    rounded to the output's dtype.
    """

    value: torch.Tensor
    error: torch.Tensor

    def wrong_elements(self, actual: torch.Tensor, exact: bool) -> torch.Tensor:
        """Where `actual` is not the rounded value, or not within the error of it and half a unit in
        the last place.
        """
        if exact:
            return actual != self.value.float().to(actual.dtype)
        rounding = ulp(self.value.abs() + self.error, actual.dtype) / 2
        is_close = (actual.double() - self.value).abs() <= self.error + rounding
        return ~is_close  # a NaN is not close to anything


@dataclass(frozen=True)
class Fused:
    """A call whose output is [*batch, M, N], with an addend if beta is not 0.

    bias, residual: "" for none, "matrix", or a "row" or "column" that is repeated by stride 0.
    layout: of A, of B, and of all other matrices: n by rows, t by columns, s by rows with a gap
        after each element.
    pad: elements between rows and between matrices. offset: elements before the first.
    """

    M: int
    N: int
    K: int
    dtype: torch.dtype = torch.bfloat16
    activation: str | None = None
    bias: str = ""
    residual: str = ""
    aux: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    layout: str = "nnn"
    batch: tuple[int, ...] = ()
    out_dtype: torch.dtype | None = None
    pad: int = 0
    offset: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether operands are small integers, so that every sum is exact."""
        return self.activation in EXACT_ACTIVATIONS

    def forms(self) -> dict[str, str]:
        """The tensors that the call has: each a "matrix", a "row" or a "column"."""
        forms = {"a": "matrix", "b": "matrix", "out": "matrix"}
        optional = {
            "bias": self.bias,
            "residual": self.residual,
            "c": "matrix" if self.beta else "",
            "aux": "matrix" if self.aux else "",
        }
        return forms | {name: form for name, form in optional.items() if form}

    def matrix_size(self, name: str) -> tuple[int, int]:
        """Rows and columns of a tensor; what has the columns of the product before its gate has
        twice as many where there is one.
        """
        columns = self.N * glu_split(self.activation or "")
        sizes = {"a": (self.M, self.K), "b": (self.K, columns)}
        sizes |= {"out": (self.M, self.N), "residual": (self.M, self.N)}
        return sizes.get(name, (self.M, columns))

    def strides(self, name: str, form: str) -> tuple[int, ...]:
        """Strides of a tensor, in elements."""
        rows, columns = self.matrix_size(name)
        layout = dict(zip("ab", self.layout, strict=False)).get(name, self.layout[-1])
        stored = (columns, rows) if layout == "t" else (rows, columns)
        padded = [extent + self.pad for extent in (*self.batch, *stored)]
        gap = 2 if layout == "s" else 1
        *batch, outer, inner = (gap * n for n in torch.empty(padded, device="meta").stride())
        row, column = (inner, outer) if layout == "t" else (outer, inner)
        if form == "row":
            return (*(0 for _ in batch), 0, column)
        if form == "column":
            return (*(0 for _ in batch), row, 0)
        return (*batch, row, column)

    def operands(self, device: str) -> dict[str, Guarded]:
        """The call's tensors between guards: inputs hold random numbers, the same in every run."""
        generator = torch.Generator(device).manual_seed(self.K)
        tensors = {}
        for name, form in self.forms().items():
            is_output = name in OUTPUTS
            dtype = self.dtype if name in ("a", "b", "c") else self.out_dtype or self.dtype
            tensor = Guarded(
                name,
                (*self.batch, *self.matrix_size(name)),
                self.strides(name, form),
                dtype,
                device,
                offset=self.offset,
                output=is_output,
            )
            if not is_output:
                shape = tensor.cells.shape
                values = torch.randn(shape, generator=generator, device=device)
                tensor.cells.copy_((3 * values).round() if self.is_exact else values)
            tensor.arm()
            tensors[name] = tensor
        return tensors

    def references(self, tensors: dict[str, Any]) -> dict[str, Reference]:
        """What the call's outputs have to be."""
        names = "a", "b", "c", "bias", "residual"
        a, b, c, bias, residual = (
            tensors[name].double() if name in tensors else torch.zeros(()) for name in names
        )
        x = self.alpha * (a @ b) + self.beta * c + bias
        terms = abs(self.alpha) * (a.abs() @ b.abs()) + (self.beta * c).abs() + bias.abs()
        error_of_sums = 2 * (self.K + 2) * UNIT * terms

        y = apply(x, self.activation or "", residual)
        error = STEEPEST_SLOPE * error_of_sums + 4 * UNIT * x.abs()
        if self.activation in GATED:
            gate, other = x.chunk(2, -1)
            error_of_gate, _ = error.chunk(2, -1)
            _, error_of_other = error_of_sums.chunk(2, -1)
            error = error_of_gate * (other.abs() + error_of_other) + gate.abs() * error_of_other
        error = error + 4 * UNIT * (y.abs() + 2 * residual.abs())
        references = {"out": Reference(y, error)}
        if self.aux:
            references["aux"] = Reference(x, error_of_sums)
        return references

    def check(
        self, kernel: str | None, device: str = "cpu", run: Callable[..., None] = run
    ) -> None:
        """Runs the call: every element of `out` and `aux` is right, and nothing else was written.

        `run` makes the call, in place of the public API.
        """
        guarded = self.operands(device)
        tensors: dict[str, Any] = {name: tensor.view for name, tensor in guarded.items()}
        of_epilogue = {name: tensors.get(name) for name in ("bias", "residual", "aux")}
        a, b, c, out = (tensors.get(name) for name in ("a", "b", "c", "out"))

        run(a, b, c, out, self.alpha, self.beta, kernel, activation=self.activation, **of_epilogue)

        for name, reference in self.references(tensors).items():
            actual = tensors[name]
            wrong = reference.wrong_elements(actual, self.is_exact)
            assert not bool(wrong.any()), (
                f"{self}: {int(wrong.sum())} wrong elements of {name}, "
                f"the first {actual[wrong][:3]}, expected {reference.value[wrong][:3]}"
            )
        violations = {
            name: tensor.violation(writable=name in OUTPUTS) for name, tensor in guarded.items()
        }
        assert not any(violations.values()), f"{self}: {violations}"
