"""`outblas inspect`: machine code, resources, occupancy and rooflines, without a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..core import configs, progress, registry
from ..core.shapes import LAYOUTS, Shape
from ..inspect.inspection import ARCHS, compilable
from . import inspect_snapshot, progress_line
from .common import (
    NONE,
    JsonOption,
    SaveOption,
    check_given,
    check_one_of,
    check_writable,
    give,
    note,
    one_shape,
    split,
    table,
    usage_errors,
)

if TYPE_CHECKING:
    from ..inspect import Inspection

_SPECIFIC = (90,)  # architectures that code is compiled for by the name with an a
# Columns of the instruction table, and the mnemonics they count.
_GROUPS = {
    "products": ("HGMMA", "QGMMA", "HMMA", "QMMA", "FFMA"),
    "TMA": ("UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP"),
    "async copies": ("LDGSTS",),
    "shared": ("LDSM", "LDS", "STSM", "STS"),
    "global": ("LDG", "STG"),
    "local": ("LDL", "STL"),
    "barriers": ("BAR", "SYNCS", "UCGABAR_ARV", "UCGABAR_WAIT", "LDGDEPBAR"),
}


def inspect(
    kernels: Annotated[
        list[str] | None, typer.Argument(help="Names of kernels. Default: all.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(help="Config, such as tile_m=128,stages=4. Default: the kernel's own choice."),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(
            help="Architectures, comma-separated: 75, 80, 90 or sm_90a. Default: all that a kernel "
            "runs on."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="bfloat16, float16 or float32. Default: the dtype that the seed documents measure."
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(help="nt, nn, tn or tt. Default: the layout that the seed documents measure."),
    ] = None,
    shapes: Annotated[str, typer.Option(help="One shape: N or MxNxK.")] = "4096",
    json: JsonOption = False,
    save: SaveOption = None,
    sass: Annotated[
        bool, typer.Option("--sass", help="Print the SASS of one kernel for one architecture.")
    ] = False,
    ptx: Annotated[
        bool, typer.Option("--ptx", help="Print the PTX of one kernel for one architecture.")
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(
            help="Compile the variants of this snapshot (of the named kernels, if any) and compare "
            "their machine code."
        ),
    ] = None,
    update: Annotated[
        bool,
        typer.Option(
            "--update", help="With --against: update the snapshot to today's machine code."
        ),
    ] = False,
    snapshot: Annotated[
        Path | None, typer.Option(help="Add the inspected variants to this snapshot.")
    ] = None,
) -> None:
    """Compiles kernels and shows what the assembler made of them; needs no GPU.

    It shows registers, spills, occupancy, instructions, rooflines and the assembler's warnings.

    With --against it exits with 0 if the machine code is the same, with 1 if it differs or a
    variant is missing or unknown, and with 3 if other compilers made the snapshot and nothing was
    compared.
    """
    if against is not None or update:
        others: dict[str, object] = {
            "--config": config,
            "--arch": arch,
            "--dtype": dtype,
            "--layout": layout,
            "--snapshot": snapshot,
            "--json": json or None,
            "--save": save,
            "--sass": sass or None,
            "--ptx": ptx or None,
        }
        inspect_snapshot.run(against, kernels or [], update=update, others=others)
        return
    try:
        with usage_errors():
            check_writable(save)
            before = None if snapshot is None else inspect_snapshot.read(snapshot)
            for option, text in (
                ("--config", config),
                ("--arch", arch),
                ("--dtype", dtype),
                ("--layout", layout),
            ):
                check_given(option, text)
            if layout is not None:
                check_one_of("--layout", layout, LAYOUTS)
            variants = _variants(kernels or [], _archs(arch), dtype)
            if (sass or ptx) and (len(variants) != 1 or json):
                raise ValueError(
                    f"--sass and --ptx print one variant, and {len(variants)} were "
                    f"chosen{' with --json' if json else ''}: "
                    "name one kernel and one --arch, without --json"
                )
            shape = one_shape(shapes, least=0)
            found = _inspect(variants, config, dtype, layout, shape)
            if snapshot is not None and before is not None:
                inspect_snapshot.add(snapshot, before, found, config, shape)
    except ImportError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None

    def show() -> None:
        if sass or ptx:
            typer.echo(
                "\n".join(
                    text for text, on in ((found[0].sass, sass), (found[0].ptx_text, ptx)) if on
                )
            )
        else:
            _show(found)

    give([inspection.record() for inspection in found], show, json=json, save=save)


def _archs(text: str | None) -> list[int]:
    """Architectures as the command line and the compilers name them: 90, 90a, sm_90 and sm_90a are
    one.
    """
    found = []
    for part in split(text or ""):
        name = part.lower().removeprefix("sm_").removesuffix("a")
        known = [str(arch) for arch in ARCHS]
        if name not in known or (part.lower().endswith("a") and int(name) not in _SPECIFIC):
            check_one_of(
                "--arch",
                part,
                [*known, *(f"sm_{arch}{'a' * (arch in _SPECIFIC)}" for arch in ARCHS)],
            )
        found.append(int(name))
    return list(dict.fromkeys(found))


def _variants(
    names: Sequence[str], archs: Sequence[int], dtype: str | None
) -> list[tuple[str, int]]:
    """Kernels and architectures: all of the named kernels', or of all kernels those that the
    options allow.
    """
    variants = []
    for kernel in [registry.find(name) for name in dict.fromkeys(names)] or registry.ladder():
        own = compilable(kernel)
        if names:
            variants += [(kernel.name, arch) for arch in archs or own]
        elif not dtype or dtype in kernel.dtypes:
            variants += [(kernel.name, arch) for arch in own if not archs or arch in archs]
    if not variants:
        raise ValueError(
            f"--dtype is {dtype!r}, but no kernel takes it on the architectures of --arch"
        )
    return variants


def _inspect(
    variants: Sequence[tuple[str, int]],
    config: str | None,
    dtype: str | None,
    layout: str | None,
    shape: Shape,
) -> list[Inspection]:
    from ..inspect import inspect

    options = {"config": config, "dtype": dtype, "layout": layout}
    with progress_line.shown():
        return [
            inspect(kernel, arch=arch, shape=shape, **options)
            for kernel, arch in progress.counted(variants, lambda v: f"{v[0]} sm_{v[1]}")
        ]


def _show(found: Sequence[Inspection]) -> None:
    rows = [
        (
            i.kernel,
            i.arch,
            f"{i.dtype} {i.layout}",
            i.registers,
            f"{i.spill_stores} / {i.spill_loads}",
            f"{i.smem_bytes / 1024:g}",
            i.stages,
            i.threads,
            i.ctas_per_sm,
            f"{i.warps_per_sm} ({_share(i):.0%})",
            i.limiter,
        )
        for i in found
    ]
    columns = (
        "kernel",
        "arch",
        "operands",
        "registers",
        "spilled B, st / ld",
        "smem KiB",
        "stages",
        "threads",
    )
    table("Resources", (*columns, "CTAs/SM", "warps/SM", "limited by"), rows, keys=2)
    groups = [
        [i.kernel, i.arch, *(_group(i.instructions, ops) for ops in _GROUPS.values())]
        for i in found
    ]
    headings = ["kernel", "arch", *_GROUPS]
    if any(i.ffma_reuse is not None for i in found):
        headings.append("FFMA in hot loop")
        groups = [[*row, _ffma(i)] for row, i in zip(groups, found, strict=True)]
    table("Instructions", headings, groups, keys=2)
    bounds = [
        (
            i.kernel,
            machine,
            _figure(b["tflops"]),
            b["by"],
            *(
                _ceiling(b["ceilings"].get(x), i.intensity.get(x))
                for x in ("compute", "dram", "l1", "shared", "l2")
            ),
        )
        for i in found
        for machine, b in i.bound.items()
    ]
    levels = ("compute", "DRAM", "L1", "shared memory", "L2 without merging")
    table(
        "Roofline: TFLOP/s (FLOP per byte)",
        ("kernel", "machine", "bound", "by", *levels),
        bounds,
        keys=2,
    )
    for i in found:
        name = f"{i.kernel} {i.arch}"
        note(f"{name}: {_config(i)}")
        for access, conflicts in (i.bank_conflicts or {}).items():
            note(
                f"{name}: {access}: bank conflicts add {conflicts:g} wavefronts per instruction",
                None,
            )
        for warning in i.warnings:
            note(f"{name}: {warning}", "yellow")


def _config(i: Inspection) -> str:
    """What a kernel chose by shape, or what differs from its own configuration."""
    module = registry.load(i.kernel)
    if hasattr(module, "choose"):
        return i.config
    return configs.brief(configs.from_text(module.Config, i.config)) or "the kernel's own config"


def _share(i: Inspection) -> float:
    from ..core.machines import reference

    return i.warps_per_sm / reference(int(i.arch[3:5])).warps_per_sm


def _group(instructions: Mapping[str, int], operations: Sequence[str]) -> str:
    """`4 HGMMA.64x64x16.F32.BF16`: products in full, whatever else is counted under the bare
    operation.
    """
    counts: dict[str, int] = {}
    for mnemonic, n in instructions.items():
        operation = mnemonic.split(".")[0]
        if operation in operations:
            name = mnemonic if operation.endswith("MMA") else operation
            counts[name] = counts.get(name, 0) + n
    return "\n".join(f"{n} {name}" for name, n in counts.items()) or NONE


def _ffma(i: Inspection) -> str:
    """`94.1%, 35.2% .reuse`: FFMA among the instructions of the hot loop, and those that keep an
    operand.
    """
    return NONE if i.ffma_reuse is None else f"{i.ffma_share:.1%}, {i.ffma_reuse:.1%} .reuse"


def _ceiling(tflops: float | None, intensity: float | None) -> str:
    if tflops is None:
        return NONE
    return _figure(tflops) if intensity is None else f"{_figure(tflops)} ({_figure(intensity)})"


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
