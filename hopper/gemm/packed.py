"""What `hopper.gemm` and `hopper.grouped` compile for a GPU that need not be there: for packs."""

from typing import Any

from outblas.base.machines import Machine
from outblas.call.grouped import GroupedProblem
from outblas.call.problem import Problem
from outblas.hopper.gemm import gpc_placement, group_layouts, heuristic, smid_probe
from outblas.hopper.gemm.group_rule import config_for
from outblas.hopper.gemm.group_variant import variant_of as group_variant_of
from outblas.hopper.gemm.host import unsupported
from outblas.hopper.gemm.on_demand import compile_variant
from outblas.hopper.gemm.variant import Variant, example_variant
from outblas.hopper.parts import compile
from outblas.hopper.parts.config import HopperConfig

Compiled = Variant | smid_probe.ProbeVariant


def variants(
    problem: Problem, config: HopperConfig | None, machine: Machine
) -> tuple[Compiled, ...]:
    """Returns the kernels that a supported problem launches on a GPU: the product, and the probes
    that find out where its CTAs run. `config`: None for the kernel's own choice there.
    """
    if config is None:
        config = heuristic.config(problem, heuristic.rates(machine))
    product = example_variant(problem, config, machine.sms)
    if not (product.traits.ordered and product.traits.single_wave):
        return (product,)
    sizes = sorted({1, gpc_placement.CLUSTER, config.cluster})
    return (product, *map(smid_probe.ProbeVariant, sizes))


def computed(problem: Problem, machine: Machine) -> Problem:
    """Returns the problem that a call leaves to the kernel on a GPU: where the kernel does not
    store a C in fp8 with scales, as in `host.quantizes`, that with a C in fp32.
    """
    if problem.epilogue.scale_out is None:
        return problem
    rates = heuristic.rates(machine)
    if unsupported(problem) is None and heuristic.quantizes(problem, rates):
        return problem
    return heuristic.unquantized(problem)


def group_variant_on(
    problem: GroupedProblem, config: HopperConfig | None, machine: Machine
) -> Variant:
    """Returns the kernel that a supported product launches on a GPU. `config`: None for the
    kernel's own choice there.
    """
    problem = group_layouts.in_words(problem)
    return group_variant_of(problem, config or config_for(problem, heuristic.rates(machine)))


def keep(variant: Compiled) -> dict[str, object]:
    """Compiles a kernel onto disk, without a GPU, and returns the facts that it is found by."""

    def build() -> Any:
        if isinstance(variant, smid_probe.ProbeVariant):
            return smid_probe.compile_variant(variant)
        return compile_variant(variant)

    compile.keep(variant, build)
    return variant.cache_key_fields
