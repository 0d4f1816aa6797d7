"""Sweeps: many workloads over the GPUs of this machine or of a cluster. Each workload is tuned on
one GPU.
"""

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, Unpack

from outblas.autotune.measure.progress import Report, silent
from outblas.autotune.search.prune import check_epilogue, check_grouping
from outblas.autotune.search.strategy import strategy_of
from outblas.autotune.search.target import HOPPER_GROUPED, TuneTarget, fingerprint
from outblas.autotune.search.target import of as target_of
from outblas.autotune.store.records import Weights, Workload
from outblas.autotune.store.store import Store
from outblas.autotune.sweeps import engine
from outblas.autotune.sweeps.options import SweepKeywords, SweepOptions
from outblas.autotune.sweeps.outcome import Job, Sweep
from outblas.base import grouped_shapes
from outblas.base.grouped_shapes import TERMS_LAYOUT, GroupedWorkload
from outblas.base.shapes import Shape
from outblas.base.shapes import parse as parse_shapes

# What is tuned: sizes of products, or workloads of groups, or either as text; or whole workloads.
Shapes: TypeAlias = (
    str | int | Shape | GroupedWorkload | Sequence[Shape | GroupedWorkload | Workload]
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
            groups, or text such as "moe:mixtral-8x7b" or "8x4096x28672x4096:zipf". Or `Workload`
            records, which have the dtypes, the layout, weights and epilogue.
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
        ImportError: The DSL of a kernel, or ray, is not installed.
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
    settings = replace(options or SweepOptions(), **keywords)
    workloads = workloads_of(shapes, dtype, out_dtype, layout, settings.weights, settings.epilogue)
    jobs = _jobs(kernels, workloads, settings)
    gpus = visible_gpus(settings.gpus) if settings.engine == "local" else []
    with _opened(store) as opened:
        if settings.engine == "ray":
            from outblas.autotune.sweeps import ray_engine

            result = ray_engine.run(jobs, opened, progress, settings)
        else:
            result = engine.run_local(jobs, gpus, opened, progress, settings)
    result.store, result.seconds = opened.path, time.monotonic() - begun
    return result


def _opened(store: Store | str | Path | None) -> AbstractContextManager[Store]:
    """Returns a store that is closed afterwards, unless it is the caller's."""
    if isinstance(store, Store):
        return nullcontext(store)
    return Store(None if store is None else Path(store))


def _jobs(
    kernels: str | TuneTarget | Sequence[str | TuneTarget],
    workloads: Sequence[Workload],
    options: SweepOptions,
) -> list[Job]:
    """Returns a job for each workload. Raises the errors of `sweep`."""
    names = [kernels] if isinstance(kernels, str | TuneTarget) else list(kernels)
    if not names:
        raise ValueError("kernels is empty, expected names of kernels")
    targets = tuple(dict.fromkeys(map(target_of, names)))
    check_targets(targets, workloads)
    for target in targets:
        fingerprint(target.module)  # a module that is missing is an error before anything starts
    strategy = strategy_of(options.strategy)
    return [Job(targets, workload, options, strategy=strategy) for workload in workloads]


def check_targets(targets: Sequence[TuneTarget], workloads: Sequence[Workload]) -> None:
    """Raises ValueError for kernels that multiply no groups where there are some, or only groups,
    or that have no epilogue; ImportError where a DSL is missing.
    """
    for target in targets:
        for workload in workloads:
            check_epilogue(target, workload.epilogue)
            if workload.grouping or target == HOPPER_GROUPED:
                check_grouping(target, workload.grouping)


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
    parts = gpus.split(",") if isinstance(gpus, str) else [gpus] if isinstance(gpus, int) else gpus
    if gpus == "all":
        parts = range(count)
    texts = [str(part).strip() for part in parts]
    if not texts or not all(text.isdecimal() and int(text) < count for text in texts):
        raise ValueError(f"gpus is {gpus!r}, expected 'all', 'cpu' or indices below {count}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = (
        [name.strip() for name in visible.split(",")] if visible else list(map(str, range(count)))
    )
    return [names[index] for index in dict.fromkeys(map(int, texts))]


def workloads_of(
    shapes: Shapes,
    dtype: str = "bfloat16",
    out_dtype: str = "",
    layout: str | Sequence[str] = "nt",
    weights: Weights = "warm",
    epilogue: str = "",
) -> list[Workload]:
    """Returns the workloads that shapes, layouts and conditions make, each once. Raises ValueError.

    Gradients of the weights of groups have the one layout that they can have, and read no weights.
    """
    layouts = layout.split(",") if isinstance(layout, str) else list(layout)
    workloads = []
    for letters in layouts:
        for shape in _shapes(shapes):
            if isinstance(shape, Workload):
                workloads.append(shape)
                continue
            grouping, stored = "", letters.strip()
            if isinstance(shape, GroupedWorkload):
                grouping = str(shape.grouping)
                if shape.form == "terms":
                    stored = TERMS_LAYOUT
                    if weights == "cold":
                        raise ValueError(
                            f"weights is 'cold', expected 'warm' for {shape}, which reads none"
                        )
            sizes = shape.shape if isinstance(shape, GroupedWorkload) else shape
            workloads.append(
                Workload(*sizes, dtype, out_dtype, stored, weights, epilogue, grouping)
            )
    return list(dict.fromkeys(workloads))


def _shapes(shapes: Any) -> Sequence[Shape | GroupedWorkload | Workload]:
    """Returns shapes in any of their forms as a list. Raises ValueError."""
    if isinstance(shapes, str):
        if grouped_shapes.names_groups(shapes):
            return grouped_shapes.parse(shapes, "shapes")
        return parse_shapes(shapes, "shapes", least=1)
    if isinstance(shapes, int):
        return [(shapes, shapes, shapes)]
    if isinstance(shapes, GroupedWorkload) or (
        isinstance(shapes, tuple) and all(isinstance(size, int) for size in shapes)
    ):
        shapes = [shapes]
    listed = list(shapes)
    if not listed or not all(
        isinstance(shape, GroupedWorkload | Workload)
        or (isinstance(shape, tuple) and len(shape) == 3)
        for shape in listed
    ):
        raise ValueError(
            f"shapes is {shapes!r}, expected (M, N, K), a list of them, an integer or text"
        )
    return listed
