"""`outblas list`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from .. import registry
from .common import JsonOption, print_json, table, usage_error


def list_kernels(
    ladder: Annotated[str | None, typer.Argument(help="One ladder; all by default.")] = None, json: JsonOption = False
) -> None:
    """The kernels that can be called by name."""
    try:
        kernels = registry.ladder(ladder)
    except ValueError as error:
        raise usage_error(error) from None
    if json:
        print_json([dataclasses.asdict(kernel) for kernel in kernels])
        return
    rows = [(k.name, k.idea, k.parent or "–", k.dsl, _archs(k), k.source) for k in kernels]
    table("Kernels", ("name", "idea", "parent", "DSL", "GPUs", "source"), rows)


def _archs(kernel: registry.Kernel) -> str:
    if kernel.max_arch is None:
        return f"sm_{kernel.min_arch} and newer"
    return f"sm_{kernel.min_arch}" if kernel.max_arch == kernel.min_arch else f"sm_{kernel.min_arch}–{kernel.max_arch}"
