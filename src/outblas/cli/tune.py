"""`outblas tune`."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ..core.shapes import LAYOUTS
from . import interrupts, tune_grouped, tune_preview, tune_result
from .common import (
    NO_GPU,
    JsonOption,
    LayoutOption,
    PrecisionOption,
    SaveOption,
    ShapesOption,
    check_given,
    check_length,
    check_one_of,
    check_writable,
    give,
    parse_shapes,
    split,
    usage_errors,
)

if TYPE_CHECKING:
    from ..autotune.search.strategy import Strategy
    from ..autotune.store.records import Weights, Workload

OPS = ("gemm", "grouped")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def tune(
    kernels: Annotated[
        str | None,
        typer.Option(
            help=(
                "Names of kernels, comma-separated; they compete. Default: those that matmul "
                "chooses from on this GPU."
            )
        ),
    ] = None,
    op: Annotated[
        str,
        typer.Option(
            help="What is tuned: gemm (one product), or grouped (hopper.grouped, for the products "
            "of experts; --shapes as in outblas bench --op grouped)."
        ),
    ] = "gemm",
    shapes: ShapesOption = "4096",
    dtype: PrecisionOption = "bfloat16",
    out_dtype: Annotated[
        str | None, typer.Option(help="float32: 16-bit operands, a product in fp32.")
    ] = None,
    layout: LayoutOption = "nt",
    weights: Annotated[
        str,
        typer.Option(
            help=(
                "warm: every call reads the same B. cold: calls rotate over copies of B that L2 "
                "cannot hold, as when a model decodes."
            )
        ),
    ] = "warm",
    epilogue: Annotated[
        str | None,
        typer.Option(
            help=(
                "What follows the product, such as bias+gelu: any of bias, an activation and "
                "residual, joined by +."
            )
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help=(
                "Time for the whole sweep, such as 20m or 8h; every shape gets at least 5s. "
                "Default: no limit."
            )
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=(
                "How many configs of each kernel to measure at a shape, in the order of the "
                "strategy. Default: all."
            ),
        ),
    ] = None,
    top_k: Annotated[int, typer.Option(min=1, help="How many configs reach the finals.")] = 8,
    gpus: Annotated[
        str | None,
        typer.Option(
            help=(
                "all, indices such as 0,1, or cpu, which runs portable in Triton's interpreter. "
                "Default: 0."
            )
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="local, or ray: all GPUs of a Ray cluster, a shape at a time each.")
    ] = "local",
    address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster, host:port.")
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(
            help=(
                "Which configs are measured, and in which order. ranked: those first that the "
                "ranker predicts to be fastest; grid, random, random:SEED, or module:Class for "
                "a Strategy of your own."
            )
        ),
    ] = "ranked",
    ranker: Annotated[
        str,
        typer.Option(
            help=(
                "What predicts times. model: the analytic model of this package; heuristics: "
                "NVIDIA's nvMatmulHeuristics."
            )
        ),
    ] = "model",
    store: Annotated[
        Path | None,
        typer.Option(
            help="The file with the results. Default: tuning.sqlite in the cache directory."
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(help="Use results that the store has; --no-resume measures everything again."),
    ] = True,
    retry_failed: Annotated[
        bool,
        typer.Option(
            "--retry-failed",
            help=(
                "Measure failed configs again, except those that were wrong or that the kernel "
                "refused."
            ),
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Show what would be measured, and why other configs would not. Measures nothing.",
        ),
    ] = False,
    explain: Annotated[
        str | None,
        typer.Option(help="MxNxK: show what matmul chooses there, and why. Measures nothing."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help=(
                "With --dry-run or --explain: T4, A100, H100, GH200 or H200 instead of the GPU of "
                "this machine."
            )
        ),
    ] = None,
    json: JsonOption = False,
    save: SaveOption = None,
) -> None:
    """Finds the fastest configs of kernels on this GPU, for `outblas.matmul` to use.

    A sweep may be interrupted at any moment. The same command continues where it stopped.

    Exit codes: 1 if a shape could not be tuned or a result could not be stored, 3 without a GPU,
    130 after Ctrl-C.
    """
    from ..autotune.store.store import StoreError

    with usage_errors(
        ImportError,
        ConnectionError,
        StoreError,
        options={"kernel": "--kernels", "machine": "--gpu"},
    ):
        check_writable(save)
        for option, text in (
            ("--kernels", kernels),
            ("--out-dtype", out_dtype),
            ("--epilogue", epilogue),
            ("--budget", budget),
            ("--gpus", gpus),
            ("--explain", explain),
            ("--gpu", gpu),
            ("--address", address),
        ):
            check_given(option, text)
        seconds = parse_budget(budget or "")
        _check_engine(engine, address, gpus)
        _check_preview(dry_run, explain, gpu)
        _check_weights(weights, explain)
        _check_gpus(gpus, preview=dry_run or explain is not None)
        _check_ranker(ranker)
        search_strategy = _strategy(strategy)
        _check_store(store)
        conditions = (cast("Weights", weights), epilogue or "")
        check_one_of("--op", op, OPS)
        if op == "grouped":
            kernels = kernels or tune_grouped.KERNEL
            tune_grouped.check(explain, epilogue, ranker)
            workloads = tune_grouped.workloads(shapes, dtype, out_dtype, layout, conditions[0])
        else:
            workloads = _workloads(explain, shapes, dtype, out_dtype, layout, conditions)
        _check_kernels(kernels, workloads[0])
        if explain is not None:
            value = tune_preview.explain(
                workloads, tune_preview.gpu_of(gpu, gpus), store, quiet=json
            )
        elif dry_run:
            preview_gpu = tune_preview.gpu_of(gpu, gpus)
            targets = tune_preview.targets_of(kernels, preview_gpu, workloads[0])
            value = tune_preview.dry_run(
                targets,
                workloads,
                preview_gpu,
                trials=trials,
                ranker=ranker,
                strategy=search_strategy,
                quiet=json,
            )
        else:
            value = _interruptible_sweep(
                kernels,
                workloads,
                quiet=json,
                budget=seconds,
                trials=trials,
                top_k=top_k,
                gpus=gpus or "0",
                engine=engine,
                address=address,
                strategy=search_strategy,
                ranker=ranker,
                store=store,
                resume=resume,
                retry_failed=retry_failed,
            )
    give(value, lambda: None, json=json, save=save)
    raise typer.Exit(1 if value.get("failures") else 0)


def _check_engine(engine: str, address: str | None, gpus: str | None) -> None:
    """Raises ValueError, as all below, before anything is started."""
    from ..autotune.sweeps.options import ENGINES

    check_one_of("--engine", engine, ENGINES)
    if engine == "ray" and gpus is not None:
        raise ValueError(
            f"--gpus is {gpus!r}, expected no --gpus with --engine ray, which uses all GPUs of the "
            "cluster"
        )
    if engine != "ray" and address is not None:
        raise ValueError(f"--address is {address!r}, expected no --address without --engine ray")


def _check_preview(dry_run: bool, explain: str | None, gpu: str | None) -> None:
    if dry_run and explain is not None:
        raise ValueError("--dry-run and --explain are both given, expected one of them")
    if gpu is not None and not dry_run and explain is None:
        raise ValueError(
            f"--gpu is {gpu!r}, expected no --gpu without --dry-run or --explain: --gpus says on "
            "which GPUs to tune"
        )


def _check_weights(weights: str, explain: str | None) -> None:
    from ..autotune.store.records import WEIGHTS

    check_one_of("--weights", weights, WEIGHTS)
    if weights != "warm" and explain is not None:
        raise ValueError(
            f"--weights is {weights!r}, expected no --weights with --explain: a call does not say "
            "whether its weights are in L2"
        )


def _check_gpus(gpus: str | None, *, preview: bool) -> None:
    """Where nothing is measured, a machine without a GPU may name the first one, or all."""
    import torch

    from ..autotune.sweeps.sweep import visible_gpus

    if gpus is None or gpus in ("cpu", "all"):
        return
    if not all(part.strip().isdecimal() for part in gpus.split(",")):
        raise ValueError(f"--gpus is {gpus!r}, expected all, cpu, or indices such as 0,1")
    there = torch.cuda.is_available()
    if there or (preview and gpus != "0"):
        visible_gpus(gpus)


def _check_ranker(ranker: str) -> None:
    from ..autotune.sweeps.options import RANKERS

    check_one_of("--ranker", ranker, RANKERS)


def _strategy(name: str) -> Strategy:
    """A strategy by its name; a module of one's own may lie in the current folder."""
    from ..autotune.search.strategy import strategy_of

    if ":" in name and "" not in sys.path:
        sys.path.append("")
    try:
        return strategy_of(name)
    except TypeError as error:  # an object that is no strategy is a wrong option here
        raise ValueError(str(error)) from None


