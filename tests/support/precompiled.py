"""Compiles hopper.gemm ahead of its calls, in processes: hundreds of kernels are minutes of one
core.
"""

import functools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from outblas.autotune import automatic
from outblas.base import registry
from outblas.base.configs import from_text, to_text
from outblas.base.limits import default_workers
from outblas.call import default_kernel
from outblas.call.problem import Problem, problem
from outblas.hopper import gemm
from outblas.hopper.gemm import heuristic
from outblas.hopper.gemm.variant import example_variant
from outblas.hopper.parts.config import HopperConfig
from outblas.verify.call import prepare
from outblas.verify.cases import Case

KERNEL = "hopper.gemm"
SMS = (
    torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 132
)

Asked = tuple[Problem, HopperConfig | None]  # a call; None: the rule's config
Ahead = Callable[[Iterable[Asked]], int]


@functools.cache
def of_case(case: Case) -> Problem:
    """What `matmul` or `addmm` makes of a case on the first GPU; without one, as its addresses lie
    on the CPU.
    """
    call = prepare(
        case, "cuda" if torch.cuda.is_available() else "cpu", *3 * [lambda cells, generator: None]
    )
    c = call.c.view if call.c and case.beta else None
    scaled = c is not None or (call.c is not None and case.alpha != 1)
    made = problem(call.a.view, call.b.view, call.out.view, c, scaled=scaled)
    return replace(made, device=torch.device("cuda", 0))


def by_rule(problem: Problem) -> HopperConfig:
    """What the kernel takes if no config is given."""
    return heuristic.config(problem, heuristic.Rates(SMS))


def by_default(problem: Problem) -> HopperConfig | None:
    """What a call takes that names no kernel; None if that is another kernel."""
    for kernel, text in () if problem.batch else automatic.choices(problem):
        module = registry.load(kernel)
        config = from_text(module.Config, text) if text or kernel != KERNEL else by_rule(problem)
        if module.unsupported(problem, config) is None:
            return config if kernel == KERNEL else None
    return by_rule(problem) if default_kernel.by_rule(problem, 90, SMS) == KERNEL else None


def variant(asked: Asked) -> Any:
    """The compile that serves a call: its problem, and its config or None for the rule's."""
    given, config = asked
    return example_variant(given, config or by_rule(given), SMS)


@contextmanager
def compilers() -> Iterator[Ahead]:
    """A function that compiles to the cache on disk what calls need, each variant once, and returns
    how many it had.
    """
    beside = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))  # of which few compile ahead
    workers = max(1, min(default_workers(), 2 * default_workers() // beside))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start) as pool:

        def ahead(calls: Iterable[Asked]) -> int:
            distinct = {variant(call): call for call in calls}
            for future in [
                pool.submit(_compile, given, config or by_rule(given))
                for given, config in distinct.values()
            ]:
                future.result()
            return len(distinct)

        yield ahead


def _start():
    """In a process that compiles: no GPU, and one core."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)


def _compile(problem, config):
    try:
        gemm.precompile(problem, config, 90)
    except Exception as error:  # may hold what cannot be sent
        raise RuntimeError(
            f"{to_text(config)} at {problem}: {type(error).__name__}: {error}"
        ) from None
