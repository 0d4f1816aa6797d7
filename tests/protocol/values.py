"""What registers hold in the model: sums as lists of products, and what makes no difference to a
protocol.
"""

from functools import cache

from . import state
from .fault import ProtocolFault

LANES_OF_ELEMENT = 4  # registers a thread has in the model, of each part of K of a cluster


class Opaque:
    """What makes no difference to a protocol: whatever is asked of it is another one."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return OPAQUE

    def __call__(self, *_, **__):
        return OPAQUE

    def __getitem__(self, _):
        return OPAQUE


OPAQUE = Opaque()


class Numeric:
    """A type of numbers: a call is its value."""

    def __init__(self, name, width):
        self.name, self.width = name, width

    def __call__(self, value=0):
        return value if type(value) is int or isinstance(value, float) else int(value)

    def __or__(self, other):
        return self  # in annotations

    def __repr__(self):
        return self.name


WIDTHS = {
    "Boolean": 8,
    "Int8": 8,
    "Uint8": 8,
    "Int16": 16,
    "Int32": 32,
    "Uint16": 16,
    "Uint32": 32,
    "Int64": 64,
    "Float32": 32,
    "BFloat16": 16,
    "Float16": 16,
    "Float8E4M3FN": 8,
    "Float8E5M2": 8,
}
NUMERICS = {name: Numeric(name, width) for name, width in WIDTHS.items()}


class Sum:
    """An accumulator: the products that it is made of, in the order in which they were added.
    `part`: which part of the tile's columns its thread has it of.
    """

    __slots__ = ("_longer", "part", "products")

    def __init__(self, products, part):
        self.products, self.part = products, part
        self._longer = None

    def with_product(self, product, part):
        """This sum and one product more: one object for all registers that have held this one."""
        longer = self._longer
        if longer is None or longer.products[-1] is not product or longer.part != part:
            longer = self._longer = Sum((*self.products, product), part)
        return longer

    def __add__(self, other):
        if not isinstance(other, Sum):
            return self
        if other.part != self.part:
            raise ProtocolFault(
                "wrong result",
                f"sums of parts {self.part} and {other.part} of the columns are added",
            )
        return Sum(self.products + other.products, self.part)

    def __radd__(self, zero):
        return self

    def __eq__(self, other):
        return isinstance(other, Sum) and (self.products, self.part) == (other.products, other.part)

    def __hash__(self):
        return hash((self.products, self.part))

    def __repr__(self):
        return f"Sum({self.products}, {self.part})"


@cache
def empty_sums(count):
    """What so many registers hold before any product."""
    parts = [Sum((), part) for part in range(-(-count // LANES_OF_ELEMENT))]
    return tuple(parts[i // LANES_OF_ELEMENT] for i in range(count))


class Registers:
    """Registers of a thread, or a view of some. `fetched`: what was last copied to them from shared
    memory; `running`: wgmma that add to them.
    """

    __slots__ = ("count", "fetched", "owner", "running", "start", "values")

    def __init__(self, values, start=0, count=None, owner=None):
        self.values, self.start = values, start
        self.count = len(values) - start if count is None else count
        self.owner = owner or self
        if owner is None:
            self.running = 0

    @property
    def iterator(self):
        return RegisterPointer(self, 0)

    @property
    def layout(self):
        return self.count

    @property
    def shape(self):
        return self.count

    element_type = NUMERICS["Float32"]

    def _used_early(self):
        return ProtocolFault(
            "early read", f"{state.machine.agent.name} uses accumulators while wgmma adds to them"
        )

    def __getitem__(self, i):
        if self.owner.running:
            raise self._used_early()
        return self.values[self.start + i]

    def __setitem__(self, i, value):
        if self.owner.running:
            raise self._used_early()
        self.values[self.start + i] = value

    def fill(self, _):
        for i, empty in enumerate(empty_sums(self.count)):
            self[i] = empty

    def add(self, others):
        """Adds other registers, of each the one with its number."""
        if self.owner.running or others.owner.running:
            raise self._used_early()
        added = other = total = None
        for i in range(self.count):
            old, new = self.values[self.start + i], others.values[others.start + i]
            if old is not added or new is not other:
                added, other, total = old, new, old + new
            self.values[self.start + i] = total

    def multiplied(self, product, overwrite):
        """A wgmma has added its product."""
        self.owner.running -= 1
        values = empty_sums(self.count) if overwrite else self.values
        for i in range(self.count):
            self.values[i] = values[i].with_product(product, i // LANES_OF_ELEMENT)

    def load(self):
        return Vector([self[i] for i in range(self.count)])

    def store(self, vector):
        for i in range(self.count):
            self[i] = vector.values[i]


class Vector:
    def __init__(self, values):
        self.values = values

    def to(self, _):
        return self


class RegisterPointer:
    def __init__(self, registers, offset):
        self.registers, self.offset = registers, offset

    def __add__(self, count):
        return RegisterPointer(self.registers, self.offset + count)
