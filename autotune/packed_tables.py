"""The tables of tuned configs in a pack: those that chose its kernels.

A process may have other tables than the one that built a pack, and would choose kernels that the
pack lacks. So a pack has its tables with it, and they choose for the products that it was built
for. Their names are

    shipped/NAME.json    a table that came with outblas, as the file is: that of the model of GPU,
                         and that of the nearest other model, which the lookup reads too
    own/results.json     the builder's own results for that model of GPU, in the same form

They choose among the configs of the kernels that packs hold: a call that a pack serves compiles
nothing, and a kernel of Triton for 16-bit operands, which may have been measured to be faster,
would be compiled. For float32 operands packs hold every kernel that is tuned.

The results of a user who loads a pack come before both, as before shipped tables: they may choose a
kernel that the pack lacks.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from outblas.autotune.search.target import HOPPER_GROUPED
from outblas.autotune.store import tables
from outblas.autotune.store.records import Gpu, Workload
from outblas.autotune.store.store import Store
from outblas.autotune.tuned_entries import (
    MODEL,
    TunedEntry,
    entry_of,
    from_shipped,
    own_and_nearest,
    read_tables,
)
from outblas.base import pack
from outblas.base.ownership import shown
from outblas.base.pack import Pack
from outblas.call import recorded_groups
from outblas.call.default_kernel import PRODUCTION, candidates
from outblas.call.epilogue import glu_split
from outblas.call.grouped import GroupedProblem
from outblas.call.problem import dtype_name
from outblas.call.products import WIDE, Products, parse_line
from outblas.call.steps import NO_STEPS
from outblas.device import triton_variant

_PACKED = PRODUCTION, HOPPER_GROUPED.name
_ARCH = 90  # that of the GPUs that packs are built for
SHIPPED_FOLDER, OWN_RESULTS = "shipped/", "own/results.json"


def gathered(gpu: Gpu, store: Path | None = None, folder: Path = tables.TABLES) -> dict[str, bytes]:
    """Returns the tables that choose on a model of GPU: shipped ones of a folder, and the results
    of a store if one is given.

    Raises ValueError for a store without results of this model, StoreError and OSError.
    """
    chosen = itertools.chain(*own_and_nearest(gpu, read_tables(folder)))
    texts = {f"{SHIPPED_FOLDER}{path.name}": path.read_bytes() for path, _ in chosen}
    if store is not None:
        with Store(store, read_only=True) as opened:
            winners = opened.winners(gpu_name=gpu.name)
        winners = [winner for winner in winners if winner.gpu.model == gpu.model]
        if not winners:
            raise ValueError(f"{shown(store)} has no results of {gpu.name} with {gpu.sms} SMs")
        texts[OWN_RESULTS] = tables.to_bytes(tables.best_of(winners, lambda winner: winner.when))
    return texts


def entries(texts: Mapping[str, bytes], gpu: Gpu) -> list[TunedEntry]:
    """Returns the winners that tables have for a GPU, as the lookup reads them, of the kernels
    that packs hold. Raises ValueError for a text that is no table.
    """
    packed = {name: _table(name, text) for name, text in texts.items()}
    results = packed.pop(OWN_RESULTS, None)
    winners = []
    if results is not None and results.gpu.model == gpu.model:
        winners += [entry_of(MODEL, results.gpu, entry) for entry in results.entries]
    winners += from_shipped(gpu, [(Path(name), table) for name, table in sorted(packed.items())])
    kernels = {dtype: candidates(_ARCH, dtype) for dtype in WIDE}  # whose configs packs hold
    return [e for e in winners if e.kernel in kernels.get(e.workload.dtype, _PACKED)]


def entries_of(loaded: Pack, gpu: Gpu) -> list[TunedEntry] | None:
    """Returns the winners that a pack's tables have for a GPU; None where the pack was built for
    another model, or with other versions, so that its kernels are not used. Raises PackError and
    ValueError for tables that are not as they were packed.
    """
    if loaded.about.get("gpu") != gpu.name or not loaded.tables or not _is_usable(loaded):
        return None
    return entries({name: loaded.table(name) for name in loaded.tables}, gpu)


def covers(loaded: Pack, workload: Workload, *, fp8: bool = False) -> bool:
    """Returns whether a pack was built for a GEMM, in plain form or with its epilogue. `fp8`: the
    workload stands for a GEMM of fp8 operands, of which two are one element.
    """
    is_listed = _stands_for if fp8 else _is_of
    return any(
        line.groups is None and fp8 == (line.scaling is not None) and is_listed(line, workload)
        for line in _products(loaded)
    )


def covers_groups(loaded: Pack, problem: GroupedProblem) -> bool:
    """Returns whether a pack was built for GEMMs of groups, without an epilogue, a gather, a
    scatter or scales.
    """
    groups, rows = recorded_groups.groups_of(problem), recorded_groups.rows_of(problem)
    K = problem.M if groups.form == "terms" else problem.K
    sizes = problem.N, K, dtype_name(problem.dtype)
    return any(
        line.groups is not None
        and (replace(line.groups, top=0), line.steps) == (groups, NO_STEPS)
        and (line.N, line.K, line.dtype) == sizes
        and _has_rows(line, rows)
        for line in _products(loaded)
    )


def described(loaded: Pack) -> list[dict[str, object]]:
    """Returns what `outblas pack show` says of each table: `name`, `gpu`, `entries`, `size` in
    bytes, and `sha256`. Of a table that is damaged, the reason is its `gpu`.
    """
    rows: list[dict[str, object]] = []
    for name, part in loaded.tables.items():
        row: dict[str, object] = {"name": name, "size": part.size, "sha256": part.sha256}
        try:
            table = _table(name, loaded.table(name))
        except ValueError as error:
            rows.append(row | {"gpu": str(error), "entries": 0})
        else:
            rows.append(row | {"gpu": table.gpu.name, "entries": len(table.entries)})
    return rows


def problems(loaded: Pack) -> Iterator[str]:
    """Yields what is wrong with tables that are as they were packed: that they are none."""
    for name in loaded.tables:
        try:
            _table(name, loaded.table(name))
        except pack.PackError:  # `Pack.problems` has it
            continue
        except ValueError as error:
            yield f"{shown(loaded.path)}: {error}"


def _table(name: str, text: bytes) -> tables.TunedTable:
    try:
        return tables.read_table(text.decode())
    except ValueError as error:  # UnicodeDecodeError is one
        raise ValueError(f"the table {name} cannot be read: {error}") from None


def _is_usable(loaded: Pack) -> bool:
    """Returns whether the kernels of a pack were built with the versions that are here."""
    try:
        if not loaded.toolchain:  # all are of Triton
            return not loaded.differences(triton_variant.toolchain_fields())
        from outblas.hopper.parts.compile import toolchain_fields
    except ImportError:  # without the DSL, or without Triton
        return False
    return not loaded.differences(toolchain_fields())


@functools.cache
def _products(loaded: Pack) -> tuple[Products, ...]:
    lines = loaded.about.get("products", ())
    try:
        return tuple(parse_line(line) for line in lines)
    except (ValueError, AttributeError, TypeError) as error:
        pack.warn_once(f"{shown(loaded.path)}: the tables are not used: {error}")
        return ()


def _has_rows(products: Products, rows: int) -> bool:
    return any(first <= rows <= last for first, last in products.rows)


def _stands_for(products: Products, workload: Workload) -> bool:
    """Returns whether a workload is the one whose tuned choices products of fp8 operands take."""
    columns = products.N // glu_split(products.steps.activation)
    words = max(2, -(-products.K // 2))
    return _has_rows(products, workload.M) and (columns, words) == (workload.N, workload.K)


def _is_of(products: Products, workload: Workload) -> bool:
    N, steps = products.N, str(products.steps)
    if products.out_dtype:  # they take what was tuned without an epilogue
        N, steps = N // glu_split(products.steps.activation), ""
    return (
        not products.batch_invariant
        and not products.batch
        and _has_rows(products, workload.M)
        and (N, products.K) == (workload.N, workload.K)
        and (products.dtype, products.result) == (workload.dtype, workload.out_dtype)
        and (products.layout, steps) == (workload.layout, workload.epilogue)
    )
