"""Tuning from inside a program: what `matmul` asks before it plans a call, and `outblas.tune`."""

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence

import torch

from ..core import problem as operands
from ..core.ownership import shown
from ..core.problem import Problem
from ..runtime import dispatch, fallback
from ..runtime.default_kernel import PRODUCTION, rivals
from . import lookup
from .lookup import HERE, Knowledge
from .search.target import Subject
from .store.records import BestConfig, Workload

FIRST_SECONDS = (
    60.0  # for a shape that OUTBLAS_TUNE=on meets, unless OUTBLAS_TUNE_BUDGET says otherwise
)
FIRST_TRIALS = 64
_given_up: set[Workload] = set()


def choices(problem: Problem, tune: str = "") -> Iterator[tuple[str, str]]:
    """Kernels and configs as text for a product that names none, the best first; maybe none.

    Raises ValueError for an OUTBLAS_TUNE that is no mode.
    """
    mode = lookup.mode(tune, os.environ.get("OUTBLAS_TUNE"))
    workload = None if mode == "off" else of_problem(problem)
    index = problem.device.index
    if workload is None or index is None:
        return
    try:
        known, turned = lookup.knowledge(index), False
        if PRODUCTION in rivals(
            known.gpu.arch, workload.dtype
        ):  # which computes a C stored by columns as C^T
            problem, turned = operands.oriented(problem)
            workload = of_problem(problem) or workload
        if mode == "on" and not _tuned(known, workload) and workload not in _given_up:
            known = _first_time(workload, index) or known
        found = [
            c
            for c in known.choices(workload)
            if known.objection(c.kernel, workload, problem) is None
        ]
        asked = [
            (
                c.kernel,
                "" if turned and c.kernel != PRODUCTION else lookup.suited(c, workload, problem),
            )
            for c in found
        ]
    except Exception as error:  # costs speed, and the caller no product
        fallback.complain(f"nothing that was tuned is used: {error}")
        return
    yield from asked


def of_problem(problem: Problem) -> Workload | None:
    """The workload that stands for a product; None for a batch, an empty one, and operands without
    a unit stride.
    """
    dtype = "tf32" if problem.tf32 else operands.dtype_name(problem.dtype)
    letters = [
        "n" if row == 1 else "t" if column == 1 else ""
        for column, row in (problem.a[-2:], problem.b[-2:])
    ]
    if problem.batch or 0 in (problem.M, problem.N, problem.K) or "" in letters:
        return None
    return Workload(
        problem.M,
        problem.N,
        problem.K,
        dtype,
        operands.dtype_name(problem.out_dtype),
        "".join(letters),
    )


def tune(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    kernels: Sequence[str | Subject] | None = None,
    budget: float | None = FIRST_SECONDS,
    trials: int | None = None,
    top_k: int = 8,
    retry_failed: bool = False,
) -> BestConfig:
    """Finds the fastest kernel and config for `outblas.matmul(a, b)`, which takes it from now on.

    Args:
        a, b: operands as `matmul` takes them, 16-bit or fp32, on an NVIDIA GPU; only their shapes,
            layouts and dtype count: packed ones of the same are measured.
        out_dtype: as in `matmul`.
        kernels: names from `outblas list`; by default those that `matmul` may choose from on this
            GPU.
        budget, trials, top_k, retry_failed: as in `outblas.autotune.sweep`.

    The winner stays in the user's store. Raises TypeError and ValueError for operands that do not
    fit together or that no kernel takes, RuntimeError inside a CUDA graph capture, where the store
    cannot be written, and where nothing could be measured. Warns where results were measured that
    could not be stored, and says where they are.
    """
    operands.check_tensor("a", a)
    operands.check_tensor("b", b)
    shape = operands.check_pair(a, b)
    kind = operands.check_out_dtype(out_dtype, a.dtype)
    if not a.is_cuda:
        raise ValueError(
            f"a is on {a.device}, expected an NVIDIA GPU: there is nothing to tune elsewhere"
        )
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a CUDA graph is being captured: tune before, not inside")
    tf32 = a.dtype is torch.float32 and dispatch.tf32_requested()
    out = torch.empty(shape, dtype=kind, device="meta")
    workload = of_problem(operands.problem(a, b, out, tf32=tf32))
    if workload is None:
        raise ValueError(
            f"a is {tuple(a.shape)} with strides {a.stride()} and b {tuple(b.shape)} with "
            f"{b.stride()}, expected "
            "matrices that are not empty, or a batch that shares b, each with a stride of 1"
        )
    return _sweep(
        workload, a.device.index, kernels, budget, trials, top_k, retry_failed=retry_failed
    )


def _tuned(known: Knowledge, workload: Workload) -> bool:
    return any(k.origin == HERE and k.workload == workload for k in known.known)


def first_seconds() -> float:
    """For how long a shape is tuned that is met for the first time. Raises ValueError for an
    OUTBLAS_TUNE_BUDGET that is no time.
    """
    text = os.environ.get("OUTBLAS_TUNE_BUDGET") or str(FIRST_SECONDS)
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) > 0:
            return seconds
    raise ValueError(
        f"OUTBLAS_TUNE_BUDGET is '{shown(text)}', expected a number of seconds above 0"
    )


def _first_time(workload: Workload, index: int) -> Knowledge | None:
    """Tunes a shape that is met for the first time; what goes wrong is said once and costs speed
    only.
    """
    try:
        _sweep(workload, index, None, first_seconds(), FIRST_TRIALS, 8, allow_unsaved=True)
    except Exception as error:
        _given_up.add(workload)
        fallback.complain(f"{workload} could not be tuned: {error}")
        return None
    known = lookup.knowledge(index)
    if not _tuned(
        known, workload
    ):  # the store keeps nothing, and has said so: not again at every call
        _given_up.add(workload)
    return known


def _sweep(
    workload: Workload,
    index: int,
    kernels: Sequence[str | Subject] | None,
    budget: float | None,
    trials: int | None,
    top_k: int,
    *,
    retry_failed: bool = False,
    allow_unsaved: bool = False,
) -> BestConfig:
    from .sweeps.sweep import lost_results, sweep

    major, minor = torch.cuda.get_device_capability(index)
    found = sweep(
        rivals(10 * major + minor, workload.dtype) if kernels is None else kernels,
        workload.shape,
        dtype=workload.dtype,
        out_dtype=workload.out_dtype,
        layout=workload.layout,
        budget=budget,
        trials=trials,
        top_k=top_k,
        gpus=index,
        retry_failed=retry_failed,
        allow_unsaved=allow_unsaved,
    )
    lookup.forget()
    dispatch.forget()
    if found.unsaved and not allow_unsaved:
        warnings.warn(lost_results(found.unsaved, found.store, found.rescued), stacklevel=3)
    if not found.winners:
        reasons = [failure.reason for failure in found.failures]
        reasons += [
            trial.reason for outcome in found.outcomes for trial in outcome.trials if not trial.ok
        ][:1]
        reasons += [left.reason for outcome in found.outcomes for left in outcome.unmeasured][:1]
        raise RuntimeError(
            f"{workload}: no config could be measured: {'; '.join(reasons) or 'none is valid'}"
        )
    return found.winners[0]
