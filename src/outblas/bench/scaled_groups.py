"""Grouped products of fp8 operands with scales of blocks in a campaign: their operands, their
providers, and the check that comes before they are timed.

The rows of A have a scale for each 128 terms. So have the columns of B where groups are terms;
elsewhere 128 columns share one, as in checkpoints.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch

from outblas.base.compat.torch_private import scaled_mm as cublas_scaled_mm
from outblas.base.grouped_shapes import GroupedWorkload
from outblas.bench import deepgemm
from outblas.bench.block_scaled import K_MULTIPLE, Integers, by_columns, dequantised
from outblas.bench.grouped import (
    GroupedProvider,
    GroupedTask,
    Place,
    Prepare,
    chunks,
    deepest,
    fault_of_call,
    group_ends,
    supported,
)
from outblas.bench.operation import Operation, error_of_blocks, is_beyond
from outblas.bench.providers import DEEPGEMM, Call
from outblas.bench.record import GROUPED_BASE
from outblas.core import quantization
from outblas.core.fp8 import BLOCK
from outblas.torch_ops.grouped_mm import KERNELS
from outblas.torch_ops.quantize import quantize
from outblas.torch_ops.scaled_grouped_mm import scaled_grouped_mm
from outblas.verify.kernels import Refused

Tensor = torch.Tensor

PRECISION = "fp8-block"
LAYOUT = "nt"  # of both forms: tensor cores read fp8 terms that are contiguous
OUT_DTYPE = torch.bfloat16
_SCALE_BYTES = 4
# cuBLAS takes sizes that are multiples of 16, and multiples of 8 rows where each has scales of its
# own, as Transformer Engine found.
_TORCH_MULTIPLE = 16
_TORCH_ROWS = 8


class ScaledGroups(NamedTuple):
    """A (M, K), B (experts, K, N) or, where groups are terms, (K, N), their scales as `quantize`
    lays them out, and where groups end. The weights are the second, as campaigns expect.
    """

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    offs: Tensor


@dataclass(frozen=True)
class ScaledTask(GroupedTask):
    """The products of all groups of a workload. Groups of terms end at multiples of `BLOCK`, for
    the terms that share a scale belong to one group.
    """

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.workload.sizes_in(BLOCK if self.workload.form == "terms" else 1)

    def operands(self, operation: Operation) -> ScaledGroups:
        """Returns operands from normal(0, 1)."""
        return quantised(self, "cuda")

    def case(self, operation: Operation) -> "ScaledCase":
        return ScaledCase(self)

    def bytes_moved(self, operation: Operation) -> int:
        """Returns the bytes of the operands, their scales and the result. Weights of groups without
        rows are not read; their gradients are written.
        """
        M, N, K = self.shape
        blocks, count = math.ceil(K / BLOCK), self.weights_moved
        of_a = M * (K + _SCALE_BYTES * blocks)
        if self.workload.form == "terms":
            return of_a + N * (K + _SCALE_BYTES * blocks) + count * M * N * OUT_DTYPE.itemsize
        of_b = count * (N * K + _SCALE_BYTES * blocks * math.ceil(N / BLOCK))
        return of_a + of_b + M * N * OUT_DTYPE.itemsize


def tasks(workloads: Sequence[GroupedWorkload]) -> list[ScaledTask]:
    """Returns the products of a campaign, without duplicates."""
    return list(dict.fromkeys(ScaledTask(workload, LAYOUT) for workload in workloads))


# ---- operands
def quantised(task: ScaledTask, device: str) -> ScaledGroups:
    """Returns operands from normal(0, 1), the same every time."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        t = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return t.normal_(generator=generator)

    M, N, K = task.shape
    recipe = "1x128" if task.workload.form == "terms" else "128x128"
    a, scale_a = quantize(normal(M, K), "1x128")
    weight, scale_of_weight = quantize(normal(*_lead(task), N, K), recipe)
    return ScaledGroups(a, weight.mT, scale_a, scale_of_weight.mT, group_ends(task, device))


