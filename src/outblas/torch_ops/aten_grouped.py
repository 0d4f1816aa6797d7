"""`torch.nn.functional.grouped_mm` under `outblas.enable`: its calls in the form of
`outblas.grouped_mm`, and which of them stay with torch.

Its operator, `_grouped_mm`, multiplies two batches where both operands have 3 dimensions; such a
call is planned as `bmm`. What follows is about all others, whose groups `offs` divides.
"""

from typing import NamedTuple

import torch

from outblas.base.compat.torch_private import current_device as _current_device
from outblas.call import grouped, recorded_shapes
from outblas.call.dispatch import Plan
from outblas.call.errors import OperandError
from outblas.call.grouped import NO_TENSORS, Form, GroupedProblem
from outblas.call.hooks import GroupedKernels
from outblas.call.tensor_memory import read_address
from outblas.torch_ops import grouped_mm
from outblas.torch_ops.aten_rules import GROUPED, Product, Rules

Tensor = torch.Tensor

NOT_INVARIANT = f"{GROUPED} has no batch-invariant kernel where offs divides its operands"
# torch's kernel of bfloat16 products refuses as many.
_TOO_MANY_GROUPS = 1024
_DIVIDED = {"ragged_m": "M", "ragged_n": "N", "ragged_k": "K"}


# ---- which products are slower than torch's
class Slower(NamedTuple):
    """A class of grouped products of which one was measured to be slower than torch's.

    divided: the dimension that is divided. gain: torch's time over ours in the slowest product.
    groups, fewer_than: the class has so many groups or more, and fewer than so many. above, up_to:
    and more than `above` rows, columns or terms in the mean of its groups, up to `up_to`.
    """

    divided: str
    gain: float
    groups: int = 1
    fewer_than: int = 2**31
    above: int = 0
    up_to: int = 2**31

    def has(self, product: Product) -> bool:
        """Returns whether a product belongs to the class."""
        if product.divided != self.divided:
            return False
        if not self.groups <= product.groups < self.fewer_than:
            return False
        extent = {"M": product.M, "N": product.N, "K": product.K}[self.divided]
        return self.above < extent / product.groups <= self.up_to

    def __str__(self) -> str:
        count = f"{self.groups} and more"
        if self.fewer_than < 2**31:
            count = f"{self.groups} to {self.fewer_than - 1}"
        span = f"more than {self.above}" if self.above else "any number"
        if self.up_to < 2**31:
            span = f"{self.above + 1} to {self.up_to}"
        return f"{count} groups of {span} along {self.divided}"


# NVIDIA H100, bfloat16, torch 2.11: results/h100_grouped.json and h100_grouped_terms.json have 8,
# 128 and 256 groups, even and skewed, which a call does not tell apart. Of products with groups of
# columns one was measured.
SLOWER = (
    Slower("M", 0.97, groups=256, above=128),
    Slower("N", 0.97),
    Slower("K", 0.88, groups=256),
    Slower("K", 0.94, fewer_than=128, up_to=32),
)


def slower_reason(product: Product, min_gain: float) -> str:
    """Returns why a grouped product is known to miss `min_gain`; "" if nothing is known of it."""
    for known in SLOWER:
        if known.has(product) and known.gain < min_gain:
            return (
                f"{known} were {known.gain} times as fast as torch's at worst, and min_gain is "
                f"{min_gain:g}"
            )
    return ""


# ---- what torch accepts, and what it returns
def refusal(a: Tensor, b: Tensor) -> str:
    """Returns what torch does not accept of operands that `outblas.grouped_mm` accepts: it raises
    under `enable`, too.
    """
    for name, t in (("mat_a", a), ("mat_b", b)):
        if read_address(t) % 16:
            return f"{name} does not begin at a multiple of 16 bytes"
        (rows, columns), (row, column) = t.shape[-2:], t.stride()[-2:]
        # An extent of 1 leaves both layouts open; torch looks for columns first.
        if row == 1 and column >= max(rows, 1):
            step = column
        elif column == 1 and row >= max(columns, 1):
            step = row
        else:
            return f"{name} has strides {t.stride()}, expected contiguous rows or columns"
        if step * t.element_size() % 16:
            return f"{name} has rows or columns that are {step} apart, no multiple of 16 bytes"
    return ""


