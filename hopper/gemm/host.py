"""The host side of `hopper.gemm`: supported problems, planning a launch, compiling ahead,
inspection.

A plan is a chain of frozen values:

    Problem → CanonicalProblem → KernelTraits (in a Variant) → TileSchedule → Launcher

A `GemmLayer` makes it: what the number of rows does not change once, the others for each number.
"""

import functools
import math
from dataclasses import replace
from typing import Any

from outblas.base.cuda_graphs import capturing, not_ready
from outblas.call import fp8
from outblas.call.artifact import Artifact
from outblas.call.problem import Launch, Problem
from outblas.call.sm_carveout import usable
from outblas.hopper.gemm import (
    gpc_placement,
    heuristic,
    operand_copies,
    packed_choice,
    rule_cycles,
)
from outblas.hopper.gemm.canonical import ROWS, canonicalize, orient
from outblas.hopper.gemm.config import Config, invalid_reason
from outblas.hopper.gemm.launcher import Launcher, launcher_of
from outblas.hopper.gemm.on_demand import compile_variant, shared_memory
from outblas.hopper.gemm.rule_cycles import device_rates
from outblas.hopper.gemm.schedule import tile_grid, tile_schedule
from outblas.hopper.gemm.variant import (
    WaveTraits,
    example_variant,
    variant_of,
    varies_with_rows,
    waves_of,
)
from outblas.hopper.parts import bounds, compile, tile_order
from outblas.hopper.parts.config import HopperConfig
from outblas.hopper.parts.config_limits import (
    block_scaled_reason,
    gated_reason,
    promoted_reason,
    quantized_reason,
)

MOST_SCALE_STRIDE = 2**29  # elements of 4 bytes, whose bytes fit 32 bits with a sign


def unsupported(problem: Problem, config: HopperConfig | None = None) -> str | None:
    """Returns why the kernel cannot compute this problem, or None. The message says what is needed
    and what was given. All strides are supported.
    """
    if config is not None and (reason := invalid_reason(config)):
        return f"config: {reason}"
    if reason := bounds.extents(problem):
        return reason
    if problem.epilogue.gated and operand_copies.aligned(problem).b[-1] == 1 and problem.N % 8:
        return (
            "it supports gated pairs in multiples of 8 columns where b's rows are contiguous, "
            f"but was given {problem.N}"
        )
    if reason := far_scales_reason(problem) or quantized_problem_reason(problem):
        return reason
    return None if config is None else config_unsupported_reason(problem, config)


def far_scales_reason(problem: Problem) -> str | None:
    """Returns why the kernel cannot read the scales of blocks of K, or None. From one block to the
    next it steps by bytes that 32 bits hold.
    """
    if not problem.formats or not fp8.formats(problem.formats).block_a:
        return None
    for name in ("scale_a", "scale_b"):
        view = getattr(problem.epilogue, name)
        if max(view.strides) >= MOST_SCALE_STRIDE:
            return (
                f"it supports strides of {name} below {MOST_SCALE_STRIDE}, but was given "
                f"{view.strides}"
            )
    return None


def quantized_problem_reason(problem: Problem) -> str | None:
    """Returns why the kernel cannot store C in fp8 with scales, or None."""
    if problem.epilogue.scale_out is None:
        return None
    if problem.epilogue.residual:
        return "it supports no residual of outputs in fp8, but was given one"
    row, column = problem.out[-2:]
    in_granules = row * problem.out_dtype.itemsize % 16 == 0 or problem.M == 1
    is_packed = column == 1 and in_granules and problem.alignment[2] >= 16
    if problem.N % fp8.BLOCK or problem.batch or not is_packed:
        return (
            f"it supports outputs in fp8 that are contiguous matrices of multiples of {fp8.BLOCK} "
            f"columns, but was given {problem.N}, batch {problem.batch} and strides {problem.out}"
        )
    return None


