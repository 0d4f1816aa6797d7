"""Search spaces. Every kernel declares its own space of frozen configs, and describes the resources
that each config needs.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Generic, Literal, TypeVar

C = TypeVar("C")

# A field and its values, or a tuple of fields that are only valid together and their tuples of
# values.
Axes = Mapping[str | tuple[str, ...], tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The resources and features of a config, in one vocabulary for all kernels. Sizes are in
    elements, memory in bytes.

    math: the instructions that multiply.
    tile_m, tile_n: the outputs of a CTA's tile.
    tile_k: the terms along K that one step of a tile adds.
    stages: steps of operands that are in shared memory at a time (1: loads and MMAs alternate).
    threads: threads per CTA.
    registers: estimated registers per thread.
    groups: groups of threads that multiply different rows, and can hide each other's latency.
    in_flight: whether MMAs continue while a group waits for operands.
    issue: the fraction of the instructions' peak rate that the code reaches, where it is known to
        be below 1.
    cluster_m, cluster_n: CTAs of a cluster that load shared operands once.
    persistent: whether a fixed number of CTAs processes all tiles.
    sms: the number of persistent CTAs (0: one per SM).
    order, group_m, group_n: the order in which CTAs process tiles, and its super-group size.
    store: how outputs are stored: straight from "registers", in "wide" fragments, or "staged" in
        shared memory and asynchronously.
    split_k: CTAs that divide K of each tile among them and add their sums through memory.
    stream_k: whether CTAs divide K of the tiles in the last wave.
    cluster_k: CTAs of a cluster that divide K of each tile and add through shared memory.
    pingpong: whether groups process different tiles, so that one stores while the other multiplies.
    gpc_local: whether the SMs of a GPC process neighbouring tiles in a single wave.
    cache_lines: L2 cache lines that loads of A, and of B, request per 128 contiguous bytes.
    straddles_lines: whether tiles begin and end inside cache lines, which neighbouring tiles then
        both request.
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
    straddles_lines: bool = False


@dataclass(frozen=True, kw_only=True)
class Space(Generic[C]):
    """The configs of a kernel that are worth trying for one problem on one GPU.

    `own` is the kernel's default config; all others differ from it along `axes`. `invalid_reason`
    returns why a config cannot run or cannot be fast here, or None; reasons of one kind differ only
    in their numbers. Configs for which `compile_key` returns the same value share one compilation.

    `footprint_key` returns what the footprint of a config depends on besides the config and the
    dtypes of the operands and the output. Footprints for which it returns the same value, in
    whichever space, are equal. None: nobody knows, so every space makes its own.
    """

    own: C
    axes: Axes
    invalid_reason: Callable[[C], str | None]
    footprint: Callable[[C], Footprint]
    also: Iterable[C] = ()
    compile_key: Callable[[C], C] = lambda config: config
    footprint_key: Callable[[C], Hashable] | None = None

    def configs(self) -> Iterator[C]:
        """Yields each config once: the kernel's default, those of `also`, then the product of the
        axes.
        """
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


class LazySpace(Space[C]):
    """A space that chooses the kernel's default config when it is first asked for: looking up a
    single config seldom needs it.
    """

    def __init__(self, choose: Callable[[], C], **others: Any) -> None:
        """Args as of `Space`, with `choose` in the place of `own`."""
        plain = {"also": (), "compile_key": lambda config: config, "footprint_key": None}
        vars(self).update(plain | others, _choose=choose)

    @functools.cached_property
    def own(self) -> C:
        """The kernel's default config."""
        return self._choose()  # type: ignore[attr-defined,no-any-return]
