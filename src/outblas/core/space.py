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
    """What a config does with a GPU, in one vocabulary for all kernels. Sizes in elements, memory
    in bytes.

    `math`: the instructions that multiply. A CTA of `threads` computes `tile_m` × `tile_n` outputs,
    `tile_k` terms a step, `stages` steps of operands in shared memory at a time (1: loads and
    products take turns). `groups` of threads multiply different rows and may cover each other's
    waits; `in_flight`: products run on while a group awaits operands. `registers` a thread,
    estimated. CTAs of a `cluster_m` × `cluster_n` cluster load shared operands once.
    `issue`: the share of the instructions' rate that its code reaches, where that is known to be
    less. `persistent` CTAs share the tiles, `sms` of them (0: one on each SM), in `order`,
    super-groups of `group_m` × `group_n`. `store`: how outputs leave: straight from "registers", in
    "wide" pieces, or "staged" and asynchronous. `split_k` CTAs share each tile along K and add
    through memory, `cluster_k` of a cluster through shared memory;
    `stream_k`: CTAs share the tiles of the last wave. `pingpong` groups have tiles of their own and
    store one while the other multiplies. `gathered`: where there is one wave, SMs of a GPC have
    neighbours. `lines`: of L2 that loads of A and of B ask for where 128 bytes lie side by side.
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
    gathered: bool = False
    lines: tuple[int, int] = (1, 1)


@dataclass(frozen=True, kw_only=True)
class Space(Generic[C]):
    """The configs of a kernel worth trying for one problem on one GPU.

    `own` is the config that the kernel takes if none is given, from which all differ along `axes`.
    `invalid_reason` says why a config cannot run or cannot pay here, or None; reasons of one kind
    differ in their numbers alone. Configs of which `compiled_as` makes the same share one compile.
    """

    own: C
    axes: Axes
    invalid_reason: Callable[[C], str | None]
    footprint: Callable[[C], Footprint]
    also: Iterable[C] = ()
    compiled_as: Callable[[C], C] = lambda config: config

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
