"""From a space to the configs worth compiling: what each rule takes away, and the rest in the
model's order.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core import registry
from ...core.artifact import example
from ...core.configs import to_text
from ...core.machines import Machine
from ...core.problem import Problem
from ...core.space import Footprint, Space
from ..store.records import Gpu, Workload
from . import cost_model
from .gpu import machine as machine_of
from .target import Subject, registered

# of the best config's share of useful work, below which a config must be the fastest by the model
EFFICIENCY = 0.5
_NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True)
class Candidate:
    """A config worth measuring: its text, that of the config whose compile it shares, what it asks
    for, the model's opinion, and whether it is what the kernel takes if none is given.
    """

    subject: Subject
    config: Any
    text: str
    compile_key: str
    footprint: Footprint
    predicted_us: float
    own: bool = False

    @property
    def label(self) -> str:
        return f"{self.subject.name}[{self.text}]"


@dataclass(frozen=True)
class Pruned:
    """How many configs a rule took away; `example` is its reason for one of them."""

    rule: str
    example: str
    count: int


@dataclass(frozen=True)
class Plan:
    """`ranked`: best first. `left_out` configs are valid, and beyond the number of trials asked
    for.
    """

    generated: int
    pruned: tuple[Pruned, ...]
    ranked: tuple[Candidate, ...]
    left_out: int = 0

    @property
    def valid(self) -> int:
        return len(self.ranked) + self.left_out


# Times a candidate's footprint at a workload on a machine, in µs: lower is better, only the order
# counts.
Ranker = Callable[[Footprint, Workload, Machine], float]


def by_model(f: Footprint, workload: Workload, machine: Machine) -> float:
    return cost_model.predict(f, workload, machine).us


def problem(workload: Workload) -> Problem:
    """The workload as kernels see it, without data."""
    dtype, out_dtype = (
        getattr(torch, name) for name in (workload.operand_dtype, workload.out_dtype)
    )
    return example(dtype, out_dtype, workload.layout, workload.shape, tf32=workload.dtype == "tf32")


def plan(
    subjects: Sequence[Subject],
    workload: Workload,
    gpu: Gpu,
    *,
    trials: int | None = None,
    ranker: Ranker = by_model,
) -> Plan:
    """What a sweep of these kernels would try, the best first: `trials` of each, its own config in
    any case.

    Raises ValueError where a kernel cannot take the dtype or the GPU, ImportError where its DSL is
    missing.
    """
    machine, given = machine_of(gpu), problem(workload)
    generated, reasons, examples = 0, Counter[str](), dict[str, str]()
    kept: list[tuple[Candidate, float]] = []

    def drop(reason: str) -> None:
        rule = _NUMBER.sub("#", reason)
        reasons[rule] += 1
        examples.setdefault(rule, reason)

    for subject in subjects:
        check(subject, workload, gpu)
        space: Space[Any] = subject.load().space(given, machine)
        for config in space.configs():
            generated += 1
            if reason := space.invalid_reason(config):
                drop(reason)
                continue
            f = space.footprint(config)
            us, efficiency = 0.0, 1.0
            if machine is not None:
                us, efficiency = (
                    ranker(f, workload, machine),
                    cost_model.wave_efficiency(f, workload, machine),
                )
            text, shared = to_text(config), to_text(space.compile_key(config))
            kept.append(
                (
                    Candidate(subject, config, text, shared, f, us, own=config == space.own),
                    efficiency,
                )
            )
    best = max((efficiency for _, efficiency in kept), default=0.0)
    wasteful = EFFICIENCY * best
    quickest = min(
        (candidate.predicted_us for candidate, efficiency in kept if efficiency >= wasteful),
        default=0.0,
    )
    ranked = []
    for candidate, efficiency in kept:
        if efficiency < wasteful and candidate.predicted_us >= quickest and not candidate.own:
            drop(
                f"{efficiency:.2f} of the SMs' work is wanted, expected {EFFICIENCY * best:.2f}: "
                "half of the best's"
            )
        else:
            ranked.append(candidate)
    ranked.sort(key=lambda candidate: candidate.predicted_us)
    places = Counter[str]()
    chosen = []
    for candidate in ranked:
        places[candidate.subject.name] += 1
        if trials is None or places[candidate.subject.name] <= trials or candidate.own:
            chosen.append(candidate)
    pruned = (Pruned(rule, examples[rule], count) for rule, count in reasons.most_common())
    return Plan(generated, tuple(pruned), tuple(chosen), len(ranked) - len(chosen))


def check(subject: Subject, workload: Workload, gpu: Gpu) -> None:
    """Raises ValueError for a kernel that does not run on a GPU or take a dtype."""
    if registered(subject.name) != subject:
        return
    record = registry.find(subject.name)
    name = f"kernel {subject.name!r}"
    if gpu.arch == 0:
        if record.dsl != "triton":
            raise ValueError(
                f"{name} needs an NVIDIA GPU, and was given the CPU: portable alone is interpreted "
                "there"
            )
    elif gpu.arch < record.min_arch or (record.max_arch is not None and gpu.arch > record.max_arch):
        upper = "or newer" if record.max_arch is None else f"to sm_{record.max_arch}"
        raise ValueError(
            f"{name} needs sm_{record.min_arch} {upper}, and {gpu.name} is sm_{gpu.arch}"
        )
    if workload.operand_dtype not in record.dtypes:
        raise ValueError(
            f"{name} needs operands of dtype {' or '.join(record.dtypes)}, and was given "
            f"{workload.operand_dtype}"
        )
