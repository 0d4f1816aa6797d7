"""`outblas tune`: its options, the sweep, and what ends one in order: Ctrl-C and SIGTERM."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from outblas.base import grouped_shapes
from outblas.cli import tune_output
from outblas.cli.common import (
    NO_GPU,
    ChartOption,
    HtmlOption,
    JsonOption,
    SaveOption,
    StoreOption,
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
    from outblas.autotune.search.strategy import Strategy
    from outblas.autotune.store.records import Workload
    from outblas.autotune.store.store import Store
    from outblas.autotune.sweeps.options import SweepOptions

OPS = ("gemm", "grouped")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def tune(
    kernels: Annotated[
        str | None,
        typer.Option(
            help="Names of kernels, comma-separated; they compete. Default: those that matmul "
            "chooses from on this GPU."
        ),
    ] = None,
    op: Annotated[
        str,
        typer.Option(
            help="What is tuned: gemm (one GEMM), or grouped (hopper.grouped, for the GEMMs of "
            "experts; --shapes as in outblas bench --op grouped)."
        ),
    ] = "gemm",
    shapes: Annotated[
        str | None,
        typer.Option(help="Shapes, as in outblas bench. Default: 4096."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16 (the default), float16, float32 or tf32.")
    ] = None,
    out_dtype: Annotated[
        str | None, typer.Option(help="float32: 16-bit operands, a result in fp32.")
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            help="nt (the default), nn, tn or tt: how A and B are stored, n row-major, t "
            "transposed."
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="warm (the default): every call reads the same B. cold: calls rotate over copies "
            "of B that L2 cannot hold, as when a model decodes."
        ),
    ] = None,
    epilogue: Annotated[
        str | None,
        typer.Option(
            help="What follows the GEMM, such as bias+gelu: any of bias, an activation and "
            "residual, joined by +."
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Time for the whole sweep, such as 20m or 8h; every shape gets at least 5s. "
            "Default: no limit."
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many configs of each kernel to measure at a shape, in the order of the "
            "strategy. Default: all.",
        ),
    ] = None,
    top_k: Annotated[int, typer.Option(min=1, help="How many configs reach the finals.")] = 8,
    gpus: Annotated[
        str | None,
        typer.Option(
            help="all, indices such as 0,1, or cpu, which runs portable in Triton's interpreter. "
            "Default: 0."
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="local, or ray: all GPUs of a Ray cluster, a shape at a time each.")
    ] = "local",
    address: Annotated[
        str | None,
        typer.Option(help="Address of the Ray cluster, host:port. Default: RAY_ADDRESS."),
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(
            help="Which configs are measured, and in which order. ranked: those first that the "
            "model predicts to be fastest; grid, random, random:SEED, or module:Class for a "
            "Strategy of your own."
        ),
    ] = "ranked",
    store: StoreOption = None,
    resume: Annotated[
        bool,
        typer.Option(help="Use results that the store has; --no-resume measures everything again."),
    ] = True,
    retry_failed: Annotated[
        bool,
        typer.Option(
            "--retry-failed",
            help="Measure failed configs again, except those that were wrong or that the kernel "
            "refused.",
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
    report: Annotated[
        bool,
        typer.Option(
            "--report",
            help="Show what the store has of one kernel at one shape: those with the most trials "
            "that fit the options. Measures nothing.",
        ),
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", help="With --report: a file of outblas cache export, instead of a store."
        ),
    ] = None,
    html: HtmlOption = None,
    chart: ChartOption = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="With --dry-run, --explain or --report: another GPU than that of this machine, "
            "such as H100."
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
    texts = {"kernels": kernels, "shapes": shapes, "dtype": dtype, "out-dtype": out_dtype}
    texts |= {"layout": layout, "weights": weights, "epilogue": epilogue, "budget": budget}
    texts |= {"gpus": gpus, "explain": explain, "gpu": gpu, "address": address}
    with usage_errors(ImportError):
        check_writable(save)
        for name, text in texts.items():
            check_given(f"--{name}", text)
        _check_modes(dry_run, explain, report, gpu=gpu, source=source, html=html, chart=chart)
    if report:
        tune_output.report(texts, store, source, json=json, save=save, html=html, chart=chart)
        return
    from outblas.autotune.search.target import of
    from outblas.autotune.store.store import Store, StoreError
    from outblas.autotune.sweeps.options import SweepOptions
    from outblas.autotune.sweeps.sweep import check_targets

    with usage_errors(
        ImportError,
        ConnectionError,
        StoreError,
        options={"kernel": "--kernels", "machine": "--gpu", "weights": "--weights"},
    ):
        options = SweepOptions(
            budget=parse_budget(budget or ""),
            trials=trials,
            top_k=top_k,
            strategy=_strategy(strategy),
            resume=resume,
            retry_failed=retry_failed,
            gpus=gpus or "0",
            engine=cast(Any, engine),
            address=address,
            weights=cast(Any, weights or "warm"),
            epilogue=epilogue or "",
        )
        _check_gpus(gpus, engine, preview=dry_run or explain is not None)
        if store is not None:
            check_length(store)
            Store(store, read_only=True).close()
        check_one_of("--op", op, OPS)
        workloads = _workloads(op, explain or shapes or "4096", texts, explain=explain is not None)
        kernels = kernels or ("hopper.grouped" if op == "grouped" else "")
        check_targets([of(name) for name in split(kernels)], workloads)
        if explain is not None:
            here = tune_output.gpu_of(gpu, gpus)
            value = tune_output.explain(workloads, here, store, quiet=json)
        elif dry_run:
            here = tune_output.gpu_of(gpu, gpus)
            value = tune_output.dry_run(kernels, workloads, here, options, quiet=json)
        else:
            value = _sweep(kernels, workloads, options, store, quiet=json)
    give(value, lambda: None, json=json, save=save)
    raise typer.Exit(1 if value.get("failures") else 0)


def _check_modes(dry_run: bool, explain: str | None, report: bool, **more: object) -> None:
    """Raises ValueError for options that exclude one another, or that need another."""
    modes = {"--dry-run": dry_run, "--explain": explain is not None, "--report": report}
    chosen = [name for name, is_set in modes.items() if is_set]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} are given, expected one of them")
    for name, value in more.items():
        option = "--from" if name == "source" else f"--{name}"
        needed = list(modes) if name == "gpu" else ["--report"]
        if value is not None and not set(chosen) & set(needed):
            raise ValueError(f"{option} is {str(value)!r}, expected {' or '.join(needed)} with it")


def _check_gpus(gpus: str | None, engine: str, *, preview: bool) -> None:
    """Raises ValueError. Where nothing is measured, a machine without a GPU may name the first one,
    or all.
    """
    import torch

    from outblas.autotune.sweeps.sweep import visible_gpus

    if gpus is None or gpus == "cpu":
        return
    if engine == "ray":
        raise ValueError(
            f"--gpus is {gpus!r}, expected no --gpus with --engine ray, which uses all GPUs of the "
            "cluster"
        )
    if gpus != "all" and not all(part.strip().isdecimal() for part in gpus.split(",")):
        raise ValueError(f"--gpus is {gpus!r}, expected all, cpu, or indices such as 0,1")
    if torch.cuda.is_available() or (preview and gpus not in ("0", "all")):
        visible_gpus(gpus)


def _strategy(name: str) -> Strategy:
    """A strategy by its name; a module of one's own may lie in the current folder."""
    from outblas.autotune.search.strategy import strategy_of

    if ":" in name and "" not in sys.path:
        sys.path.append("")
    try:
        return strategy_of(name)
    except TypeError as error:  # an object that is no strategy is a wrong option here
        raise ValueError(str(error)) from None


