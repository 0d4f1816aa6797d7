"""Describes an incorrect result so that an engineer can act on it: how many elements, where, and
the expected values.
"""

import torch

from outblas.verify.call import GuardedCall


def describe(call: GuardedCall, wrong: torch.Tensor) -> list[str]:
    """Returns one line about elements that were never written and one about wrong ones. `wrong` is
    a mask of out's shape.
    """
    unwritten = call.out.unwritten()
    lines = []
    if bool(unwritten.any()):
        lines.append(f"unwritten: {where(unwritten)}")
    values = wrong & ~unwritten
    if bool(values.any()):
        lines.append(f"wrong: {where(values)}; {_errors(call, values)}")
    return lines


def where(mask: torch.Tensor) -> str:
    """Returns the number of marked elements, the first index, and the bounding box. A box that is
    completely marked points at a tile, a row or a column.
    """
    batches = mask.flatten(0, -3) if mask.dim() > 2 else mask[None]
    used = int(batches.flatten(1).any(-1).sum())
    rows, columns = (batches.any(dim).any(0).nonzero().flatten().tolist() for dim in (-1, -2))
    count = int(mask.sum())
    area = used * (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1)
    box = (
        f"{'all of' if area == count else 'within'} rows {rows[0]}-{rows[-1]}, columns "
        f"{columns[0]}-{columns[-1]}"
    )
    matrices = f" of {used} of {len(batches)} matrices" if mask.dim() > 2 else ""
    return f"{count} of {mask.numel()} elements, first at {list(_first_of(mask))}, {box}{matrices}"


def _first_of(mask: torch.Tensor) -> tuple[int, ...]:
    """Returns the index of the first True, one dimension at a time, because torch.nonzero does not
    support 2³¹ elements.
    """
    index: list[int] = []
    while mask.dim():
        index.append(
            int(mask.flatten(1).any(-1).nonzero()[0]) if mask.dim() > 1 else int(mask.nonzero()[0])
        )
        mask = mask[index[-1]]
    return tuple(index)


def _errors(call: GuardedCall, wrong: torch.Tensor) -> str:
    """Returns the expected and the actual value of the first wrong element, the largest error, and
    the number of NaN.
    """
    largest, place, nans = -1.0, (), 0
    for rows in call.row_chunks():
        mask = wrong[..., rows, :]
        got = call.out.view[..., rows, :].double()
        want = call.product(rows).to(call.out.view.dtype).double()
        nans += int((got.isnan() & mask).sum())
        error = (got - want).abs().nan_to_num_(nan=-1.0, posinf=torch.inf)
        error.masked_fill_(~mask, -1.0)
        if error.numel() and float(error.max()) > largest:
            largest = float(error.max())
            *batch, row, column = _first_of(error == largest)
            place = (*batch, rows.start + row, column)
    text = _pair(call, _first_of(wrong))
    if largest >= 0:
        text += f"; largest error {largest:g} at {list(place)}: {_pair(call, place)}"
    if nans:
        text += f"; {nans} are NaN (read outside the operands, where all is NaN?)"
    return text


def _pair(call: GuardedCall, index: tuple[int, ...]) -> str:
    *batch, row, column = index
    want = call.product(slice(row, row + 1))[(*batch, 0, column)].to(call.out.view.dtype)
    return f"expected {float(want):.9g}, got {float(call.out.view[index]):.9g}"
