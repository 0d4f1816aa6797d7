"""Grouped products by torch, group by group, where no kernel computes them."""

from collections.abc import Iterator

import torch

from outblas.call.epilogue import composed
from outblas.call.grouped import NO_TENSORS, Checked, Form, GroupedTensors, check_order
from outblas.call.grouped_scales import spread
from outblas.call.sm_carveout import kept_by_torch

Tensor = torch.Tensor


@kept_by_torch
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
    What no group covers is zero. Raises OperandError where ends decrease.
    """
    form, dtype = checked.form, checked.dtype
    is_bare = tensors is NO_TENSORS and not activation
    wide = dtype if is_bare else torch.float32  # an epilogue rounds once
    if tensors.a_index is not None:
        chosen = tensors.a_index.clamp(0, mat_a.shape[0] - 1).long()
        mat_a = mat_a[chosen]
        if tensors.scale_a is not None:
            tensors = tensors._replace(scale_a=tensors.scale_a[chosen])
    out.zero_()
    sizes = ends.tolist()
    if form != "masked":
        check_order(sizes)
    extent = mat_b.shape[-1] if form == "ragged_n" else mat_a.shape[0 if form == "ragged_m" else 1]
    for group, part in enumerate(_parts(form, sizes, extent)):
        a, b = (t.to(wide) for t in _pair(form, mat_a, mat_b, group, part))
        if not (tensors.scale_a is tensors.scale_b is None):
            a, b = _scaled_pair(form, a, b, group, part, tensors)
        product = a @ b
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


def _pair(
    form: Form, mat_a: Tensor, mat_b: Tensor, group: int, part: slice
) -> tuple[Tensor, Tensor]:
    """Returns the operands of a group."""
    match form:
        case "ragged_m":
            return mat_a[part], mat_b[group]
        case "masked":
            return mat_a[group, part], mat_b[group]
        case "ragged_n":
            return mat_a[group], mat_b[:, part]
    return mat_a[:, part], mat_b[part]


def _scaled_pair(
    form: Form, a: Tensor, b: Tensor, group: int, part: slice, tensors: GroupedTensors
) -> tuple[Tensor, Tensor]:
    """Returns the operands of a group in fp32, multiplied by their scales."""
    assert tensors.scale_a is not None, "a call has both"
    assert tensors.scale_b is not None, "a call has both"
    if form == "ragged_k":
        terms = part.start, part.stop
        return a * spread(tensors.scale_a, 1, *terms), b * spread(tensors.scale_b, 0, *terms)
    scale_a, scale_b = _pair(form, tensors.scale_a, tensors.scale_b, group, part)
    K, N = b.shape
    blocks = spread(scale_b, 0, 0, K)
    return a * spread(scale_a, 1, 0, K), b * spread(blocks, 1, 0, N)


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
    bias, residual, aux, _, scatter_index, weights, *_ = tensors
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
