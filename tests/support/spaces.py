"""Search spaces of all kernels, and a footprint to vary."""

import functools
import itertools
import random
from collections.abc import Iterable
from typing import Any

from outblas.autotune.search import prune
from outblas.autotune.search.target import of
from outblas.autotune.store.records import Workload
from outblas.base import registry
from outblas.base.machines import MACHINES, Machine, find
from outblas.base.space import Footprint, Space

NAMES = tuple(name for names in registry.LADDERS.values() for name in names)
SHAPES = ((4096, 4096, 4096), (16, 4096, 4096), (257, 129, 65))
SQUARE = Workload(*SHAPES[0])
H100 = find("h100")

# A persistent CTA of 128x128 with a pipeline, as a Hopper kernel asks for.
FOOTPRINT = Footprint(
    math="wgmma",
    tile_m=128,
    tile_n=128,
    tile_k=64,
    stages=4,
    threads=384,
    registers=168,
    shared_memory=160 * 1024,
    in_flight=True,
    persistent=True,
    store="staged",
)


def runs_on(name: str) -> list[Machine]:
    """The machines that a kernel runs on."""
    record = registry.find(name)
    return [
        m for m in MACHINES.values() if record.min_arch <= m.arch <= (record.max_arch or m.arch)
    ]


def machine_for(name: str) -> Machine:
    """An H100 where the kernel runs on one, else the first machine that it runs on."""
    return H100 if H100 in runs_on(name) else runs_on(name)[0]


def precisions(name: str, machine: Machine = H100) -> tuple[str, ...]:
    """The dtypes of operands that a kernel takes on a machine, and tf32 where it takes that."""
    if name.startswith("turing.") and machine.arch < 80:
        return ("float16",)
    return (*registry.find(name).dtypes, *(["tf32"] if name == "portable" else []))


def workload(name: str, shape: tuple[int, int, int] = SHAPES[0], dtype: str = "") -> Workload:
    """A product that a kernel takes, by default at 4096 and of the first of its dtypes."""
    return Workload(*shape, dtype or precisions(name)[0], layout=registry.layout_of(name))


def space(name: str, asked: Workload | None = None, machine: Machine | None = None) -> Space[Any]:
    """By default at 4096, on an H100 where the kernel runs on one."""
    return (
        of(name).load().space(prune.problem(asked or workload(name)), machine or machine_for(name))
    )


def valid(found: Space[Any]) -> list[Any]:
    """The configs that a sweep would try."""
    return [config for config in found.configs() if found.invalid_reason(config) is None]


def some(name: str, found: Space[Any], most: int) -> list[Any]:
    """A few of them, at random."""
    return list(
        itertools.islice((c for c in _shuffled(name) if found.invalid_reason(c) is None), most)
    )


@functools.cache
def _shuffled(name: str) -> list[Any]:
    configs = list(space(name).configs())
    random.Random(name).shuffle(configs)
    return configs


def fields_of(axes: Iterable[str | tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The fields of a config that each axis varies."""
    return [(axis,) if isinstance(axis, str) else axis for axis in axes]
