"""The winners that are known for a GPU, from its store and from shipped tables, and how near they
are to a workload.
"""

import functools
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..core.shapes import Shape
from ..core.steps import GATED
from ..runtime.default_kernel import PRODUCTION
from .search.target import HOPPER_GROUPED, registered
from .store.records import BestConfig, Gpu, Workload
from .store.store import Store
from .store.tables import Entry, Table, read_table

HERE = "tuned on this GPU"
MODEL = "tuned on this GPU model, other versions"
SHIPPED = "shipped table of this GPU model"
COUSIN = "shipped table of the nearest GPU model"
ORIGINS = (HERE, MODEL, SHIPPED, COUSIN)

Named = tuple[Path, Table]  # a table and its file


@dataclass(frozen=True)
class TunedEntry:
    """A config that won at a workload.

    Attributes:
        origin: where the result comes from, one of `ORIGINS`.
        gpu: the name of the GPU.
        sms: how many SMs it has.
        us: the time of a call.
        ratio: cuBLAS's time divided by it.
        when: the date of the measurement.
    """

    origin: str
    gpu: str
    sms: int
    workload: Workload
    kernel: str
    config: str
    us: float
    ratio: float
    when: str

    # Kept, because lookups compare workloads with entries again and again.
    @functools.cached_property
    def shape(self) -> Shape:
        """The shape of the workload."""
        return self.workload.shape

    @functools.cached_property
    def doublings(self) -> tuple[float, ...]:
        """The binary logarithms of the shape."""
        return doublings_of(self.workload)

    @functools.cached_property
    def plain_kind(self) -> tuple[str, ...]:
        """The kind of the plain workload."""
        return self.workload.plain.kind

    @functools.cached_property
    def width(self) -> tuple[int, bool]:
        """The width of the operands, as `width_of` has it."""
        return width_of(self.workload)


def from_store(gpu: Gpu, path: Path | None) -> Iterator[TunedEntry]:
    try:
        with Store(path, read_only=True) as store:
            found = [each for each in store.winners(gpu_name=gpu.name) if each.gpu.sms == gpu.sms]
    except Exception as error:  # matmul must not raise for this
        warnings.warn(f"outblas cannot read its tuning store: {error}", stacklevel=2)
        return
    kernels = {each.kernel for each in found}
    kernels_here = {k for k in kernels if registered(k) or k == HOPPER_GROUPED.name}
    for each in reversed(found):
        if each.kernel in kernels_here:
            yield entry_of(HERE if each.gpu == gpu else MODEL, gpu, each)


def entry_of(origin: str, gpu: Gpu, found: BestConfig | Entry) -> TunedEntry:
    """Returns a winner of a store or of a table on a GPU."""
    return TunedEntry(
        origin,
        gpu.name,
        gpu.sms,
        found.workload,
        found.kernel,
        found.config,
        found.us,
        found.ratio,
        found.when,
    )


def from_tables(gpu: Gpu, folder: Path) -> Iterator[TunedEntry]:
    yield from from_shipped(gpu, _readable(folder))


def tables_for(gpu: Gpu, folder: Path) -> tuple[list[Named], list[Named]]:
    """Returns the tables of a folder that a lookup on a GPU reads: those of its model, and that of
    the nearest other one.
    """
    return _own_and_nearest(gpu, _readable(folder))


def from_shipped(gpu: Gpu, tables: Iterable[Named]) -> Iterator[TunedEntry]:
    """Yields the winners that tables have for a GPU."""
    own, nearest = _own_and_nearest(gpu, tables)
    for origin, chosen in ((SHIPPED, own), (COUSIN, nearest)):
        for _, table in chosen:
            for each in table.entries:
                yield entry_of(origin, table.gpu, each)


def _readable(folder: Path) -> Iterator[Named]:
    for path in sorted(folder.glob("*.json")):
        try:
            yield path, read_table(path)
        except (ValueError, OSError) as error:
            warnings.warn(f"outblas ignores the tuning table {path.name}: {error}", stacklevel=2)


