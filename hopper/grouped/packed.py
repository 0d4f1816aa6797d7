"""What `hopper.grouped` compiles for a product on a GPU that need not be there: for packs."""

from dataclasses import replace

from ...core.grouped import GroupedProblem
from ...core.machines import Machine
from ..core import compile
from ..core.config import HopperConfig
from ..gemm import heuristic
from . import layouts
from .host import config_for, gathers_before
from .variant import GroupedVariant, compile_variant, variant_of


def pack_problem(problem: GroupedProblem) -> GroupedProblem:
    """Returns the product that a call launches: one whose rows were gathered into memory before,
    where `host.run` does so.
    """
    if not gathers_before(problem):
        return problem
    vector = 8 if problem.scales is None else 16
    row = -(-problem.K // vector) * vector
    alignment = (16, *problem.alignment[1:])
    plain = replace(problem, a=(row, 1), gathers=False, rows_of_a=problem.M, alignment=alignment)
    if problem.scales is None:
        return plain
    scales = problem.scales
    by_columns = replace(scales, a=(0, 1, problem.M), alignment=(16, scales.alignment[1]))
    return replace(plain, scales=by_columns)


def pack_variant(
    problem: GroupedProblem, config: HopperConfig | None, machine: Machine
) -> GroupedVariant:
    """Returns the kernel that a supported product launches on a GPU. `config`: None for the
    kernel's own choice there.
    """
    problem = layouts.in_words(problem)
    return variant_of(problem, config or config_for(problem, heuristic.rates(machine)))


def keep_variant(made: GroupedVariant) -> dict[str, object]:
    """Compiles a kernel onto disk, without a GPU, and returns the facts that it is found by."""
    compile.keep(made, lambda: compile_variant(made))
    return made.cache_key_fields
