"""The host side of the CUDA-core rungs: what they take, layouts from configs, what the compiler is
told.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ..core.problem import Problem
from ..core.registry import Kernel
from ..core.space import Axes, Footprint
from ..device import gluon, launch, rung, simt
from ..device.grid import group_m, max_registers, needs_int64, pieces_of
from ..device.mapping import by_rows
from .simt_access import in_shared, passes
from .simt_config import AXES, SimtConfig, invalid_reason
from .simt_maps import maps

# Fields of a config that a kernel does not read.
UNREAD = {
    "direct": ("block_k", "transpose_a", "pad", "prefetch", "store_at"),
    "staged": ("store_at",),
    "pipelined": ("prefetch",),
}


def entry(
    kernel: Kernel, body: Any, own: type[SimtConfig], buffers: int = 1, steps: int = 1
) -> rung.Entry[SimtConfig]:
    """What a rung's module offers, for a Gluon kernel with `buffers` slabs in shared memory of
    which an iteration of its loop multiplies `steps`.
    """
    return SimtRung(kernel, body, own, buffers, steps).entry()


class SimtRung(rung.Rung[SimtConfig]):
    """A rung of the CUDA-core ladder."""

    base, dtype, layout = SimtConfig, torch.float32, "nn"

    def __init__(
        self, kernel: Kernel, body: Any, own: type[SimtConfig], buffers: int, steps: int
    ) -> None:
        super().__init__(kernel, body, own)
        self.buffers, self.steps = buffers, steps

    @property
    def unread(self) -> tuple[str, ...]:
        return UNREAD[self.body.__name__]

    def invalid_reason(self, config: SimtConfig, limit: int) -> str | None:
        return invalid_reason(config, limit, self.buffers)

    def refusal(self, problem: Problem, config: SimtConfig, arch: int) -> str | None:
        if problem.tf32:
            return "multiplies in IEEE fp32, and was given fp32 operands while torch asks for tf32"
        return None

    def described(self, config: SimtConfig, problem: Problem) -> Mapping[str, Any]:
        accesses = in_shared(config, problem)
        return {
            "stages": self.buffers if config.block_k > 1 else 1,
            "bank_conflicts": {
                name: found.excess / found.instructions for name, found in accesses.items()
            }
            or None,
            "passes": passes(config, problem),
        }

    @property
    def axes(self) -> Axes:
        return AXES

    def footprint(self, config: SimtConfig, problem: Problem) -> Footprint:
        c = config
        return Footprint(
            math="fma",
            tile_m=c.block_m,
            tile_n=c.block_n,
            tile_k=c.block_k,
            stages=self.buffers if c.block_k > 1 else 1,
            threads=c.threads,
            registers=c.accumulators + 2 * (c.thread_m + c.thread_n) + 24,
            shared_memory=self.buffers * c.slab_bytes if c.block_k > 1 else 0,
            in_flight=c.prefetch or self.buffers > 1,
            group_m=c.group_m,
            store="wide" if c.piece_n > 1 else "registers",
        )

    def specialization(
        self, config: SimtConfig, problem: Problem, constants: dict[str, Any], arch: int
    ) -> launch.Specialization:
        """Divisors only as far as copies and stores of 16 bytes need them: every further one would
        be another compile.
        """
        # Below sm_90, and with an A that is transposed on its way, the same code takes a few more:
        # it would spill.
        limited = arch >= 90 and (config.transpose_a or problem.a[-1] == 1)
        known = {
            name: config.vector > 1 and launch.vector(problem, name) >= config.vector
            for name in "ab"
        }
        written = [problem.out, *([problem.c] if problem.c else [])]
        known["c"] = known["out"] = config.piece_n > 1 and all(
            strides[-1] == 1 and not any(stride % 4 for stride in strides[:-1])
            for strides in written
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
            max_registers=config.max_registers if limited else max_registers(config.threads),
        )

    def constants(self, config: SimtConfig, problem: Problem, arch: int) -> dict[str, Any]:
        c, held = config, maps(config, problem)
        M, N, K = problem.M, problem.N, problem.K
        return {
            "BLOCK_M": c.block_m,
            "BLOCK_N": c.block_n,
            "BLOCK_K": c.block_k,
            "GROUP_M": group_m(c, problem),
            "EVEN": M % c.block_m == 0 and N % c.block_n == 0,
            "EVEN_K": K % (c.block_k * self.steps) == 0,
            "SHORT": c.block_k * self.steps >= K,
            "WIDE": needs_int64(problem, config),
            "TRANSPOSE_A": c.transpose_a,
            "OUTPUTS": gluon.registers(held.outputs),
            "ROWS": gluon.registers(by_rows(held.outputs)),
            "A_COPY": gluon.registers(held.a),
            "B_COPY": gluon.registers(held.b),
            "A_SHARED": gluon.padded(
                (c.block_k, c.block_m) if c.transpose_a else (c.block_m, c.block_k), c.pad
            ),
            "B_SHARED": gluon.padded((c.block_k, c.block_n), c.pad_b),
            "PREFETCH": c.prefetch,
            "STORE_AT": c.store_at,
            "SNAKE": simt.snake(c.thread_m, c.thread_n),
            "RUNG": self.kernel.name.replace(".", "_"),
        }
