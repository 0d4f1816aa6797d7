"""A kernel of groups for sweeps without a GPU: products of single groups by torch, and configs that
are wrong, refused, or leave a group out.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outblas.base.space import Space
from outblas.call import grouped
from outblas.call.grouped import NO_TENSORS, GroupedProblem
from outblas.torch_ops.grouped_mm import by_torch
from support.faulty_kernel import space_of

GROUPED = True
FAULTS = ("wrong", "refuse", "leave-out")


@dataclass(frozen=True)
class Config:
    """`number` tells apart configs that are otherwise equal; `fault` is one of `FAULTS` or ""."""

    number: int = 0
    fault: str = ""


def unsupported(problem: GroupedProblem, config: Config) -> str | None:
    return f"fault is {config.fault}" if config.fault == "refuse" else None


def plan(problem: GroupedProblem, config: Config) -> Callable[..., None]:
    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, offs: torch.Tensor) -> None:
        if (a.stride(), b.stride(), out.stride()) != (problem.a, problem.b, problem.out):
            raise ValueError("the tensors lie otherwise than was planned for")
        found = torch.empty_like(out, dtype=torch.float32)
        checked = grouped.check(a.float(), b.float(), offs, NO_TENSORS, "", torch.float32)
        by_torch(checked, a.float(), b.float(), offs, found, NO_TENSORS, "")
        if config.fault == "wrong":
            found[-1, ..., -1] += 1
        if config.fault == "leave-out":
            found = found[:-1]
        out[: found.shape[0]].copy_(found)

    return launch


def precompile(problem: GroupedProblem, config: Config, arch: int) -> None: ...


def space(problem: GroupedProblem, machine: object) -> Space[Config]:
    return space_of(Config(), {"number": (0, 1, 2)}, [Config(fault=fault) for fault in FAULTS])
