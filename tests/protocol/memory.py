"""Shared and global memory of the model: what lies where, who reads it, and whether it may."""

import itertools
from collections.abc import Callable
from typing import Any

from .fault import ProtocolFault


class Write:
    """What an agent writes to shared memory; TMA may read it once the agent has fenced."""

    __slots__ = ("agent", "fenced")

    def __init__(self, agent: str):
        self.agent, self.fenced = agent, False


class Copy(Write):
    """What a thread's cp.async writes. wgmma may read it once a thread has fenced that knows, by
    the phase of a barrier at which the copy arrives, that it has landed.
    """

    __slots__ = ("barrier", "landed", "phase", "then")

    def __init__(self, agent: str):
        super().__init__(agent)
        self.landed = False
        self.barrier: Any = None
        self.phase = 0
        self.then: list[Callable[[], None]] = []


class Region:
    """A range of bytes and what lies there. `write`: by threads, not by TMA."""

    __slots__ = ("high", "low", "tag", "write")

    def __init__(self, low: int, high: int, tag: object, write: Write | None):
        self.low, self.high, self.tag, self.write = low, high, tag, write


class SharedMemory:
    """What lies where: tags of ranges of bytes, and who reads which range at the moment."""

    def __init__(self, name: str):
        self.name = name
        self.regions: dict[int, Region] = {}  # by their first byte; none meets another
        self.readers: dict[int, tuple[int, int, str]] = {}
        self.words: dict[int, object] = {}
        self.unordered: dict[int, str] = {}  # of words, who wrote what others may not see yet
        self.numbers = itertools.count()

    def write(self, low: int, high: int, tag: object, write: Write | None = None) -> None:
        if self.readers:
            self.check_unread(low, high, tag)
        written = Region(low, high, tag, write)
        for region in self.meeting(low, high):
            del self.regions[region.low]
            if region.low < low:
                self.regions[region.low] = Region(region.low, low, region.tag, region.write)
            if high < region.high:
                self.regions[high] = Region(high, region.high, region.tag, region.write)
        self.regions[low] = written

    def meeting(self, low: int, high: int) -> list[Region]:
        """The regions that a range meets."""
        same = self.regions.get(low)
        if same is not None and same.high == high:
            return [same]
        return [r for r in self.regions.values() if r.low < high and low < r.high]

    def check_unread(self, low: int, high: int, tag: object) -> None:
        for start, end, who in self.readers.values():
            if start < high and low < end:
                raise ProtocolFault(
                    "overwritten", f"{self.name}: {tag} is written over what {who} still reads"
                )

    def read(self, low: int, high: int, who: str) -> list[Region]:
        """The regions of a range, all of it written."""
        found = self.meeting(low, high)
        found.sort(key=lambda region: region.low)
        covered = sum([min(r.high, high) - max(r.low, low) for r in found])
        if covered < high - low:
            raise ProtocolFault(
                "early read", f"{self.name}: {who} reads bytes that nobody has written"
            )
        for region in found:
            if type(region.tag) is InFlight:
                raise ProtocolFault(
                    "early read", f"{self.name}: {who} reads where {region.tag.tag} has not landed"
                )
        return found

    def in_range(self, low: int, high: int) -> list[object]:
        """Tags of the regions that a range meets."""
        return [region.tag for region in self.meeting(low, high)]

    def begin_read(self, low: int, high: int, who: str) -> int:
        number = next(self.numbers)
        self.readers[number] = low, high, who
        return number

    def end_read(self, number: int) -> None:
        del self.readers[number]


class InFlight:
    """What will land here."""

    __slots__ = ("tag",)

    def __init__(self, tag: object):
        self.tag = tag

    def __repr__(self) -> str:
        return f"InFlight(tag={self.tag!r})"


class GlobalMemory:
    """So many 32-bit words, which outlive a launch. What is written is visible to others some time,
    or by a fence.
    """

    def __init__(self, words: int):
        self.words = words
        self.values: dict[int, object] = {}

    def check(self, index: int) -> None:
        if not 0 <= index < self.words:
            raise ProtocolFault("wrong result", f"word {index} of a workspace of {self.words}")
