"""`outblas profile --phases`: where a kernel's own cycles go."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..core import progress, registry
from ..inspect.profiled import CUBLAS, Request
from ..report import phases
from . import progress_line
from .common import give, table, usage_errors

if TYPE_CHECKING:
    import torch


def check(kernel: str) -> None:
    """Raises ValueError for a kernel that cannot count its cycles."""
    if kernel == CUBLAS or not hasattr(registry.load(kernel), "phases"):
        raise ValueError(
            f"--phases is given for {kernel!r}, expected a kernel of the hopper ladder"
        )


def run(
    requests: list[Request],
    device: torch.device,
    environment: dict[str, Any],
    *,
    json: bool,
    save: Path | None,
) -> None:
    """Runs every request in an instrumented compile, then shows the mean cycles of each role."""
    with progress_line.shown():
        results = [_measure(request, device) for request in progress.counted(requests, described)]
    gpu = environment["gpu"]

    def show() -> None:
        for request, result in zip(requests, results, strict=True):
            title = f"{sizes(request)} {request.dtype} {request.layout} on {gpu}: SM cycles"
            table(title, phases.COLUMNS, phases.rows([phases.counted(gpu, result, request.kernel)]))

    give({"environment": environment, "results": results}, show, json=json, save=save)


def _measure(request: Request, device: torch.device) -> dict[str, Any]:
    import torch

    from ..bench.operands import normal

    try:
        with usage_errors(), torch.cuda.device(device):
            a, b, out = normal(request.shape, request.layout, getattr(torch, request.dtype))
            roles = registry.load(request.kernel).phases(a, b, out, request.chosen())
    except RuntimeError as error:  # of CUDA or of the DSL
        typer.echo(f"Profiling failed: {error}", err=True)
        raise typer.Exit(1) from None
    return {
        "provider": request.kernel,
        "shape": list(request.shape),
        "dtype": request.dtype,
        "layout": request.layout,
        "config": request.config,
        "resolved": request.resolved(),
        "phases": [asdict(role) for role in roles],
    }


def described(request: Request) -> str:
    """ "hopper.gemm 4096×4096×4096", as progress names it."""
    return f"{request.kernel} {sizes(request)}"


def sizes(request: Request) -> str:
    """ "4096×4096×4096"."""
    return "×".join(map(str, request.shape))
