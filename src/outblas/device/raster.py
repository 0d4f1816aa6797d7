"""Orders in which the tiles of C are computed, as plain lists of indices. Tiles that run at the
same time share data in L2.

`tiles` and `table` have them as arrays, which a call makes for its launch in microseconds.

Tiles are numbered `m * columns + n` over a grid of `rows` along M and `columns` along N. A tile
reads one panel of A (its row) and one panel of B (its column), so tiles that run at the same time
should form a block that is as square as possible, measured in bytes of panels.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

ORDERS = ("row", "column", "consecutive", "grouped", "serpentine", "hilbert")
PAD = -1  # marks the absence of a tile


Tiles = NDArray[np.int32]


def order(kind: str, rows: int, columns: int, group_m: int = 16, group_n: int = 8) -> list[int]:
    """Returns every tile of the grid once, in the order `kind`.

    - "row": n fastest. "column": m fastest. "consecutive": the same order as "row"; `schedule`
      distributes it differently.
    - "grouped": groups of `group_m` x `group_n` tiles, cut off at the edges, one row of groups
      after the other, so that a row of groups reuses its panels of A. Inside a group m is fastest:
      a step that ends inside a group has completed whole columns of it. Their tiles share panels of
      B, which are the larger ones where tiles are wider than high.
    - "serpentine": bands of `group_m` tile rows swept column by column, m fastest, every other band
      backwards, so that a band starts at the columns where the previous one ended. `group_n` has no
      effect.
    - "hilbert": a Hilbert curve, generalised to any rectangle, along its longer side. Groups have
      no effect.

    Raises ValueError for another kind and for sizes below 1.
    """
    listed: list[int] = tiles(kind, rows, columns, group_m, group_n).tolist()
    return listed


def tiles(kind: str, rows: int, columns: int, group_m: int = 16, group_n: int = 8) -> Tiles:
    """Returns the tiles of `order` as an array. Raises ValueError as it does."""
    if kind not in ORDERS:
        raise ValueError(f"kind is {kind!r}, expected one of: {', '.join(ORDERS)}")
    _check(rows=rows, columns=columns, group_m=group_m, group_n=group_n)
    if kind == "hilbert":
        wide = (0, columns, 1, rows, columns) if columns >= rows else (0, rows, columns, columns, 1)
        return np.fromiter(_hilbert(*wide), np.int32, rows * columns)
    grid = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    match kind:
        case "column":
            return grid.T.ravel()
        case "grouped":
            bands = [
                grid[top : top + group_m, left : left + group_n].T.ravel()
                for top in range(0, rows, group_m)
                for left in range(0, columns, group_n)
            ]
        case "serpentine":
            bands = [
                grid[top : top + group_m, :: -1 if band % 2 else 1].T.ravel()
                for band, top in enumerate(range(0, rows, group_m))
            ]
        case _:
            return grid.ravel()
    return np.concatenate(bands)


def schedule(
    kind: str, rows: int, columns: int, workers: int, group_m: int = 16, group_n: int = 8
) -> list[list[int]]:
    """Returns which worker computes which tile in which step: a list of steps, each with one tile
    per worker, and -1 for a worker without a tile.

    Tiles are distributed round robin: worker w takes `order(...)[step * workers + w]`.
    "consecutive" instead gives every worker one run of neighbouring tiles, longer runs first. In
    both cases the numbers of tiles differ by at most one, and -1 appears only in the last step.
    `workers` above the number of tiles counts as that number.

    Raises ValueError as `order` does, and for `workers` below 1.
    """
    steps: list[list[int]] = table(kind, rows, columns, workers, group_m, group_n).tolist()
    return steps


def table(
    kind: str, rows: int, columns: int, workers: int, group_m: int = 16, group_n: int = 8
) -> Tiles:
    """Returns what `schedule` does as an array (steps, workers). Raises ValueError as it does."""
    _check(workers=workers)
    ordered = tiles(kind, rows, columns, group_m, group_n)
    count = ordered.size
    workers = min(workers, count)
    steps = -(-count // workers)
    if kind != "consecutive":
        padded = np.full(steps * workers, PAD, np.int32)
        padded[:count] = ordered
        return padded.reshape(steps, workers)
    length, longer = divmod(count, workers)
    worker = np.arange(workers, dtype=np.int32)
    runs = worker * length + np.minimum(worker, longer) + np.arange(steps, dtype=np.int32)[:, None]
    runs[length:, longer:] = PAD
    return runs


def _check(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}, expected an integer of at least 1")


def _hilbert(corner: int, length: int, along: int, width: int, across: int) -> Iterator[int]:
    """Yields the curve over `length` x `width` tiles from `corner` to the other end of that long
    side.

    `along` and `across` are the signed steps to the next index in either direction. A rectangle
    much longer than wide is split into two, one after the other. Any other is a U: across on the
    near half, along on the far side, back across. Every cut leaves a first part of even length,
    whose curve ends in the corner next to the second part. For an even width of more than 2 and an
    odd length there is no such curve (both ends would have the same colour on a chessboard); one
    step is diagonal there.
    """
    if width == 1:
        yield from (corner + i * along for i in range(length))
    elif length == 1:
        yield from (corner + i * across for i in range(width))
    elif 2 * length > 3 * width:
        near = _even_half(length)
        yield from _hilbert(corner, near, along, width, across)
        yield from _hilbert(corner + near * along, length - near, along, width, across)
    else:
        near, arm = length // 2, _even_half(width)
        yield from _hilbert(corner, arm, across, near, along)
        yield from _hilbert(corner + arm * across, length, along, width - arm, across)
        last = corner + (length - 1) * along + (arm - 1) * across
        yield from _hilbert(last, arm, -across, length - near, -along)


def _even_half(size: int) -> int:
    half = size // 2
    return half + 1 if half % 2 and size > 2 else half
