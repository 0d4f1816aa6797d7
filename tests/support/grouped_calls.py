"""Calls of `grouped_mm` with epilogue, gather and scatter, and what they are to return: products of
single groups and torch functions on them, one after the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

import outblas
from outblas.core.epilogue import ACTIVATIONS, composed, glu_split
from outblas.core.grouped import Form

Tensor = torch.Tensor

FORMS: tuple[Form, ...] = ("ragged_m", "ragged_n", "ragged_k")
ENDS = (0, 5, 5, 17, 21)  # of five groups, two of them empty
EXTENT = 24  # of the dimension that is divided: three more than belong to groups
ROWS_OF_A = 10  # that `a_index` chooses from
# Activations: CI takes a function and a gated pair; what all of them compute has tests of its own.
SOME_IN_CI = [
    name if name in ("", "gelu", "swiglu") else pytest.param(name, marks=pytest.mark.slow)
    for name in ("", *ACTIVATIONS)
]
FLOATING = "mat_a", "mat_b", "bias", "residual", "scatter_weights"


@dataclass(frozen=True)
class Call:
    """The tensors of a call by name, and its other arguments."""

    form: Form
    tensors: dict[str, Tensor]
    activation: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def offs(self) -> Tensor | None:
        """Returns the ends of the groups, on the device of the operands."""
        if self.form == "batch":
            return None
        return torch.tensor(ENDS, dtype=torch.int32, device=self.tensors["mat_b"].device)

    def run(self, **more: Any) -> Tensor:
        """Calls `grouped_mm`."""
        given: dict[str, Any] = {**self.tensors, **self.options, **more}
        given.setdefault("activation", self.activation or None)
        if "offs" not in given:
            given["offs"] = self.offs()
        return outblas.grouped_mm(**given)

    def with_tensors(self, **tensors: Tensor) -> "Call":
        return replace(self, tensors=self.tensors | tensors)

    def wide(self) -> "Call":
        """Returns the call in float64."""
        wide = {n: t.double() if n in FLOATING else t for n, t in self.tensors.items()}
        return replace(self, tensors=wide)

    def expected(self) -> tuple[Tensor, Tensor]:
        """Returns the product with its bias, and the result. What the call leaves undefined, or
        does not write, is NaN.
        """
        x = self._product()
        y = composed(x, self.activation, None)
        weights, place = self.tensors.get("scatter_weights"), self.tensors.get("scatter_index")
        if weights is not None:
            y = y * weights[: ENDS[-1]].unsqueeze(1)
        residual = self.tensors.get("residual")
        if place is None:
            y = self._padded(y)
            return self._padded(x), y if residual is None else y + residual
        place = place[: ENDS[-1]]
        is_inside = (place >= 0) & (place < EXTENT)
        place, y = place[is_inside].long(), y[is_inside]
        out = torch.full((EXTENT, y.shape[1]), torch.nan, dtype=y.dtype)
        out = out.index_put((place,), y if residual is None else y + residual[place])
        return self._padded(x), out

    def _padded(self, t: Tensor) -> Tensor:
        """Adds what belongs to no group."""
        if self.form in ("ragged_k", "batch"):
            return t
        dim = 0 if self.form == "ragged_m" else 1
        shape = list(t.shape)
        shape[dim] = EXTENT - ENDS[-1]
        return torch.cat([t, torch.full(shape, torch.nan, dtype=t.dtype)], dim)

    def _product(self) -> Tensor:
        """Returns the product with its bias, of what belongs to groups."""
        a, b = self.tensors["mat_a"], self.tensors["mat_b"]
        if "a_index" in self.tensors:
            a = a[self.tensors["a_index"].clamp(0, a.shape[0] - 1).long()]
        parts = []
        for group, (i, j) in enumerate(zip((0, *ENDS[:-1]), ENDS, strict=True)):
            match self.form:
                case "ragged_m":
                    part = a[i:j] @ b[group]
                case "ragged_n":
                    part = a[group] @ b[:, i:j]
                case "ragged_k":
                    part = a[:, i:j] @ b[i:j]
                case "batch":
                    part = a[group] @ b[group]
            if "bias" in self.tensors:
                part = part + self.tensors["bias"][group]
            parts.append(part)
        if self.form in ("ragged_k", "batch"):
            return torch.stack(parts)
        return torch.cat(parts, 0 if self.form == "ragged_m" else 1)


def draw(
    form: Form,
    *names: str,
    activation: str = "",
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
    index: torch.dtype = torch.int64,
    real: bool = False,
    M: int = 19,
    N: int = 34,
    K: int = 20,
) -> Call:
    """Draws a call with the tensors `names` besides its operands: small integers, so that sums are
    exact, or real numbers. Some indices lie outside.
    """

    def values(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return (torch.randn(shape) if real else torch.randint(-2, 3, shape)).to(dtype)

    narrow = N // glu_split(activation)
    rows = ROWS_OF_A if "a_index" in names else EXTENT
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "ragged_m": ((rows, K), (len(ENDS), K, N), (EXTENT, narrow)),
        "ragged_n": ((len(ENDS), M, K), (K, EXTENT), (M, EXTENT)),
        "ragged_k": ((M, EXTENT), (EXTENT, N), (len(ENDS), M, narrow)),
        "batch": ((len(ENDS), M, K), (len(ENDS), K, N), (len(ENDS), M, narrow)),
    }
    shape_a, shape_b, result = shapes[form]
    wide = out_dtype or dtype
    scatter = torch.randperm(EXTENT)
    scatter[3], scatter[7] = EXTENT + 5, -3
    possible = {
        "bias": values(len(ENDS), N, dtype=wide),
        "residual": values(*result, dtype=wide),
        "a_index": torch.randint(-2, ROWS_OF_A + 2, (EXTENT,)).to(index),
        "scatter_index": scatter.to(index),
        "scatter_weights": values(EXTENT, dtype=torch.float32),
    }
    tensors = {"mat_a": values(*shape_a), "mat_b": values(*shape_b)}
    tensors |= {name: possible[name] for name in names}
    options = {} if out_dtype is None else {"out_dtype": out_dtype}
    return Call(form, tensors, activation, options)


def empty_aux(call: Call, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Returns an aux for a call that is NaN everywhere."""
    x, _ = call.expected()
    return torch.full(x.shape, torch.nan, dtype=dtype)


def subsets(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yields every subset of names with which a call is valid."""
    for number in range(2 ** len(names)):
        found = tuple(name for i, name in enumerate(names) if number >> i & 1)
        if "scatter_weights" not in found or "scatter_index" in found:
            yield found


def check_equal(got: Tensor, want: Tensor) -> None:
    """Compares what is defined, exactly after rounding."""
    differs = (got != want.to(got.dtype)) & ~want.isnan()
    if differs.any():
        index = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(differs.sum())} of {differs.numel()} values differ, the first at {index}: "
            f"{got[index].item()!r}, expected {want[index].item()!r}"
        )


def check_close(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Compares what is defined."""
    is_defined = ~want.isnan()
    torch.testing.assert_close(
        got[is_defined].double(), want[is_defined].double(), rtol=tolerance, atol=tolerance
    )
