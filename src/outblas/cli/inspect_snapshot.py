"""`outblas inspect --against`, `--update` and `--snapshot`: machine code beside what a file says of
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..core import progress, registry
from ..core.shapes import Shape, to_text
from . import progress_line
from .common import check_writable, note, table, usage_errors

if TYPE_CHECKING:
    from ..inspect import Inspection
    from ..inspect.snapshot import Difference, Snapshot
    from ..inspect.variant import KernelVariant

DIFFERENT = 1  # exit code where machine code differs, or a variant is missing or unknown
NOTHING_COMPARED = 3  # exit code where other compilers made the snapshot


def run(
    path: Path | None, kernels: Sequence[str], *, update: bool, others: Mapping[str, object]
) -> None:
    """Compares a snapshot with what is compiled now, or writes today's code to it.

    `kernels` are those to look at, all of the file's by default; `others` are options that have no
    meaning here.
    """
    from ..inspect import snapshot

    with usage_errors():
        if path is None:
            raise ValueError("--update needs --against FILE, which names the snapshot to update")
        if given := [option for option, value in others.items() if value is not None]:
            raise ValueError(
                f"--against takes its variants from the snapshot, expected no {', '.join(given)}"
            )
        if update:
            check_writable(path, "--against")
            if kernels:
                raise ValueError(
                    "--update compiles all variants of the snapshot, expected no names of kernels"
                )
        before = snapshot.load(path)
        chosen = _chosen(before, kernels)
    try:
        if update:
            _update(path, before)
        else:
            _compare(before, chosen, whole=not kernels)
    except ImportError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def read(path: Path) -> Snapshot:
    """The snapshot to which `add` adds: an empty one where there is no file yet.

    Raises ValueError for a file that cannot be written, that is no snapshot, or that other
    compilers made.
    """
    from ..inspect import snapshot

    check_writable(path, "--snapshot")
    if not path.exists():
        return snapshot.Snapshot(snapshot.compilers(), {})
    before = snapshot.load(path)
    if changed := snapshot.other_compilers(before):
        raise ValueError(
            f"--snapshot {path}: {'; '.join(changed)}: "
            f"run outblas inspect --against {path} --update first"
        )
    return before


def add(
    path: Path, before: Snapshot, found: Sequence[Inspection], config: str | None, shape: Shape
) -> None:
    """Writes a snapshot of what was there before and of what was inspected."""
    from ..inspect import snapshot

    entries = dict(before.entries)
    for inspection in found:
        variant = _variant(inspection, config, shape)
        code = snapshot.summary(
            inspection, smem_bytes=inspection.smem_bytes, threads=inspection.threads
        )
        entries[_name(variant)] = snapshot.Entry(variant, code)
    snapshot.save(path, snapshot.Snapshot(before.compilers, entries))


def _variant(i: Inspection, config: str | None, shape: Shape) -> KernelVariant:
    """What was compiled for an inspection."""
    from ..inspect.variant import KernelVariant

    return KernelVariant(
        kernel=i.kernel,
        arch=int(i.arch.removeprefix("sm_").removesuffix("a")),
        config=config or "",
        dtype=i.dtype,
        out_dtype="" if i.out_dtype == i.dtype else i.out_dtype,
        layout=i.layout,
        shape=shape,
    )


def _name(variant: KernelVariant) -> str:
    """`hopper.gemm sm_90 bfloat16 nt 4096 tile_n=192`."""
    M, N, K = variant.shape
    parts = (
        variant.kernel,
        f"sm_{variant.arch}",
        variant.dtype,
        variant.out_dtype,
        variant.layout,
        to_text((M, N, K)),
    )
    return " ".join(part for part in (*parts, variant.config) if part)


def _chosen(before: Snapshot, kernels: Sequence[str]) -> list[str]:
    """The names of the entries to compare. Raises ValueError for a kernel that has none."""
    for kernel in kernels:
        if not any(entry.variant.kernel == kernel for entry in before.entries.values()):
            registry.find(kernel)
            raise ValueError(f"kernel is {kernel!r}, but the snapshot has no variant of it")
    return [
        name
        for name, entry in before.entries.items()
        if not kernels or entry.variant.kernel in kernels
    ]


def _compare(before: Snapshot, names: Sequence[str], *, whole: bool) -> None:
    from ..inspect import snapshot

    if changed := snapshot.other_compilers(before):
        note(
            "Nothing was compared: other compilers made the snapshot, and they may choose other "
            "instructions.",
            "yellow",
        )
        for line in changed:
            note(line, None)
        raise typer.Exit(NOTHING_COMPARED)
    found = snapshot.uncovered(before) if whole else []
    with progress_line.shown():
        for name in progress.counted(names):
            found += snapshot.compare(name, before.entries[name])
    if found:
        _show(found)
        raise typer.Exit(DIFFERENT)
    note(f"{len(names)} variants have the same machine code as in the snapshot.", "green")


def _update(path: Path, before: Snapshot) -> None:
    from ..inspect import snapshot

    entries, found = {}, []
    with progress_line.shown():
        for name in progress.counted(list(before.entries)):
            entry = before.entries[name]
            code = snapshot.summarize(entry.variant)
            entries[name] = snapshot.Entry(entry.variant, code)
            if entry.code is not None:
                found += snapshot.differences(name, entry.code, code)
    snapshot.save(path, snapshot.Snapshot(snapshot.compilers(), entries))
    if found:
        _show(found)
    note(f"{path}: {len(entries)} variants were written.")


def _show(found: Sequence[Difference]) -> None:
    rows = [(each.name, each.what, each.before, each.now) for each in found]
    table("Machine code", ("variant", "figure", "snapshot", "now"), rows)