def padded_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Returns the strides of torch's result, whose rows begin at multiples of 16 bytes."""
    granule = 16 // itemsize
    row = -(-shape[-1] // granule) * granule
    return (row, 1) if len(shape) == 2 else (shape[1] * row, row, 1)


# ---- calls
class Grouped(NamedTuple):
    """The arguments of a call of `torch._grouped_mm` with an `offs`."""

    a: Tensor
    b: Tensor
    offs: Tensor
    bias: Tensor | None
    out_dtype: torch.dtype | None

    def reason(self) -> str:
        """Returns why torch computes the call, whatever the rules are; "" if it need not."""
        a, b, offs, bias, out_dtype = self
        if bias is not None:
            return "it has a bias"
        if out_dtype not in (None, a.dtype):
            return f"its result is {out_dtype}"
        try:
            grouped.check(a, b, offs, NO_TENSORS, "", None)
        except OperandError as error:  # torch says what is wrong
            return str(error)
        if a.dtype == torch.bfloat16 and offs.shape[0] >= _TOO_MANY_GROUPS:
            return f"it has {offs.shape[0]} groups"
        return refusal(a, b)

    def product(self) -> Product:
        """Returns the product of a call that has no `reason`, as a filter sees it."""
        (M, K), N = self.a.shape[-2:], self.b.shape[-1]
        divided = _DIVIDED[self._output()[0]]
        return Product(GROUPED, 1, M, N, K, self.a.dtype, self.offs.shape[0], divided)

    def problem(self) -> GroupedProblem:
        """Returns the problem that a call poses which has no `reason`."""
        form, shape, strides = self._output()
        sample = self.a.new_empty_strided(shape, strides)
        return grouped.describe(form, self.a, self.b, sample, self.offs.shape[0])

    def plan(self, problem: GroupedProblem, kernels: GroupedKernels) -> Plan:
        """Returns the plan for calls like this one: plan(a, b, offs) returns the result."""
        if recorded_shapes.is_recording():
            recorded_shapes.note_groups(problem)
        form, shape, strides = self._output()
        device = self.a.device
        several = device.type == "cuda" and torch.cuda.device_count() > 1

        def launch(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
            out = a.new_empty_strided(shape, strides)
            planned = grouped.in_planned_form(form, a, b, out, NO_TENSORS)
            kernels.run(problem, *planned[:3], offs.contiguous(), planned[3])
            return out

        def execute(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
            if several and _current_device() != device.index:
                with torch.cuda.device(device):
                    return launch(a, b, offs)
            return launch(a, b, offs)

        return execute

    def _output(self) -> tuple[Form, tuple[int, ...], tuple[int, ...]]:
        """Returns the form of the product, and the shape and strides of its result."""
        checked = grouped.check(self.a, self.b, self.offs, NO_TENSORS, "", None)
        shape = checked.result
        return checked.form, shape, padded_strides(shape, checked.dtype.itemsize)


def kernels_for(rules: Rules, given: Grouped, product: Product) -> GroupedKernels | str:
    """Returns the kernels that compute a call, or why torch computes it.

    `portable` was never compared with torch: it takes what `hopper.grouped` does not where speed
    does not matter by a `min_gain` of 0, or where the rules name it.
    """
    name = rules.kernel
    if not name:
        if reason := slower_reason(product, rules.min_gain):
            return reason
        if reason := grouped_mm._no_kernel_reason(given.a) or "":
            return reason
        name = grouped_mm.HOPPER if rules.min_gain > 0 else ""
    try:
        return grouped_mm.kernels_for(given.problem(), name)
    except ValueError as error:
        if name == rules.kernel:
            return str(error)
        return (
            f"{error}; no other kernel was compared with torch, and min_gain is {rules.min_gain:g}"
        )
