"""The host side of `hopper.grouped`: what it supports, and how it launches."""

import functools
from dataclasses import replace
from typing import Any

import torch

from outblas.base import configs
from outblas.base.cuda_graphs import capturing, not_ready
from outblas.call import hooks
from outblas.call.artifact import Artifact
from outblas.call.epilogue import View
from outblas.call.grouped import (
    GATHERING_COLUMNS,
    NO_TENSORS,
    GroupedProblem,
    GroupedTensors,
)
from outblas.call.sm_carveout import reserved
from outblas.hopper.gemm import group_layouts as layouts
from outblas.hopper.gemm.config import Config
from outblas.hopper.gemm.group_rule import config_for as config_for
from outblas.hopper.gemm.group_variant import variant_of
from outblas.hopper.gemm.on_demand import compile_variant, shared_memory
from outblas.hopper.gemm.rule_cycles import Rates, device_rates
from outblas.hopper.gemm.traits import CAPACITIES
from outblas.hopper.parts import bounds, compile, tile_order
from outblas.hopper.parts.config import HopperConfig

Tensor = torch.Tensor

MOST_GROUPS = CAPACITIES[-1]  # whose schedule fits beside the stages
_DTYPES = (torch.bfloat16, torch.float16)


@functools.lru_cache(maxsize=4096)  # as `launch`
def unsupported(problem: GroupedProblem) -> str | None:
    """Returns why the kernel cannot take a product on an sm_90 GPU; None if it can."""
    if problem.scales is not None:
        if reason := layouts.words_reason(problem):
            return reason
        problem = layouts.in_words(problem)
    if problem.dtype not in _DTYPES:
        return f"it supports bfloat16 and float16, but was given {problem.dtype}"
    if problem.capacity and problem.zero_tail:
        return "it sets no rows to zero where groups have places of their own"
    if layouts.has_tail(problem) and _beside_the_product(problem):
        return (
            "it sets rows behind the last group to zero only without an epilogue and a scatter, "
            f"but was given {_beside_the_product(problem)}"
        )
    most = MOST_GROUPS - layouts.has_tail(problem)
    if problem.groups > most:
        return f"it supports {most} groups, but was given {problem.groups}"
    rows = layouts.rows_of_a(problem)
    extents = problem.M, problem.N, problem.K, rows
    if problem.K < 1 or max(extents) > bounds.LARGEST:
        return (
            f"it supports extents of 1 to {bounds.LARGEST}, but was given "
            f"{problem.M}x{problem.N}x{problem.K}"
        )
    if problem.gathers and (rows < 1 or rows * problem.a[0] // 8 >= 2**31):
        return (
            "it gathers from 1 or more rows, which span less than 2**34 elements, but was given "
            f"{rows} rows with strides {problem.a}"
        )
    return _unusable_reason(problem)


def _beside_the_product(problem: GroupedProblem) -> str:
    """Returns what a call asks for besides the products, or ""."""
    scatter = "scatter_index" if problem.scatters else ""
    return ", ".join(text for text in (str(problem.epilogue), scatter) if text)


def _unusable_reason(problem: GroupedProblem) -> str | None:
    """Returns why TMA cannot move an operand or the result; None if it can."""
    operands = (problem.a, problem.alignment[0]), (problem.b, problem.alignment[1])
    found = layouts.matrix_strides(problem)
    for name, (strides, alignment), usable in zip(problem.names, operands, found, strict=True):
        outer_fits = all(stride > 0 and stride % 8 == 0 for stride in strides[:-2])
        if alignment < 16 or usable is None or not outer_fits:
            given = strides[:-2] + strides[:-3:-1] if problem.exchanged else strides
            return (
                "it needs operands at multiples of 16 bytes, contiguous in a dimension that is not "
                "divided among groups, with other strides that are positive multiples of 8, but "
                f"{name} has strides {given} at an address that is a multiple of {alignment}"
            )
    return _unusable_result(problem) or _unusable_halves(problem)


def _unusable_result(problem: GroupedProblem) -> str | None:
    """Returns why rows of the result, or of x, cannot be stored; None if they can. Ragged columns
    are stored element by element, because they begin at any address.
    """
    if problem.exchanged:
        if problem.out[0] == 1:
            return None
        return f"it needs contiguous rows of the result, but was given strides {problem.out[::-1]}"
    stored = {"the result": View(problem.out, problem.alignment[2])}
    if problem.epilogue.aux is not None:
        stored["aux"] = problem.epilogue.aux
    for name, view in stored.items():
        granule = layouts.granule(problem)
        if not layouts.in_granules(problem, view) or problem.columns % granule:
            return (
                f"it needs rows of {name} that begin and end at multiples of 16 bytes, but was "
                f"given {problem.columns} columns with strides {view.strides}"
            )
    return None


def _unusable_halves(problem: GroupedProblem) -> str | None:
    """Returns why TMA cannot read both halves of gated pairs; None if it can."""
    _, strides = layouts.matrix_strides(problem)
    has_contiguous_rows = strides is not None and strides[1] == 1
    if problem.epilogue.gated and has_contiguous_rows and problem.columns % 8:
        return (
            "it needs halves of mat_b that begin at multiples of 16 bytes, but was given "
            f"{problem.N} contiguous columns for an activation that pairs them"
        )
    return None


def run(
    problem: GroupedProblem,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    offs: Tensor,
    tensors: GroupedTensors,
) -> None:
    """Computes a product that `unsupported` does not refuse.

    Raises RuntimeError while a CUDA graph is captured, if a kernel is needed for the first time.
    """
    if 0 in (problem.M, problem.N):
        return
    launched = gathered(problem)
    if launched is not problem:
        a, tensors = _gathered_tensors(launched, a, tensors)
    launch(launched, carveout=reserved())(a, b, out, offs, tensors)


def gathered(problem: GroupedProblem) -> GroupedProblem:
    """Returns the product that is launched: where rows are gathered into memory before the kernel
    multiplies them, one without an index.
    """
    if not problem.gathers or (problem.N <= GATHERING_COLUMNS and problem.scales is None):
        return problem
    vector = 8 if problem.scales is None else 16
    scales = problem.scales
    if scales is not None:  # by columns, as TMA loads them
        scales = replace(scales, a=(0, 1, problem.M), alignment=(16, scales.alignment[1]))
    return replace(
        problem,
        a=(-(-problem.K // vector) * vector, 1),
        gathers=False,
        rows_of_a=problem.M,
        alignment=(16, *problem.alignment[1:]),
        scales=scales,
    )


def _gathered_tensors(
    problem: GroupedProblem, a: Tensor, tensors: GroupedTensors
) -> tuple[Tensor, GroupedTensors]:
    """Returns A and the tensors of a product that `gathered` returns, in memory of their own."""
    assert tensors.a_index is not None
    chosen = tensors.a_index.clamp(0, a.shape[0] - 1)
    values = a if problem.scales is None else a.view(torch.uint8)
    rows = values.new_empty(problem.M, problem.a[0])[:, : problem.K]
    torch.index_select(values, 0, chosen, out=rows)
    tensors = tensors._replace(a_index=None)
    if tensors.scale_a is not None:
        scale_a = tensors.scale_a.t().index_select(1, chosen).t()
        tensors = tensors._replace(scale_a=scale_a)
    return rows.view(a.dtype), tensors


def artifact(problem: GroupedProblem, config: HopperConfig | None = None) -> Artifact:
    """Compiles what `launch` would launch for a supported product on an H100; needs no GPU. Raises
    ValueError for a product that is not supported.
    """
    if reason := unsupported(problem):
        raise ValueError(reason)
    problem = layouts.in_words(problem)
    config = config or config_for(problem, Rates())
    variant = variant_of(problem, config)
    return compile.artifact_of(
        "hopper.grouped",
        config,
        variant,
        functools.partial(compile_variant, variant),
        shared_memory(variant),
        problem,
        variant.layout,
    )


# As many shapes as a model with experts has, many times over.
@functools.lru_cache(maxsize=4096)
def launch(problem: GroupedProblem, config: HopperConfig | None = None, carveout: int = 0) -> Any:
    """Returns the function that launches the kernel for a supported product with a config, by
    default one that was tuned for it, else that of `config_for`. A product keeps the config
    that its first launch took. `carveout`: the SMs that are left to other kernels.
    """
    problem = layouts.in_words(problem)
    if config is None:
        text = hooks.tuner.get().grouped_config(problem)
        rates = device_rates(problem.device)
        config = configs.from_text(Config, text) if text else config_for(problem, rates)
    if carveout:
        config = tile_order.within(problem.device, config, carveout)
    variant = variant_of(problem, config)
    if capturing(problem.device) and not compile.is_loaded(variant):
        raise not_ready()
    compiled = compile.load(variant, lambda: compile_variant(variant))
    clusters = tile_order.clusters(problem.device, config.sms, config.cluster)
    strides_a, strides_b = layouts.matrix_strides(problem)
    assert strides_a is not None, "`unsupported` refuses other strides"
    assert strides_b is not None, "`unsupported` refuses other strides"
    shape_b, lead = (problem.K, problem.N), problem.b[:-2]
    whole_b = (problem.groups, *shape_b) if lead else shape_b
    of_words = problem.scales is not None

    def launch_kernel(
        a: Tensor, b: Tensor, out: Tensor, offs: Tensor, tensors: GroupedTensors = NO_TENSORS
    ) -> None:
        if of_words:
            a, b = a.view(torch.bfloat16), b.mT.view(torch.bfloat16).mT
        compiled(
            a.as_strided((layouts.rows_of_a(problem), problem.K), strides_a),
            b.as_strided(whole_b, (*lead, *strides_b)),
            out,
            offs,
            None,  # addend
            tensors.bias,
            tensors.residual,
            tensors.aux,
            tensors.scale_a,
            tensors.scale_b,
            None,  # scale_out
            tensors.scatter_index,
            tensors.scatter_weights,
            tensors.a_index,
            None,  # sums, counters
            None,
            1,  # partitions of K
            clusters,
            1.0,  # alpha, beta
            0.0,
        )

    return launch_kernel
