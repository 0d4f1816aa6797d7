"""`outblas list`."""

import dataclasses
from typing import Annotated

import typer

from outblas.base import registry
from outblas.cli.common import NONE, JsonOption, give, table, usage_errors


def list_kernels(
    ladder: Annotated[
        str | None,
        typer.Argument(help="Name of a ladder: simt, portable, turing or hopper. Default: all."),
    ] = None,
    long: Annotated[
        bool, typer.Option("--long", "-l", help="Also show parent, DSL, GPUs and source.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Lists the kernels, which can all be called by name."""
    with usage_errors(options={"name": "ladder"}):
        kernels = registry.ladder(ladder)
    columns = ("name", "idea", "parent", "DSL", "GPUs", "source")
    rows = [(k.name, k.idea, k.parent or NONE, k.dsl, _archs(k), k.source) for k in kernels]
    shown = len(columns) if long else 2
    give(
        [dataclasses.asdict(kernel) for kernel in kernels],
        lambda: table("Kernels", columns[:shown], [row[:shown] for row in rows]),
        json=json,
    )


def _archs(kernel: registry.Kernel) -> str:
    if kernel.max_arch is None:
        return f"sm_{kernel.min_arch} and newer"
    last = "" if kernel.max_arch == kernel.min_arch else f"–{kernel.max_arch}"
    return f"sm_{kernel.min_arch}{last}"
