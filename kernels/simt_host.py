"""The host side of the CUDA-core rungs: supported calls, layouts made from configs, and what the
compiler is told.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from outblas.base.registry import Kernel
from outblas.base.space import Axes, Footprint
from outblas.call.problem import Problem
from outblas.device import gluon, launch, rung, simt
from outblas.device.grid import chunks_of, group_m, max_registers, needs_int64
from outblas.device.mapping import by_rows
from outblas.device.records import OperandLayout, OutputLayout, TileTraits
from outblas.kernels.simt_access import in_shared, passes
from outblas.kernels.simt_config import AXES, SimtConfig, invalid_reason
from outblas.kernels.simt_maps import maps

# The fields of a config that a kernel does not read.
UNREAD = {
    "direct": ("block_k", "transpose_a", "pad", "prefetch", "store_at"),
    "staged": ("store_at",),
    "pipelined": ("prefetch",),
}


def entry(
    kernel: Kernel, body: Any, own: type[SimtConfig], buffers: int = 1, steps: int = 1
) -> rung.Entry[SimtConfig]:
    """Returns what a rung's module exports, for a Gluon kernel with `buffers` k-blocks in shared
    memory whose loop multiplies `steps` of them per iteration.
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

    def unsupported_reason(self, problem: Problem, config: SimtConfig, arch: int) -> str | None:
        if problem.tf32:
            return "multiplies in IEEE fp32, but was given fp32 operands while torch asks for tf32"
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
            shared_memory=self.buffers * c.k_block_bytes if c.block_k > 1 else 0,
            in_flight=c.prefetch or self.buffers > 1,
            group_m=c.group_m,
            store="wide" if c.piece_n > 1 else "registers",
        )

    def specialization(
        self, config: SimtConfig, problem: Problem, constants: dict[str, Any], arch: int
    ) -> launch.Specialization:
        # Below sm_90, and where the copy transposes an A stored by columns back to rows, the same
        # code takes a few more registers, and would spill with the limit.
        limited = arch >= 90 and (config.transpose_a or problem.a[-1] == 1)
        tile: TileTraits = constants["TILE"]
        return launch.specialize(
            problem,
            chunks_of(problem, config),
            constants,
            _divisibility(config, problem, even=tile.even_m and tile.even_n),
            wide=tile.wide,
            num_warps=config.num_warps,
            max_registers=config.max_registers if limited else max_registers(config.threads),
        )

    def ladder_constants(self, config: SimtConfig, problem: Problem, arch: int) -> dict[str, Any]:
        c, layouts = config, maps(config, problem)
        a_shape = (c.block_k, c.block_m) if c.transpose_a else (c.block_m, c.block_k)
        # Both or neither: a kernel with masks on one side only would need another compile.
        even = problem.M % c.block_m == 0 and problem.N % c.block_n == 0
        return {
            "TILE": TileTraits(
                name=self.kernel.name.replace(".", "_"),
                block_m=c.block_m,
                block_n=c.block_n,
                block_k=c.block_k,
                group_m=group_m(c, problem),
                even_m=even,
                even_n=even,
                even_k=problem.K % (c.block_k * self.steps) == 0,
                wide=needs_int64(problem, config),
            ),
            "OUTPUTS": OutputLayout(
                sums=gluon.registers(layouts.outputs),
                rows=gluon.registers(by_rows(layouts.outputs)),
            ),
            "A_LOAD": OperandLayout(
                copy=gluon.registers(layouts.a),
                shared=gluon.padded(a_shape, c.pad),
                transposed=c.transpose_a,
            ),
            "B_LOAD": OperandLayout(
                copy=gluon.registers(layouts.b),
                shared=gluon.padded((c.block_k, c.block_n), c.pad_b),
                k_axis=0,
            ),
            "PREFETCH": c.prefetch,
            "SHORT": c.block_k * self.steps >= problem.K,
            "STORE_AT": c.store_at,
            "SNAKE": simt.snake(c.thread_m, c.thread_n),
        }


@dataclass(frozen=True)
class _Divisibility:
    """Divisors only as far as copies and stores of 16 bytes need them.

    `known`: the tensors for which they are needed. `sizes_by_four`: masks of M and N cover groups
    of four.
    """

    known: dict[str, bool]
    sizes_by_four: bool

    def of_pointer(self, tensor: str, alignment: int) -> int:
        return alignment if self.known[tensor] else 1

    def of_stride(self, tensor: str, stride: int) -> int:
        return 4 if self.known[tensor] and stride % 4 == 0 else 1

    def of_size(self, name: str, size: int) -> int:
        if name in ("M", "N"):
            return 4 if self.sizes_by_four else 1
        return 4 if name == "K" and size % 4 == 0 else 1


def _divisibility(config: SimtConfig, problem: Problem, *, even: bool) -> _Divisibility:
    """Returns the divisors. `even`: tiles divide M and N, so no mask reads these."""
    known = {name: config.vector > 1 and problem.vector(name) >= config.vector for name in "ab"}
    stored = [problem.out, *([problem.c] if problem.c else [])]
    known["c"] = known["out"] = config.piece_n > 1 and all(
        strides[-1] == 1 and not any(stride % 4 for stride in strides[:-1]) for strides in stored
    )
    return _Divisibility(known, not even and problem.M % 4 == problem.N % 4 == 0)
