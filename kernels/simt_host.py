"""The host side of the CUDA-core rungs: what they take, layouts from configs, compiling, launching."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from triton.compiler import CompiledKernel

from .. import machines
from ..artifact import Artifact, example
from ..configs import mistyped
from ..device import gluon, simt, triton_artifact
from ..device.mapping import by_rows
from ..operands import Launch, Problem, dtype_name
from ..registry import Kernel
from . import launch
from .grid import MAX_PROGRAMS, group_m, needs_int64, pieces_of, tiles
from .portable_config import vector
from .simt_access import in_shared, passes
from .simt_config import REGISTERS, SimtConfig, invalid_reason, unread_reason
from .simt_maps import maps

# Fields of a config that a kernel does not read.
UNREAD = {
    "direct": ("block_k", "transpose_a", "pad", "prefetch", "store_at"),
    "staged": ("store_at",),
    "pipelined": ("prefetch",),
}


def entry(
    kernel: Kernel, body: Any, own: type[SimtConfig], buffers: int = 1, steps: int = 1
) -> tuple[Callable[..., str | None], Callable[..., Launch], Callable[..., Artifact]]:
    """A rung's `unsupported`, `plan` and `artifact`, for a Gluon kernel with `buffers` slabs in shared memory of which
    an iteration of its loop multiplies `steps`."""

    def invalid(config: SimtConfig, limit: int) -> str | None:
        if not isinstance(config, SimtConfig):
            return f"config is a {type(config).__name__}, expected the Config of {kernel.name}"
        reason = (
            mistyped(config)
            or invalid_reason(config, limit, buffers)
            or unread_reason(config, own(), kernel.name, UNREAD[body.__name__])
        )
        return f"config: {reason}" if reason else None

    def unsupported(problem: Problem, config: SimtConfig | None = None) -> str | None:
        """Why this kernel cannot take a call (with this config); None if it can."""
        if reason := launch.unsupported_dtype(problem):
            return reason
        if problem.device.type != "cuda":
            return f"needs CUDA tensors, and was given tensors on {problem.device}"
        if problem.tf32:
            return "multiplies in IEEE fp32, and was given fp32 operands while torch asks for tf32"
        chosen = config or own()
        if reason := invalid(chosen, launch.shared_memory_limit(problem.device)):
            return reason
        if tiles(chosen, problem) > MAX_PROGRAMS:
            return f"needs at most {MAX_PROGRAMS} tiles, and was given {tiles(chosen, problem)}"
        return None

    def plan(problem: Problem, config: SimtConfig | None = None) -> Launch:
        """Compiles for a call and returns its launch, for the current device and its current stream. Raises ValueError
        when the call or the config is not supported."""
        if reason := unsupported(problem, config):
            raise ValueError(f"kernel {kernel.name!r}: {reason}")
        config = config or own()
        constants = _constants(config, problem, steps, kernel.name)
        with torch.cuda.device(problem.device):
            arch, device = launch.arch_of(problem.device), torch.cuda.current_device()
            compiled = _compile(body, _specialize(problem, config, constants, arch), arch, device)
            pieces = pieces_of(problem, config)
            return launch.bind(problem, pieces, lambda programs: compiled[programs, 1, 1], constants)

    def artifact(
        config: SimtConfig | None = None,
        *,
        arch: int | None = None,
        dtype: torch.dtype = torch.float32,
        out_dtype: torch.dtype | None = None,
        layout: str = "nn",
        shape: tuple[int, int, int] = (4096, 4096, 4096),
    ) -> Artifact:
        """What `plan` would launch on the reference GPU of an architecture (90 without one); needs no GPU. Raises
        ValueError for what the kernel cannot take."""
        machine = machines.reference(90 if arch is None else arch)
        given = example(dtype, out_dtype, layout, shape)
        if dtype not in launch.TYPES:
            raise ValueError(f"dtype is {dtype_name(dtype)}, expected bfloat16, float16 or float32")
        config = config or own()
        if reason := invalid(config, machine.shared_memory_per_cta):
            raise ValueError(reason)
        accesses = in_shared(config, given)
        constants = _constants(config, given, steps, kernel.name)
        return triton_artifact.from_compiled(
            _compile(body, _specialize(given, config, constants, machine.arch), machine.arch, None),
            kernel=kernel.name,
            config=config,
            dtype=given.dtype,
            out_dtype=given.out_dtype,
            layout=layout,
            stages=buffers if config.block_k > 1 else 1,
            tile=(config.block_m, config.block_n, config.block_k),
            bank_conflicts={name: found.excess / found.instructions for name, found in accesses.items()} or None,
            passes=passes(config, given),
        )

    return unsupported, plan, artifact


def readable_name(specialization: Any) -> str:
    """A kernel's name in profilers: rung, tile and dtype."""
    rung, *sizes = (str(specialization.constants[name]) for name in ("RUNG", "BLOCK_M", "BLOCK_N", "BLOCK_K"))
    return f"outblas_{rung}_{'x'.join(sizes)}_{specialization.signature['a'].removeprefix('*')}"


