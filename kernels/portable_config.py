"""Configs of the portable kernel: their limits, the presets, and the cost model that picks one."""

import math
from dataclasses import dataclass, replace

import torch

from outblas.base.configs import to_text
from outblas.base.machines import Machine
from outblas.base.space import Axes, Footprint, LazySpace, Space
from outblas.call.problem import Problem
from outblas.call.tensor_memory import LINE
from outblas.device import l2
from outblas.device.grid import tiles

_LARGEST_BLOCK = 1024  # Triton's tensors hold at most 2**20 elements
_BARRIERS = 64  # bytes; tcgen05 waits on one
# The fraction of the tensor cores' rate that tiles of 256 columns reach if B is not stored by rows,
# measured on an H100.
WIDE_B = 0.75
# Assumed rows of a batch-invariant product, where one preset serves one row and thousands.
_TYPICAL_ROWS = 512
# fp32 registers per thread; with addresses and fragments, 256 would exceed the limit of 255.
_MAX_ACCUMULATORS = 128


@dataclass(frozen=True)
class PortableConfig:
    """The config of the kernel `portable`, which Triton compiles for any GPU.

    `invalid_reason` in this module says which combinations cannot be built.

    Attributes:
        block_m: Rows of C in the tile of a CTA: a power of two from 16 to 1024 elements.
        block_n: Columns of C in the tile of a CTA, likewise.
        block_k: Terms of K in a step, likewise.
        group_m: Rows of tiles that are walked together, column by column, so that neighbours in
            time share operands in L2.
        num_warps: Warps of a CTA: a power of two, at most 32.
        num_stages: The depth of Triton's software pipeline.

    Example:
        >>> import torch, outblas
        >>> from outblas.kernels.portable_config import PortableConfig
        >>> config = PortableConfig(block_m=32, block_n=32, block_k=32)
        >>> c = outblas.matmul(torch.ones(8, 8), torch.eye(8), kernel="portable", config=config)
        >>> c.sum()
        tensor(64.)
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    group_m: int = 8
    num_warps: int = 4
    num_stages: int = 3

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.num_warps

    @property
    def accumulators(self) -> int:
        """The float32 accumulators of a thread."""
        return self.block_m * self.block_n // self.threads

    @property
    def widened_operands(self) -> float:
        """The registers of a thread that one step of widened 16-bit operands takes, where FMA
        multiplies.
        """
        return 2 * math.sqrt(self.accumulators) * self.block_k

    def shared_memory(self, dtype: torch.dtype) -> int:
        """Compute the most shared memory that the kernel takes.

        That is barriers, and either the stages or a float32 tile of outputs before wide stores.

        Args:
            dtype: The dtype of the operands.

        Returns:
            Bytes of a CTA.
        """
        stage = (self.block_m + self.block_n) * self.block_k * dtype.itemsize
        return _BARRIERS + max(self.num_stages * stage, self.block_m * self.block_n * 4)

    def registers(self, vector_a: int, vector_b: int) -> int:
        """Estimate the registers of a thread that accumulators and load addresses take.

        Args:
            vector_a: The elements that one load of A takes.
            vector_b: The elements that one load of B takes.

        Returns:
            Registers of a thread.
        """
        addresses = (
            self.block_m * self.block_k // vector_a + self.block_k * self.block_n // vector_b
        )
        return self.accumulators + 2 * addresses // self.threads


def invalid_reason(
    config: PortableConfig, dtype: torch.dtype, shared_memory_limit: int | None
) -> str | None:
    """Returns why a config cannot run on operands of `dtype` with this much shared memory per CTA,
    or None if it can.

    Without a limit (the interpreter) only the form of the config is checked.
    """
    for name in ("block_m", "block_n", "block_k"):
        size = getattr(config, name)
        if not _power_of_two(size) or not 16 <= size <= _LARGEST_BLOCK:
            return f"{name} is {size}, expected a power of two from 16 to {_LARGEST_BLOCK}"
    if not _power_of_two(config.num_warps) or config.num_warps > 32:
        return f"num_warps is {config.num_warps}, expected 1, 2, 4, 8, 16 or 32"
    for name, most in (("group_m", 1024), ("num_stages", 64)):
        if not 1 <= getattr(config, name) <= most:
            return f"{name} is {getattr(config, name)}, expected 1 to {most}"
    if config.accumulators > _MAX_ACCUMULATORS:
        return (
            f"block_m x block_n in {config.num_warps} warps is {config.accumulators} accumulators "
            "per thread, "
            f"expected at most {_MAX_ACCUMULATORS}"
        )
    needed = config.shared_memory(dtype)
    if shared_memory_limit is not None and needed > shared_memory_limit:
        return (
            f"{to_text(config)} needs {needed} bytes of shared memory, but the device has "
            f"{shared_memory_limit}"
        )
    return None


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _presets(*rows: tuple[int, int, int, int, int]) -> tuple[PortableConfig, ...]:
    return tuple(PortableConfig(m, n, k, 8, warps, stages) for m, n, k, warps, stages in rows)


# The interpreter's cost is per operation, not per element.
INTERPRETED = PortableConfig(64, 64, 64, 8, 4, 1)

# Presets for tensor cores. Among configs of equal cost, `choose` takes the first that fits.
TENSOR_CORE = _presets(
    (128, 256, 64, 8, 4),
    (256, 128, 64, 8, 4),
    (128, 256, 64, 8, 3),
    (256, 128, 64, 8, 3),
    (128, 128, 64, 4, 4),
    (128, 128, 64, 4, 3),
    (128, 128, 64, 8, 3),
    (128, 256, 32, 8, 3),
    (128, 128, 32, 8, 4),
    (128, 128, 32, 8, 3),
    (128, 64, 64, 4, 4),
    (64, 128, 64, 4, 4),
    (128, 64, 32, 4, 3),
    (64, 128, 32, 4, 3),
    (64, 64, 64, 4, 4),
    (64, 64, 32, 4, 3),
    (64, 32, 64, 4, 4),
    (32, 64, 64, 4, 4),
    (32, 32, 64, 4, 4),
    (32, 32, 32, 4, 3),
    (16, 128, 64, 4, 4),
    (128, 16, 64, 4, 4),
    (16, 64, 128, 4, 4),
    (64, 16, 128, 4, 4),
    (16, 32, 128, 4, 4),
    (32, 16, 128, 4, 4),
    (16, 16, 128, 4, 4),
    (16, 16, 32, 2, 3),
)

# Presets for fused multiply-adds: IEEE fp32, and every dtype below sm_80, where tl.dot has no
# tensor cores.
FMA = _presets(
    (64, 64, 32, 4, 3),
    (128, 64, 16, 8, 3),
    (64, 128, 16, 8, 3),
    (128, 128, 16, 8, 3),
    (64, 64, 16, 4, 3),
    (64, 32, 16, 4, 3),
    (32, 64, 16, 4, 3),
    (32, 32, 16, 4, 3),
    (16, 64, 16, 4, 3),
    (64, 16, 16, 4, 3),
    (16, 32, 32, 4, 3),
    (32, 16, 32, 4, 3),
    (16, 16, 32, 2, 3),
)

CANDIDATES: tuple[PortableConfig, ...] = tuple(dict.fromkeys(TENSOR_CORE + FMA))


def uses_fma(problem: Problem, arch: int) -> bool:
    """Returns whether tl.dot becomes fused multiply-adds on this architecture (90 is sm_90) instead
    of tensor-core products.
    """
    return arch < 80 or (problem.dtype == torch.float32 and not problem.tf32)


def candidates(problem: Problem, arch: int, shared_memory_limit: int) -> tuple[PortableConfig, ...]:
    """Returns the presets for a problem that fit the device and do not spill there."""
    vectors = vector(problem, "a", arch), vector(problem, "b", arch)
    return tuple(
        config
        for config in (FMA if uses_fma(problem, arch) else TENSOR_CORE)
        if invalid_reason(config, problem.dtype, shared_memory_limit) is None
        and config.registers(*vectors) <= _register_budget(problem, arch, min(vectors))
        and not (
            uses_fma(problem, arch)
            and problem.dtype.itemsize == 2
            and config.widened_operands > 192
        )
    )


def _register_budget(problem: Problem, arch: int, narrowest: int) -> int:
    """Returns the registers per thread for accumulators and addresses; the rest of the 255 holds
    operands and other values of a k-block.
    """
    if uses_fma(problem, arch):
        return 80 if problem.dtype == torch.float32 else 64
    if not _reads_shared_memory(arch):
        return 112
    if problem.dtype == torch.float32 or narrowest * problem.dtype.itemsize < 4:
        return 128  # 16-bit loads that are too narrow for cp.async pass through registers
    return 160


def _reads_shared_memory(arch: int) -> bool:
    """Returns whether tensor cores read operands from shared memory (wgmma, tcgen05) instead of
    registers (mma.sync).
    """
    return 90 <= arch < 120


def vector(problem: Problem, operand: str, arch: int) -> int:
    """Returns the elements (a power of two, at most 16 bytes) that one copy of operand "a" or "b"
    moves to shared memory.
    """
    strides = problem.a if operand == "a" else problem.b
    along_k = strides[-1 if operand == "a" else -2] == 1
    if problem.tf32 and _reads_shared_memory(arch) and not along_k:
        return 1  # these tensor cores take 32-bit operands only along K, so the copy transposes
    return problem.vector(operand)


def choose(problem: Problem, sm_count: int, arch: int, shared_memory_limit: int) -> PortableConfig:
    """Returns the cheapest preset by `cycles`. Raises ValueError when none fits.

    All batch-invariant products with the same N, K, dtype and layout of B get the same preset,
    whatever A and the output are.
    """
    if problem.batch_invariant:
        problem = _representative(problem)
    fitting = candidates(problem, arch, shared_memory_limit)
    if not fitting:
        raise ValueError(
            f"no preset of the portable kernel fits {shared_memory_limit} bytes of shared memory"
        )
    return min(fitting, key=lambda config: cycles(config, problem, sm_count, arch))


def _representative(problem: Problem) -> Problem:
    """Returns the product that represents all products with the same B: with enough rows to fill a
    GPU, packed and aligned.
    """
    packed_a, packed_out, aligned = (problem.K, 1), (problem.N, 1), (LINE, LINE, 16)
    shared = replace(
        problem, M=_TYPICAL_ROWS, batch=(), b=problem.b[-2:], c=None, alignment=aligned
    )
    return replace(shared, a=packed_a, out=packed_out)


def cycles(config: PortableConfig, problem: Problem, sm_count: int, arch: int) -> float:
    """Estimates the SM cycles of a call: waves of tiles, times the k-blocks of a tile, times the
    products and loads of a k-block.
    """
    if uses_fma(problem, arch):
        # For each term, a thread pays for its products and for reads of the operands, 4 cycles
        # each. Copies and the ends of a tile are hidden by other CTAs, unless one CTA fills the
        # registers of an SM.
        alone = 1.2 if config.accumulators > 32 else 1
        reads = 2 * math.sqrt(config.accumulators)
        if problem.b[-1] != 1:
            reads *= 8  # bank conflicts, where B is not stored by rows: fitted to an H100
        issued = config.accumulators + reads
        k_block = config.block_k * alone * config.threads * issued / 128 + 40
        tile = math.ceil(problem.K / config.block_k) * k_block
    else:
        products = 2048 if problem.dtype.itemsize == 2 else 1024
        if arch >= 90 and config.block_m < 64:
            products //= 2  # mma.sync in place of wgmma
        if arch >= 90 and config.block_n > 128 and problem.b[-1] != 1:
            products = int(products * WIDE_B)
        loaded = 64  # bytes per cycle from L2
        per_k = config.block_m * config.block_n / products
        per_k += (config.block_m + config.block_n) * problem.dtype.itemsize / loaded
        k_block = config.block_k * per_k + 40  # barriers and address arithmetic
        tile = math.ceil(problem.K / config.block_k) * k_block + 1000  # first loads, last stores
    return math.ceil(tiles(config, problem) * math.prod(problem.batch) / sm_count) * tile


_AXES: Axes = {
    "block_m": (16, 32, 64, 128, 256),
    "block_n": (16, 32, 64, 128, 256),
    "block_k": (32, 64, 128),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
    "group_m": (1, 8),
}
# The other fields have no effect in the interpreter.
_INTERPRETED: Axes = {name: _AXES[name] for name in ("block_m", "block_n", "block_k")}


def space(problem: Problem, machine: Machine | None) -> Space[PortableConfig]:
    """Returns the configs that are worth trying for a problem on a GPU, or in the interpreter if
    `machine` is None.
    """
    arch, limit = (0, None) if machine is None else (machine.arch, machine.shared_memory_per_cta)
    fma = uses_fma(problem, arch)
    vectors = vector(problem, "a", arch), vector(problem, "b", arch)

    def reason(config: PortableConfig) -> str | None:
        if invalid := invalid_reason(config, problem.dtype, limit):
            return invalid.removeprefix(to_text(config)).strip()
        if machine is None:
            return None
        needed, budget = config.registers(*vectors), _register_budget(problem, arch, min(vectors))
        if needed > budget:
            return (
                f"accumulators and addresses take {needed} registers per thread, expected at most "
                f"{budget}"
            )
        if fma and problem.dtype.itemsize == 2 and config.widened_operands > 192:
            return (
                f"widened operands take {config.widened_operands:.0f} registers per thread, "
                "expected at most 192"
            )
        return None

    lines = (1, 1) if fma else l2.lines(problem)

    def footprint(c: PortableConfig) -> Footprint:
        warpgroups = c.block_m >= 64 and c.num_warps % 4 == 0
        return Footprint(
            math="fma" if fma else "wgmma" if _reads_shared_memory(arch) and warpgroups else "mma",
            tile_m=c.block_m,
            tile_n=c.block_n,
            tile_k=c.block_k,
            stages=c.num_stages,
            threads=c.threads,
            registers=c.registers(*vectors) + 32,
            shared_memory=c.shared_memory(problem.dtype),
            groups=max(1, c.num_warps // 4),
            in_flight=True,
            issue=WIDE_B
            if arch >= 90 and not fma and c.block_n > 128 and problem.b[-1] != 1
            else 1.0,
            group_m=c.group_m,
            store="wide",
            cache_lines=lines,
        )

    def default() -> PortableConfig:
        if machine is None:
            return INTERPRETED
        return choose(problem, machine.sms, arch, machine.shared_memory_per_cta)

    # What footprints depend on besides the config and the dtypes.
    of_problem = fma, vectors, lines, problem.b[-1] != 1, arch
    return LazySpace(
        default,
        axes=_INTERPRETED if machine is None else _AXES,
        also=() if machine is None else CANDIDATES,
        invalid_reason=reason,
        footprint=footprint,
        footprint_key=lambda _: of_problem,
    )
