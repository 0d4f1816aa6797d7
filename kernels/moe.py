"""What lies between the products of a layer of experts: passes over memory, in fp32, each sum in
one order.

A *slot* is a pair of a token and one of its experts: slot t k + j belongs to token t. Rows of the
products are slots, sorted by expert; the sort keeps the order of slots. `row_of_slot` says which
row a slot is, or -1 where its expert does not exist; `slot_of_row` is the inverse, in which such
slots come last. Nothing is read by the host.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from outblas.call.epilogue import GATED
from outblas.kernels.activation import _value_and_slope
from outblas.kernels.passes import Passes

Tensor = torch.Tensor

COLUMNS = 1024  # of a program that moves rows: 16 bytes of 16-bit elements for each of 128 threads


class SlotTile(NamedTuple):
    """The blocks of kernels that sum."""

    slots: int  # that a program counts or ranks
    chunk: int  # of slots, with which a program compares its own at a time
    rows: int  # of `activation_kernel`
    columns: int  # of `activation_kernel`, at a time


_COMPILED = SlotTile(128, 16, 4, 256)  # in `activation_kernel` a warp has a row, a thread 16 bytes
_INTERPRETED_TILE = SlotTile(16, 8, 2, 16)  # the interpreter sums one element after the other


@triton.jit
def _add(a, b):  # type: ignore[no-untyped-def]
    return a + b


# ---- routing
@triton.jit
def _expert_of(expert, slot, slots, experts):  # type: ignore[no-untyped-def]
    """Returns the experts of slots: `experts` for those that do not exist, and behind the last."""
    e = tl.load(expert + slot, mask=slot < slots, other=-1)
    return tl.where((e >= 0) & (e < experts), e, experts).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def count_kernel(  # type: ignore[no-untyped-def]
    expert, counts, slots, experts, blocks, SLOTS: tl.constexpr, BUCKETS: tl.constexpr
):
    """Counts how many slots of a block each expert has: counts[expert, block]."""
    block = tl.program_id(0)
    e = _expert_of(expert, block * SLOTS + tl.arange(0, SLOTS), slots, experts)
    bucket = tl.arange(0, BUCKETS)
    tl.store(
        counts + bucket.to(tl.int64) * blocks + block,
        tl.histogram(e, BUCKETS),
        mask=bucket <= experts,
    )


@triton.jit  # type: ignore[untyped-decorator]
def rank_kernel(  # type: ignore[no-untyped-def]
    expert,
    ends,
    row_of_slot,
    slot_of_row,
    slots,
    experts,
    blocks,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Finds the rows of a block's slots. `ends` has the sums of `counts` up to each element."""
    block = tl.program_id(0)
    slot = block * SLOTS + tl.arange(0, SLOTS)
    e = _expert_of(expert, slot, slots, experts)
    before = e.to(tl.int64) * blocks + block - 1
    row = tl.load(ends + before, mask=before >= 0, other=0)
    for start in tl.static_range(0, SLOTS, CHUNK):
        other = block * SLOTS + start + tl.arange(0, CHUNK)
        same = e[:, None] == _expert_of(expert, other, slots, experts)[None, :]
        earlier = other[None, :] < slot[:, None]
        row += tl.reduce((same & earlier).to(tl.int32), 1, _add)
    tl.store(row_of_slot + slot, tl.where(e < experts, row, -1), mask=slot < slots)
    tl.store(slot_of_row + row, slot, mask=slot < slots)


