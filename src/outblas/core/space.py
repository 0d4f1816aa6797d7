"""Search spaces: every kernel declares its own, as frozen configs, and says of each what it asks of
a GPU.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Generic, Literal, TypeVar

C = TypeVar("C")

# One field and its values, or fields that only make sense together and their tuples of values.
Axes = Mapping[str | tuple[str, ...], tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What a config does with a GPU, in one vocabulary for all kernels. Sizes are in elements,
    memory in bytes.

    math: the instructions that multiply.
    tile_m, tile_n: the outputs of a CTA's tile.
    tile_k: its terms in a step along K.
    stages: steps of operands in shared memory at a time (1: loads and products take turns).
    threads: of a CTA.
    registers: of a thread, estimated.
    groups: groups of threads that multiply different rows and may cover each other's waits.
    in_flight: whether products run on while a group awaits operands.
    issue: the share of the instructions' rate that the code reaches, where that is known to be
        less.
    cluster_m, cluster_n: CTAs of a cluster that load shared operands once.
    persistent: whether CTAs share the tiles.
    sms: the persistent CTAs (0: one on each SM).
    order, group_m, group_n: the order in which they take tiles, and its super-groups.
    store: how outputs leave: straight from "registers", in "wide" fragments, or "staged" in shared
        memory and asynchronous.
    split_k: CTAs that share each tile along K and add through memory.
    stream_k: whether CTAs share the tiles of the last wave.
    cluster_k: CTAs of a cluster that share each tile along K and add through shared memory.
    pingpong: whether groups have tiles of their own, and one stores while the other multiplies.
    gpc_local: whether the SMs of a GPC have neighbouring tiles where there is one wave.
    cache_lines: lines of L2 that loads of A, and of B, request for 128 bytes that lie side by side.
    """

    math: Literal["wgmma", "mma", "fma"]
    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    threads: int
    registers: int
    shared_memory: int
    groups: int = 1
    in_flight: bool = False
    issue: float = 1.0
    cluster_m: int = 1
    cluster_n: int = 1
    persistent: bool = False
    sms: int = 0
    order: str = "grouped"
    group_m: int = 1
    group_n: int = 0
    store: Literal["registers", "wide", "staged"] = "registers"
    split_k: int = 1
    stream_k: bool = False
    cluster_k: int = 1
    pingpong: bool = False
    gpc_local: bool = False
    cache_lines: tuple[int, int] = (1, 1)


@dataclass(frozen=True, kw_only=True)
class Space(Generic[C]):
    """The configs of a kernel worth trying for one problem on one GPU.

    `own` is the config that the kernel takes if none is given, from which all differ along `axes`.
    `invalid_reason` says why a config cannot run or cannot pay here, or None; reasons of one kind
    differ in their numbers alone. Configs of which `compile_key` makes the same share one compile.
    """

    own: C
    axes: Axes
    invalid_reason: Callable[[C], str | None]
    footprint: Callable[[C], Footprint]
    also: Iterable[C] = ()
    compile_key: Callable[[C], C] = lambda config: config

    def configs(self) -> Iterator[C]:
        """Each config once: the kernel's own, those of `also`, then the product of the axes."""
        seen = set()
        for config in (self.own, *self.also, *self._product()):
            if config not in seen:
                seen.add(config)
                yield config

    def _product(self) -> Iterator[C]:
        names = [(axis,) if isinstance(axis, str) else axis for axis in self.axes]
        choices = [
            values if isinstance(axis, tuple) else tuple((value,) for value in values)
            for axis, values in self.axes.items()
        ]
        for picked in product(*choices):
            changes = {
                field: value
                for fields, values in zip(names, picked, strict=True)
                for field, value in zip(fields, values, strict=True)
            }
            yield dataclasses.replace(self.own, **changes)  # type: ignore[type-var]