def integers(task: ScaledTask, device: str) -> ScaledGroups:
    """Returns small integers with scales that are powers of two, whose sums are exact, the same
    every time.

    Raises ValueError if a sum is too long for that.
    """
    M, N, K = task.shape
    draw, blocks = Integers(deepest(task), device), math.ceil(K / BLOCK)
    a, weight = draw.values(M, K), draw.values(*_lead(task), N, K)
    scale_a = quantization.empty_scales(a.shape, "1x128", a.device)
    scale_a.copy_(draw.scales(M, blocks))
    if task.workload.form == "terms":
        scale_b = draw.scales(blocks, N)
    else:
        scale_b = draw.scales(*_lead(task), math.ceil(N / BLOCK), blocks).mT
    return ScaledGroups(a, weight.mT, scale_a, scale_b, group_ends(task, device))


def _lead(task: ScaledTask) -> tuple[int, ...]:
    return () if task.workload.form == "terms" else (task.workload.experts,)


# ---- the check
@dataclass(frozen=True)
class ScaledCase:
    """What a provider is checked with before it is timed."""

    task: ScaledTask
    device: str = "cuda"

    def fault(self, prepare: Prepare) -> str | None:
        """Returns what is wrong with the results of prepared calls, or None: with those of small
        integers, which must be exact, or with those of normal data, which may have the error of
        fp32 sums of blocks that tensor cores sum.
        """
        exact = self._fault(prepare, integers(self.task, self.device), is_exact=True)
        return exact or self._fault(prepare, quantised(self.task, self.device), is_exact=False)

    def _fault(self, prepare: Prepare, made: ScaledGroups, *, is_exact: bool) -> str | None:
        def wrong(found: Tensor) -> Iterator[tuple[Place, Tensor]]:
            for begin, got, a, b in _compared(found, made, self.task):
                x = a @ b
                if is_exact:
                    # torch rounds float64 by way of fp32, which represents these sums
                    yield begin, got != x.to(got.dtype)
                else:
                    error = error_of_blocks(a.abs() @ b.abs(), a.shape[1])
                    yield begin, is_beyond(got, x, error)

        return fault_of_call(prepare(*made), self.task, OUT_DTYPE, self.device, wrong)


def _compared(
    out: Tensor, made: ScaledGroups, task: ScaledTask
) -> Iterator[tuple[Place, Tensor, Tensor, Tensor]]:
    """Yields rows of each group's result, where they begin, and the operands of which they are the
    product, in float64 and times their scales.
    """
    a, b, scale_a, scale_b, _ = made
    lead: Place
    for group, (begin, end) in enumerate(pairwise((0, *task.ends))):
        part = slice(begin, end)
        if task.workload.form == "rows":
            of_group, left, scales, lead, start = out[part], a[part], scale_a[part], (), begin
            factor = dequantised(b[group], scale_b[group], (BLOCK, BLOCK))
        else:
            blocks, lead, start = _blocks(begin, end), (group,), 0
            of_group, left, scales = out[group], a[:, part], scale_a[:, blocks]
            factor = dequantised(b[part], scale_b[blocks], (BLOCK, 1))
        for rows in chunks(of_group.shape[0], factor):
            values = dequantised(left[rows], scales[rows], (1, BLOCK))
            yield (*lead, start + rows.start), of_group[rows], values, factor


def _blocks(begin: int, end: int) -> slice:
    """Returns the blocks of a group of terms."""
    return slice(begin // BLOCK, math.ceil(end / BLOCK))


# ---- providers
def parse(name: str) -> GroupedProvider:
    """Returns the provider of a name: `torch`, `outblas`, a kernel of `outblas.scaled_grouped_mm`,
    or `deepgemm`.

    Raises ValueError for any other name.
    """
    named: dict[str, Prepare] = {GROUPED_BASE: _torch, "outblas": partial(_outblas, None)}
    named |= {kernel: partial(_outblas, kernel) for kernel in KERNELS}
    named[DEEPGEMM] = _deepgemm
    if name not in named:
        raise ValueError(
            f"--kernels has {name!r}, expected some of {', '.join(named)} with --dtype {PRECISION}"
        )
    return GroupedProvider(name, "", named[name], trusted=name == GROUPED_BASE)


def _outblas(
    kernel: str | None, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor
) -> Call:
    """Prepares the call of a user, with or without the name of a kernel."""

    def call(b: Tensor = b) -> Tensor:
        return scaled_grouped_mm(
            a, b, scale_a, scale_b, offs=offs, out_dtype=OUT_DTYPE, kernel=kernel
        )

    return supported(kernel, call)


def _deepgemm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor) -> Call:
    """Prepares DeepGEMM's product of groups of rows, where it is installed."""
    if b.dim() == 2:
        raise Refused(f"{DEEPGEMM} takes groups of rows, not of terms")
    return deepgemm.prepared_groups(a, b, scale_a, scale_b, offs)