@cache
def _compile(body: Any, specialization: launch.Specialization, arch: int, device: int | None) -> CompiledKernel:
    """`device` is the index of the GPU on which the caller loads the kernel: a loaded kernel belongs to one."""
    constants: dict[tuple[int, ...], Any] = {(i,): value for i, value in specialization.constants}
    signature = dict(specialization.signature)
    return gluon.compile(body, signature, constants, specialization.attributes, arch, specialization.options)


def _specialize(problem: Problem, config: SimtConfig, constants: dict[str, Any], arch: int) -> launch.Specialization:
    """Divisors only as far as copies and stores of 16 bytes need them: every further one would be another compile."""
    # Below sm_90, and with an A that is transposed on its way, the same code takes a few more: it would spill.
    limited = arch >= 90 and (config.transpose_a or problem.a[-1] == 1)
    known = {name: config.vector > 1 and vector(problem, name, 90) >= config.vector for name in "ab"}
    written = [problem.out, *([problem.c] if problem.c else [])]
    known["c"] = known["out"] = config.piece_n > 1 and all(
        strides[-1] == 1 and not any(stride % 4 for stride in strides[:-1]) for strides in written
    )

    def divisor(name: str, value: int) -> int:
        if name in ("M", "N"):  # of masks alone, which even tiles do not have
            return 4 if not constants["EVEN"] and problem.M % 4 == problem.N % 4 == 0 else 1
        if name == "K":
            return 4 if value % 4 == 0 else 1
        operand, is_stride, _ = name.partition("_")
        if not known.get(operand):
            return 1
        if not is_stride:
            return value
        return 4 if value % 4 == 0 else 1

    return launch.specialize(
        problem,
        pieces_of(problem, config),
        constants,
        divisor,
        wide=constants["WIDE"],
        num_warps=config.num_warps,
        max_registers=config.max_registers if limited else min(255, REGISTERS // config.threads),
    )


def _constants(config: SimtConfig, problem: Problem, steps: int, rung: str) -> dict[str, Any]:
    """Arguments of a kernel after those of every kernel, in order."""
    c, held = config, maps(config, problem)
    M, N, K = problem.M, problem.N, problem.K
    return {
        "BLOCK_M": c.block_m, "BLOCK_N": c.block_n, "BLOCK_K": c.block_k, "GROUP_M": group_m(c, problem),
        "EVEN": M % c.block_m == 0 and N % c.block_n == 0, "EVEN_K": K % (c.block_k * steps) == 0,
        "SHORT": c.block_k * steps >= K, "WIDE": needs_int64(problem, config), "TRANSPOSE_A": c.transpose_a,
        "OUTPUTS": gluon.registers(held.outputs), "ROWS": gluon.registers(by_rows(held.outputs)),
        "A_COPY": gluon.registers(held.a), "B_COPY": gluon.registers(held.b),
        "A_SHARED": gluon.shared(*((c.block_k, c.block_m) if c.transpose_a else (c.block_m, c.block_k)), c.pad),
        "B_SHARED": gluon.shared(c.block_k, c.block_n, c.pad_b), "PREFETCH": c.prefetch, "STORE_AT": c.store_at,
        "SNAKE": simt.snake(c.thread_m, c.thread_n), "RUNG": rung.replace(".", "_"),
    }  # fmt: skip
