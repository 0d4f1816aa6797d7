"""Grouped products in a campaign: their operands, their providers, and the check that comes before
they are timed.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from outblas.base.grouped_shapes import TERMS_LAYOUT, GroupedWorkload
from outblas.bench import cold
from outblas.bench.campaign import Operands
from outblas.bench.operation import Operation, operand_dtype
from outblas.bench.providers import Call, Provider
from outblas.bench.record import GROUPED_BASE
from outblas.torch_ops.grouped_mm import HOPPER, KERNELS, PORTABLE, grouped_mm
from outblas.verify.call import CHUNK
from outblas.verify.cases import Case
from outblas.verify.kernels import Refused
from outblas.verify.oracle import integer_ranges

Tensor = torch.Tensor
Fill = Callable[[Tensor], object]
Prepare = Callable[..., Call]
Place = tuple[int, ...]

# Of operands that have no scales; torch's function multiplies no tf32.
PRECISIONS = ("bfloat16", "float16", "float32")


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

    def case(self, operation: Operation) -> Any:
        return GroupedCase(self, operand_dtype(operation.dtype))

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


def tasks(
    workloads: Sequence[GroupedWorkload], layouts: Sequence[str], of_backward: bool
) -> list[GroupedTask]:
    """Returns the products of a campaign, or those of their backward passes, without duplicates.

    `layouts` are those of ragged rows; gradients of weights have `TERMS_LAYOUT`. The gradient of
    rows reads the same weights by their other dimension.
    """
    flipped = {"nt": "nn", "nn": "nt"}
    found = []
    for layout in layouts:
        for workload in workloads:
            products = workload.backward() if of_backward else (("", workload),)
            for name, each in products:
                of_rows = flipped[layout] if name == "dA" else layout
                letters = of_rows if each.form == "rows" else TERMS_LAYOUT
                found.append(GroupedTask(each, letters, name))
    return list(dict.fromkeys(found))


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
        made = self._integers()

        def wrong(found: Tensor) -> Iterator[tuple[Place, Tensor]]:
            for begin, got, want in _compared(found, *made, self.task):
                yield begin, got != want.to(got.dtype)

        return fault_of_call(
            prepare(*made), self.task, self.out_dtype or self.dtype, self.device, wrong
        )

    def _integers(self) -> tuple[Tensor, Tensor, Tensor]:
        M, N, _ = self.task.shape
        case = Case(M, N, deepest(self.task), self.dtype, self.out_dtype)
        of_a, of_b, _ = integer_ranges(case)
        generator = torch.Generator(self.device).manual_seed(0)

        def within(largest: int) -> Fill:
            return lambda t: t.random_(-largest, largest + 1, generator=generator)

        return operands(self.task, self.dtype, within(of_a), within(of_b), self.device)


def fault_of_call(
    call: Call,
    task: GroupedTask,
    dtype: torch.dtype,
    device: str,
    wrong: Callable[[Tensor], Iterable[tuple[Place, Tensor]]],
) -> str | None:
    """Returns what is wrong with the result of a call, or None. `wrong` yields where some rows of a
    result begin, and which of their elements are wrong.
    """
    shape = result_shape(task)
    # Freed at once: the allocator most likely gives this memory to the result.
    torch.full(shape, math.nan, dtype=dtype, device=device)
    found = call()
    if not isinstance(found, Tensor) or found.shape != shape or found.dtype != dtype:
        return f"wrong: expected a tensor of shape {shape} and {dtype}"
    count = 0
    first: Place = ()
    for begin, elements in wrong(found):
        if bool(elements.any()):
            at = [int(i) for i in elements.nonzero()[0]]
            first = first or (*begin[:-1], begin[-1] + at[0], at[1])
            count += int(elements.sum())
    if not count:
        return None
    return f"wrong: {count} of {found.numel()} elements, first at {list(first)}"


def deepest(task: GroupedTask) -> int:
    """Returns how many products the longest sum has."""
    return max(task.sizes) if task.workload.form == "terms" else task.shape[2]


def result_shape(task: GroupedTask) -> tuple[int, ...]:
    """Returns the shape of the result of `grouped_mm`."""
    M, N, _ = task.shape
    return (M, N) if task.workload.form == "rows" else (task.workload.experts, M, N)


def _compared(
    out: Tensor, a: Tensor, b: Tensor, offs: Tensor, task: GroupedTask
) -> Iterator[tuple[Place, Tensor, Tensor]]:
    """Yields rows of each group's result, where they begin, and what they should be in float64."""
    del offs  # the host knows the groups
    lead: Place
    for group, (begin, end) in enumerate(pairwise((0, *task.ends))):
        part = slice(begin, end)
        if task.workload.form == "rows":
            of_group, left, right, lead, start = out[part], a[part], b[group], (), begin
        else:
            of_group, left, right, lead, start = out[group], a[:, part], b[part], (group,), 0
        factor = right.double()
        for rows in chunks(of_group.shape[0], factor):
            yield (*lead, start + rows.start), of_group[rows], left[rows].double() @ factor


def chunks(count: int, factor: Tensor) -> Iterator[slice]:
    """Yields slices of `count` rows, each so short that its product with a matrix takes little
    memory.
    """
    step = max(1, CHUNK // max(1, *factor.shape))
    for first in range(0, count, step):
        yield slice(first, first + step)


# ---- providers
@dataclass(frozen=True)
class GroupedProvider(Provider):
    """A provider of grouped products; it prepares calls from the operands of a task."""

    prepare: Prepare

    def fault(self, case: Any) -> str | None:
        """Returns what is wrong with this provider's results, or None. Raises Refused."""
        if self.trusted:
            return None
        found: str | None = case.fault(self.prepare)
        return found


def check_torch() -> None:
    """Raises ValueError where torch has no grouped product to compare with."""
    if not hasattr(torch.nn.functional, "grouped_mm"):
        raise ValueError(
            "--op grouped compares with torch.nn.functional.grouped_mm, which torch "
            f"{torch.__version__} lacks, expected torch 2.10 or later"
        )


def parse(name: str) -> GroupedProvider:
    """Returns the provider of a name: `torch`, `outblas`, or a kernel of `outblas.grouped_mm`.

    Raises ValueError for any other name.
    """
    named: dict[str, Prepare] = {GROUPED_BASE: _torch, "outblas": partial(_outblas, None)}
    named |= {kernel: partial(_outblas, kernel) for kernel in KERNELS}
    if name not in named:
        raise ValueError(f"--kernels has {name!r}, expected some of {', '.join(named)}")
    return GroupedProvider(name, "", named[name], trusted=name == GROUPED_BASE)


def runnable(device: torch.device) -> tuple[str, ...]:
    """Returns the names of the kernels that run on a device."""
    on_sm90 = torch.cuda.get_device_capability(device) == (9, 0)
    return (HOPPER, PORTABLE) if on_sm90 else (PORTABLE,)


def _torch(a: Tensor, b: Tensor, offs: Tensor) -> Call:
    grouped: Callable[..., Tensor] = torch.nn.functional.grouped_mm
    return lambda b=b: grouped(a, b, offs=offs)


def _outblas(kernel: str | None, a: Tensor, b: Tensor, offs: Tensor) -> Call:
    """Prepares the call of a user, with or without the name of a kernel."""
    return supported(kernel, lambda b=b: grouped_mm(a, b, offs=offs, kernel=kernel))


def supported(kernel: str | None, call: Call) -> Call:
    """Returns the call of a kernel. Raises Refused if the kernel does not support it."""
    if kernel is not None:
        try:
            call()
        except ValueError as error:
            raise Refused(str(error)) from None
    return call
