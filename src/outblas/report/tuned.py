"""README's tables of what was tuned: for every workload of a shipped table the kernel that `matmul` takes there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..autotune.choose import short
from ..autotune.transfer import Entry, Table, read_table
from ..shapes import to_text
from .page import environment_notes


def table(path: Path) -> str:
    """In Markdown: a row a shape, the winner in each dtype and layout. Raises ValueError for what is no table."""
    found = read_table(path)
    kinds = sorted({entry.workload.kind for entry in found.entries})
    shapes = sorted({entry.workload.shape for entry in found.entries}, key=lambda s: (s[0] * s[1] * s[2], s))
    heads = [f"{dtype} {layout}" for dtype, _, layout in kinds]
    lines = [f"| shape | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for shape in shapes:
        cells = [_cell([e for e in found.entries if e.workload.shape == shape and e.workload.kind == k]) for k in kinds]
        lines.append(f"| {to_text(shape)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{_note(found)}\n"])


def _cell(entries: Sequence[Entry]) -> str:
    """The fastest kernel, how it compares with cuBLAS, and what its config changes of its own."""
    if not entries:
        return "–"
    best = max(entries, key=lambda entry: entry.ratio)
    changed = short(best.kernel, best.config)
    config = f"<br>{changed.replace(',', ', ')}" if changed else ""
    return f"{best.ratio:.3f} `{best.kernel}`{config}"


def _note(found: Table) -> str:
    gpu = found.gpu
    days = sorted({entry.when[:10] for entry in found.entries})
    where = environment_notes(
        [
            {
                "gpu": gpu.name, "driver": gpu.driver, "cuda": gpu.cuda, "torch": gpu.torch, "triton": gpu.triton,
                "nvidia-cutlass-dsl": gpu.dsl,
            }
        ]
    )[0]  # fmt: skip
    what = "× cuBLAS in the finals, and the fields in which the config differs from the kernel's own"
    return f"{what}. {where}; {days[-1]}."