def _check_store(store: Path | None) -> None:
    """Raises StoreError for a file that is no store."""
    from ..autotune.store import database

    if store is not None:
        check_length(store)
        database.check(store)


def _check_kernels(kernels: str | None, workload: Workload) -> None:
    from ..autotune.search.prune import check_grouping
    from ..autotune.search.target import of

    for name in split(kernels or ""):
        check_grouping(of(name), workload.grouping)


def _workloads(
    explain: str | None,
    shapes: str,
    dtype: str,
    out_dtype: str | None,
    layout: str,
    conditions: tuple[Weights, str],
) -> list[Workload]:
    """`conditions`: the weights and the epilogue."""
    from ..autotune.store.records import Workload

    layouts = split(layout)
    for letters in layouts or [layout]:
        if letters not in LAYOUTS:
            raise ValueError(f"--layout is {letters!r}, expected of {', '.join(LAYOUTS)}")
    parse_shapes(shapes, least=1)
    chosen = (
        parse_shapes(explain, "--explain", least=1)
        if explain is not None
        else parse_shapes(shapes, least=1)
    )
    return [
        Workload(*shape, dtype, out_dtype or "", letters, *conditions)
        for letters in layouts
        for shape in chosen
    ]


def parse_budget(text: str) -> float | None:
    """`90s`, `20m`, `1.5h`, or seconds; None for an empty text. Raises ValueError."""
    if not text:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if not found or not float(found[1]):
        raise ValueError(f"--budget is {text!r}, expected a time such as 90s, 20m or 8h")
    return float(found[1]) * _UNITS[found[2] or "s"]


