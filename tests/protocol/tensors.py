"""Tensors of the model: ranges of shared memory, parts of matrices in global memory, words of a
workspace.
"""

import math
from types import SimpleNamespace

from . import state
from .fault import ProtocolFault
from .scale_memory import ScalePointer, ScaleTensor
from .values import NUMERICS, Opaque, RegisterPointer, Registers


class Pointer:
    """An address in a CTA's shared memory."""

    __slots__ = ("address", "size")
    memspace = "shared"

    def __init__(self, address, size):
        self.address, self.size = address, size

    def __add__(self, count):
        return Pointer(self.address + int(count) * self.size, self.size)

    def toint(self):
        return self

    def __int__(self):
        return self.address


class WordPointer:
    """The address of 32-bit words in a CTA's shared memory, which is a number."""

    def __init__(self, address):
        self.address = address

    def toint(self):
        return self.address


class GlobalPointer:
    __slots__ = ("index", "memory")
    memspace = "global"

    def __init__(self, memory, index):
        self.memory, self.index = memory, index

    def __add__(self, count):
        return GlobalPointer(self.memory, self.index + int(count))

    def toint(self):
        return self


class GlobalTensor:
    """Words of the workspace."""

    def __init__(self, memory):
        self.memory = memory

    @property
    def iterator(self):
        return GlobalPointer(self.memory, 0)

    def __setitem__(self, index, value):
        self.memory.values[index] = value


class SharedLayout:
    """`count` stages, or buffers, of `shape`."""

    inner = Opaque()

    def __init__(self, shape, dtype, count):
        self.shape, self.dtype, self.count = tuple(shape), dtype, count
        self.unit = math.prod(self.shape) * dtype.width // 8  # bytes of one

    @property
    def outer(self):
        return self


