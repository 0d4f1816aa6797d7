"""The winners that are known for a GPU, from its store and from shipped tables, and how near they
are to a workload.
"""

import functools
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outblas.autotune.search.target import HOPPER_GROUPED, registered
from outblas.autotune.store.records import BestConfig, Gpu, Workload
from outblas.autotune.store.store import Store
from outblas.autotune.store.tables import ShippedConfig, TunedTable, read_table
from outblas.base.shapes import Shape
from outblas.call.default_kernel import PRODUCTION
from outblas.call.steps import GATED

HERE = "tuned on this GPU"
MODEL = "tuned on this GPU model, other versions"
SHIPPED = "shipped table of this GPU model"
COUSIN = "shipped table of the nearest GPU model"
ORIGINS = (HERE, MODEL, SHIPPED, COUSIN)

Named = tuple[Path, TunedTable]  # a table and its file


@dataclass(frozen=True)
class TunedEntry:
    """A config that won at a workload.

    Attributes:
        origin: where the result comes from, one of `ORIGINS`.
        gpu: the name of the GPU.
        us: the time of a call.
        ratio: cuBLAS's time divided by it.
    """

    origin: str
    gpu: str
    workload: Workload
    kernel: str
    config: str
    us: float
    ratio: float

    # Kept, because lookups compare workloads with entries again and again.
    @functools.cached_property
    def shape(self) -> Shape:
        """The shape of the workload."""
        return self.workload.shape

    @functools.cached_property
    def doublings(self) -> tuple[float, ...]:
        """The binary logarithms of the shape."""
        return tuple(map(math.log2, self.workload.shape))

    @functools.cached_property
    def width(self) -> tuple[int, bool]:
        """The width of the operands, as `width_of` has it."""
        return width_of(self.workload)


def entry_of(origin: str, gpu: Gpu, best: BestConfig | ShippedConfig) -> TunedEntry:
    """Returns a winner of a store or of a table on a GPU."""
    return TunedEntry(
        origin, gpu.name, best.workload, best.kernel, best.config, best.us, best.ratio
    )


def from_store(gpu: Gpu, path: Path | None) -> Iterator[TunedEntry]:
    """Yields the winners of a store on GPUs of one model, the newest first."""
    try:
        with Store(path, read_only=True) as store:
            winners = store.winners(gpu_name=gpu.name)
    except Exception as error:  # matmul must not raise for this
        warnings.warn(f"outblas cannot read its tuning store: {error}", stacklevel=2)
        return
    for best in reversed(winners):
        is_here = registered(best.kernel) or best.kernel == HOPPER_GROUPED.name
        if is_here and best.gpu.model == gpu.model:
            yield entry_of(HERE if best.gpu == gpu else MODEL, gpu, best)


def from_shipped(gpu: Gpu, tables: Iterable[Named]) -> Iterator[TunedEntry]:
    """Yields the winners that tables have for a GPU."""
    for origin, chosen in zip((SHIPPED, COUSIN), own_and_nearest(gpu, tables), strict=True):
        for _, table in chosen:
            for entry in table.entries:
                yield entry_of(origin, table.gpu, entry)


def read_tables(folder: Path) -> Iterator[Named]:
    """Yields the tables of a folder that can be read, and warns of the others."""
    for path in sorted(folder.glob("*.json")):
        try:
            yield path, read_table(path)
        except (ValueError, OSError) as error:
            warnings.warn(f"outblas ignores the tuning table {path.name}: {error}", stacklevel=2)


def own_and_nearest(gpu: Gpu, tables: Iterable[Named]) -> tuple[list[Named], list[Named]]:
    """Returns the tables that a lookup on a GPU reads: those of its model, and that of the nearest
    other one.
    """
    ours, cousins = [], []
    for path, table in tables:
        if table.gpu.model == gpu.model:
            ours.append((path, table))
        elif table.gpu.arch == gpu.arch:
            cousins.append((path, table))

    def apart(named: Named) -> tuple[int, str]:
        other = named[1].gpu
        return abs(other.sms - gpu.sms), other.name

    return ours, sorted(cousins, key=apart)[:1]


def distance(one: Workload, other: Workload) -> float:
    """Returns the distance of two shapes in binary orders of magnitude: doubling one of M, N, K is
    1.
    """
    return math.dist(*(tuple(map(math.log2, workload.shape)) for workload in (one, other)))


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


def is_akin(entry: TunedEntry, workload: Workload) -> bool:
    """Returns whether a winner at a bare GEMM applies to the dtype and layout of a plain workload.

    For the production kernel, all layouts and all 16-bit dtypes are equivalent.
    """
    if entry.workload.plain.kind == workload.kind:
        return True
    return (
        entry.kernel == PRODUCTION
        and entry.width == width_of(workload)
        and (entry.workload.out_dtype == "float32") == (workload.out_dtype == "float32")
    )


def best_by_kernel(entries: Iterable[TunedEntry]) -> list[TunedEntry]:
    """Returns the entry of the nearest origin for each kernel, the fastest kernel first."""
    best: dict[str, TunedEntry] = {}
    for entry in sorted(entries, key=lambda entry: ORIGINS.index(entry.origin)):
        best.setdefault(entry.kernel, entry)
    return sorted(best.values(), key=lambda entry: -entry.ratio)


def nearest_to(entries: Sequence[TunedEntry], workload: Workload) -> list[TunedEntry]:
    """Returns the winners at the nearest workload, of one at least, the fastest kernel first."""
    place = min((e.workload for e in entries), key=lambda w: (distance(w, workload), w))
    return best_by_kernel(entry for entry in entries if entry.workload == place)
