"""Calls of `grouped_mm` and `scaled_grouped_mm` in all forms, and what they return: GEMMs of single
groups in float64, and torch functions on them, one after the other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import outblas
from outblas.call import grouped
from outblas.call.epilogue import composed, glu_split
from outblas.call.grouped import Form, GroupedProblem, GroupedTensors
from outblas.call.hooks import GroupedKernels
from outblas.kernels import grouped as portable

from .fp8 import BY_ROW, RECIPES, SQUARE

Tensor = torch.Tensor

FORMS: tuple[Form, ...] = ("ragged_m", "ragged_n", "ragged_k")
ENDS = (0, 5, 5, 17, 21)  # of five groups, two of them empty
COUNTS = (3, 0, 2**31 - 1, -(2**31), 17)  # of as many, where each has a room
EXTENT = 24  # of the dimension that is divided: three more than belong to groups; or of a room
ROWS_OF_A = 10  # that `a_index` chooses from
BLOCK = 128  # terms, and columns of B, that share a scale
FLOATING = "mat_a", "mat_b", "bias", "residual", "scatter_weights"


@dataclass(frozen=True)
class GroupedCall:
    """The tensors of a call by name, among them `offs` or `counts`, and its other arguments."""

    form: Form
    tensors: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def activation(self) -> str:
        return self.options.get("activation") or ""

    def run(self, **more: Any) -> Tensor:
        result: Tensor
        if "scale_a" not in self.tensors:
            result = outblas.grouped_mm(**{**self.tensors, **self.options, **more})
            return result
        by_terms = self.form == "ragged_k"
        recipes = {
            "scale_recipe_a": RECIPES[BY_ROW],
            "scale_recipe_b": RECIPES[BY_ROW if by_terms else SQUARE],
        }
        arguments: dict[str, Any] = {**recipes, **self.tensors, **self.options, **more}
        if by_terms:  # then scales lie as B's columns are stored
            arguments["scale_b"] = arguments["scale_b"].mT
        if "out_dtype" in arguments:
            arguments["output_dtype"] = arguments.pop("out_dtype")
        result = outblas.scaled_grouped_mm(**arguments)
        return result

    def replaced(self, **tensors: Tensor) -> "GroupedCall":
        return replace(self, tensors=self.tensors | tensors)

    def on(self, device: str) -> "GroupedCall":
        return self.replaced(**{name: t.to(device) for name, t in self.tensors.items()})

    def poisoned(self) -> "GroupedCall":
        """Returns the call with NaN in operands, scales and residual where no group reads them."""
        names = [n for n in ("mat_a", "scale_a", "residual") if n in self.tensors]
        return self.replaced(**{name: self._poisoned(name) for name in names})

    def _poisoned(self, name: str) -> Tensor:
        t = self.tensors[name].clone()
        if name == "residual" and self.form == "ragged_k":
            return t  # it is read everywhere
        step = 128 if name == "scale_a" and self.form == "ragged_k" else 1
        is_fp8 = t.element_size() == 1
        memory, poison = (t.view(torch.uint8), 127) if is_fp8 else (t, torch.nan)
        dim = {"ragged_m": 0, "masked": 1, "ragged_n": -1, "ragged_k": -1}[self.form]
        for group, part in enumerate(self.parts()):
            if self.form == "masked":
                memory[group, part.stop :] = poison
        if self.form in ("ragged_m", "ragged_k") or (self.form, name) == ("ragged_n", "residual"):
            end = -(-self.parts()[-1].stop // step)
            memory.narrow(dim, end, memory.shape[dim] - end).fill_(poison)
        return t

    def parts(self) -> list[slice]:
        """Returns each group's part of the dimension that is divided, or of its room."""
        a, b = self.tensors["mat_a"], self.tensors["mat_b"]
        if self.form == "batch":
            return [slice(None)] * a.shape[0]
        extent = {"ragged_m": 0, "masked": 1, "ragged_k": 1}.get(self.form)
        size = b.shape[-1] if extent is None else a.shape[extent]
        if "a_index" in self.tensors:
            size = len(self.tensors["a_index"])
        groups = self.tensors["counts" if self.form == "masked" else "offs"]
        ends = [min(max(end, 0), size) for end in groups.tolist()]
        starts = [0] * len(ends) if self.form == "masked" else [0, *ends[:-1]]
        return [slice(i, j) for i, j in zip(starts, ends, strict=True)]

    def operands(self) -> tuple[Tensor, Tensor]:
        """Returns A, its rows gathered, and B in float64, times their scales."""
        t = self.tensors
        a, b = t["mat_a"].double(), t["mat_b"].double()
        if "scale_a" in t:
            a = a * _widened(t["scale_a"], a, 1, BLOCK)
            b = b * _widened(t["scale_b"], b, BLOCK, 1 if self.form == "ragged_k" else BLOCK)
        if "a_index" in t:
            a = a[t["a_index"].clamp(0, a.shape[0] - 1).long()]
        return a, b

    def x(self) -> Tensor:
        """Returns the GEMMs with their bias."""
        return self.x_and_result()[0]

    def expected(self) -> Tensor:
        return self.x_and_result()[1]

    def x_and_result(self) -> tuple[Tensor, Tensor]:
        """Returns both; NaN where they are undefined, or not written."""
        (a, b), t = self.operands(), self.tensors
        parts, N = self.parts(), b.shape[-1]
        lead = {"ragged_k": (len(parts), a.shape[0]), "ragged_n": a.shape[1:2]}
        shape = lead.get(self.form, a.shape[:-1])
        blank: dict[str, Any] = {
            "fill_value": torch.nan,
            "dtype": torch.float64,
            "device": a.device,
        }
        x = torch.full((*shape, N), **blank)
        y = torch.full((*shape, N // glu_split(self.activation)), **blank)
        for group, part in enumerate(parts):
            product = self._product(a, b, group, part)
            if "bias" in t:
                product = product + t["bias"][group].double()
            index = self._index(group, part)
            x[index] = product
            result = composed(product, self.activation, None)
            if "scatter_weights" in t:
                result = result * t["scatter_weights"][part].double().unsqueeze(1)
            if "scatter_index" in t:
                place = t["scatter_index"][part].long()
                is_inside = (place >= 0) & (place < y.shape[0])
                index, result = (place[is_inside],), result[is_inside]
            y[index] = result + t["residual"][index].double() if "residual" in t else result
        return x, y

    def _product(self, a: Tensor, b: Tensor, group: int, part: slice) -> Tensor:
        match self.form:
            case "ragged_m":
                return a[part] @ b[group]
            case "masked":
                return a[group, part] @ b[group]
            case "ragged_n":
                return a[group] @ b[:, part]
            case "ragged_k":
                return a[:, part] @ b[part]
        return a[group] @ b[group]

    def _index(self, group: int, part: slice) -> tuple[Any, ...]:
        """Returns where a group's part of the result lies."""
        places: dict[Form, tuple[Any, ...]] = {
            "ragged_m": (part,),
            "masked": (group, part),
            "ragged_n": (slice(None), part),
        }
        return places.get(self.form, (group,))


def _widened(scale: Tensor, operand: Tensor, rows: int, columns: int) -> Tensor:
    """Returns the scale of each element of an operand, of which so many rows and columns share
    one.
    """
    wide = scale.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return wide[..., : operand.shape[-2], : operand.shape[-1]].double()


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
    ends: tuple[int, ...] | None = None,
    extent: int = EXTENT,
    rows_of_a: int = ROWS_OF_A,
) -> GroupedCall:
    """Draws a call with the tensors `names` besides its operands: small integers, so that sums are
    exact, or real numbers. Some indices lie outside.

    M, K: where they are not divided. ends: those of groups, or their counts. extent: the size of
    the dimension that is divided, or the rows for which a group has room. rows_of_a: where they are
    gathered.
    """

    def values(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return (torch.randn(shape) if real else torch.randint(-2, 3, shape)).to(dtype)

    ends = ends or (COUNTS if form == "masked" else ENDS)
    narrow, groups = N // glu_split(activation), len(ends)
    rows = rows_of_a if "a_index" in names else extent
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "ragged_m": ((rows, K), (groups, K, N), (extent, narrow)),
        "masked": ((groups, extent, K), (groups, K, N), (groups, extent, narrow)),
        "ragged_n": ((groups, M, K), (K, extent), (M, extent)),
        "ragged_k": ((M, extent), (extent, N), (groups, M, narrow)),
        "batch": ((groups, M, K), (groups, K, N), (groups, M, narrow)),
    }
    shape_a, shape_b, result = shapes[form]
    wide = out_dtype or dtype
    scatter = torch.randperm(extent)
    scatter[3::17], scatter[7::17] = scatter[3::17] + extent, scatter[7::17] - extent
    possible = {
        "bias": values(groups, N, dtype=wide),
        "residual": values(*result, dtype=wide),
        "a_index": torch.randint(-2, rows_of_a + 2, (extent,)).to(index),
        "scatter_index": scatter.to(index),
        "scatter_weights": values(extent, dtype=torch.float32),
    }
    tensors = {"mat_a": values(*shape_a), "mat_b": values(*shape_b)}
    if form != "batch":
        tensors["counts" if form == "masked" else "offs"] = torch.tensor(ends, dtype=torch.int32)
    tensors |= {name: possible[name] for name in names}
    options = {"activation": activation or None, "out_dtype": out_dtype}
    return GroupedCall(form, tensors, {n: value for n, value in options.items() if value})


def empty_aux(call: GroupedCall, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Returns an aux for a call that is NaN everywhere."""
    x = call.x()
    return torch.full(x.shape, torch.nan, dtype=dtype, device=x.device)


@dataclass(frozen=True)
class Guarded:
    """A call as a kernel gets it. Its result, and its aux if it has one, are NaN and lie between
    two others of NaN, in `memory` and `aux_memory`.
    """

    problem: GroupedProblem
    launch: Callable[[GroupedKernels], None]
    memory: Tensor
    aux_memory: Tensor

    @property
    def out(self) -> Tensor:
        return self.memory[1]

    @property
    def aux(self) -> Tensor:
        return self.aux_memory[1]

    def check_guards(self) -> None:
        for memory in (self.memory, self.aux_memory):
            assert memory[::2].isnan().all(), "written outside of the result"


def guarded(call: GroupedCall, *, aux: bool = False, zero_tail: bool = False) -> Guarded:
    """Describes a call, of which no dispatcher has checked the groups."""
    t = call.tensors
    dtype = call.options.get("out_dtype") or t["mat_a"].dtype
    x, y = call.x_and_result()
    memory, aux_memory = (
        torch.full((3, *shape), torch.nan, dtype=dtype, device=x.device)
        for shape in (y.shape, x.shape if aux else (1,))
    )
    beside = {n: x for n, x in t.items() if n not in ("mat_a", "mat_b", "offs")}
    caller_tensors = GroupedTensors(**beside, aux=aux_memory[1] if aux else None)
    operands = call.form, t["mat_a"], t["mat_b"], memory[1]
    tensors = grouped.in_kernel_form(caller_tensors, t["mat_a"].shape[0])
    named: dict[str, Any] = {"activation": call.activation, "zero_tail": zero_tail}
    problem = grouped.describe(*operands, len(call.parts()), tensors, **named)
    a, b, out, moved = grouped.in_planned_form(*operands, tensors)
    ends = grouped.ends(t.get("offs"), caller_tensors)

    def launch(kernels: GroupedKernels = portable) -> None:
        kernels.run(problem, a, b, out, ends, moved)

    return Guarded(problem, launch, memory, aux_memory)


def subsets(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yields every subset of names with which a call is valid."""
    for number in range(2 ** len(names)):
        chosen = tuple(name for i, name in enumerate(names) if number >> i & 1)
        if "scatter_weights" not in chosen or "scatter_index" in chosen:
            yield chosen


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
