"""README's tables of what was tuned: for every workload of a shipped table the kernel that `matmul`
takes there.
"""

from pathlib import Path
from statistics import geometric_mean

from ...autotune.choose import short
from ...autotune.transfer import Entry, Table, read_table
from ...choice import PRODUCTION
from ...shapes import SUITE, Shape, to_text
from ..page import environment_notes


def table(path: Path) -> str:
    """In Markdown: a row a shape of the suite, the winner in each dtype and layout; what other
    shapes reach together. Raises ValueError for what is no table.
    """
    found = read_table(path)
    kinds = sorted({entry.workload.kind for entry in found.entries})
    shapes = sorted(
        {entry.workload.shape for entry in found.entries}, key=lambda s: (s[0] * s[1] * s[2], s)
    )
    heads = [f"{dtype} {layout}" for dtype, _, layout in kinds]
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
    """How many shapes, what they reach, and those that are slower than cuBLAS."""
    ratios = [entry.ratio for entry in best.values()]
    slower = [
        f"{to_text(shape)} {_ratio(entry)}" for shape, entry in best.items() if entry.ratio < 1
    ]
    said = (
        f"{len(best)} shapes, geometric mean {geometric_mean(ratios):.3f}, at most "
        f"{max(ratios):.3f}"
    )
    return said + (f"; below 1: {', '.join(slower)}" if slower else "")


def _best(found: Table, shape: Shape, kind: tuple[str, str, str]) -> Entry | None:
    there = (e for e in found.entries if e.workload.shape == shape and e.workload.kind == kind)
    return max(there, key=lambda entry: entry.ratio, default=None)


def _ratio(entry: Entry) -> str:
    return f"{entry.ratio:.3f}" + ("" if entry.kernel == PRODUCTION else f" (`{entry.kernel}`)")


def _cell(best: Entry | None, before: Entry | None) -> str:
    """The fastest kernel, how it compares with cuBLAS, and what its config changes; `before` may
    have both.
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