def config_unsupported_reason(problem: Problem, config: HopperConfig) -> str | None:
    """Returns why this problem cannot be computed with a config that is valid for other problems,
    or None.
    """
    in_halves = heuristic.sums_halves(problem)
    if problem.epilogue.gated and (reason := gated_reason(config, in_halves)):
        return f"config: {reason}"
    if reason := fp8_reason(problem, config):
        return f"config: {reason}"
    is_quantized = problem.epilogue.scale_out is not None
    if is_quantized and (reason := quantized_reason(config, problem.epilogue.gated)):
        return f"config: {reason}"
    if problem.batch_invariant and (config.split or config.cluster_k > 1 or config.k_serpentine):
        wanted = "split_k and cluster_k 1, stream_k and k_serpentine False"
        return f"batch_invariant needs one order of K ({wanted}), but the config has another"
    k_tiles = -(-problem.K // config.tile_k)
    if k_tiles < config.cluster_k:
        return (
            f"cluster_k is {config.cluster_k}, but K = {problem.K} has fewer k tiles of "
            f"{config.tile_k}"
        )
    return bounds.tiles(orient(problem, config)[0], config)


def fp8_reason(problem: Problem, config: HopperConfig) -> str | None:
    """Returns why this config cannot compute a product of fp8 operands, or None."""
    if not problem.formats:
        return None
    formats = fp8.formats(orient(problem, config)[0].formats)
    if formats.promoted and (reason := promoted_reason(config, problem.epilogue.gated)):
        return reason
    if formats.block_a:
        return block_scaled_reason(config, formats.block_b)
    return None


def plan(problem: Problem, config: HopperConfig | None = None) -> Launch:
    """Compiles or loads the kernel for a supported problem, and returns its launch; where there is
    one for every number of rows, its `at_rows` returns them. Raises ValueError where the default
    config does not suit the problem.
    """
    if config is None:
        config = own_config(problem)
    if problem.weights_ready and problem.M <= rule_cycles.FEW:
        config = replace(config, pdl=True, weights_ready=True)
    if problem.sm_carveout:
        config = tile_order.within(problem.device, config, problem.sm_carveout)
    layer = GemmLayer(problem, config)
    launch = layer.launch(problem.M)
    if layer.any_rows:
        vars(launch)["at_rows"] = layer.launch
    return launch


class GemmLayer:
    """A product and a config, whose launches differ in the number of rows.

    `any_rows`: whether there is a launch for every number from two on. A product of one row, with a
    batch, with copies of operands, with a C that is not row-major or with scales of blocks has one
    for its own only.
    """

    def __init__(self, problem: Problem, config: HopperConfig) -> None:
        self.canonical = canonicalize(problem, config)
        if self.canonical.copies[1]:  # a call writes the B that its kernel reads
            config = replace(config, weights_ready=False)
        self.config = config
        self.resident = tile_order.clusters(problem.device, config.sms, config.cluster)
        blocks = bool(problem.formats) and fp8.formats(problem.formats).block_a
        is_alone = problem.M == 1 or problem.batch or any(self.canonical.copies) or blocks
        self.any_rows = not is_alone and problem.out[-1] == 1
        self._granule = 16 if varies_with_rows(problem) else 1
        self._launchers: dict[tuple[int, WaveTraits], Launcher] = {}

    def launch(self, rows: int) -> Launch:
        """Compiles or loads the kernel for a number of rows, and returns its launch. Raises
        ValueError for more rows than the config supports, and RuntimeError while a CUDA graph is
        captured and the kernel is not loaded yet.
        """
        config, problem = self.config, self.canonical.launch
        if rows != self.canonical.given.M:
            problem = self.canonical.launch_of(rows)
            if reason := bounds.tiles(problem, config):
                raise ValueError(f"kernel 'hopper.gemm': {reason}")
        grid = tile_grid(problem, config)
        key = math.gcd(rows, self._granule), waves_of(grid, config, self.resident)
        launcher = self._launchers.get(key)
        if launcher is None:
            launcher = self._launchers[key] = self._launcher(rows, key[1])
        schedule = tile_schedule(problem, config, grid, launcher.variant.traits, self.resident)
        if schedule.placement is None:
            return launcher.bind(rows, schedule, schedule.table)
        bind = functools.partial(launcher.bind, rows, schedule)
        return gpc_placement.watched(bind, schedule.placement)

    def _launcher(self, rows: int, waves: WaveTraits) -> Launcher:
        """Returns the launcher of the kernel for a number of rows and those that share it."""
        canonical = self.canonical.with_rows(rows) if self.any_rows else self.canonical
        variant = variant_of(canonical.launch, canonical.transposed, self.config, waves)
        if capturing(canonical.given.device) and not compile.is_loaded(variant):
            raise not_ready()
        run = compile.load(variant, lambda: compile_variant(variant))
        return launcher_of(run, canonical.with_rows(ROWS) if self.any_rows else canonical, variant)


def own_config(problem: Problem) -> HopperConfig:
    """Returns the config that the kernel takes by default. Raises ValueError where it does not suit
    the problem.
    """
    config = packed_choice.config(problem, _usable_rates(problem))
    if reason := config_unsupported_reason(problem, config):
        raise ValueError(f"kernel 'hopper.gemm': {reason}")
    return config


def packed_plan(problem: Problem) -> Launch | None:
    """Returns the launch of a kernel that a pack has, for a supported problem, None without one."""
    config = packed_choice.packed_config(problem, _usable_rates(problem))
    if config is None or config_unsupported_reason(problem, config):
        return None
    return plan(problem, config)


def _usable_rates(problem: Problem) -> rule_cycles.Rates:
    """Returns the rates of a problem's GPU, with the SMs that it may use."""
    rates = device_rates(problem.device)
    if problem.sm_carveout:
        rates = rates._replace(sms=usable(rates.sms, 0, problem.sm_carveout))
    return rates


def quantizes(problem: Problem) -> bool:
    """Returns whether the kernel should store C in fp8 with scales, as this problem has it, rather
    than in fp32 for another kernel to quantize.
    """
    if 0 in (problem.M, problem.N, problem.K) or unsupported(problem):
        return False
    return heuristic.quantizes(problem, device_rates(problem.device))


def precompile(problem: Problem, config: HopperConfig, arch: int) -> None:
    """Compiles onto disk what `plan` would load for a supported problem. Needs no GPU, and loads
    nothing onto one.
    """
    del arch
    variant = example_variant(problem, config)
    compile.keep(variant, lambda: compile_variant(variant))


def artifact(config: HopperConfig | None = None, **requested: Any) -> Artifact:
    """Compiles what `plan` would launch for aligned operands and a row-major output on a GPU of 132
    SMs; needs no GPU. The arguments and errors are those of `hopper.parts.compile.artifact`.
    """
    return compile.artifact(
        "hopper.gemm",
        config or Config(),
        unsupported,
        example_variant,
        compile_variant,
        shared_memory,
        **requested,
    )
