"""Sweeps: many workloads over the GPUs of this machine or of a cluster. Each workload is tuned on
one GPU.
"""

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias, Unpack

from ...core import grouped_shapes
from ...core.grouped_shapes import TERMS_LAYOUT, GroupedWorkload
from ...core.shapes import Shape
from ...core.shapes import parse as parse_shapes
from ..measure.progress import Report, silent
from ..search.prune import check_epilogue, check_grouping
from ..search.strategy import strategy_of
from ..search.target import HOPPER_GROUPED, TuneTarget
from ..search.target import of as target_of
from ..store.records import Workload
from ..store.store import Store
from . import local_engine
from .options import SweepKeywords, SweepOptions, options_with, ranker_of
from .outcome import Sweep
from .tuner import Job

# What is tuned: sizes of products, or workloads of groups, or either as text.
Shapes: TypeAlias = (
    str | int | Shape | Sequence[Shape] | GroupedWorkload | Sequence[GroupedWorkload]
)


def sweep(
    kernels: str | TuneTarget | Sequence[str | TuneTarget],
    shapes: Shapes = 4096,
    *,
    dtype: str = "bfloat16",
    out_dtype: str = "",
    layout: str | Sequence[str] = "nt",
    store: Store | str | Path | None = None,
    progress: Report = silent,
    options: SweepOptions | None = None,
    **keywords: Unpack[SweepKeywords],
) -> Sweep:
    """Find the fastest config of kernels for shapes and layouts, and keep all trials in a store.

    Worker processes check each config for a right result and time it. The fastest configs then
    take turns with cuBLAS in the finals. A config that hangs, crashes or gives a wrong result costs
    its own trial only. A sweep that was killed continues from the store when it is started again.

    Args:
        kernels: The names of kernels, as in `outblas.ladder`, or a `TuneTarget` for a kernel of
            your own. Several kernels compete.
        shapes: (M, N, K), a list of these, an int N for N x N x N, or text as on the command line,
            such as "4096,16x4096x4096". For a kernel of groups, "hopper.grouped": workloads of
            groups, or text such as "moe:mixtral-8x7b" or "8x4096x28672x4096:zipf".
        dtype: The precision of the operands: "bfloat16", "float16", "float32" (IEEE products) or
            "tf32".
        out_dtype: "float32" for 16-bit operands with a float32 product; "" for the dtype of the
            operands.
        layout: "nt", "nn", "tn" or "tt", or several: how A and B are stored, "n" by rows, "t"
            transposed. Gradients of the weights of groups are always "tn".
        store: Where trials are kept and looked up: a `Store`, or the path of its file; None for
            the user's store in the cache directory.
        progress: A function that receives a `Progress` at every step, from the threads that drive
            the GPUs.
        options: The budget and everything else that `SweepOptions` has.
        **keywords: Fields of `SweepOptions`, which take precedence over `options`.

    Returns:
        The outcome of each workload, the winners and the failures.

    Raises:
        TypeError: An argument has the wrong type; nothing was started.
        ValueError: An argument is none of its choices, or there is no such GPU; nothing was
            started.
        StoreError: The store cannot be opened for writing, and nothing was started; or a result
            could not be written: the trials before it are in the store.
        ImportError: The DSL of a kernel, ray or the heuristics are not installed.
        StrategyError: The strategy failed; what was measured is in the store.

    Example:
        `sweep("portable", 64, gpus="cpu", trials=4)` is a short sweep that needs no GPU: it runs in
        Triton's interpreter. Arguments are checked before anything starts:

        >>> from outblas.autotune import SweepOptions, sweep
        >>> options = SweepOptions(budget=600, top_k=4)
        >>> sweep("portable", (64, 64, 64), layout="np", options=options, gpus="cpu")
        Traceback (most recent call last):
        ValueError: layout is 'np', expected one of nt, nn, tn, tt
    """
    begun = time.monotonic()
    targets = _targets(kernels)
    chosen = options_with(options, keywords)
    workloads = _workloads(shapes, dtype, out_dtype, layout, chosen)
    for target in targets:
        check_epilogue(target, chosen.epilogue)
        for grouping in dict.fromkeys(workload.grouping for workload in workloads):
            if grouping or target == HOPPER_GROUPED:
                check_grouping(target, grouping)
    jobs = _jobs(targets, workloads, chosen)
    gpus = visible_gpus(chosen.gpus) if chosen.engine == "local" else []
    with ExitStack() as stack:
        if isinstance(store, Store):
            opened = store
        else:
            opened = stack.enter_context(Store(None if store is None else Path(store)))
        found = _run(jobs, gpus, opened, progress, chosen)
    found.seconds = time.monotonic() - begun
    return found


def _jobs(
    targets: tuple[TuneTarget, ...], workloads: Sequence[Workload], options: SweepOptions
) -> list[Job]:
    ranker, strategy = ranker_of(options.ranker), strategy_of(options.strategy)
    return [
        Job(
            targets,
            workload,
            trials=options.trials,
            top_k=options.top_k,
            resume=options.resume,
            ranker=ranker,
            retry_failed=options.retry_failed,
            strategy=strategy,
        )
        for workload in workloads
    ]