def _workloads(
    op: str, shapes: str, texts: dict[str, str | None], *, explain: bool
) -> list[Workload]:
    """What is tuned. Raises ValueError."""
    from outblas.autotune.sweeps.sweep import workloads_of

    parsed: Any
    if op == "grouped":
        if explain:
            raise ValueError("--explain cannot be combined with --op grouped")
        parsed = grouped_shapes.parse(shapes)
    else:
        parsed = list(parse_shapes(shapes, "--explain" if explain else "--shapes", least=1))
        if explain and texts["shapes"] is not None:
            parse_shapes(texts["shapes"], least=1)
    if explain and texts["weights"] not in (None, "warm"):
        raise ValueError(
            f"--weights is {texts['weights']!r}, expected no --weights with --explain: a call does "
            "not say whether its weights are in L2"
        )
    return workloads_of(
        parsed,
        texts["dtype"] or "bfloat16",
        texts["out-dtype"] or "",
        split(texts["layout"] or "nt"),
        cast(Any, texts["weights"] or "warm"),
        texts["epilogue"] or "",
    )


def parse_budget(text: str) -> float | None:
    """`90s`, `20m`, `1.5h`, or seconds; None for an empty text. Raises ValueError."""
    if not text:
        return None
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if not parts or not float(parts[1]):
        raise ValueError(f"--budget is {text!r}, expected a time such as 90s, 20m or 8h")
    return float(parts[1]) * _UNITS[parts[2] or "s"]


