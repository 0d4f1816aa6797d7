"""What a campaign times at a time: one product, or the products of all groups of a workload, with
their operands, and the check that comes before groups are timed.

fp8 operands of groups have scales of blocks. The rows of A have a scale for each 128 terms. So have
the columns of B where groups are terms; elsewhere 128 columns share one, as in checkpoints.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, pairwise, product
from typing import Any

import torch

from outblas.base.grouped_shapes import TERMS_LAYOUT, GroupedWorkload
from outblas.base.shapes import Shape, backward, to_text
from outblas.bench import cold
from outblas.bench.operands import Fill, block_scaled, dequantised, matrix
from outblas.bench.operation import (
    Operation,
    Place,
    error_of_blocks,
    is_beyond,
    is_inexact,
    operand_dtype,
    wrong_elements,
)
from outblas.call.fp8 import BLOCK
from outblas.verify.call import CHUNK
from outblas.verify.cases import Case
from outblas.verify.oracle import integer_ranges

Tensor = torch.Tensor
Operands = tuple[Any, ...]

_SCALED_LAYOUT = "nt"  # of both forms: tensor cores read fp8 terms that are contiguous
_SCALE_BYTES = 4


@dataclass(frozen=True)
class GemmTask:
    """One product to time. `product` is "", or "dA" or "dB" for a gradient."""

    shape: Shape
    layout: str
    product: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (to_text(self.shape), self.layout, self.product) if part)

    def operands(self, operation: Operation) -> Operands:
        """Returns what calls are prepared with, on the current GPU. The weights are the second."""
        return operation.operands(self.shape, self.layout)

    def case(self, operation: Operation) -> Case:
        """Returns what providers are checked with."""
        tf32 = operation.dtype == "tf32"
        return Case(*self.shape, operation.out_dtype, layout=self.layout, tf32=tf32)

    def bytes_moved(self, operation: Operation) -> int:
        """Returns the bytes of the operands that are read and of the result."""
        M, N, K = self.shape
        of_operands, of_output = operation.operand_bytes
        return (M * K + K * N) * of_operands + M * N * of_output

    def is_memory_bound(self, operation: Operation, l2_bytes: int) -> bool:
        """Returns whether a call is also timed with cold weights."""
        return cold.is_memory_bound(self.shape[0], self.bytes_moved(operation), l2_bytes)

    def facts(self) -> dict[str, Any]:
        """Returns the fields of a record that say what was timed."""
        return {"shape": self.shape, "layout": self.layout, "product": self.product}


@dataclass(frozen=True)
class GroupedTask:
    """The products of all groups of a workload. `product` is "", or "dA" or "dB" for a gradient.

    has_scales: whether operands are fp8 with scales of blocks. Groups of terms then end at
        multiples of `BLOCK`, for the terms that share a scale belong to one group.
    """

    workload: GroupedWorkload
    layout: str
    product: str = ""
    has_scales: bool = False

    def __str__(self) -> str:
        return " ".join(part for part in (str(self.workload), self.layout, self.product) if part)

    @property
    def of_rows(self) -> bool:
        """Whether groups divide the rows of A, and not the terms of the sums."""
        return self.workload.form == "rows"

    @property
    def shape(self) -> Shape:
        """The sizes (M, N, K) of the products of all groups."""
        return self.workload.shape

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each group."""
        return self.workload.sizes_in(BLOCK if self.has_scales and not self.of_rows else 1)

    @property
    def ends(self) -> tuple[int, ...]:
        """Where each group ends: the values of `offs`."""
        return tuple(accumulate(self.sizes))

    def operands(self, operation: Operation) -> Operands:
        """Returns A, B, their scales as `quantize` lays them out, if any, and `offs`."""
        return self.case(operation).operands(integers=False)

    def case(self, operation: Operation, device: str = "cuda") -> "GroupedCase":
        """Returns what providers are checked with."""
        return GroupedCase(self, operand_dtype(operation.dtype), device, operation.out_dtype)

    def bytes_moved(self, operation: Operation) -> int:
        """Returns the bytes of the operands, their scales and the result. Weights of groups without
        rows are not read; their gradients are written.
        """
        M, N, K = self.shape
        of_operands, of_output = operation.operand_bytes
        weights = sum(size > 0 for size in self.sizes) if self.of_rows else 1
        results = 1 if self.of_rows else self.workload.experts
        scales = M + weights * (math.ceil(N / BLOCK) if self.of_rows else N)
        of_scales = _SCALE_BYTES * math.ceil(K / BLOCK) * scales if self.has_scales else 0
        return (M + weights * N) * K * of_operands + results * M * N * of_output + of_scales

    def is_memory_bound(self, operation: Operation, l2_bytes: int) -> bool:
        """Returns whether a call is also timed with cold weights. Gradients read none."""
        rows = self.workload.rows / self.workload.experts
        return self.of_rows and cold.is_memory_bound(rows, self.bytes_moved(operation), l2_bytes)

    def facts(self) -> dict[str, Any]:
        """Returns the fields of a record that say what was timed."""
        grouping = asdict(self.workload.grouping)
        return {"shape": self.shape, "layout": self.layout, "product": self.product, **grouping}