# ---- rows
@triton.jit  # type: ignore[untyped-decorator]
def dispatch_kernel(  # type: ignore[no-untyped-def]
    x, out, row_of_slot, columns, K: tl.constexpr, COLUMNS: tl.constexpr
):
    """Stores columns of one token of x in each of its rows."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS
    column += tl.arange(0, COLUMNS)
    value = tl.load(x + token * columns + column, mask=column < columns, other=0.0)
    for j in tl.static_range(K):
        row = tl.load(row_of_slot + token * K + j).to(tl.int64)
        end = tl.where(row >= 0, columns, 0)
        tl.store(out + row * columns + column, value, mask=column < end)


@triton.jit  # type: ignore[untyped-decorator]
def combine_kernel(  # type: ignore[no-untyped-def]
    rows,
    weights,
    out,
    row_of_slot,
    columns,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums the rows of one token, multiplied by its weights where WEIGHTED."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS
    column += tl.arange(0, COLUMNS)
    total = tl.full((COLUMNS,), 0, tl.float32)
    for j in tl.static_range(K):
        row = tl.load(row_of_slot + token * K + j).to(tl.int64)
        end = tl.where(row >= 0, columns, 0)
        value = tl.load(rows + row * columns + column, mask=column < end, other=0.0).to(tl.float32)
        if WEIGHTED:
            # A row that does not exist adds nothing, even if its weight is infinite.
            w = tl.load(weights + token * K + j, mask=row >= 0, other=0.0)
            value *= w.to(tl.float32)
        total += value
    at = out + token * columns + column
    tl.store(at, total.to(out.dtype.element_ty), mask=column < columns)


@triton.jit  # type: ignore[untyped-decorator]
def activation_kernel(  # type: ignore[no-untyped-def]
    grad,
    x,
    weights,
    grad_x,
    weighted,
    grad_weights,
    slot_of_row,
    offs,
    experts,
    rows,
    COLUMNS: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Computes h = f(x) again, and from `grad`, the gradient of h / w for the weight w of a row:
    grad_x = w grad f'(x), weighted = w h, and grad_weights[slot] = sum over columns of grad h.

    GATE: rows of x and grad_x are twice as wide; their first halves belong to the gate. Rows
    beyond the last expert's get a zero in grad_weights, and nothing else.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    is_used = row < tl.load(offs + experts - 1)
    slot = tl.load(slot_of_row + row, mask=is_row, other=0)
    w = tl.load(weights + slot, mask=is_used, other=0.0).to(tl.float32)[:, None]
    first = row.to(tl.int64)[:, None] * COLUMNS
    total = tl.full((ROWS,), 0, tl.float32)
    for start in range(0, COLUMNS, INNER):
        column = start + tl.arange(0, INNER)[None, :]
        mask = is_used[:, None] & (column < COLUMNS)
        at = first + column
        of_x = at + first if GATE else at
        g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        argument = tl.load(x + of_x, mask=mask, other=0.0).to(tl.float32)
        value, slope = _value_and_slope(argument, FUNCTION)
        if GATE:
            other = tl.load(x + of_x + COLUMNS, mask=mask, other=0.0).to(tl.float32)
            of_other = (g * w * value).to(grad_x.dtype.element_ty)
            tl.store(grad_x + of_x + COLUMNS, of_other, mask=mask)
            value, slope = value * other, slope * other
        total += tl.reduce(g * value, 1, _add)
        tl.store(grad_x + of_x, (g * w * slope).to(grad_x.dtype.element_ty), mask=mask)
        tl.store(weighted + at, (w * value).to(weighted.dtype.element_ty), mask=mask)
    tl.store(grad_weights + slot, total, mask=is_row)


# ---- launches
_PASSES = Passes(
    "the kernels between the products of experts",
    count_kernel,
    rank_kernel,
    dispatch_kernel,
    combine_kernel,
    activation_kernel,
)
_launch = _PASSES.launch


def route(expert_index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts the slots of (T, k) indices by expert. The tensors of this and of the other functions
    are checked, contiguous and not empty.

    Returns where each expert's rows end, (experts,); row_of_slot, (T, k); slot_of_row, (T k,). All
    are int32. Like the other functions it raises RuntimeError while a CUDA graph is captured, if a
    kernel is needed for the first time, and CompileForbidden where it may not be compiled.
    """
    slots, device = expert_index.numel(), expert_index.device
    tile = _tile(device)
    blocks = triton.cdiv(slots, tile.slots)
    counts = torch.empty(experts + 1, blocks, dtype=torch.int32, device=device)
    row_of_slot = torch.empty(expert_index.shape, dtype=torch.int32, device=device)
    slot_of_row = torch.empty(slots, dtype=torch.int32, device=device)
    buckets = max(128, triton.next_power_of_2(experts + 1))
    sizes = slots, experts, blocks
    _launch(
        count_kernel,
        (blocks,),
        (expert_index, counts, *sizes),
        {"SLOTS": tile.slots, "BUCKETS": buckets},
    )
    ends = counts.flatten().cumsum(0, dtype=torch.int32)
    given = expert_index, ends, row_of_slot, slot_of_row, *sizes
    _launch(rank_kernel, (blocks,), given, {"SLOTS": tile.slots, "CHUNK": tile.chunk})
    offs = ends.view(experts + 1, blocks)[:experts, -1].contiguous()
    return offs, row_of_slot, slot_of_row


def dispatch(x: Tensor, row_of_slot: Tensor) -> Tensor:
    """Returns the rows of the products, (T k, H), from the tokens (T, H). Rows beyond the last
    expert's are not written.
    """
    (tokens, k), columns = row_of_slot.shape, x.shape[1]
    out = x.new_empty(tokens * k, columns)
    grid = tokens, triton.cdiv(columns, COLUMNS)
    _launch(dispatch_kernel, grid, (x, out, row_of_slot, columns), {"K": k, "COLUMNS": COLUMNS})
    return out


def combine(rows: Tensor, row_of_slot: Tensor, weights: Tensor | None) -> Tensor:
    """Returns for each token the sum of its rows, (T, H), multiplied by its weights (T, k)."""
    (tokens, k), columns = row_of_slot.shape, rows.shape[1]
    out = rows.new_empty(tokens, columns)
    constants = {"K": k, "WEIGHTED": weights is not None, "COLUMNS": COLUMNS}
    given = rows, weights, out, row_of_slot, columns
    _launch(combine_kernel, (tokens, triton.cdiv(columns, COLUMNS)), given, constants)
    return out


def activation_backward(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    slot_of_row: Tensor,
    offs: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes from `grad`, the gradient of the weighted inner rows (T k, F), and from x, the rows
    before the activation (T k, W): the gradient of x, the weighted inner rows themselves, and the
    gradient of the weights (T, k) in fp32.
    """
    rows, columns = grad.shape
    grad_x, weighted = torch.empty_like(x), torch.empty_like(grad)
    grad_weights = torch.empty(weights.shape, dtype=torch.float32, device=weights.device)
    tensors = grad, x, weights, grad_x, weighted, grad_weights, slot_of_row, offs
    tile = _tile(grad.device)
    constants = {
        "COLUMNS": columns,
        "FUNCTION": GATED.get(activation, activation),
        "GATE": activation in GATED,
        "ROWS": tile.rows,
        "INNER": tile.columns,
    }
    sizes = offs.numel(), rows
    _launch(activation_kernel, (triton.cdiv(rows, tile.rows),), (*tensors, *sizes), constants)
    return grad_x, weighted, grad_weights


def _tile(device: torch.device) -> SlotTile:
    return _INTERPRETED_TILE if device.type == "cpu" else _COMPILED
