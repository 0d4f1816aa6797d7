"""`outblas pack`: compiled kernels in one file, for a deployment that compiles nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from outblas.base import pack
from outblas.cli.common import (
    JsonOption,
    check_writable,
    give,
    note,
    number_of,
    say,
    table,
    usage_errors,
)

app = typer.Typer(
    help="Builds, shows and verifies packs: compiled kernels that a deployment loads.",
    no_args_is_help=True,
)

FileArgument = Annotated[Path, typer.Argument(help="The pack.")]


@app.command()
def build(
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    shapes: Annotated[
        Path | None,
        typer.Option(
            help="A file with products, one to a line: M or FIRST-LAST, then xNxK, and if wanted a "
            "dtype, a layout, an epilogue and batch-invariant; with fp8 also the recipes of "
            "scales, fast-accum and the dtype of the result, with experts groups:NUMBER, and "
            "for slices lda:NUMBER, align-a:NUMBER and others. # begins a comment."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="llama-3-8b, llama-3-70b or qwen3-32b, or the path of a config.json as Hugging "
            "Face has it: the linear layers of that model, its experts and its head. Layers of an "
            "fp8 checkpoint are products of fp8 operands."
        ),
    ] = None,
    rows: Annotated[
        str, typer.Option(help="With --model, the numbers of rows: 1-512,1024, for example.")
    ] = "1-512",
    tensor_parallel: Annotated[
        int,
        typer.Option(min=1, help="With a config.json, how many GPUs share a layer."),
    ] = 1,
    gpu: Annotated[
        str, typer.Option(help="The GPU whose configs are taken: H100, H200, GH200, H20 or H800.")
    ] = "H100",
    store: Annotated[
        Path | None,
        typer.Option(
            help="A file with tuning results of your own for that GPU. They are packed, and choose "
            "before the shipped tables do."
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes that compile. Default: one per core.")
    ] = None,
) -> None:
    """Compiles all that a list of products needs into one file. Needs no GPU.

    The shipped tables and the kernel's own rule choose the configs, as in a process without tuning
    results of its own. The tables are packed too: a process with others takes the kernels that the
    pack has. Kernels of Triton that products need besides are packed as well. Products whose kernel
    packs do not hold are counted and left out.
    """
    from outblas.autotune.store.store import StoreError
    from outblas.packing import build as building
    from outblas.packing import products

    with usage_errors(ImportError, OSError, StoreError):
        check_writable(output, "--output")
        if store is not None and not store.exists():
            raise ValueError(f"--store is {str(store)!r}, expected a file that exists")
        if (shapes is None) == (model is None):
            raise ValueError("expected --shapes or --model, one of them")
        if shapes is not None:
            listed = products.parse_file(shapes)
        else:
            listed = products.of_model(str(model), rows, tensor_parallel)
        built = building.build(
            listed, output, gpu=gpu, store=store, jobs=jobs, say=lambda text: say(text, err=True)
        )
    size = output.stat().st_size / 2**20
    typer.echo(f"{output}: {number_of(built.kernels, 'kernel')}, {size:.1f} MiB")
    for kernel, count in sorted(built.left_out.items()):
        typer.echo(f"{number_of(count, 'product')} left out: {kernel} computes them, by Triton")


@app.command()
def show(file: FileArgument, json: JsonOption = False) -> None:
    """Shows what a pack was built for, with which versions and tables."""
    from outblas.autotune import packed_tables

    content = _opened(file)
    tables = packed_tables.described(content)
    size = sum(entry.size for entry in content.objects.values())
    value: dict[str, Any] = {
        "file": str(file),
        "about": dict(content.about),
        "toolchain": content.toolchain,
        "triton_toolchain": content.triton_toolchain,
        "objects": len(content.objects),
        "bytes": size,
        "tables": tables,
    }

    def shown() -> None:
        facts = [(name, text) for name, text in content.about.items() if name != "products"]
        facts += content.toolchain.items()
        facts += [(f"of Triton: {name}", text) for name, text in content.triton_toolchain.items()]
        table(str(file), ("fact", "value"), facts)
        for line in content.about.get("products", ()):
            typer.echo(line)
        rows = [
            (row["name"], row["gpu"], row["entries"], str(row["sha256"])[:16]) for row in tables
        ]
        if rows:
            table("tables", ("table", "GPU", "entries", "SHA-256"), rows)
        note(f"{number_of(len(content.objects), 'kernel')}, {size / 2**20:.1f} MiB")

    give(value, shown, json=json)


@app.command()
def verify(file: FileArgument) -> None:
    """Checks every byte of a pack, and whether this installation can use it.

    It exits with code 1 if anything is wrong.
    """
    from outblas.autotune import packed_tables

    content = _opened(file)
    problems = [*content.problems(), *packed_tables.problems(content)]
    if content.objects:
        problems += _other_versions(content)
    for problem in problems:
        say(problem, err=True)
    if problems:
        raise typer.Exit(1)
    kernels, tables = len(content.objects), len(content.tables)
    parts = f"{number_of(kernels, 'kernel')}, {number_of(tables, 'table')}"
    typer.echo(f"{file}: {parts}, all as they were packed")


def _opened(file: Path) -> pack.Pack:
    with usage_errors(OSError):
        return pack.read(file)


def _other_versions(content: pack.Pack) -> list[str]:
    """What differs between the versions that a pack was built with and those that are here."""
    try:
        from outblas.device import triton_variant
        from outblas.hopper.parts import compile

        of_here = [compile.toolchain_fields()]
        if content.triton_toolchain:
            of_here.append(triton_variant.toolchain_fields())
    except ImportError as error:  # PackageNotFoundError is one
        return [f"this installation cannot use it: {error}"]
    return [
        f"it was built with {name} {value}, here is {here[name]}"
        for here in of_here
        for name, value in content.differences(here).items()
    ]