# ---- torch, which has no grouped product with scales of blocks
def _torch(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor) -> Call:
    """Prepares one `torch._scaled_mm` for each group, which writes to its part of a result.

    Raises Refused for sizes that torch refuses, of whatever groups.
    """
    ends = offs.tolist()
    N = b.shape[-1]
    if N % _TORCH_MULTIPLE:
        raise Refused(f"torch._scaled_mm takes multiples of {_TORCH_MULTIPLE} columns, not {N}")
    prepare = _torch_of_rows if b.dim() == 3 else _torch_of_terms
    return prepare(a, b, scale_a, scale_b, ends)


def _torch_of_rows(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: list[int]) -> Call:
    """cuBLAS takes multiples of `_TORCH_ROWS` rows. A group with another number of rows is
    multiplied with the next rows, whose results the next groups write again, and whose scales are
    1. Behind the last group are rows of zeros.
    """
    M, K = a.shape
    if K % K_MULTIPLE:
        raise Refused(
            f"torch._scaled_mm takes K that is a multiple of {K_MULTIPLE}, with scales of "
            f"{BLOCK}x{BLOCK} blocks, not {K}"
        )
    rows = a.new_zeros((M + _TORCH_ROWS - 1, K))
    rows[:M].copy_(a)
    out = a.new_full((rows.shape[0], b.shape[2]), math.nan, dtype=OUT_DTYPE)
    of_weights = scale_b.unbind()
    parts = []
    for group, (begin, end) in enumerate(pairwise((0, *ends))):
        if begin == end:
            continue
        count = math.ceil((end - begin) / _TORCH_ROWS) * _TORCH_ROWS
        scales = by_columns(scale_a.new_ones((count, scale_a.shape[1])))
        scales[: end - begin].copy_(scale_a[begin:end])
        part = slice(begin, begin + count)
        parts.append((group, rows[part], scales, out[part]))

    def call(b: Tensor = b) -> Tensor:
        weights = b.unbind()
        for group, x, scales, result in parts:
            cublas_scaled_mm(
                x, weights[group], scales, of_weights[group], out_dtype=OUT_DTYPE, out=result
            )
        return out[:M]

    return call


def _torch_of_terms(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: list[int]
) -> Call:
    """A group without terms gets zeros."""
    M, K = a.shape
    if M % _TORCH_ROWS or K % _TORCH_MULTIPLE:
        raise Refused(
            f"torch._scaled_mm takes multiples of {_TORCH_ROWS} rows and of {_TORCH_MULTIPLE} "
            f"terms, not {M} and {K}"
        )
    scale_a, scale_b = by_columns(scale_a), scale_b.contiguous()
    out = a.new_full((len(ends), M, b.shape[1]), math.nan, dtype=OUT_DTYPE)
    empty, parts = [], []
    for result, (begin, end) in zip(out, pairwise((0, *ends)), strict=True):
        if begin == end:
            empty.append(result)
            continue
        terms, blocks = slice(begin, end), _blocks(begin, end)
        parts.append((terms, a[:, terms], scale_a[:, blocks], scale_b[blocks], result))

    def call(b: Tensor = b) -> Tensor:
        for terms, x, of_rows, of_columns, result in parts:
            cublas_scaled_mm(x, b[terms], of_rows, of_columns, out_dtype=OUT_DTYPE, out=result)
        for result in empty:
            result.zero_()
        return out

    return call
