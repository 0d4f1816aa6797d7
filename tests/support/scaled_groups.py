"""Calls of `scaled_grouped_mm`, and what they are to return, in float64."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

import outblas
from outblas.core.epilogue import composed, glu_split
from outblas.core.grouped import Form

from .fp8 import E4M3

Tensor = torch.Tensor

FORMS: tuple[Form, ...] = ("ragged_m", "masked", "ragged_k")
BLOCK = 128
# Of groups of rows, of which some are empty: their ends, or their numbers where each has a room.
ENDS = (0, 5, 5, 22, 40)
EXTENT = 43  # three rows more than belong to groups
CAPACITY = 17
COUNTS = (3, 0, 17, -4, 21)
# Of groups of terms.
TERM_ENDS = (0, 128, 128, 384)
TERMS = 512  # 128 terms more than belong to groups


def values(*shape: int, dtype: torch.dtype, real: bool = False) -> Tensor:
    """Draws small integers, which fp8 holds, or real numbers."""
    return (torch.randn(shape) if real else torch.randint(-3, 4, shape)).to(dtype)


def scales(*shape: int, real: bool = False) -> Tensor:
    """Draws powers of two, with which sums of integers stay exact, or real numbers."""
    if real:
        return torch.rand(shape) + 0.1
    return 2.0 ** torch.randint(-1, 3, shape)


def blocks(extent: int) -> int:
    """Returns how many blocks a dimension has."""
    return -(-extent // BLOCK)


def widened(scale: Tensor, operand: Tensor, rows: int, columns: int) -> Tensor:
    """Returns the scale of each element of an operand, of which so many rows and columns share
    one.
    """
    spread = scale.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return spread[..., : operand.shape[-2], : operand.shape[-1]].double()


@dataclass(frozen=True)
class ScaledGroups:
    """A call: its tensors by name, among them `offs` or `counts`, and its other arguments."""

    form: Form
    tensors: dict[str, Tensor]
    options: dict[str, Any]

    def run(self, **more: Any) -> Tensor:
        return outblas.scaled_grouped_mm(**{**self.tensors, **self.options, **more})

    def replaced(self, **tensors: Tensor) -> "ScaledGroups":
        return replace(self, tensors=self.tensors | tensors)

    def on(self, device: str) -> "ScaledGroups":
        return self.replaced(**{name: t.to(device) for name, t in self.tensors.items()})

    def operands(self) -> tuple[Tensor, Tensor]:
        """Returns the operands times their scales."""
        t = self.tensors
        a, b = t["mat_a"].double(), t["mat_b"].double()
        columns = 1 if self.form == "ragged_k" else BLOCK
        return a * widened(t["scale_a"], a, 1, BLOCK), b * widened(t["scale_b"], b, BLOCK, columns)

    def parts(self) -> list[Any]:
        """Returns the index of each group's part of the rows of the result, or of the terms."""
        if self.form == "masked":
            room = self.tensors["mat_a"].shape[1]
            counts = [min(max(n, 0), room) for n in self.tensors["counts"].tolist()]
            return [(group, slice(count)) for group, count in enumerate(counts)]
        return [slice(i, j) for i, j in pairwise((0, *self.tensors["offs"].tolist()))]

    def expected(self) -> Tensor:
        """Returns the result; NaN where it is undefined."""
        (a, b), t = self.operands(), self.tensors
        if "a_index" in t:
            a = a[t["a_index"].clamp(0, a.shape[0] - 1).long()]
        function = self.options.get("activation") or ""
        groups, columns = len(self.parts()), b.shape[-1] // glu_split(function)
        shape = (groups, a.shape[0]) if self.form == "ragged_k" else a.shape[:-1]
        out = torch.full((*shape, columns), torch.nan, dtype=torch.float64, device=a.device)
        for group, part in enumerate(self.parts()):
            x = a[:, part] @ b[part] if self.form == "ragged_k" else a[part] @ b[group]
            if "bias" in t:
                x = x + t["bias"][group].double()
            y = composed(x, function, None)
            if "scatter_weights" in t:
                y = y * t["scatter_weights"][part].unsqueeze(1)
            if self.form == "ragged_k":
                part = group
            elif "scatter_index" in t:
                part = t["scatter_index"][part].long()
            out[part] = y + t["residual"][part].double() if "residual" in t else y
        return out


def draw(
    form: Form,
    *names: str,
    a: torch.dtype = E4M3,
    b: torch.dtype = E4M3,
    out_dtype: torch.dtype = torch.bfloat16,
    activation: str = "",
    real: bool = False,
    M: int = 21,
    N: int = 136,
    K: int = 200,
    ends: tuple[int, ...] | None = None,
    extent: int = 0,
) -> ScaledGroups:
    """Draws a call with the tensors `names` besides its operands, scales and groups.

    M: the rows, where they are not divided. K: the terms, where they are not divided. ends: those
    of groups, or their counts. extent: the size of the dimension that is divided, or the rows for
    which a group has room; 0 for that of the other tests.
    """
    own = {"ragged_m": ENDS, "masked": COUNTS, "ragged_k": TERM_ENDS}
    given = torch.tensor(own[form] if ends is None else ends, dtype=torch.int32)
    extent = extent or {"ragged_m": EXTENT, "masked": CAPACITY, "ragged_k": TERMS}[form]
    groups, terms = len(given), extent if form == "ragged_k" else K
    lead = {"ragged_m": (extent,), "masked": (groups, extent), "ragged_k": (M,)}[form]
    whole = () if form == "ragged_k" else (groups,)
    columns = N if form == "ragged_k" else blocks(N)
    tensors = {
        "mat_a": values(*lead, terms, dtype=a, real=real),
        "mat_b": values(*whole, N, terms, dtype=b, real=real).mT,
        "scale_a": scales(*lead, blocks(terms), real=real),
        "scale_b": scales(*whole, blocks(terms), columns, real=real),
        "counts" if form == "masked" else "offs": given,
    }
    result = (groups, M) if form == "ragged_k" else lead
    possible = {
        "bias": values(groups, N, dtype=out_dtype, real=real),
        "residual": values(*result, N // glu_split(activation), dtype=out_dtype, real=real),
        "a_index": torch.randint(-2, extent + 2, (extent,)),
        "scatter_index": torch.randperm(extent),
        "scatter_weights": scales(extent),
    }
    tensors |= {name: possible[name] for name in names}
    return ScaledGroups(form, tensors, {"activation": activation or None, "out_dtype": out_dtype})
