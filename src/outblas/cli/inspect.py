"""`outblas inspect`: machine code, resources, occupancy and rooflines, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from outblas.base import configs, progress, registry
from outblas.base.machines import reference
from outblas.base.shapes import LAYOUTS
from outblas.cli import progress_line
from outblas.cli.common import (
    NONE,
    JsonOption,
    check_given,
    check_one_of,
    give,
    note,
    one_shape,
    split,
    table,
    usage_errors,
)
from outblas.inspect.inspection import ARCHS, compilable

if TYPE_CHECKING:
    from outblas.inspect import Inspection

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
_LEVELS = {  # of the roofline
    "compute": "compute",
    "DRAM": "dram",
    "L1": "l1",
    "shared memory": "shared",
    "L2 without merging": "l2",
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
        typer.Option(help="bfloat16, float16 or float32. Default: as the ladder is measured."),
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="nt, nn, tn or tt. Default: as the ladder is measured.")
    ] = None,
    shapes: Annotated[str, typer.Option(help="One shape: N or MxNxK.")] = "4096",
    json: JsonOption = False,
    sass: Annotated[
        bool, typer.Option("--sass", help="Print the SASS of one kernel for one architecture.")
    ] = False,
    ptx: Annotated[
        bool, typer.Option("--ptx", help="Print the PTX of one kernel for one architecture.")
    ] = False,
) -> None:
    """Compiles kernels and shows what the assembler made of them; needs no GPU.

    It shows registers, spills, occupancy, instructions, rooflines and the assembler's warnings.
    """
    from outblas.inspect import inspect

    try:
        with usage_errors(), progress_line.shown():
            options = {"config": config, "dtype": dtype, "layout": layout}
            for name, text in (("arch", arch), *options.items()):
                check_given(f"--{name}", text)
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
            inspections = [
                inspect(kernel, arch=number, shape=shape, **options)
                for kernel, number in progress.counted(variants, lambda v: f"{v[0]} sm_{v[1]}")
            ]
    except ImportError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if sass or ptx:
        texts = (inspections[0].sass if sass else "", inspections[0].ptx_text if ptx else "")
        typer.echo("\n".join(filter(None, texts)))
    else:
        give([each.record() for each in inspections], lambda: show(inspections), json=json)


def _archs(text: str | None) -> list[int]:
    """Architectures as the command line and the compilers name them: 90, 90a, sm_90 and sm_90a are
    one.
    """
    names = {str(arch): arch for arch in ARCHS} | {f"{arch}a": arch for arch in _SPECIFIC}
    expected = [*map(str, ARCHS), *(f"sm_{a}{'a' * (a in _SPECIFIC)}" for a in ARCHS)]
    archs = []
    for part in split(text or ""):
        name = part.lower().removeprefix("sm_")
        if name not in names:
            check_one_of("--arch", part, expected)
        archs.append(names[name])
    return list(dict.fromkeys(archs))


def _variants(
    names: Sequence[str], archs: Sequence[int], dtype: str | None
) -> list[tuple[str, int]]:
    """Kernels and architectures: all of the named kernels', or of all kernels those that the
    options allow.
    """
    variants = []
    for kernel in [registry.find(name) for name in dict.fromkeys(names)] or registry.ladder():
        if names:
            variants += [(kernel.name, arch) for arch in archs or compilable(kernel)]
        elif not dtype or dtype in kernel.dtypes:
            variants += [(kernel.name, a) for a in compilable(kernel) if not archs or a in archs]
    if not variants:
        raise ValueError(
            f"--dtype is {dtype!r}, but no kernel takes it on the architectures of --arch"
        )
    return variants


def show(inspections: Sequence[Inspection]) -> None:
    """Prints tables of resources, instructions and rooflines, and the assembler's warnings."""
    resources: dict[str, Callable[[Inspection], object]] = {
        "operands": lambda i: f"{i.dtype} {i.layout}",
        "registers": lambda i: i.registers,
        "spilled B, st / ld": lambda i: f"{i.spill_stores} / {i.spill_loads}",
        "smem KiB": lambda i: f"{i.smem_bytes / 1024:g}",
        "stages": lambda i: i.stages,
        "threads": lambda i: i.threads,
        "CTAs/SM": lambda i: i.ctas_per_sm,
        "warps/SM": lambda i: (
            f"{i.warps_per_sm} ({i.warps_per_sm / reference(int(i.arch[3:5])).warps_per_sm:.0%})"
        ),
        "limited by": lambda i: i.limiter,
    }
    rows = [(i.kernel, i.arch, *(cell(i) for cell in resources.values())) for i in inspections]
    table("Resources", ("kernel", "arch", *resources), rows)
    rows = [
        (i.kernel, i.arch, *(_group(i.instructions, _GROUPS[name]) for name in _GROUPS), _ffma(i))
        for i in inspections
    ]
    table("Instructions", ("kernel", "arch", *_GROUPS, "FFMA in hot loop"), rows)
    bounds = [
        (
            i.kernel,
            machine,
            _figure(bound["tflops"]),
            bound["by"],
            *(_ceiling(bound["ceilings"].get(x), i.intensity.get(x)) for x in _LEVELS.values()),
        )
        for i in inspections
        for machine, bound in i.bound.items()
    ]
    title = "Roofline: TFLOP/s (FLOP per byte)"
    table(title, ("kernel", "machine", "bound", "by", *_LEVELS), bounds)
    for i in inspections:
        name = f"{i.kernel} {i.arch}"
        note(f"{name}: {_config(i)}")
        for access, conflicts in (i.bank_conflicts or {}).items():
            text = f"bank conflicts add {conflicts:g} wavefronts per instruction"
            note(f"{name}: {access}: {text}", None)
        for warning in i.warnings:
            note(f"{name}: {warning}", "yellow")


def _config(i: Inspection) -> str:
    """What a kernel chose by shape, or what differs from its own configuration."""
    module = registry.load(i.kernel)
    if hasattr(module, "choose"):
        return i.config
    return configs.brief(configs.from_text(module.Config, i.config)) or "the kernel's own config"


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
