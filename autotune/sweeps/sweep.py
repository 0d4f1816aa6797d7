"""Sweeps: many workloads over the GPUs of this machine, or of a cluster; a workload is
never split.
"""

import contextlib
import math
import os
import queue
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ...core.shapes import Shape
from ...core.shapes import parse as parse_shapes
from ..measure.compile_pool import Compilers
from ..measure.isolated import TRIAL_SECONDS, MeasureWorker, WorkerDied
from ..measure.progress import Progress, Report, silent
from ..search import prune
from ..search.prune import Ranker
from ..search.target import Subject
from ..search.target import of as subject_of
from ..store.records import Workload
from ..store.store import Store, StoreError
from .outcome import Budget, Failure, Sweep, _serial
from .tuner import Job, tune

Engine = Literal["local", "ray"]
ENGINES: tuple[Engine, ...] = ("local", "ray")
RANKERS = ("model", "heuristics")
STOP_SECONDS = 10.0  # for an interrupted sweep to end


def sweep(
    kernels: str | Subject | Sequence[str | Subject],
    shapes: str | int | Shape | Sequence[Shape] = 4096,
    *,
    dtype: str = "bfloat16",
    out_dtype: str = "",
    layout: str | Sequence[str] = "nt",
    budget: float | None = None,
    trials: int | None = None,
    top_k: int = 8,
    gpus: str | int | Sequence[int] = "0",
    engine: Engine = "local",
    address: str | None = None,
    store: Store | str | Path | None = None,
    resume: bool = True,
    retry_failed: bool = False,
    ranker: str = "model",
    compile_workers: int | None = None,
    trial_seconds: float = TRIAL_SECONDS,
    progress: Report = silent,
    allow_unsaved: bool = False,
) -> Sweep:
    """Finds the fastest config of kernels for shapes, layouts and one dtype, and keeps all trials
    in a store.

    Args:
        kernels: names from `outblas list`, or a `Subject` for one of your own. Several compete.
        shapes: (M, N, K), several of them, an int for a cube, or text as on the command line
            ("4096,16x4096x4096").
        dtype: of the operands: bfloat16, float16, float32 (IEEE products) or tf32. out_dtype:
            float32 for 16-bit operands whose product is wanted in fp32; by default that of the
            operands.
        layout: "nt", "nn", "tn", "tt", or several: A then B, n stored by rows, t transposed.
        budget: seconds for all of it, of which a workload gets 5 at least; None: until all is done.
            A workload keeps a quarter of its share for the finals.
        trials: configs of each kernel to measure for each workload, the best by the ranker; None:
            all valid ones.
        top_k: configs in the finals.
        gpus: "all", indices ("0,1", 0, [0, 1]), or "cpu": the interpreter, for portable. Ignored
            with engine "ray".
        engine: "local", or "ray": one task a workload on a cluster at `address` (by default the one
            that there is, or a local one).
        store: where trials go, and come from when `resume`; by default the user's.
        retry_failed: whether configs that have failed are measured anew; those that are right,
            wrong or refused by the kernel are not.
        ranker: "model", the analytic one, or "heuristics", NVIDIA's nvMatmulHeuristics.
        compile_workers: processes that compile; by default as many as the machine carries.
        trial_seconds: after which a config counts as hanging, besides its calls and the start of a
            worker.
        progress: called with a snapshot at every step, from the threads that drive GPUs.
        allow_unsaved: measure even where the store cannot be written, and keep results while the
            process lives.

    Returns the outcomes and winners. A config that hangs, crashes or is wrong costs its own trial;
    one whose worker is killed from outside is tried again, and then left unmeasured. Killed at any
    moment, a sweep goes on where it was. Results that cannot be written to the store any more are
    exported to another file: `Sweep.rescued` says where, or the note of the exception that ended
    the sweep.

    Raises:
        TypeError, ValueError: an argument is wrong; nothing has been started.
        StoreError: the store cannot be written; nothing has been started.
        ImportError: a kernel's DSL, ray or the heuristics are not installed.
    """
    begun = time.monotonic()
    subjects = _subjects(kernels)
    workloads = _workloads(shapes, dtype, out_dtype, layout)
    for name, value in (("trials", trials), ("top_k", top_k), ("compile_workers", compile_workers)):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name} is {value!r}, expected an integer of at least 1")
    for name, seconds in (("budget", budget), ("trial_seconds", trial_seconds)):
        if seconds is not None and not (
            isinstance(seconds, int | float) and 0 < seconds < math.inf
        ):
            raise ValueError(f"{name} is {seconds!r}, expected seconds above 0")
    if engine not in ENGINES:
        raise ValueError(f"engine is {engine!r}, expected one of {', '.join(ENGINES)}")
    jobs = [
        Job(
            subjects,
            workload,
            trials=trials,
            top_k=top_k,
            resume=resume,
            ranker=ranker_of(ranker),
            retry_failed=retry_failed,
        )
        for workload in workloads
    ]
    visible = visible_gpus(gpus) if engine == "local" else []
    with ExitStack() as stack:
        kept = (
            store
            if isinstance(store, Store)
            else stack.enter_context(Store(None if store is None else Path(store)))
        )
        if not allow_unsaved:
            kept.check_persistent()
        try:
            if engine == "ray":
                from . import ray_engine

                found = ray_engine.run(
                    jobs, kept, progress, budget=budget, address=address, workers=compile_workers
                )
            else:
                found = _local(
                    jobs, visible, kept, progress, budget, compile_workers, trial_seconds
                )
        except BaseException as error:
            unsaved, rescued = (0, None) if allow_unsaved else _rescue(kept)
            if unsaved:
                error.add_note(lost_results(unsaved, kept.path, rescued))
            raise
        found.store = kept.path
        found.unsaved, found.rescued = (kept.unsaved, None) if allow_unsaved else _rescue(kept)
    found.seconds = time.monotonic() - begun
    return found