Task = GemmTask | GroupedTask


def tasks(shapes: Sequence[Shape], layouts: Sequence[str], of_backward: bool) -> list[GemmTask]:
    """Returns the products of a campaign, or those of their backward passes, without duplicates."""
    forward = [GemmTask(shape, layout) for layout in layouts for shape in shapes]
    if not of_backward:
        return forward
    pairs = [backward(task.shape, task.layout) for task in forward]
    return [GemmTask(shape, layout, name) for pair in pairs for name, shape, layout in pair]


def grouped_tasks(
    workloads: Sequence[GroupedWorkload],
    layouts: Sequence[str],
    of_backward: bool,
    operation: Operation,
) -> list[GroupedTask]:
    """Returns the products of groups of a campaign, or those of their backward passes, without
    duplicates.

    `layouts` are those of ragged rows; gradients of weights have `TERMS_LAYOUT`. The gradient of
    rows reads the same weights by their other dimension.
    """
    if operation.scaling:
        scaled = partial(GroupedTask, layout=_SCALED_LAYOUT, has_scales=True)
        return list(dict.fromkeys(map(scaled, workloads)))
    flipped = {"nt": "nn", "nn": "nt"}
    chosen = []
    for layout, workload in product(layouts, workloads):
        for name, part in workload.backward() if of_backward else (("", workload),):
            of_rows = flipped[layout] if name == "dA" else layout
            letters = of_rows if part.form == "rows" else TERMS_LAYOUT
            chosen.append(GroupedTask(part, letters, name))
    return list(dict.fromkeys(chosen))


