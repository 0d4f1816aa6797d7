"""What a warp's accesses to memory cost, from which thread holds which element: wavefronts in
shared memory, transactions in global memory.

This is plain Python, by the rules that ncu's counters follow on sm_90.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .mapping import Basis, Mapping

WARP = 32
BANKS = 32  # of one word each
LINE = 128  # bytes of a transaction
SECTOR = 32

Address = Callable[[int, int], int]  # row and column of an element → its word, or its byte


@dataclass(frozen=True)
class Shared:
    """What one warp needs to move its part of a tile: instructions, the wavefronts that they take,
    and the fewest that they could take.
    """

    instructions: int
    wavefronts: int
    ideal: int

    @property
    def excess(self) -> int:
        """Wavefronts that bank conflicts add."""
        return self.wavefronts - self.ideal

    def __add__(self, other: Shared) -> Shared:
        return Shared(
            self.instructions + other.instructions,
            self.wavefronts + other.wavefronts,
            self.ideal + other.ideal,
        )


def shared(mapping: Mapping, word: Address) -> Shared:
    """Reads or writes of a tile in shared memory by warp 0, at most four adjacent words of a thread
    in one instruction.

    Bits of a register's number that move no element are skipped: a value is moved once.
    """
    width, starts = _vectors(mapping, word)
    found = Shared(0, 0, 0)
    for register in starts:
        addresses = [word(*mapping.element(register, lane)) for lane in range(WARP)]
        wavefronts, ideal = of_request(addresses, width)
        found += Shared(1, wavefronts, ideal)
    return found


def _vectors(mapping: Mapping, word: Address) -> tuple[int, list[int]]:
    """Words of one instruction, which starts at a multiple of them, and the first register
    of each.
    """
    start = word(0, 0)
    moves = [
        (bit, word(*basis) - start)
        for bit, basis in enumerate(mapping.registers)
        if basis != (0, 0)
    ]
    within: list[int] = []
    for width in (1, 2):
        adjacent = [bit for bit, step in moves if step == width]
        threads = [word(*basis) - start for basis in (*mapping.lanes, *mapping.warps)]
        steps = [step for _, step in moves if step > width] + [step for step in threads if step]
        if not adjacent or any(step % (2 * width) for step in steps):
            break
        within += adjacent
    others = [bit for bit, _ in moves if bit not in within]
    return 2 ** len(within), [
        sum((number >> i & 1) << bit for i, bit in enumerate(others))
        for number in range(2 ** len(others))
    ]


def of_request(addresses: Sequence[int], width: int) -> tuple[int, int]:
    """Wavefronts of one request of a warp for `width` words from these on, and those that it needs.

    Wide accesses go in groups of lanes that ask for 128 bytes at most: 32 lanes of one word, 16 of
    two, 8 of four. Twice as many go together if each asks for the same as its neighbour, or as the
    lane two further.
    """
    lanes = WARP // width
    groups = []
    for first in range(0, WARP, 2 * lanes) if width > 1 else (0,):
        both = addresses[first : first + 2 * lanes]
        paired = any(all(both[i] == both[i ^ step] for i in range(len(both))) for step in (1, 2))
        groups += [both] if paired or width == 1 else [both[:lanes], both[lanes:]]
    return sum(_passes(group, width) for group in groups), len(groups)


def _passes(addresses: Sequence[int], width: int) -> int:
    """The most different words that one bank delivers."""
    words = {address + i for address in addresses for i in range(width)}
    return max(Counter(word % BANKS for word in words).values())


def touched(mapping: Mapping, byte: Address, size: int, unit: int) -> int:
    """Units of memory (lines of 128 bytes, sectors of 32) that one request of warp 0 touches,
    `size` bytes a lane.
    """
    starts = (byte(*mapping.element(0, lane)) for lane in range(WARP))
    return len({at // unit for start in starts for at in (start, start + size - 1)})


def k_block_reads(mapping: Mapping, terms: int, axis: int) -> Mapping:
    """The reads of a whole k-block by the threads that compute `mapping`: terms × rows (axis 0) or
    terms × columns (axis 1). Lanes that differ on the other axis alone read the same.
    """

    def kept(bases: Sequence[Basis]) -> Iterator[Basis]:
        for basis in bases:
            yield (0, basis[axis])

    steps = tuple((1 << bit, 0) for bit in range(terms.bit_length() - 1))
    registers = tuple(basis for basis in kept(mapping.registers) if basis != (0, 0))
    return Mapping(
        (terms, mapping.shape[axis]),
        (*registers, *steps),
        tuple(kept(mapping.lanes)),
        tuple(kept(mapping.warps)),
    )
