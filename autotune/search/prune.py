"""From the search spaces of kernels to the configs that are worth compiling: the rules that remove
configs.
"""

import functools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outblas.autotune.search import cost_model
from outblas.autotune.search.candidates import Candidate, by_interpreter
from outblas.autotune.search.gpu import machine as machine_of
from outblas.autotune.search.target import HOPPER_GROUPED, TuneTarget, registered
from outblas.autotune.search.target import of as target_of
from outblas.autotune.store.records import Gpu, Workload
from outblas.base import registry
from outblas.base.configs import to_text
from outblas.base.machines import Machine
from outblas.base.space import Space
from outblas.bench.tasks import GroupedTask, grouped_operands, result_shape
from outblas.call.artifact import example
from outblas.call.grouped import GroupedProblem, describe
from outblas.call.problem import Problem

# A config whose fraction of useful work is below this fraction of the best config's is tried only
# if the model predicts it to be the fastest.
EFFICIENCY = 0.5
_NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True)
class Pruned:
    """The number of configs that a rule removed; `example` is its reason for one of them."""

    rule: str
    example: str
    count: int


@dataclass(frozen=True)
class Plan:
    """What a sweep tries for one workload.

    Attributes:
        generated: the number of configs that the spaces of the kernels have.
        pruned: why some of them are not tried, with their numbers, the largest first.
        candidates: the others, in the order in which the spaces generate them.
        ranked: those that are measured, in the order in which the strategy proposed them.
    """

    generated: int
    pruned: tuple[Pruned, ...]
    candidates: tuple[Candidate, ...]
    ranked: tuple[Candidate, ...] = ()

    @property
    def valid(self) -> int:
        return len(self.candidates)


@functools.lru_cache(maxsize=1024)
def problem(workload: Workload) -> Problem:
    """Returns the workload as a problem for kernels, without data."""
    dtype, out_dtype = (
        getattr(torch, name) for name in (workload.operand_dtype, workload.out_dtype)
    )
    return example(
        dtype,
        out_dtype,
        workload.layout,
        workload.shape,
        tf32=workload.dtype == "tf32",
        steps=workload.steps,
    )


@functools.lru_cache(maxsize=1024)
def grouped_problem(workload: Workload) -> GroupedProblem:
    """Returns a workload of groups as a problem for kernels, without data."""
    groups = workload.grouped
    assert groups is not None, "`described` asks for workloads of groups only"
    dtype, out_dtype = (
        getattr(torch, name) for name in (workload.operand_dtype, workload.out_dtype)
    )
    task = GroupedTask(groups, workload.layout)
    a, b, _ = grouped_operands(task, dtype, lambda t: t, lambda t: t, "meta")
    out = torch.empty(result_shape(task), dtype=out_dtype, device="meta")
    return describe("ragged_m" if groups.form == "rows" else "ragged_k", a, b, out, groups.experts)


def described(workload: Workload) -> Problem | GroupedProblem:
    """Returns a workload as the problem that kernels for it take, without data."""
    return grouped_problem(workload) if workload.grouping else problem(workload)


def prune(targets: Sequence[TuneTarget], workload: Workload, gpu: Gpu) -> Plan:
    """Returns the configs of these kernels that can run at a workload and may be the fastest there.

    Raises ValueError where a kernel does not support the dtype or the GPU, ImportError where its
    DSL is missing.
    """
    machine, problem = machine_of(gpu), described(workload)
    rated: list[tuple[Candidate, float]] = []  # with the fraction of the SMs' work that is useful
    reasons: list[str] = []
    for target in targets:
        check(target, workload, gpu)
        space = target.load().space(problem, machine)
        for config in space.configs():
            if reason := space.invalid_reason(config):
                reasons.append(reason)
            else:
                rated.append(_rated(target, space, config, workload, machine))
    generated = len(rated) + len(reasons)

    least = EFFICIENCY * max((useful for _, useful in rated), default=0.0)
    efficient = (candidate.predicted_us for candidate, useful in rated if useful >= least)
    fastest_us = min(efficient, default=0.0)
    candidates = []
    for candidate, useful in rated:
        # A kernel's default config stays, because every other one has to beat it.
        if useful >= least or candidate.predicted_us < fastest_us or candidate.own:
            candidates.append(candidate)
        else:
            reasons.append(
                f"{useful:.2f} of the work that the SMs do is needed, expected at least "
                f"{least:.2f}, which is half of the best config's"
            )
    return Plan(generated, _counted(reasons), tuple(candidates))


