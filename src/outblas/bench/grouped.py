"""Grouped products in a campaign: their operands, and the check that comes before they are timed.

fp8 operands have scales of blocks. The rows of A have a scale for each 128 terms. So have the
columns of B where groups are terms; elsewhere 128 columns share one, as in checkpoints.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from outblas.base.grouped_shapes import TERMS_LAYOUT, GroupedWorkload
from outblas.bench import block_scaled, cold
from outblas.bench.block_scaled import BlockScaled, dequantised
from outblas.bench.campaign import Operands
from outblas.bench.operation import Operation, error_of_blocks, is_beyond, operand_dtype
from outblas.bench.providers import Call
from outblas.core.fp8 import BLOCK
from outblas.verify.call import CHUNK
from outblas.verify.cases import Case
from outblas.verify.oracle import integer_ranges

Tensor = torch.Tensor
Fill = Callable[[Tensor], object]
Prepare = Callable[..., Call]
Place = tuple[int, ...]

# torch's function multiplies no tf32.
PRECISIONS = ("bfloat16", "float16", "float32", "fp8-block")
_SCALED_LAYOUT = "nt"  # of both forms: tensor cores read fp8 terms that are contiguous
_SCALE_BYTES = 4


@dataclass(frozen=True)
class GroupedTask:
    """The products of all groups of a workload. `product` is "", or "dA" or "dB" for a gradient."""

    workload: GroupedWorkload
    layout: str
    product: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (str(self.workload), self.layout, self.product) if part)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The sizes (M, N, K) of the products of all groups."""
        return self.workload.shape

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each group."""
        return self.workload.sizes

    @property
    def ends(self) -> tuple[int, ...]:
        """Where each group ends: the values of `offs`."""
        return tuple(accumulate(self.sizes))

    def operands(self, operation: Operation) -> Operands:
        """Returns A and B from normal(0, 1), and `offs`."""
        generator = torch.Generator("cuda").manual_seed(0)
        fill = partial(torch.Tensor.normal_, generator=generator)
        return operands(self, operand_dtype(operation.dtype), fill, fill, "cuda")

    def case(self, operation: Operation, device: str = "cuda") -> "GroupedCase":
        return GroupedCase(self, operand_dtype(operation.dtype), device, operation.out_dtype)

    def bytes_moved(self, operation: Operation) -> int:
        """Returns the bytes of the operands and the result. Weights of groups without rows are not
        read; their gradients are written.
        """
        w = self.workload
        elements = w.rows * (w.K + w.N) + self.weights_moved * w.K * w.N
        return elements * operand_dtype(operation.dtype).itemsize

    @property
    def weights_moved(self) -> int:
        """How many groups' weights are read, or have a gradient that is written."""
        w = self.workload
        return sum(size > 0 for size in self.sizes) if w.form == "rows" else w.experts

    def is_memory_bound(self, operation: Operation, l2_bytes: int) -> bool:
        """Returns whether a call is also timed with cold weights: its groups have few rows, or all
        that it reads and writes fits twice into L2. Gradients of weights read no weights.
        """
        if self.workload.form == "terms":
            return False
        few_rows = self.workload.rows <= cold.FEW_ROWS * self.workload.experts
        return few_rows or 2 * self.bytes_moved(operation) <= l2_bytes

    def facts(self) -> dict[str, Any]:
        """Returns the fields of a record that say what was timed."""
        return {
            "shape": self.shape,
            "layout": self.layout,
            "product": self.product,
            "experts": self.workload.experts,
            "form": self.workload.form,
            "distribution": self.workload.distribution,
        }


