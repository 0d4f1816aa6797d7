"""The tables of a page on a shipped tuning table: what `matmul` runs for each workload."""

from collections.abc import Iterable, Sequence
from statistics import geometric_mean

from outblas.autotune.named_configs import short
from outblas.autotune.store.tables import ShippedConfig, TunedTable
from outblas.base.shapes import SUITE, Shape, to_text
from tools.pages import tables
from tools.pages.results import Results

_Kind = tuple[str, ...]
_OWN = "default"


def part(results: Results, _: str) -> str:
    """The best config at each shape of the suite, in each dtype and layout; the fields of those
    configs; and what came of the other shapes.
    """
    table = results.tables[0]
    best = sorted(_best(table.entries), key=lambda entry: _order(entry.workload.shape))
    suite = [entry for entry in best if _is_of_suite(entry)]
    others = [entry for entry in best if not _is_of_suite(entry)]
    return "\n".join([*_of_suite(suite), *_of_others(others), "", _note(table), ""])


def _is_of_suite(entry: ShippedConfig) -> bool:
    return entry.workload.shape in SUITE and not entry.workload.grouping


def _best(entries: Iterable[ShippedConfig]) -> list[ShippedConfig]:
    """The fastest kernel of each workload."""
    best: dict[tuple[Shape, _Kind], ShippedConfig] = {}
    for entry in entries:
        place = entry.workload.shape, entry.workload.kind
        if place not in best or entry.ratio > best[place].ratio:
            best[place] = entry
    return list(best.values())


def _of_suite(best: Sequence[ShippedConfig]) -> list[str]:
    """A row for each workload, whose config has a number, and a row for each number."""
    changed = {(e.kernel, e.config): short(e.kernel, e.config) for e in best}
    numbers = {config: str(i) for i, config in enumerate((c for c in changed if changed[c]), 1)}
    kinds = [entry.workload.kind for entry in best]
    rows = [
        (
            to_text(entry.workload.shape),
            *_kind_cells(entry.workload.kind, kinds),
            f"{entry.ratio:.3f}",
            f"`{entry.kernel}`",
            numbers.get((entry.kernel, entry.config), _OWN),
        )
        for entry in best
    ]
    lines = tables.table(("shape", *_kind_heads(kinds), "× cuBLAS", "kernel", "config"), rows)
    configs = [
        (number, f"`{kernel}`", _fields(changed[kernel, config]))
        for (kernel, config), number in numbers.items()
    ]
    heading = "fields that differ from the kernel's default"
    return [*lines, "", *tables.table(("config", "kernel", heading), configs)]


def _of_others(best: Sequence[ShippedConfig]) -> list[str]:
    """A row for each kind of workload that was tuned at shapes beside the suite, then the shapes
    where nothing was faster than cuBLAS.
    """
    if not best:
        return []
    kinds = [entry.workload.kind for entry in best]
    rows = []
    for kind in sorted(set(kinds)):
        ratios = [entry.ratio for entry in best if entry.workload.kind == kind]
        below = sum(ratio < 1 for ratio in ratios)
        mean, highest = f"{geometric_mean(ratios):.3f}", f"{max(ratios):.3f}"
        rows.append((*_kind_cells(kind, kinds), str(len(ratios)), mean, highest, str(below)))
    heads = _kind_heads(kinds)
    columns = (*heads, "shapes", "geometric mean", "highest", "below 1")
    lines = ["", "Shapes outside of the suite:", "", *tables.table(columns, rows)]
    slower = [
        (
            to_text(entry.workload.shape),
            *_kind_cells(entry.workload.kind, kinds),
            f"{entry.ratio:.3f}",
        )
        for entry in best
        if entry.ratio < 1
    ]
    if slower:
        lines += ["", "Those of them where no kernel was as fast as cuBLAS:", ""]
        lines += tables.table(("shape", *heads, "× cuBLAS"), slower)
    return lines


def _kind_heads(kinds: Iterable[_Kind]) -> list[str]:
    """The headings of what a workload is beside its shape: weights, epilogue and groups where they
    vary.
    """
    varied = _varied(kinds)
    return ["dtype", "layout", *(name for name, shown in varied.items() if shown)]


def _kind_cells(kind: _Kind, kinds: Iterable[_Kind]) -> list[str]:
    """The cells under those headings."""
    dtype, _, layout, weights, epilogue, groups = kind
    beside = {"weights": weights, "epilogue": epilogue or "none", "groups": groups or "none"}
    return [dtype, layout, *(beside[name] for name, shown in _varied(kinds).items() if shown)]


def _varied(kinds: Iterable[_Kind]) -> dict[str, bool]:
    """Whether any workload has cold weights, an epilogue, or groups."""
    kinds = list(kinds)
    return {
        "weights": any(kind[3] != "warm" for kind in kinds),
        "epilogue": any(kind[4] for kind in kinds),
        "groups": any(kind[5] for kind in kinds),
    }


def _fields(changed: str) -> str:
    return ", ".join(f"`{field}`" for field in changed.split(","))


def _order(shape: Shape) -> tuple[int, Shape]:
    """A key that sorts shapes by the work of a product."""
    m, n, k = shape
    return m * n * k, shape


def _note(table: TunedTable) -> str:
    gpu = table.gpu
    days = sorted({entry.when[:10] for entry in table.entries})
    where = tables.environments(
        [
            {
                "gpu": gpu.name,
                "driver": gpu.driver,
                "cuda": gpu.cuda,
                "torch": gpu.torch,
                "triton": gpu.triton,
                "nvidia-cutlass-dsl": gpu.dsl,
            }
        ]
    )[0]
    what = f"*× cuBLAS*: as measured in the finals of the sweep; *{_OWN}*: the kernel's own config"
    return f"{what}. {where}; {days[-1]}."
