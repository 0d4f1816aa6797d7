"""Grouped products by torch, group by group, where no kernel computes them."""

from collections.abc import Iterator

import torch

from ..core.epilogue import composed
from ..core.grouped import NO_TENSORS, Checked, Form, GroupedTensors

Tensor = torch.Tensor


def by_torch(
    checked: Checked,
    mat_a: Tensor,
    mat_b: Tensor,
    ends: Tensor,
    out: Tensor,
    tensors: GroupedTensors,
    activation: str,
) -> None:
    """Computes the products group by group. `ends`, or the counts of groups, are read by the host.
    What no group covers is zero.
    """
    form, dtype = checked.form, checked.dtype
    is_bare = tensors is NO_TENSORS and not activation
    wide = dtype if is_bare else torch.float32  # an epilogue rounds once
    if tensors.a_index is not None:
        mat_a = mat_a.index_select(0, tensors.a_index.clamp(0, mat_a.shape[0] - 1))
    out.zero_()
    extent = mat_b.shape[-1] if form == "ragged_n" else mat_a.shape[0 if form == "ragged_m" else 1]
    for group, part in enumerate(_parts(form, ends.tolist(), extent)):
        match form:
            case "ragged_m":
                a, b = mat_a[part], mat_b[group]
            case "masked":
                a, b = mat_a[group, part], mat_b[group]
            case "ragged_n":
                a, b = mat_a[group], mat_b[:, part]
            case _:
                a, b = mat_a[:, part], mat_b[part]
        product = a.to(wide) @ b.to(wide)
        if is_bare:
            _of_group(form, out, group, part).copy_(product)
        else:
            _store_group(form, product, group, part, out, tensors, activation)


def _parts(form: Form, ends: list[int], extent: int) -> Iterator[slice]:
    """Yields the part of the divided dimension, of size `extent`, that each group has."""
    begin = 0
    for end in ends:
        end = min(max(end, begin), extent)
        yield slice(begin, end)
        begin = 0 if form == "masked" else end


def _of_group(form: Form, t: Tensor, group: int, part: slice) -> Tensor:
    """Returns the part of a tensor like the result that a group has."""
    match form:
        case "ragged_m":
            return t[part]
        case "ragged_n":
            return t[:, part]
        case "masked":
            return t[group, part]
    return t[group]


def _store_group(
    form: Form,
    x: Tensor,
    group: int,
    part: slice,
    out: Tensor,
    tensors: GroupedTensors,
    activation: str,
) -> None:
    """Stores the result of a group from its product in fp32."""
    bias, residual, aux, _, scatter_index, weights, _ = tensors
    if bias is not None:
        x = x + bias[group]
    if aux is not None:
        _of_group(form, aux, group, part).copy_(x)
    y = composed(x, activation, None)
    if weights is not None:
        y = y * weights[part].unsqueeze(1)
    if scatter_index is None:
        more = 0 if residual is None else _of_group(form, residual, group, part)
        _of_group(form, out, group, part).copy_(y + more)
        return
    place = scatter_index[part].long()
    is_inside = (place >= 0) & (place < out.shape[0])
    place, y = place[is_inside], y[is_inside]
    out[place] = (y if residual is None else y + residual[place]).to(out.dtype)
