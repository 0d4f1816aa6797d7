"""The scales of fp8 operands in the model's memories, each a word of its own: where those of a
launch lie, and the instructions that move them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from . import state
from .fault import ProtocolFault
from .memory import Copy, InFlight

if TYPE_CHECKING:
    from collections.abc import Callable

SPACE = 1 << 40  # bytes of the address space that each operand's scales have
GRANULE = 16  # bytes


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale of a row of A, or of a column of B, or of 128 of them, and of a block of K.
    `group`: of a grouped product whose groups have scales of their own, else 0.
    """

    operand: str
    index: int
    block: int
    group: int = 0

    def __mul__(self, other: object) -> tuple[object, ...]:
        return self, other

    def __rmul__(self, other: object) -> tuple[object, ...]:
        return other, self


@cache
def scale_of(operand: str, index: int, block: int, group: int) -> Scale:
    """The one object that stands for a scale, which makes comparisons fast."""
    return Scale(operand, index, block, group)


UNWRITTEN = Scale("nobody", 0, 0)


@dataclass(frozen=True)
class Root:
    """The scales of an operand as a caller has them. `modes`: which of "index", "block" and "group"
    each mode of the tensor counts.
    """

    operand: str
    modes: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def number(self) -> int:
        return 1 if self.operand == "A" else 2

    @property
    def tensor(self) -> ScaleTensor:
        return ScaleTensor(self.number * SPACE, self.shape, self.stride)

    def at(self, offset: int) -> Scale:
        """The scale that lies so many words behind the first one."""
        found, rest = {}, offset
        by_stride = sorted(zip(self.stride, self.shape, self.modes, strict=True), reverse=True)
        for stride, extent, mode in by_stride:
            found[mode], rest = (0, rest) if extent == 1 else divmod(rest, stride)
            if found[mode] >= extent:
                rest = -1
        if rest:
            raise ProtocolFault(
                "wrong result", f"{state.machine.agent.name} reads outside of scales {self}"
            )
        return scale_of(self.operand, found["index"], found["block"], found.get("group", 0))


@lru_cache(maxsize=8)
def known_scales(*roots: Root) -> dict[int, Scale]:
    """Scales that launches with these roots have asked for, by their addresses."""
    return {}


def root(operand: str, extents: dict[str, int], fastest: tuple[str, ...]) -> Root:
    """Scales of so many indices, blocks and groups, in the order of the tensor's modes. `fastest`:
    the modes by their strides, which are multiples of 4 but for the first one's, with a gap behind
    each line.
    """
    strides, step = {}, 1
    for mode in fastest:
        strides[mode] = step
        step = -(-step * extents[mode] // 4) * 4 + 4
    modes = tuple(extents)
    return Root(operand, modes, tuple(extents.values()), tuple(strides[mode] for mode in modes))


class ScalePointer:
    """An address in global memory, which is a number."""

    def __init__(self, address: int):
        self.address = address

    def toint(self) -> int:
        return self.address


class ScaleTensor:
    """Scales in global memory, or a part of them."""

    def __init__(self, address: int, shape: Any, stride: Any):
        self.address, self.shape, self.stride = address, tuple(shape), tuple(stride)

    @property
    def iterator(self) -> ScalePointer:
        return ScalePointer(self.address)

    @property
    def layout(self) -> SimpleNamespace:
        return SimpleNamespace(shape=self.shape, stride=self.stride)

    def moved(self, coordinates: Any) -> ScaleTensor:
        pairs = itertools.zip_longest(coordinates, self.stride, fillvalue=0)
        words = sum(at * stride for at, stride in pairs)
        return ScaleTensor(self.address + 4 * words, self.shape, self.stride)

    def __getitem__(self, index: Any) -> ScaleTensor:
        found = self.moved([at or 0 for at in index])
        kept = [mode for mode, at in enumerate(index) if at is None]
        shape, stride = ([x[mode] for mode in kept] for x in (self.shape, self.stride))
        return ScaleTensor(found.address, shape, stride)


class ScaleWords:
    """Scales in shared memory. What nobody has written is read where nobody needs it: behind the
    last row.
    """

    def __init__(self, words: Any):
        self.address = words.address

    def __getitem__(self, i: int) -> Scale:
        agent = state.machine.agent
        found: Any = agent.cta.memory.words.get(self.address + 4 * i, UNWRITTEN)
        if type(found) is InFlight:
            raise ProtocolFault(
                "early read", f"{agent.name} reads where {found.tag} has not landed"
            )
        return found  # type: ignore[no-any-return]


# ---- instructions
def scale_at(address: int) -> Scale:
    """The scale at an address in global memory."""
    machine = state.machine
    if machine.previous.ended and (known := machine.known_scales.get(address)):
        return known
    found = machine.scales.get(address // SPACE)
    if found is None or address % 4:
        raise ProtocolFault("wrong result", f"{machine.agent.name} reads at {address}")
    if found.operand != machine.weights:
        machine.previous.check_ended(f"scales of {found.operand} are read")
    scale = machine.known_scales[address] = found.at(address % SPACE // 4)
    return scale


def copy_word(target: int, source: int, *_: Any) -> None:
    """cp.async of a scale. Those of a stage land at once: see `land_copies`."""
    state.machine.agent.copying[target] = scale_at(source)


def land_copies() -> None:
    """The scales that the agent copies land some time."""
    agent, machine = state.machine.agent, state.machine
    words, agent.copying = agent.copying, {}
    copy = Copy(agent.name)

    def then() -> None:
        copy.landed = True
        for each in copy.then:
            each()
        agent.copies_landed.changed()

    agent.copies.append(copy)
    write(words, machine.timing.delay("copy", agent.name), f"a copy of {agent.name}", then)


def bulk_copy(target: int, source: int, size: int, barrier: int) -> None:
    """cp.async.bulk, of whole granules."""
    agent, machine = state.machine.agent, state.machine
    agent.pause("issue")
    if target % GRANULE or source % GRANULE or size % GRANULE or size <= 0:
        raise ProtocolFault(
            "wrong result", f"{agent.name} copies {size} bytes from {source} to {target}"
        )
    words = {target + i: scale_at(source + i) for i in range(0, size, 4)}
    cta = agent.cta

    def then() -> None:
        cta.barrier(barrier).landed(size)

    delay = machine.timing.delay("load scales", cta.name)
    write(words, delay, f"a load of {agent.name}", then)


def write(words: dict[int, Scale], delay: float, who: str, then: Callable[[], None]) -> None:
    """Words of shared memory are on their way for a while."""
    cta = state.machine.agent.cta
    memory, in_flight = cta.memory.words, InFlight(who)
    memory.update(dict.fromkeys(words, in_flight))

    def land() -> None:
        cta.check_present(who)
        for address, scale in words.items():
            if memory[address] is not in_flight:
                raise ProtocolFault("overwritten", f"{scale} lands where another one does")
            memory[address] = scale
        then()

    state.machine.after(delay, land)


def load_word(address: int) -> Scale:
    """ld.global.nc."""
    return scale_at(address)


INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "cp.async.ca.shared.global": copy_word,
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes": bulk_copy,
    "ld.global.nc.f32": load_word,
}
