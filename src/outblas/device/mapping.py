"""Which thread holds which element of a tile, as linear maps over bits. This is plain Python,
testable without a GPU.

Each bit of a register index, a lane index and a warp index moves the element by a power of two
along rows or columns; the moves of all set bits add up.
"""

from __future__ import annotations

from dataclasses import dataclass

Basis = tuple[int, int]  # rows, columns


@dataclass(frozen=True)
class Mapping:
    """The elements of a tile of `shape` (rows, columns) that each thread holds. For each bit of the
    register, lane and warp index, lowest bit first, it gives the move in rows and columns.
    """

    shape: tuple[int, int]
    registers: tuple[Basis, ...]
    lanes: tuple[Basis, ...]
    warps: tuple[Basis, ...]

    def element(self, register: int, lane: int, warp: int = 0) -> tuple[int, int]:
        """Returns the row and column of an element."""
        row = column = 0
        for number, bases in ((register, self.registers), (lane, self.lanes), (warp, self.warps)):
            for bit, (rows, columns) in enumerate(bases):
                if number >> bit & 1:
                    row, column = row ^ rows, column ^ columns
        return row, column

    @property
    def holders(self) -> int:
        """Returns the number of threads that hold an element which no lower-numbered thread
        holds.
        """
        return 1 << sum(basis != (0, 0) for basis in (*self.lanes, *self.warps))

    def reordered(self, registers: tuple[Basis, ...]) -> Mapping:
        """Returns the map with the same elements in each thread, in another order of registers."""
        assert sorted(registers) == sorted(self.registers)
        return Mapping(self.shape, registers, self.lanes, self.warps)

    def transposed(self) -> Mapping:
        """Returns the map of the transposed tile."""
        parts = (
            tuple(basis[::-1] for basis in bases)
            for bases in (self.registers, self.lanes, self.warps)
        )
        return Mapping(self.shape[::-1], *parts)


def powers(first: int, end: int) -> list[int]:
    """Returns first, 2·first, 4·first, … below end."""
    return [first << bit for bit in range((end // first).bit_length() - 1)] if end > first else []


def outputs(
    block: tuple[int, int],
    warp: tuple[int, int],
    thread: tuple[int, int],
    fragment: tuple[int, int],
    interleave: bool,
) -> Mapping:
    """Returns the map of a CTA's outputs. Warps lie side by side; within a warp the fragments of
    the lanes do, and repeat until they cover the warp's tile.

    Registers run down a column of the thread's outputs before they move to the next column, so that
    consecutive FMAs share their operand of B.
    """
    steps: list[list[list[Basis]]] = [[] for _ in range(4)]
    for axis in (0, 1):
        lanes = warp[axis] // thread[axis]
        span = fragment[axis] * lanes  # extent of the fragments of all lanes
        parts = (
            powers(1, fragment[axis]),
            powers(fragment[axis], span),
            powers(span, warp[axis]),
            powers(warp[axis], block[axis]),
        )
        for step, moves in zip(steps, parts, strict=True):
            step.append([(move, 0) if axis == 0 else (0, move) for move in moves])
    (fragment_m, fragment_n), (lane_m, lane_n), (again_m, again_n), (warp_m, warp_n) = steps
    registers = (*fragment_m, *again_m, *fragment_n, *again_n)
    lanes_of = (*lane_n, *lane_m)
    if interleave and lane_m and lane_n:
        lanes_of = (lane_n[0], lane_m[0], *lane_n[1:], *lane_m[1:])
    return Mapping(block, registers, lanes_of, (*warp_n, *warp_m))


def by_rows(of: Mapping) -> Mapping:
    """Returns the map with registers along rows first, which wide stores of rows require."""
    return of.reordered(tuple(sorted(of.registers, key=lambda basis: (basis[0], basis[1]))))


def copies(shape: tuple[int, int], vector: int, warps: int, spread: bool = True) -> Mapping:
    """Returns the map of a tile that a CTA copies: each thread moves `vector` elements of a row at
    once, and neighbouring lanes continue along the row.

    Where there are more threads than vectors, `spread` shortens the vectors to use more threads;
    threads that are still left over repeat the work of others.
    """
    rows, columns = shape
    vector = min(vector, max(1, rows * columns // (32 * warps)) if spread else vector, columns)
    along = powers(vector, columns)
    down = powers(1, rows)
    moves: list[Basis] = [(0, move) for move in along] + [(move, 0) for move in down]
    threads = moves[: 5 + warps.bit_length() - 1]
    threads += [(0, 0)] * (5 + warps.bit_length() - 1 - len(threads))
    registers = [(0, move) for move in powers(1, vector)] + moves[5 + warps.bit_length() - 1 :]
    return Mapping(shape, tuple(registers), tuple(threads[:5]), tuple(threads[5:]))