def grouped_operands(
    task: GroupedTask, dtype: torch.dtype, fill_a: Fill, fill_b: Fill, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns A and B as `grouped_mm` takes them, stored as the task's layout says and filled, and
    `offs`.
    """
    M, N, K = task.shape
    lead = (task.workload.experts,) if task.of_rows else ()
    a = matrix((M, K), task.layout[0], dtype, device, fill_a)
    b = matrix((*lead, K, N), task.layout[1], dtype, device, fill_b)
    return a, b, _offs(task, device)


def _offs(task: GroupedTask, device: str) -> Tensor:
    return torch.tensor(task.ends, dtype=torch.int32, device=device)


def result_shape(task: GroupedTask) -> tuple[int, ...]:
    """Returns the shape of the result of `grouped_mm`."""
    M, N, _ = task.shape
    return (M, N) if task.of_rows else (task.workload.experts, M, N)


# ---- the check of groups
@dataclass(frozen=True)
class GroupedCase:
    """What a provider is checked with before it is timed."""

    task: GroupedTask
    dtype: torch.dtype
    device: str = "cuda"
    out_dtype: torch.dtype | None = None  # that of the operands

    def operands(self, *, integers: bool) -> Operands:
        """Returns A, B, their scales if any, and `offs`: from normal(0, 1), or small integers with
        scales that are powers of two, whose partial sums fp32 represents; the same every time.

        Raises ValueError if a sum is too long for that.
        """
        task = self.task
        M, N, K = task.shape
        deepest = K if task.of_rows else max(task.sizes)
        if task.has_scales:
            lead, recipe_b = (
                ((task.workload.experts,), "128x128") if task.of_rows else ((), "1x128")
            )
            terms = deepest if integers else None
            scaled = block_scaled(
                task.shape, self.device, lead=lead, recipe_b=recipe_b, exact_terms=terms
            )
            return *scaled, _offs(task, self.device)
        generator = torch.Generator(self.device).manual_seed(0)
        of_a = of_b = 0
        if integers:
            of_a, of_b, _ = integer_ranges(Case(M, N, deepest, self.dtype, self.out_dtype))

        def fill(largest: int, t: Tensor) -> None:
            if integers:
                t.random_(-largest, largest + 1, generator=generator)
            else:
                t.normal_(generator=generator)

        fill_a, fill_b = partial(fill, of_a), partial(fill, of_b)
        return grouped_operands(task, self.dtype, fill_a, fill_b, self.device)

    def fault(self, prepare: Callable[..., Callable[[], object]]) -> str | None:
        """Returns what is wrong with the results of prepared calls, or None: with those of small
        integers, where every element must equal the float64 product bit for bit, or with scales
        with those of normal data.
        """
        fault = self.fault_on(prepare, integers=True)
        if fault is None and self.task.has_scales:
            fault = self.fault_on(prepare, integers=False)
        return fault

    def fault_on(
        self, prepare: Callable[..., Callable[[], object]], *, integers: bool
    ) -> str | None:
        """Returns what is wrong with one product, or None. Products of normal data may have the
        error of fp32 sums of blocks that tensor cores sum.
        """
        operands = self.operands(integers=integers)
        shape, dtype = result_shape(self.task), self.out_dtype or self.dtype
        call = prepare(*operands)
        # Freed at once: the allocator most likely gives this memory to the result.
        torch.full(shape, math.nan, dtype=dtype, device=self.device)

        def masks(result: Tensor) -> Iterator[tuple[Place, Tensor]]:
            for begin, part, a, b in _compared(result, operands, self.task):
                x = a @ b
                if integers:
                    yield begin, is_inexact(part, x)
                else:
                    error = error_of_blocks(a.abs() @ b.abs(), a.shape[1])
                    yield begin, is_beyond(part, x, error)

        return wrong_elements(call(), shape, dtype, masks)


def _compared(
    out: Tensor, operands: Operands, task: GroupedTask
) -> Iterator[tuple[Place, Tensor, Tensor, Tensor]]:
    """Yields rows of each group's result, where they begin, and the operands of which they are the
    product, in float64 and times their scales.
    """
    a, b, *scales, _ = operands  # the host knows the groups

    def of_group(x: Tensor, y: Tensor, part: slice, group: int) -> tuple[Tensor, Tensor]:
        return (x[part], y[group]) if task.of_rows else (x[:, part], y[part])

    for group, (begin, end) in enumerate(pairwise((0, *task.ends))):
        part = slice(begin, end)
        result, place = (out[part], (begin, 0)) if task.of_rows else (out[group], (group, 0, 0))
        left, right = of_group(a, b, part, group)
        scale_left = scale_right = None
        if scales:
            part = part if task.of_rows else blocks(begin, end)
            scale_left, scale_right = of_group(scales[0], scales[1], part, group)
        factor = dequantised(right, scale_right, (BLOCK, BLOCK if task.of_rows else 1))
        # so few rows at once that their product takes little memory
        step = max(1, CHUNK // max(1, *factor.shape))
        for first in range(0, result.shape[0], step):
            rows = slice(first, first + step)
            scale_rows = scale_left[rows] if scale_left is not None else None
            values = dequantised(left[rows], scale_rows, (1, BLOCK))
            yield (*place[:-2], place[-2] + first, 0), result[rows], values, factor


def blocks(begin: int, end: int) -> slice:
    """Returns the blocks of a group of terms."""
    return slice(begin // BLOCK, math.ceil(end / BLOCK))