def _run(
    jobs: Sequence[Job], gpus: Sequence[str], store: Store, report: Report, options: SweepOptions
) -> Sweep:
    """Runs jobs with the requested engine."""
    if options.engine == "ray":
        from . import ray_engine

        found = ray_engine.run(
            jobs,
            store,
            report,
            budget=options.budget,
            address=options.address,
            workers=options.compile_workers,
        )
    else:
        found = local_engine.run(jobs, gpus, store, report, options)
    found.store = store.path
    return found


def visible_gpus(gpus: str | int | Sequence[int]) -> list[str]:
    """Returns GPUs, named as in CUDA_VISIBLE_DEVICES, or ["cpu"]. Raises ValueError for GPUs that
    do not exist.
    """
    if gpus == "cpu":
        return ["cpu"]
    import torch

    count = torch.cuda.device_count() if torch.version.cuda else 0
    if count == 0:
        raise ValueError(
            f"gpus is {gpus!r}, and there is no NVIDIA GPU that torch can use, expected 'cpu'"
        )
    if gpus == "all":
        chosen = list(range(count))
    else:
        parts = (
            gpus.split(",")
            if isinstance(gpus, str)
            else [gpus]
            if isinstance(gpus, int)
            else list(gpus)
        )
        if not parts or not all(
            str(part).strip().isdecimal() and int(part) < count for part in parts
        ):
            raise ValueError(f"gpus is {gpus!r}, expected 'all', 'cpu' or indices below {count}")
        chosen = list(dict.fromkeys(int(part) for part in parts))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = (
        [name.strip() for name in hidden.split(",")] if hidden else [str(i) for i in range(count)]
    )
    return [names[i] for i in chosen]


def _targets(kernels: str | TuneTarget | Sequence[str | TuneTarget]) -> tuple[TuneTarget, ...]:
    listed = [kernels] if isinstance(kernels, str | TuneTarget) else list(kernels)
    if not listed:
        raise ValueError("kernels is empty, expected names of kernels")
    return tuple(dict.fromkeys(target_of(kernel) for kernel in listed))


def _workloads(
    shapes: Any, dtype: str, out_dtype: str, layout: str | Sequence[str], options: SweepOptions
) -> list[Workload]:
    groups = _groups(shapes)
    if groups:
        return _grouped_workloads(groups, dtype, out_dtype, layout, options)
    if isinstance(shapes, str):
        listed: list[Any] = list(parse_shapes(shapes, "shapes", least=1))
    elif isinstance(shapes, int):
        listed = [(shapes, shapes, shapes)]
    elif (
        isinstance(shapes, tuple)
        and len(shapes) == 3
        and all(isinstance(size, int) for size in shapes)
    ):
        listed = [shapes]
    else:
        listed = list(shapes)
    if not listed or not all(isinstance(shape, tuple) and len(shape) == 3 for shape in listed):
        raise ValueError(
            f"shapes is {shapes!r}, expected (M, N, K), a list of them, an integer or text"
        )
    layouts = layout.split(",") if isinstance(layout, str) else list(layout)
    made = (
        Workload(M, N, K, dtype, out_dtype, letters.strip(), options.weights, options.epilogue)
        for letters in layouts
        for M, N, K in listed
    )
    return list(dict.fromkeys(made))


def _groups(shapes: Any) -> list[GroupedWorkload]:
    """Returns the workloads of groups that shapes are; none where they are sizes of products."""
    if isinstance(shapes, str) and grouped_shapes.names_groups(shapes):
        return grouped_shapes.parse(shapes, "shapes")
    listed = [shapes] if isinstance(shapes, GroupedWorkload) else shapes
    if not isinstance(listed, list | tuple):
        return []
    return list(listed) if all(isinstance(each, GroupedWorkload) for each in listed) else []


def _grouped_workloads(
    groups: Sequence[GroupedWorkload],
    dtype: str,
    out_dtype: str,
    layout: str | Sequence[str],
    options: SweepOptions,
) -> list[Workload]:
    if options.ranker != "model":
        raise ValueError(f"ranker is {options.ranker!r}, expected 'model' with groups")
    layouts = layout.split(",") if isinstance(layout, str) else list(layout)
    made = []
    for letters in layouts:
        for each in groups:
            if each.form == "terms" and options.weights == "cold":
                raise ValueError(
                    f"weights is 'cold', expected 'warm' for {each}, which reads no weights"
                )
            stored = letters.strip() if each.form == "rows" else TERMS_LAYOUT
            made.append(
                Workload(
                    *each.shape,
                    dtype,
                    out_dtype,
                    stored,
                    options.weights,
                    options.epilogue,
                    str(each.grouping),
                )
            )
    return list(dict.fromkeys(made))