def _rescue(store: Store) -> tuple[int, Path | None]:
    """How many results are not in the store's file, even now, and the export that has them, if one
    can be written.
    """
    if not store.unsaved:
        return 0, None
    with contextlib.suppress(StoreError):
        store.check_persistent()  # writes what waits, if there is room again
    if not store.unsaved:
        return 0, None
    try:
        return store.unsaved, store.emergency_export()
    except StoreError as error:
        warnings.warn(f"no emergency export could be written: {error}", stacklevel=3)
        return store.unsaved, None


def lost_results(count: int, store: Path | None, rescued: Path | None) -> str:
    """What a user is told of results that are not in the store's file."""
    said = f"{count} results could not be written to {store}"
    if rescued is None:
        return f"{said}, nor anywhere else: they are lost"
    return f"{said}: they are in {rescued}, and outblas cache import takes them from there"


def visible_gpus(gpus: str | int | Sequence[int]) -> list[str]:
    """GPUs as CUDA_VISIBLE_DEVICES names them, or ["cpu"]. Raises ValueError for what is
    not there.
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


def _subjects(kernels: str | Subject | Sequence[str | Subject]) -> tuple[Subject, ...]:
    listed = [kernels] if isinstance(kernels, str | Subject) else list(kernels)
    if not listed:
        raise ValueError("kernels is empty, expected names of kernels")
    return tuple(dict.fromkeys(subject_of(kernel) for kernel in listed))


def _workloads(
    shapes: Any, dtype: str, out_dtype: str, layout: str | Sequence[str]
) -> list[Workload]:
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
        Workload(M, N, K, dtype, out_dtype, letters.strip())
        for letters in layouts
        for M, N, K in listed
    )
    return list(dict.fromkeys(made))


def ranker_of(name: str) -> Ranker:
    """Raises ValueError for an unknown name, ImportError where the library is missing."""
    if name not in RANKERS:
        raise ValueError(f"ranker is {name!r}, expected one of {', '.join(RANKERS)}")
    if name == "model":
        return prune.by_model
    from ..search import nvmmh

    return nvmmh.ranker()


def _local(
    jobs: Sequence[Job],
    visible: Sequence[str],
    store: Store,
    report: Report,
    budget: float | None,
    compile_workers: int | None,
    trial_seconds: float,
) -> Sweep:
    """A thread for each GPU, which takes workloads from one queue; all share the compiling
    processes.
    """
    found, waiting, lock = Sweep(), queue.SimpleQueue[Job](), threading.Lock()
    for job in jobs:
        waiting.put(job)
    budgets = Budget(budget, len(jobs), len(visible))
    tell = _serial(report)
    stop = threading.Event()
    refused: list[BaseException] = []
    benches: list[MeasureWorker] = []

    def drive(gpu: str, compilers: Compilers | None) -> None:
        with MeasureWorker(gpu, trial_seconds=trial_seconds) as bench:
            benches.append(bench)
            try:
                while not stop.is_set():
                    try:
                        job = waiting.get_nowait()
                    except queue.Empty:
                        return
                    run(job, bench, gpu, compilers)
            except BaseException as error:  # of this program, or of arguments that no kernel takes
                refused.append(error)
                stop.set()

    def run(job: Job, bench: MeasureWorker, gpu: str, compilers: Compilers | None) -> None:
        try:
            model = bench.describe()
        except WorkerDied as death:
            with lock:
                found.failures.append(Failure(job.workload, f"GPU {gpu}: {death}"))
            return
        if (
            compilers is not None and budget is not None
        ):  # whose start is not the first workload's to pay for
            compilers.await_one(job.subjects[0], budget / 4)
        outcome = tune(
            replace(job, seconds=budgets.share()),
            model,
            bench,
            compilers,
            store,
            tell,
            label=gpu,
            stopped=stop.is_set,
        )
        with lock:
            found.add(outcome)

    for job in jobs:
        tell(Progress(job.workload))
    with ExitStack() as stack:
        compilers = (
            None if list(visible) == ["cpu"] else stack.enter_context(Compilers(compile_workers))
        )
        threads = [
            threading.Thread(target=drive, args=(gpu, compilers), daemon=True) for gpu in visible
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)  # lets an interrupt through
        except BaseException:  # an interrupt: nothing may go on behind the caller's back
            stop.set()
            for bench in benches:
                bench.cancel()
            if compilers is not None:
                compilers.close()
            for thread in threads:
                thread.join(STOP_SECONDS)
            raise
    if refused:
        raise refused[0]
    return found
