"""Orders in which the tiles of C are computed, as plain lists of indices. Tiles that run at the
same time share data in L2.

Tiles are numbered `m * columns + n` over a grid of `rows` along M and `columns` along N. A tile
reads one panel of A (its row) and one panel of B (its column), so tiles that run at the same time
should form a block that is as square as possible, measured in bytes of panels.
"""

from collections.abc import Iterator

ORDERS = ("row", "column", "consecutive", "grouped", "serpentine", "hilbert")
PAD = -1  # marks the absence of a tile


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
    if kind not in ORDERS:
        raise ValueError(f"kind is {kind!r}, expected one of: {', '.join(ORDERS)}")
    _check(rows=rows, columns=columns, group_m=group_m, group_n=group_n)
    match kind:
        case "column":
            return [m * columns + n for n in range(columns) for m in range(rows)]
        case "grouped":
            return list(_grouped(rows, columns, group_m, group_n))
        case "serpentine":
            return list(_serpentine(rows, columns, group_m))
        case "hilbert" if columns >= rows:
            return list(_hilbert(0, columns, 1, rows, columns))
        case "hilbert":
            return list(_hilbert(0, rows, columns, columns, 1))
        case _:
            return list(range(rows * columns))


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
    _check(workers=workers)
    tiles = order(kind, rows, columns, group_m, group_n)
    workers = min(workers, len(tiles))
    if kind != "consecutive":
        tiles += [PAD] * (-len(tiles) % workers)
        return [tiles[first : first + workers] for first in range(0, len(tiles), workers)]
    length, longer = divmod(len(tiles), workers)
    starts = [w * length + min(w, longer) for w in range(workers)]
    steps = [[tiles[start + step] for start in starts] for step in range(length)]
    if longer:
        steps.append(
            [tiles[start + length] for start in starts[:longer]] + [PAD] * (workers - longer)
        )
    return steps


def _check(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}, expected an integer of at least 1")


def _grouped(rows: int, columns: int, group_m: int, group_n: int) -> Iterator[int]:
    for top in range(0, rows, group_m):
        for left in range(0, columns, group_n):
            for n in range(left, min(left + group_n, columns)):
                for m in range(top, min(top + group_m, rows)):
                    yield m * columns + n


def _serpentine(rows: int, columns: int, group_m: int) -> Iterator[int]:
    for band, top in enumerate(range(0, rows, group_m)):
        sweep = range(columns) if band % 2 == 0 else reversed(range(columns))
        bottom = min(top + group_m, rows)
        for n in sweep:
            yield from range(top * columns + n, bottom * columns + n, columns)


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