@dataclass(frozen=True)
class ScaledTask(GroupedTask):
    """The products of all groups of a workload with scales of blocks. Groups of terms end at
    multiples of `BLOCK`, for the terms that share a scale belong to one group.
    """

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.workload.sizes_in(BLOCK if self.workload.form == "terms" else 1)

    def operands(self, operation: Operation) -> Operands:
        """Returns A, B and their scales as `quantize` lays them out, from normal(0, 1), and
        `offs`.
        """
        return self.quantised("cuda")

    def case(self, operation: Operation, device: str = "cuda") -> "ScaledCase":
        return ScaledCase(self, operand_dtype(operation.dtype), device, operation.out_dtype)

    def quantised(self, device: str) -> Operands:
        """Returns operands from normal(0, 1), the same every time."""
        return self._on(block_scaled.quantised, device)

    def integers(self, device: str) -> Operands:
        """Returns small integers with scales that are powers of two, whose sums are exact, the same
        every time.

        Raises ValueError if a sum is too long for that.
        """
        return self._on(partial(block_scaled.integers, terms=deepest(self)), device)

    def _on(self, make: Callable[..., BlockScaled], device: str) -> Operands:
        of_terms = self.workload.form == "terms"
        lead = () if of_terms else (self.workload.experts,)
        recipe_b = "1x128" if of_terms else "128x128"
        return *make(self.shape, device, lead=lead, recipe_b=recipe_b), group_ends(self, device)

    def bytes_moved(self, operation: Operation) -> int:
        """Returns the bytes of the operands, their scales and the result. Weights of groups without
        rows are not read; their gradients are written.
        """
        M, N, K = self.shape
        result = M * N * operation.out_dtype.itemsize
        blocks, count = math.ceil(K / BLOCK), self.weights_moved
        of_a = M * (K + _SCALE_BYTES * blocks)
        if self.workload.form == "terms":
            return of_a + N * (K + _SCALE_BYTES * blocks) + count * result
        return of_a + count * (N * K + _SCALE_BYTES * blocks * math.ceil(N / BLOCK)) + result


def tasks(
    workloads: Sequence[GroupedWorkload],
    layouts: Sequence[str],
    of_backward: bool,
    operation: Operation,
) -> list[GroupedTask]:
    """Returns the products of a campaign, or those of their backward passes, without duplicates.

    `layouts` are those of ragged rows; gradients of weights have `TERMS_LAYOUT`. The gradient of
    rows reads the same weights by their other dimension.
    """
    if operation.scaling:
        return list(dict.fromkeys(ScaledTask(each, _SCALED_LAYOUT) for each in workloads))
    flipped = {"nt": "nn", "nn": "nt"}
    chosen = []
    for layout in layouts:
        for workload in workloads:
            products = workload.backward() if of_backward else (("", workload),)
            for name, each in products:
                of_rows = flipped[layout] if name == "dA" else layout
                letters = of_rows if each.form == "rows" else TERMS_LAYOUT
                chosen.append(GroupedTask(each, letters, name))
    return list(dict.fromkeys(chosen))