def _interruptible_sweep(
    kernels: str | None, workloads: list[Workload], **options: Any
) -> dict[str, Any]:
    """A sweep that Ctrl-C and SIGTERM end in order: it says then how to go on."""
    from ..core import cache

    with interrupts.handled() as received:
        try:
            return _sweep(kernels, workloads, **options)
        except (KeyboardInterrupt, SystemExit) as error:
            if (
                isinstance(error, SystemExit) and error.code != signal.SIGTERM
            ):  # as Ray has it, which takes the signal
                raise
            received.signal = received.signal or (
                signal.SIGTERM if isinstance(error, SystemExit) else signal.SIGINT
            )
            kept = options["store"] or cache.directory() / "tuning.sqlite"
            for line in getattr(error, "__notes__", ()):
                typer.echo(f"! {line}", err=True)
            typer.echo(
                f"Interrupted: what was measured is in {kept}. The same command continues from "
                "there:",
                err=True,
            )
            typer.echo(f"  {interrupts.same_command(without='--no-resume')}", err=True)
            raise typer.Exit(received.exit_code) from None


def _sweep(
    kernels: str | None, workloads: list[Workload], *, quiet: bool, gpus: str, **options: Any
) -> dict[str, Any]:
    """Runs the sweep under a live view, and shows what came of it."""
    import torch

    from ..autotune.sweeps.sweep import sweep
    from .tune_view import LiveView

    if gpus != "cpu" and options["engine"] == "local" and not torch.cuda.is_available():
        typer.echo(
            "No NVIDIA GPU that torch can use. --dry-run shows what a sweep would measure, and "
            "--gpus cpu tunes portable in Triton's interpreter.",
            err=True,
        )
        raise typer.Exit(NO_GPU)
    # Gradients of weights have the one layout that they can have, whatever is asked.
    of_rows = [w.layout for w in workloads if w.grouped is None or w.grouped.form == "rows"]
    layouts = list(dict.fromkeys(of_rows)) or ["nt"]
    names = split(kernels or "") or _default_kernels(gpus, options["engine"], workloads[0])
    with LiveView(quiet=quiet) as view:
        found = sweep(
            names,
            list(dict.fromkeys(w.grouped or w.shape for w in workloads)),  # type: ignore[arg-type]
            dtype=workloads[0].dtype,
            out_dtype=workloads[0].out_dtype,
            layout=layouts,
            weights=workloads[0].weights,
            epilogue=workloads[0].epilogue,
            gpus=gpus,
            progress=view,
            **options,
        )
    if not quiet:
        tune_result.show(found)
    return tune_result.record(found)


def _default_kernels(gpus: str, engine: str, workload: Workload) -> list[str]:
    import torch

    if gpus == "cpu" and engine == "local":
        return ["portable"]
    if not torch.cuda.is_available():
        raise ValueError(
            "--kernels is empty, expected names: without a GPU here there is no default"
        )
    major, minor = torch.cuda.get_device_capability()
    return tune_preview.default_kernels(10 * major + minor, workload)