def _sweep(
    kernels: str,
    workloads: list[Workload],
    options: SweepOptions,
    path: Path | None,
    *,
    quiet: bool,
) -> dict[str, Any]:
    """A sweep that Ctrl-C and SIGTERM end in order: it says then how to go on."""
    import torch

    from outblas.autotune.store.store import Store, StoreError

    if options.gpus != "cpu" and options.engine == "local" and not torch.cuda.is_available():
        typer.echo(
            "No NVIDIA GPU that torch can use. --dry-run shows what a sweep would measure, and "
            "--gpus cpu tunes portable in Triton's interpreter.",
            err=True,
        )
        raise typer.Exit(NO_GPU)
    with Store(path) as store, interruptible() as signals:
        try:
            return _shown_sweep(kernels, workloads, options, store, quiet=quiet)
        except StoreError as error:
            typer.echo(f"{error}\nThe same command continues when it can be written.", err=True)
            raise typer.Exit(1) from None
        except (KeyboardInterrupt, SystemExit) as error:
            if isinstance(error, SystemExit) and error.code != signal.SIGTERM:  # not Ray's signal
                raise
            signals.append(signal.SIGTERM if isinstance(error, SystemExit) else signal.SIGINT)
            command = shlex.join(["outblas", *(a for a in sys.argv[1:] if a != "--no-resume")])
            typer.echo(
                f"Interrupted: what was measured is in {store.path}. The same command continues "
                f"from there:\n  {command}",
                err=True,
            )
            # The status that shells give: 130 after Ctrl-C, 143 after SIGTERM.
            raise typer.Exit(128 + signals[0]) from None


def _shown_sweep(
    kernels: str, workloads: list[Workload], options: SweepOptions, store: Store, *, quiet: bool
) -> dict[str, Any]:
    """Runs the sweep under a live view, and shows what came of it."""
    from outblas.autotune.search.gpu import current
    from outblas.autotune.sweeps.sweep import sweep
    from outblas.cli.tune_view import LiveView

    names, arch = split(kernels), current().arch
    on_cpu = options.gpus == "cpu" and options.engine == "local"
    if not names and arch == 0 and not on_cpu:
        raise ValueError(
            "--kernels is empty, expected names: without a GPU here there is no default"
        )
    names = names or tune_output.default_kernels(0 if on_cpu else arch, workloads[0])
    with LiveView(quiet=quiet) as view:
        result = sweep(names, workloads, store=store, progress=view, options=options)
    if not quiet:
        tune_output.show_sweep(result)
    return tune_output.sweep_record(result)


# ---- Ctrl-C and SIGTERM: the first ends a sweep in order, the second at once
_SHOW_CURSOR = b"\x1b[?25h"  # which a live view hides


@contextlib.contextmanager
def interruptible() -> Iterator[list[int]]:
    """Yields the list of signals that have been received. Within, the first raises
    KeyboardInterrupt and the second ends the process at once: its workers follow, and what it has
    stored is on disk. A signal that is ignored stays so, as in a shell's background jobs.
    """
    signals: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if signals:
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), _SHOW_CURSOR)
            os._exit(128 + number)
        signals.append(number)
        raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, handle)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
