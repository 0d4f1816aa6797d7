"""README's table of a shipped tuning table: the kernel that `matmul` takes for every workload."""

from pathlib import Path
from statistics import geometric_mean

from ...autotune.lookup import short
from ...autotune.store.tables import Entry, Table, read_table
from ...core.shapes import SUITE, Shape, to_text
from ...runtime.default_kernel import PRODUCTION
from ..page import environment_notes


def part(path: Path, argument: str) -> str:
    """The part of a page; it takes no argument."""
    return table(path)


def table(path: Path) -> str:
    """The table in Markdown: a row for each shape of the suite with the winner in each dtype and
    layout, then a sentence on the other shapes. Raises ValueError for a file that is no table.
    """
    found = read_table(path)
    kinds = sorted({entry.workload.kind for entry in found.entries})
    shapes = sorted(
        {entry.workload.shape for entry in found.entries}, key=lambda s: (s[0] * s[1] * s[2], s)
    )
    heads = [_head(kind) for kind in kinds]
    lines = [f"| shape | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for shape in [shape for shape in shapes if shape in SUITE]:
        row = [_best(found, shape, kind) for kind in kinds]
        cells = [_cell(each, before) for each, before in zip(row, [None, *row], strict=False)]
        lines.append(f"| {to_text(shape)} | {' | '.join(cells)} |")
    lines += ["", _note(found)]
    for kind, head in zip(kinds, heads, strict=True):
        others = ((shape, _best(found, shape, kind)) for shape in shapes if shape not in SUITE)
        best = {shape: entry for shape, entry in others if entry}
        lines += ["", f"Others, {head}: {_summary(best)}."] if best else []
    return "\n".join([*lines, ""])


def _summary(best: dict[Shape, Entry]) -> str:
    """The number of shapes, their mean and best ratio, and the shapes slower than cuBLAS."""
    ratios = [entry.ratio for entry in best.values()]
    slower = [
        f"{to_text(shape)} {_ratio(entry)}" for shape, entry in best.items() if entry.ratio < 1
    ]
    mean = f"{len(best)} shapes, geometric mean {geometric_mean(ratios):.3f}"
    below = f"; below 1: {', '.join(slower)}" if slower else ""
    return f"{mean}, at most {max(ratios):.3f}{below}"


def _head(kind: tuple[str, ...]) -> str:
    """What a column is of: `bfloat16 nt`, `bfloat16 nt, cold weights`, `bfloat16 nt, bias+gelu`."""
    dtype, _, layout, weights, epilogue = kind
    cold = f"{weights} weights" if weights != "warm" else ""
    return ", ".join(part for part in (f"{dtype} {layout}", cold, epilogue) if part)


def _best(found: Table, shape: Shape, kind: tuple[str, ...]) -> Entry | None:
    there = (e for e in found.entries if e.workload.shape == shape and e.workload.kind == kind)
    return max(there, key=lambda entry: entry.ratio, default=None)


def _ratio(entry: Entry) -> str:
    return f"{entry.ratio:.3f}" + ("" if entry.kernel == PRODUCTION else f" (`{entry.kernel}`)")


def _cell(best: Entry | None, before: Entry | None) -> str:
    """The ratio to cuBLAS, the fastest kernel, and the fields that its config changes; "the same"
    where `before`, the cell on the left, has the same kernel and config.
    """
    if best is None:
        return "–"
    if before and (best.kernel, best.config) == (before.kernel, before.config):
        return f"{best.ratio:.3f}, the same"
    changed = short(best.kernel, best.config)
    config = f"<br>{changed.replace(',', ', ')}" if changed else ""
    return f"{best.ratio:.3f} `{best.kernel}`{config}"


def _note(found: Table) -> str:
    gpu = found.gpu
    days = sorted({entry.when[:10] for entry in found.entries})
    where = environment_notes(
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
    what = (
        "× cuBLAS in the finals, and the fields in which the config differs from the kernel's own"
    )
    return f"{what}. {where}; {days[-1]}."
