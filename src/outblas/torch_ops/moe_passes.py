"""The passes between the products of a layer of experts, by torch's functions: on the CPU, and
where Triton's kernels (`kernels/moe.py`, which describes them) are not to be had.
"""

import torch

from outblas.call.epilogue import composed
from outblas.torch_ops.activation_backward import formula

Tensor = torch.Tensor


def route(expert_index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts slots by expert; returns offs, row_of_slot and slot_of_row."""
    expert = expert_index.flatten().long()
    exists = (expert >= 0) & (expert < experts)
    expert = expert.where(exists, experts)
    slot_of_row = expert.argsort(stable=True)
    rows = torch.arange(expert.numel(), device=expert.device)
    row_of_slot = torch.empty_like(rows).scatter_(0, slot_of_row, rows)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=expert.device)
    counts.scatter_add_(0, expert, torch.ones_like(expert))
    offs = counts[:experts].cumsum(0, dtype=torch.int32)
    rows_or_none = row_of_slot.where(exists, -1).int().view(expert_index.shape)
    return offs, rows_or_none, slot_of_row.int()


def dispatch(x: Tensor, row_of_slot: Tensor) -> Tensor:
    """Returns the rows of the products; those beyond the last expert's are zero."""
    row, slots = row_of_slot.flatten().long(), x.repeat_interleave(row_of_slot.shape[1], 0)
    last = len(row)  # what does not exist goes into a row that is cut off
    out = x.new_zeros(last + 1, x.shape[1])
    out[row.where(row >= 0, last)] = slots
    return out[:last]


def combine(rows: Tensor, row_of_slot: Tensor, weights: Tensor | None) -> Tensor:
    """Returns for each token the sum of its rows, multiplied by its weights."""
    chosen = rows[row_of_slot.clamp(min=0).long()].float()
    if weights is not None:
        chosen = chosen * weights.unsqueeze(2).float()
    return chosen.where((row_of_slot >= 0).unsqueeze(2), 0).sum(1).to(rows.dtype)


def activation_backward(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    slot_of_row: Tensor,
    offs: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradient of x, the weighted inner rows, and the gradient of the weights."""
    slots = slot_of_row.long()
    used = (torch.arange(len(slots), device=x.device) < offs[-1]).unsqueeze(1)
    w = weights.flatten()[slots].float().unsqueeze(1).where(used, 0)
    dtype = x.dtype
    x, grad = (t.float().where(used, 0) for t in (x, grad))
    inner = composed(x, activation, None)
    grad_x = formula(grad * w, x, activation).to(dtype)
    of_weights = torch.zeros(weights.numel(), dtype=torch.float32, device=x.device)
    of_weights[slots] = (grad * inner).sum(1)
    return grad_x, (inner * w).to(dtype), of_weights.view(weights.shape)
