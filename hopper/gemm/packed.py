"""What `hopper.gemm` compiles for a product on a GPU that need not be there: for packs."""

from collections.abc import Callable
from typing import Any

from ...core.machines import Machine
from ...core.problem import Problem
from ..core import compile
from ..core.config import HopperConfig
from . import gpc_placement, heuristic, smid_probe
from .compile import compile_variant
from .variant import Rung, Variant, example_variant

Compiled = Variant | smid_probe.Variant


def variants(
    rung: Rung, problem: Problem, config: HopperConfig | None, machine: Machine
) -> tuple[Compiled, ...]:
    """Returns the kernels that a supported problem launches on a GPU: the product, and the probes
    that find out where its CTAs run. `config`: None for the kernel's own choice there.
    """
    if config is None:
        config = heuristic.config(problem, heuristic.rates(machine), rung.config)
    product = example_variant(rung, problem, config, machine.sms)
    if not (product.traits.ordered and product.traits.single_wave):
        return (product,)
    sizes = sorted({1, gpc_placement.CLUSTER, config.cluster})
    return (product, *map(smid_probe.Variant, sizes))


def computed(
    rung: Rung, unsupported: Callable[[Problem], str | None], problem: Problem, machine: Machine
) -> Problem:
    """Returns the problem that a call leaves to the kernel on a GPU: where the kernel does not
    store a C in fp8 with scales, as in `host.quantizes`, that with a C in fp32.
    """
    if problem.epilogue.scale_out is None:
        return problem
    rates = heuristic.rates(machine)
    if unsupported(problem) is None and heuristic.quantizes(problem, rates, rung.config):
        return problem
    return heuristic.unquantized(problem)


def keep(rung: Rung, variant: Compiled) -> dict[str, object]:
    """Compiles a kernel onto disk, without a GPU, and returns the facts that it is found by."""

    def build() -> Any:
        if isinstance(variant, smid_probe.Variant):
            return smid_probe.compile_variant(variant)
        return compile_variant(rung.gemm, variant)

    compile.keep(variant, build)
    return variant.cache_key_fields