def operands(
    task: GroupedTask, dtype: torch.dtype, fill_a: Fill, fill_b: Fill, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns A and B as `grouped_mm` takes them, stored as the task's layout says and filled, and
    `offs`.
    """
    M, N, K = task.shape
    lead = (task.workload.experts,) if task.workload.form == "rows" else ()

    def matrix(shape: tuple[int, ...], letter: str, fill: Fill) -> Tensor:
        stored = shape if letter == "n" else (*shape[:-2], shape[-1], shape[-2])
        t = torch.empty(stored, dtype=dtype, device=device)
        fill(t)
        return t if letter == "n" else t.mT

    a = matrix((M, K), task.layout[0], fill_a)
    b = matrix((*lead, K, N), task.layout[1], fill_b)
    return a, b, group_ends(task, device)


def group_ends(task: GroupedTask, device: str) -> Tensor:
    """Returns where groups end, as calls take it."""
    return torch.tensor(task.ends, dtype=torch.int32, device=device)


def deepest(task: GroupedTask) -> int:
    """Returns how many products the longest sum has."""
    return max(task.sizes) if task.workload.form == "terms" else task.shape[2]


def result_shape(task: GroupedTask) -> tuple[int, ...]:
    """Returns the shape of the result of `grouped_mm`."""
    M, N, _ = task.shape
    return (M, N) if task.workload.form == "rows" else (task.workload.experts, M, N)


# ---- the check
@dataclass(frozen=True)
class GroupedCase:
    """What a provider is checked with before it is timed."""

    task: GroupedTask
    dtype: torch.dtype
    device: str = "cuda"
    out_dtype: torch.dtype | None = None  # that of the operands

    def fault(self, prepare: Prepare) -> str | None:
        """Returns what is wrong with the result of a prepared call, or None.

        As in the exact oracle, the operands are small integers whose partial sums fp32 represents,
        so that every element must equal the float64 product bit for bit.
        """
        return self.fault_on(self._integers(), prepare, is_exact=True)

    def fault_on(self, operands: Operands, prepare: Prepare, *, is_exact: bool) -> str | None:
        """Returns what is wrong with the product of operands, or None. If it need not be exact, it
        may have the error of fp32 sums of blocks that tensor cores sum.
        """
        shape, dtype = result_shape(self.task), self.out_dtype or self.dtype
        call = prepare(*operands)
        # Freed at once: the allocator most likely gives this memory to the result.
        torch.full(shape, math.nan, dtype=dtype, device=self.device)
        out = call()
        if not isinstance(out, Tensor) or out.shape != shape or out.dtype != dtype:
            return f"wrong: expected a tensor of shape {shape} and {dtype}"
        count = 0
        first: Place = ()
        for begin, got, a, b in _compared(out, operands, self.task):
            x = a @ b
            if is_exact:
                # torch rounds float64 by way of fp32, which represents these sums
                wrong = got != x.to(dtype)
            else:
                wrong = is_beyond(got, x, error_of_blocks(a.abs() @ b.abs(), a.shape[1]))
            if bool(wrong.any()):
                at = [int(i) for i in wrong.nonzero()[0]]
                first = first or (*begin[:-1], begin[-1] + at[0], at[1])
                count += int(wrong.sum())
        if not count:
            return None
        return f"wrong: {count} of {out.numel()} elements, first at {list(first)}"

    def _integers(self) -> Operands:
        M, N, _ = self.task.shape
        case = Case(M, N, deepest(self.task), self.dtype, self.out_dtype)
        of_a, of_b, _ = integer_ranges(case)
        generator = torch.Generator(self.device).manual_seed(0)

        def within(largest: int) -> Fill:
            return lambda t: t.random_(-largest, largest + 1, generator=generator)

        return operands(self.task, self.dtype, within(of_a), within(of_b), self.device)


@dataclass(frozen=True)
class ScaledCase(GroupedCase):
    """What a provider of products with scales of blocks is checked with."""

    task: ScaledTask

    def fault(self, prepare: Prepare) -> str | None:
        """Returns what is wrong with the results of prepared calls, or None: with those of small
        integers, which must be exact, or with those of normal data.
        """
        exact = self.fault_on(self.task.integers(self.device), prepare, is_exact=True)
        return exact or self.fault_on(self.task.quantised(self.device), prepare, is_exact=False)


def _compared(
    out: Tensor, operands: Operands, task: GroupedTask
) -> Iterator[tuple[Place, Tensor, Tensor, Tensor]]:
    """Yields rows of each group's result, where they begin, and the operands of which they are the
    product, in float64 and times their scales.
    """
    a, b, *scales, _ = operands  # the host knows the groups
    by_rows = task.workload.form == "rows"

    def of_group(x: Tensor, y: Tensor, part: slice, group: int) -> tuple[Tensor, Tensor]:
        return (x[part], y[group]) if by_rows else (x[:, part], y[part])

    for group, (begin, end) in enumerate(pairwise((0, *task.ends))):
        part = slice(begin, end)
        result, place = (out[part], (begin,)) if by_rows else (out[group], (group, 0))
        left, right = of_group(a, b, part, group)
        scale_left = scale_right = None
        if scales:
            part = part if by_rows else blocks(begin, end)
            scale_left, scale_right = of_group(scales[0], scales[1], part, group)
        factor = dequantised(right, scale_right, (BLOCK, BLOCK if by_rows else 1))
        # so few rows at once that their product takes little memory
        step = max(1, CHUNK // max(1, *factor.shape))
        for first in range(0, result.shape[0], step):
            rows = slice(first, first + step)
            of_rows = scale_left[rows] if scale_left is not None else None
            values = dequantised(left[rows], of_rows, (1, BLOCK))
            yield (*place[:-1], place[-1] + first), result[rows], values, factor


def blocks(begin: int, end: int) -> slice:
    """Returns the blocks of a group of terms."""
    return slice(begin // BLOCK, math.ceil(end / BLOCK))
