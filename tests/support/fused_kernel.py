"""A kernel with epilogues for sweeps without a GPU: torch's product and steps, and configs that are
wrong without an epilogue, wrong with one, or refused with one.

Whoever compiles one ahead notes the epilogue of its problem, in words, in the file FUSED_LOG.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from outblas.base.space import Space
from outblas.call.epilogue import NONE, apply
from outblas.call.problem import Problem
from support.faulty_kernel import space_of

EPILOGUES = True
FAULTS = ("wrong", "wrong-epilogue", "silent-epilogue", "refuse-epilogue")


@dataclass(frozen=True)
class Config:
    """`number` tells apart configs that are otherwise equal; `fault` is one of `FAULTS` or ""."""

    number: int = 0
    fault: str = ""


def unsupported(problem: Problem, config: Config | None = None) -> str | None:
    if config and config.fault == "refuse-epilogue" and problem.epilogue != NONE:
        return f"fault is {config.fault}, expected none with {problem.epilogue}"
    return None


def plan(problem: Problem, config: Config | None = None) -> Callable[..., None]:
    fault = (config or Config()).fault
    activation = problem.epilogue.activation

    def launch(
        a: torch.Tensor,
        b: torch.Tensor,
        c: None,
        out: torch.Tensor,
        alpha: float,
        beta: float,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        aux: None = None,
    ) -> None:
        if (a.stride(), b.stride()) != (problem.a, problem.b):
            raise ValueError("the operands lie otherwise than was planned for")
        if problem.epilogue != NONE and fault == "silent-epilogue":
            return
        x = a.float() @ b.float()
        if bias is not None:
            x += bias
        y = apply(x, activation, None if residual is None else residual.float())
        if fault == ("wrong" if problem.epilogue == NONE else "wrong-epilogue"):
            y[-1, -1] += 1
        out.copy_(y)

    return launch


def precompile(problem: Problem, config: Config, arch: int) -> None:
    with open(os.environ["FUSED_LOG"], "a") as log:
        log.write(f"{problem.epilogue}\n")


def space(problem: Problem, machine: object) -> Space[Config]:
    return space_of(Config(), {"number": (0, 1, 2)}, [Config(fault=fault) for fault in FAULTS])