class Shared:
    """Parts of equal size in shared memory: stages of an operand, or buffers of C."""

    __slots__ = ("base", "count", "offset", "shape", "size", "stride")

    def __init__(self, base, stride, size, count, shape, offset=0):
        self.base, self.stride, self.size, self.count = base, stride, size, count
        self.shape, self.offset = shape, offset

    def range(self):
        if self.count != 1:
            raise AssertionError("a stage has to be named")
        low = self.base + self.offset
        return low, low + self.size

    def __getitem__(self, index):
        at = index[-1]
        if at is None:
            return self
        if not 0 <= at < self.count:
            raise ProtocolFault("wrong result", f"stage {at} of {self.count}")
        return Shared(
            self.base + at * self.stride, self.stride, self.size, 1, self.shape, self.offset
        )

    def part(self, number, parts):
        size = self.size // parts
        return Shared(
            self.base, self.stride, size, self.count, self.shape, self.offset + int(number) * size
        )

    def tile(self, box, at):
        found = self
        for extent, rows, number in zip(self.shape, box[:2], at[:2], strict=True):
            found = found.part(number, extent // rows)
        first, count, step = 0, self.count, 1
        if len(box) == 3 and isinstance(box[2], int):
            first, count = at[2] * box[2], box[2]
        elif len(box) == 3:  # every second or third, say
            (count,), (step,) = box[2].shape, box[2].stride
            first = at[2]
        base, stride = found.base + first * self.stride, step * self.stride
        return Shared(base, stride, found.size, count, box[:2], found.offset)

    def ranges(self):
        return (self.range(),)


class Rows:
    """Parts of A that one warpgroup multiplies: 64 rows of every so many."""

    __slots__ = ("groups",)

    def __init__(self, operand, warpgroup, warpgroups):
        groups = operand.shape[0] // 64
        self.groups = [operand.part(i, groups) for i in range(warpgroup, groups, warpgroups)]

    def __getitem__(self, index):
        chosen = object.__new__(Rows)
        groups = self.groups if index[1] is None else [self.groups[index[1]]]
        chosen.groups = [group[index] for group in groups]
        return chosen

    def ranges(self):
        return tuple(group.range() for group in self.groups)


class SharedWords:
    """32-bit words. What an agent writes is its own until a barrier that orders memory."""

    def __init__(self, address, count):
        self.address, self.count = address, count

    @property
    def iterator(self):
        return WordPointer(self.address)

    def __getitem__(self, i):
        agent, address = state.machine.agent, self.address + 4 * i
        memory = agent.cta.memory
        if address not in memory.words:
            raise ProtocolFault("early read", f"{agent.name} reads a word that nobody has written")
        writer = memory.unordered.get(address, agent.name)
        if writer != agent.name:
            raise ProtocolFault(
                "early read", f"{agent.name} reads a word of {writer} that no barrier has ordered"
            )
        return memory.words[address]

    def __setitem__(self, i, value):
        agent, address = state.machine.agent, self.address + 4 * i
        agent.cta.memory.words[address] = value
        agent.cta.memory.unordered[address] = agent.name
        agent.wrote.append(address)


class GlobalWords:
    def __init__(self, pointer, count):
        self.pointer, self.count = pointer, count


class Matrix:
    """A matrix in global memory, or a part of it. `offset`: coordinates of its first element;
    `rest`: modes that are still to be chosen, and their steps; `box`: the shape of a tile.
    """

    __slots__ = ("box", "name", "offset", "rest", "shape")

    def __init__(self, name, shape, offset=None, rest=(), box=None):
        self.name, self.shape, self.box = name, tuple(shape), box
        self.offset = tuple(offset or (0,) * len(self.shape))
        self.rest = tuple(rest)

    @property
    def element_type(self):
        return state.machine.types.get(self.name.split("@")[0], NUMERICS["BFloat16"])

    @property
    def iterator(self):
        return self.name

    @property
    def layout(self):
        return SimpleNamespace(shape=self.shape, stride=tuple(1 for _ in self.shape))

    def tile(self, box, at):
        steps = (*box, *(1,) * len(self.shape))
        offset, rest = list(self.offset), []
        for mode, number in enumerate(at):
            if number is None:
                rest.append((mode, steps[mode]))
            else:
                offset[mode] += number * steps[mode]
        return Matrix(self.name, self.shape, offset, rest, tuple(box))

    def __getitem__(self, index):
        offset, rest = list(self.offset), []
        for (mode, step), number in zip(self.rest, index[1:], strict=True):
            if number is None:
                rest.append((mode, step))
            else:
                offset[mode] += number * step
        return Matrix(self.name, self.shape, offset, rest)

    @property
    def tag(self):
        assert not self.rest, "all coordinates are chosen"
        return self.name, self.offset


class Table:
    """The order of tiles: one list, or for the rungs of the ladder one of each step."""

    def __init__(self, tiles):
        self.tiles = tiles

    @property
    def shape(self):
        return len(self.tiles), len(self.tiles[0])

    def __getitem__(self, index):
        return self.tiles[index[0]][index[1]] if isinstance(index, tuple) else self.tiles[index]


class Allocator:
    """Gives every agent of a CTA the same addresses, for all ask for the same."""

    def allocate(self, size, alignment=16):
        agent = state.machine.agent
        agent.allocated = -(-agent.allocated // alignment) * alignment
        address, agent.allocated = agent.allocated, agent.allocated + size
        return Pointer(address, 1)

    def allocate_array(self, dtype, count, byte_alignment=16):
        size = dtype.width // 8
        return Pointer(self.allocate(count * size, byte_alignment).address, size)

    def allocate_tensor(self, dtype, layout, alignment, swizzle=None):
        return make_tensor(self.allocate(layout.unit * layout.count, alignment), layout)


def make_tensor(iterator, layout):
    match iterator:
        case Pointer():
            if isinstance(layout, int):
                return SharedWords(iterator.address, layout)
            return Shared(iterator.address, layout.unit, layout.unit, layout.count, layout.shape)
        case GlobalPointer():
            return GlobalWords(iterator, layout)
        case ScalePointer(address=address):
            return ScaleTensor(address, layout.shape, layout.stride)
        case RegisterPointer(registers=registers, offset=offset):
            count = layout if isinstance(layout, int) else registers.count
            return Registers(registers.values, registers.start + offset, count, registers.owner)
    return Matrix(iterator, layout.shape)