def _counted(reasons: Sequence[str]) -> tuple[Pruned, ...]:
    """Counts reasons that differ only in their numbers as one rule, the most frequent first."""
    rules = [_NUMBER.sub("#", reason) for reason in reasons]
    examples = dict(zip(reversed(rules), reversed(reasons), strict=True))
    counts = Counter(rules).most_common()
    return tuple(Pruned(rule, examples[rule], count) for rule, count in counts)


def _rated(
    target: TuneTarget, space: Space[Any], config: Any, workload: Workload, machine: Machine | None
) -> tuple[Candidate, float]:
    """Returns a config as a candidate, and the fraction of the SMs' work that is useful."""
    footprint = space.footprint(config)
    predicted_us, useful = by_interpreter(footprint, workload), 1.0
    if machine is not None:
        prediction = cost_model.predict(footprint, workload, machine)
        predicted_us, useful = prediction.us, prediction.wave_efficiency
    candidate = Candidate(
        target,
        config,
        text=to_text(config),
        compile_key=to_text(space.compile_key(config)),
        footprint=footprint,
        predicted_us=predicted_us,
        own=config == space.own,
    )
    return candidate, useful


def check(target: TuneTarget, workload: Workload, gpu: Gpu) -> None:
    """Raises ValueError for a kernel that does not run on a GPU, or does not support a dtype or an
    epilogue; ImportError where its DSL is missing.
    """
    check_epilogue(target, workload.epilogue)
    check_grouping(target, workload.grouping)
    if target == HOPPER_GROUPED and gpu.arch != 90:
        where = f"{gpu.name} is sm_{gpu.arch}" if gpu.arch else "was given the CPU"
        raise ValueError(f"kernel {target.name!r} needs sm_90, but {where}")
    if target == HOPPER_GROUPED and workload.dtype not in ("bfloat16", "float16"):
        raise ValueError(
            f"kernel {target.name!r} needs operands of dtype bfloat16 or float16, but was given "
            f"{workload.dtype}"
        )
    if registered(target.name) != target:
        return
    record = registry.find(target.name)
    name = f"kernel {target.name!r}"
    if gpu.arch == 0:
        if record.dsl != "triton":
            raise ValueError(
                f"{name} needs an NVIDIA GPU, but was given the CPU: only portable runs there, in "
                "Triton's interpreter"
            )
    elif reason := registry.arch_reason(record, gpu.arch, gpu.name):
        raise ValueError(f"{name} {reason}")
    if workload.operand_dtype not in record.dtypes:
        raise ValueError(
            f"{name} needs operands of dtype {' or '.join(record.dtypes)}, but was given "
            f"{workload.operand_dtype}"
        )


def check_epilogue(target: TuneTarget, epilogue: str) -> None:
    """Raises ValueError for a kernel without epilogues where one is requested, ImportError where
    its DSL is missing.
    """
    if epilogue and not _has(target, "EPILOGUES"):
        raise ValueError(
            f"kernel {target.name!r} has no epilogue besides alpha and C, but was given {epilogue}"
        )


def check_grouping(target: TuneTarget, grouping: str) -> None:
    """Raises ValueError for a kernel of groups where there are none, or one of single products
    where there are; ImportError where its DSL is missing.
    """
    is_own = target == HOPPER_GROUPED or registered(target.name) == target
    takes_groups = target == HOPPER_GROUPED if is_own else _has(target, "GROUPED")
    if grouping and not takes_groups:
        raise ValueError(
            f"kernel {target.name!r} multiplies no groups, but was given groups {grouping}"
        )
    if takes_groups and not grouping:
        raise ValueError(f"kernel {target.name!r} multiplies groups, but was given one product")


def with_epilogues(kernels: Sequence[str]) -> list[str]:
    """Returns those of these kernels that compute an epilogue. Raises ImportError where a DSL is
    missing.
    """
    return [kernel for kernel in kernels if _has(target_of(kernel), "EPILOGUES")]


def _has(target: TuneTarget, ability: str) -> bool:
    return bool(getattr(target.load(), ability, False))
