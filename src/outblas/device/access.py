"""The cost of a warp's memory accesses, computed from which thread holds which element: wavefronts
in shared memory, transactions in global memory.

This is plain Python. It follows the rules by which ncu's counters count on sm_90.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from outblas.device.mapping import Basis, Mapping

WARP = 32
BANKS = 32  # banks, each one word wide
LINE = 128  # bytes of one transaction
SECTOR = 32

Address = Callable[[int, int], int]  # (row, column) of an element -> its word or byte address


@dataclass(frozen=True)
class Shared:
    """The cost for one warp to move its part of a tile: instructions, the wavefronts that they
    take, and the minimum number of wavefronts.
    """

    instructions: int
    wavefronts: int
    ideal: int

    @property
    def excess(self) -> int:
        """The wavefronts that bank conflicts add."""
        return self.wavefronts - self.ideal

    def __add__(self, other: Shared) -> Shared:
        return Shared(
            self.instructions + other.instructions,
            self.wavefronts + other.wavefronts,
            self.ideal + other.ideal,
        )


def shared(mapping: Mapping, word: Address) -> Shared:
    """Returns the cost for warp 0 to read or write a tile in shared memory, when each instruction
    moves up to four adjacent words per thread.

    Register bits that do not change the element are skipped, because a value is moved only once.
    """
    width, starts = _vectors(mapping, word)
    found = Shared(0, 0, 0)
    for register in starts:
        addresses = [word(*mapping.element(register, lane)) for lane in range(WARP)]
        wavefronts, ideal = of_request(addresses, width)
        found += Shared(1, wavefronts, ideal)
    return found


def _vectors(mapping: Mapping, word: Address) -> tuple[int, list[int]]:
    """Returns the number of words per instruction, which starts at a multiple of that number, and
    the first register of each instruction.
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
    """Returns the wavefronts of one request in which each lane moves `width` words from its
    address, and the minimum number of wavefronts.

    The hardware serves wide accesses in groups of lanes that request 128 bytes at most: 32 lanes of
    one word, 16 of two, 8 of four. It merges two groups if each lane requests the same address as
    its neighbour, or as the lane two positions away.
    """
    lanes = WARP // width
    groups = []
    for first in range(0, WARP, 2 * lanes) if width > 1 else (0,):
        both = addresses[first : first + 2 * lanes]
        paired = any(all(both[i] == both[i ^ step] for i in range(len(both))) for step in (1, 2))
        groups += [both] if paired or width == 1 else [both[:lanes], both[lanes:]]
    return sum(_passes(group, width) for group in groups), len(groups)


def _passes(addresses: Sequence[int], width: int) -> int:
    """Returns the number of different words in the bank that holds most of them."""
    words = {address + i for address in addresses for i in range(width)}
    return max(Counter(word % BANKS for word in words).values())


def touched(mapping: Mapping, byte: Address, size: int, unit: int) -> int:
    """Returns how many units of memory (lines of 128 bytes, sectors of 32) one request of warp 0
    touches, with `size` bytes per lane.
    """
    starts = (byte(*mapping.element(0, lane)) for lane in range(WARP))
    return len({at // unit for start in starts for at in (start, start + size - 1)})


def k_block_reads(mapping: Mapping, terms: int, axis: int) -> Mapping:
    """Returns the reads of a whole k-block by the threads that compute `mapping`: terms × rows
    (axis 0) or terms × columns (axis 1). Lanes that differ only on the other axis read the same
    elements.
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