def _own_and_nearest(gpu: Gpu, tables: Iterable[Named]) -> tuple[list[Named], list[Named]]:
    own, cousins = [], []
    for path, table in tables:
        if table.gpu.model == gpu.model:
            own.append((path, table))
        elif table.gpu.arch == gpu.arch:
            cousins.append((path, table))

    def apart(named: Named) -> tuple[int, str]:
        other = named[1].gpu
        return abs(other.sms - gpu.sms), other.name

    return own, sorted(cousins, key=apart)[:1]


def doublings_of(workload: Workload) -> tuple[float, ...]:
    """Returns the binary logarithms of a shape, whose distance is `distance`."""
    return tuple(map(math.log2, workload.shape))


def distance(one: Workload, other: Workload) -> float:
    """Returns the distance of two shapes in binary orders of magnitude: doubling one of M, N, K is
    1.
    """
    return math.sqrt(
        sum(math.log2(x / y) ** 2 for x, y in zip(one.shape, other.shape, strict=True))
    )


def width_of(workload: Workload) -> tuple[int, bool]:
    """Returns the bytes of an operand's element, and whether it may be rounded to tf32."""
    return (2 if workload.dtype in ("bfloat16", "float16") else 4), workload.dtype == "tf32"


def bare_of(workload: Workload) -> Workload:
    """Returns the bare workload that a call with an epilogue uses where nothing was tuned with that
    epilogue: with warm weights, and as many columns as the call stores.
    """
    plain = workload.plain
    if not workload.epilogue:
        return plain
    return replace(plain, N=plain.N // 2) if workload.steps.activation in GATED else plain


def is_akin(entry: TunedEntry, workload: Workload, width: tuple[int, bool]) -> bool:
    """Returns whether a winner at a bare product applies to the dtype and layout of a plain
    workload of this `width`.

    For the production kernel, all layouts and all 16-bit dtypes are equivalent.
    """
    if entry.plain_kind == workload.kind:
        return True
    return (
        entry.kernel == PRODUCTION
        and entry.width == width
        and (entry.workload.out_dtype == "float32") == (workload.out_dtype == "float32")
    )


class NearEntries:
    """Winners that lie near to shapes in the order of their distance."""

    def __init__(self, entries: Iterable[TunedEntry]) -> None:
        # Those at one distance come in the order of their workloads, then the fastest kernel first.
        self._entries = sorted(entries, key=lambda entry: (entry.workload, -entry.ratio))
        self._doublings = np.array([entry.doublings for entry in self._entries]).reshape(-1, 3)
        self._at: dict[tuple[Shape, str], list[TunedEntry]] = {}
        for entry in self._entries:
            place = entry.workload.shape, entry.workload.layout
            self._at.setdefault(place, []).append(entry)

    def at(self, workload: Workload) -> list[TunedEntry]:
        """Returns the winners at the shape and the layout of a workload."""
        return self._at.get((workload.shape, workload.layout), [])

    def within(self, reach: float, workload: Workload, most: int) -> list[TunedEntry]:
        """Returns the winners at this distance at most, the nearest first; no more than `most`."""
        apart = self._doublings - doublings_of(workload)
        squares = np.einsum("ij,ij->i", apart, apart)
        reached = np.flatnonzero(squares <= reach * reach)
        # Equal distances may differ in rounding.
        order = zip(np.sqrt(squares[reached]).round(9).tolist(), reached.tolist(), strict=True)
        return [self._entries[i] for _, i in sorted(order)[:most]]


def best_by_kernel(entries: Iterable[TunedEntry]) -> list[TunedEntry]:
    """Returns the entry of the nearest origin for each kernel, the fastest kernel first."""
    found: dict[str, TunedEntry] = {}
    for entry in sorted(entries, key=lambda entry: ORIGINS.index(entry.origin)):
        found.setdefault(entry.kernel, entry)
    return sorted(found.values(), key=lambda entry: -entry.ratio)


def nearest_to(entries: Sequence[TunedEntry], workload: Workload) -> list[TunedEntry]:
    """Returns the winners at the nearest workload, the fastest kernel first."""
    if not entries:
        return []
    place = min((e.workload for e in entries), key=lambda w: (distance(w, workload), w))
    return best_by_kernel(entry for entry in entries if entry.workload == place)
