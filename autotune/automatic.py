"""Tuning from inside a program: the choices that `matmul` asks for before it plans a call, and
`outblas.tune`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

import torch

from outblas.autotune import lookup, named_configs
from outblas.autotune.lookup import TuningIndex, is_faster
from outblas.autotune.lookup import grouped_config as grouped_config  # the runtime asks for it
from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store.records import PRECISIONS, BestConfig, Weights, Workload
from outblas.autotune.tuned_entries import HERE
from outblas.base.ownership import shown
from outblas.call import dispatch, fallback
from outblas.call import problem as operands
from outblas.call.default_kernel import PRODUCTION, candidates
from outblas.call.epilogue import NONE
from outblas.call.errors import OperandError
from outblas.call.problem import Problem
from outblas.call.steps import Steps

if TYPE_CHECKING:
    from outblas.autotune.search.strategy import Strategy
    from outblas.autotune.sweeps.options import SweepKeywords
    from outblas.autotune.sweeps.outcome import Sweep

# Seconds to tune a shape that OUTBLAS_TUNE=on meets first, unless OUTBLAS_TUNE_BUDGET sets another
# time.
FIRST_SECONDS = 60.0
FIRST_TRIALS = 64
# Workloads whose tuning failed in this process; they are not tried again at every call.
_given_up: set[Workload] = set()


def choices(
    problem: Problem, tune: str = "", *, only_faster: bool = False
) -> Iterator[tuple[str, str]]:
    """Yields kernels and configs (as text) for a GEMM that names none, the best first; possibly
    none. `only_faster`: those that were faster than torch at exactly this problem.

    Raises ValueError for an OUTBLAS_TUNE that is not a mode.
    """
    mode = lookup.mode(tune, os.environ.get("OUTBLAS_TUNE"))
    workload = None if mode == "off" else of_problem(problem)
    device = problem.device.index
    if workload is None or device is None:
        return
    try:
        tune_first = mode == "on"
        ranked = _choices(problem, workload, device, tune_first=tune_first, only_faster=only_faster)
    except Exception as error:  # costs only speed: the caller still gets a result
        fallback.warn_once(f"no tuning result is used: {error}")
        return
    yield from ranked


def tuned_rows(problem: Problem, tune: str = "") -> frozenset[int]:
    """Returns the numbers of rows at which a GEMM has choices of its own, whatever its M is. Raises
    as `choices`.
    """
    mode = lookup.mode(tune, os.environ.get("OUTBLAS_TUNE"))
    workload = None if mode == "off" else of_problem(problem)
    index = None if workload is None else _index(problem.device)
    if workload is None or index is None:
        return frozenset()
    indexes = (index, *lookup.packed_indexes(problem.device.index))
    whole = _with_epilogue(workload, problem)
    return frozenset().union(*(each.tuned_rows(whole) for each in indexes))


def _choices(
    problem: Problem, workload: Workload, device: int, *, tune_first: bool, only_faster: bool
) -> list[tuple[str, str]]:
    """Returns the choices for a GEMM on the GPU of this index. `tune_first`: the workload is
    tuned before, if it is not tuned yet.
    """
    index, transposed = lookup.tuning_index(device), False
    if PRODUCTION in candidates(index.gpu.arch, workload.dtype):
        # The production kernel computes a C stored by columns as C^T.
        problem, transposed = operands.with_row_major_output(problem)
        if transposed:
            workload = of_problem(problem) or workload
    if tune_first and not _is_tuned(index, workload) and workload not in _given_up:
        index = _tune_first(workload, device) or index
    if not transposed:  # packs have results by rows
        listed = _with_epilogue(workload, problem)
        index = lookup.packed_index(device, listed, fp8=bool(problem.formats)) or index
    return choices_of(index, problem, workload, transposed=transposed, only_faster=only_faster)


def choices_of(
    index: TuningIndex,
    problem: Problem,
    workload: Workload,
    *,
    transposed: bool = False,
    only_faster: bool = False,
) -> list[tuple[str, str]]:
    """Returns the choices that an index has for a GEMM, in the form that a call takes.
    `transposed`: the output lay by columns. `only_faster`: those that were measured to be faster
    than torch at exactly this problem; sweeps measure no addend.
    """
    # An epilogue was tuned for C stored by rows, where a bias is added to columns.
    whole = workload if transposed else _with_epilogue(workload, problem)
    if only_faster:
        unmeasured = problem.scaled or (problem.epilogue != NONE and not whole.epilogue)
        if unmeasured or (index.measured_gain(whole) or 0) <= 1:
            return []
    pruned: dict[str, bool] = {}
    keeps_config: dict[str, bool] = {}
    ranked = []
    for choice in index.choices(whole):
        kernel = choice.kernel
        if only_faster and not is_faster(choice.reason, whole):
            continue
        if kernel not in pruned:
            pruned[kernel] = index.pruned_reason(kernel, whole, problem) is not None
            keeps_config[kernel] = (kernel == PRODUCTION or not transposed) and named_configs.suits(
                kernel, whole, problem
            )
        if not pruned[kernel]:
            ranked.append((kernel, choice.config if keeps_config[kernel] else ""))
    return ranked


def _with_epilogue(workload: Workload, problem: Problem) -> Workload:
    """Returns the workload of a GEMM with its epilogue, as sweeps measure it. Returns the bare
    workload where sweeps do not measure the epilogue: where x is stored too, where fp8 operands are
    scaled, where C is wider than A.
    """
    epilogue = problem.epilogue
    if epilogue.aux or epilogue.scale_a or epilogue.scale_b or problem.dtype != problem.out_dtype:
        return workload
    steps = Steps(epilogue.bias is not None, epilogue.activation, epilogue.residual is not None)
    return replace(workload, N=problem.columns, epilogue=str(steps)) if steps else workload


def measured_gain(problem: Problem) -> float | None:
    """Returns cuBLAS's time over that of the best config at exactly this workload, without addend
    and epilogue; None where nobody measured it on this model of GPU.
    """
    workload, index = of_problem(problem), _index(problem.device)
    return None if workload is None or index is None else index.measured_gain(workload)


def measured_gains(device: torch.device, N: int, K: int, dtype: torch.dtype) -> dict[int, float]:
    """Returns cuBLAS's time over that of the best config for GEMMs with an (N, K) weight, by the
    number of rows; empty where nobody measured one on this model of GPU.
    """
    name, index = operands.dtype_name(dtype), _index(device)
    if index is None or name not in PRECISIONS:
        return {}
    return index.measured_gains(Workload(1, N, K, name))


def _index(device: torch.device) -> TuningIndex | None:
    """Returns the index of a GPU; None for another device, and where it cannot be read."""
    try:
        return None if device.index is None else lookup.tuning_index(device.index)
    except Exception as error:  # costs only speed: the caller goes on without
        fallback.warn_once(f"no tuning result is used: {error}")
        return None


def of_problem(problem: Problem) -> Workload | None:
    """Returns the workload that represents a GEMM; None for a batch, an empty one, and
    operands without a unit stride.
    """
    dtype = "tf32" if problem.tf32 else operands.dtype_name(problem.dtype)
    layout = operands.layout_of(problem)
    if problem.batch or 0 in (problem.M, problem.N, problem.K) or len(layout) < 2:
        return None
    return Workload(
        problem.M,
        problem.N,
        problem.K,
        dtype,
        operands.dtype_name(problem.out_dtype),
        layout,
    )


def tune(
    input: torch.Tensor,
    other: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    kernels: Sequence[str | TuneTarget] | None = None,
    budget: float | None = FIRST_SECONDS,
    trials: int | None = None,
    top_k: int = 8,
    retry_failed: bool = False,
    strategy: str | Strategy | type[Strategy] = "ranked",
    weights: Weights = "warm",
    epilogue: str = "",
) -> BestConfig:
    """Find the fastest kernel and config for `outblas.matmul(input, other)`.

    `matmul` uses it from then on, for float32 operands if it is faster than torch. It is kept in
    the user's store, for later programs too.

    Args:
        input: The left operand, as in `outblas.matmul`: 16-bit or float32, on an NVIDIA GPU. Only
            the shapes, layouts and dtype of the operands count; packed tensors like them are
            measured.
        other: The right operand.
        out_dtype: The dtype of the result, as in `outblas.matmul`.
        kernels: The names of the kernels that compete, or `TuneTarget` records; None for those
            that `outblas.matmul` chooses from on this GPU.
        budget: The seconds to spend; None to measure every valid config.
        trials: How many configs of each kernel to measure; None for as many as the budget allows.
        top_k: How many configs go to the finals.
        retry_failed: Whether configs whose earlier trial failed are measured again.
        strategy: What orders the configs, as in `outblas.autotune.SweepOptions`.
        weights: "warm", or "cold" to measure with weights that are not in the L2 cache. A config
            that wins with cold weights is used where nothing was tuned with warm ones.
        epilogue: What follows the product, such as "bias+gelu"; calls with that epilogue use the
            result.

    Returns:
        The winner, with its time and its ratio to cuBLAS.

    Raises:
        TypeError: An argument has the wrong type.
        OperandError: The operands do not fit together.
        ValueError: The operands are not on an NVIDIA GPU or no kernel can take them, or an
            argument is none of its choices.
        StoreError: The store cannot be written.
        RuntimeError: A CUDA graph is being captured, or no config could be measured.

    Example:
        >>> import torch, outblas
        >>> a, b = torch.randn(512, 256), torch.randn(256, 1024)
        >>> if torch.cuda.is_available():
        ...     best = outblas.tune(a.cuda(), b.cuda(), budget=20)
    """
    operands.check_tensor("input", input)
    operands.check_tensor("other", other)
    try:
        shape = operands.check_pair(input, other)
    except OperandError as error:
        error.rename({"a": "input", "b": "other"})
        raise
    dtype = operands.check_out_dtype(out_dtype, input.dtype)
    if not input.is_cuda:
        raise ValueError(
            f"input is on {input.device}, expected an NVIDIA GPU: outblas.tune measures there"
        )
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a CUDA graph is being captured: call outblas.tune before the capture")

    tf32 = input.dtype is torch.float32 and dispatch.tf32_requested()
    out = torch.empty(shape, dtype=dtype, device="meta")
    workload = of_problem(operands.problem(input, other, out, tf32=tf32))
    if workload is None:
        raise ValueError(
            f"input is {tuple(input.shape)} with strides {input.stride()} and other "
            f"{tuple(other.shape)} with {other.stride()}, expected matrices that are not empty, "
            "or a batch that shares other, each with a stride of 1"
        )
    return _sweep(
        workload,
        input.device.index,
        kernels,
        budget=budget,
        trials=trials,
        top_k=top_k,
        retry_failed=retry_failed,
        strategy=strategy,
        weights=weights,
        epilogue=epilogue,
    )


def _is_tuned(index: TuningIndex, workload: Workload) -> bool:
    return any(entry.origin == HERE and entry.workload == workload for entry in index.entries)


def first_seconds() -> float:
    """Returns how many seconds a shape is tuned when it is first met. Raises ValueError for an
    OUTBLAS_TUNE_BUDGET that is not a valid time.
    """
    text = os.environ.get("OUTBLAS_TUNE_BUDGET") or str(FIRST_SECONDS)
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) > 0:
            return seconds
    raise ValueError(
        f"OUTBLAS_TUNE_BUDGET is '{shown(text)}', expected a number of seconds above 0"
    )


def _tune_first(workload: Workload, device: int) -> TuningIndex | None:
    """Tunes a shape that is met for the first time. Warns once about a failure, which costs only
    speed.
    """
    try:
        _sweep(workload, device, None, budget=first_seconds(), trials=FIRST_TRIALS)
    except Exception as error:
        _given_up.add(workload)
        fallback.warn_once(f"{workload} could not be tuned: {error}")
        return None

    index = lookup.tuning_index(device)
    if not _is_tuned(index, workload):  # the next call must not tune again
        _given_up.add(workload)
    return index


def _sweep(
    workload: Workload,
    device: int,
    kernels: Sequence[str | TuneTarget] | None,
    **options: Unpack[SweepKeywords],
) -> BestConfig:
    """Tunes one workload on the GPU of this index, and makes lookups use the result.

    Raises RuntimeError where nothing could be measured.
    """
    from outblas.autotune.search.prune import with_epilogues
    from outblas.autotune.sweeps.sweep import sweep

    options["gpus"] = device
    major, minor = torch.cuda.get_device_capability(device)
    if kernels is None:
        kernels = candidates(10 * major + minor, workload.dtype)
        if options.get("epilogue"):
            kernels = with_epilogues(kernels)
    result = sweep(
        kernels,
        workload.shape,
        dtype=workload.dtype,
        out_dtype=workload.out_dtype,
        layout=workload.layout,
        **options,
    )
    lookup.clear_cache()
    dispatch.clear_cache()
    if result.winners:
        return result.winners[0]

    reasons = "; ".join(_reasons(result)) or "none is valid"
    raise RuntimeError(f"{workload}: no config could be measured: {reasons}")


def _reasons(result: Sweep) -> Iterator[str]:
    """Yields why a sweep has no winner."""
    yield from (failure.reason for failure in result.failures)
    failed = (trial for outcome in result.outcomes for trial in outcome.trials if not trial.ok)
    yield from (trial.reason for trial in itertools.islice(failed, 1))
    unmeasured = (left for outcome in result.outcomes for left in outcome.unmeasured)
    yield from (left.reason for left in itertools.islice(unmeasured, 1))
    if not result.finished and not result.failures:
        yield (
            f"the budget ended after {result.seconds:.0f} s, before a trial was complete (a sweep "
            f"waits while another process measures on this GPU)"
        )
