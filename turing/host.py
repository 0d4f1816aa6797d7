"""The host side of the tensor-core rungs: supported calls, layouts made from configs, and what the
compiler is told.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outblas.base.registry import Kernel
from outblas.base.space import Axes, Footprint
from outblas.call.epilogue import EPILOGUE_ARGS, NONE
from outblas.call.problem import WIDEST, Problem
from outblas.device import access, gluon, launch, rung
from outblas.device.grid import WARP, chunks_of, group_m, needs_int64, out_columns, tiles
from outblas.device.mapping import Mapping, copies
from outblas.device.records import OperandLayout, OutputLayout, TileTraits
from outblas.turing.config import AXES, ITEM, STAGED_PAD, TuringConfig, invalid_reason

# The fields of a config that a kernel does not read.
UNREAD = {
    "direct": ("pad", "swizzle", "stages", "ahead"),
    "staged": ("stages", "ahead"),
    "buffered": ("stages",),
    "pipelined": ("pad", "swizzle", "ahead"),
}

Sizes = Sequence[tuple[TuringConfig, float]]


def entry(
    kernel: Kernel, body: Any, own: type[TuringConfig], steps: int = 1
) -> rung.Entry[TuringConfig]:
    """Returns what a rung's module exports, for a Gluon kernel whose loop multiplies `steps`
    k-blocks per iteration.
    """
    return TuringRung(kernel, body, own, steps).entry()


class TuringRung(rung.Rung[TuringConfig]):
    """A rung of the tensor-core ladder.

    `steps`: the k-blocks that an iteration of its loop multiplies (0: as many as there are stages,
    at least two). `sizes`: the configs to choose from, and their speed where there are many tiles;
    if empty, the rung's default config is used.
    """

    base, dtype, layout = TuringConfig, torch.float16, "nt"

    def __init__(
        self, kernel: Kernel, body: Any, own: type[TuringConfig], steps: int, sizes: Sizes = ()
    ) -> None:
        super().__init__(kernel, body, own)
        self.steps, self.sizes = steps, sizes

    def default(self, problem: Problem, sms: int, limit: int) -> TuringConfig:
        """Returns the config of `sizes` that fits in shared memory and takes the least time,
        estimated from its waves over the SMs.
        """

        def cost(size: tuple[TuringConfig, float]) -> float:
            config, speed = size
            waves = -(-tiles(config, problem) * math.prod(problem.batch) // sms)
            return waves * config.block_m * config.block_n / speed

        fitting = [size for size in self.sizes if invalid_reason(size[0], limit) is None]
        return min(fitting, key=cost)[0] if fitting else self.own()

    @property
    def _direct(self) -> bool:
        """Whether fragments are loaded straight from global memory."""
        return bool(self.body.__name__ == "direct")

    @property
    def unread(self) -> tuple[str, ...]:
        return UNREAD[self.body.__name__]

    def target(self, config: TuringConfig, arch: int) -> int:
        return config.arch or arch

    def invalid_reason(self, config: TuringConfig, limit: int) -> str | None:
        if 0 < config.arch < self.kernel.min_arch:
            return (
                f"arch is {config.arch}, expected 0 or at least {self.kernel.min_arch}: "
                f"{self.kernel.name} needs it"
            )
        if self.steps == 0 and config.stages < 2:
            return (
                f"stages is {config.stages}, expected at least 2: {self.kernel.name} copies ahead"
            )
        return invalid_reason(config, limit)

    def unsupported_reason(self, problem: Problem, config: TuringConfig, arch: int) -> str | None:
        if config.arch > arch:
            return f"config: arch is {config.arch}, expected at most {arch}, the GPU's"
        if problem.dtype == torch.bfloat16 and self.target(config, arch) < 80:
            return "needs sm_80 for bfloat16 operands: tensor cores of sm_75 take float16"
        if problem.epilogue != NONE and not config.stage_out:
            return (
                "config: stage_out is False, expected True: an epilogue needs "
                "shared memory to store half a tile at a time"
            )
        return None

    def described(self, config: TuringConfig, problem: Problem) -> dict[str, Any]:
        lines = sum(_lines(config, problem, name, self._direct) for name in "ab")
        return {"stages": config.stages, "passes": {"l1": lines}}

    @property
    def axes(self) -> Axes:
        return AXES

    def footprint(self, config: TuringConfig, problem: Problem) -> Footprint:
        c = config
        return Footprint(
            math="mma",
            tile_m=c.block_m,
            tile_n=c.block_n,
            tile_k=c.block_k,
            stages=1 if self._direct else c.stages,
            threads=c.threads,
            registers=c.accumulators + 48,
            shared_memory=max(
                0 if self._direct else c.stages * c.k_block_bytes,
                c.staged_bytes if c.stage_out else 0,
            ),
            in_flight=c.ahead or self.steps != 1,
            group_m=c.group_m,
            store="wide" if c.stage_out else "registers",
        )

    def specialization(
        self, config: TuringConfig, problem: Problem, constants: dict[str, Any], arch: int
    ) -> launch.Specialization:
        most = {name: width(config, problem, name) for name in "ab"}
        most |= dict.fromkeys(("c", "out", *EPILOGUE_ARGS), 8)
        return launch.specialize(
            problem,
            chunks_of(problem, config),
            constants,
            _Divisibility(most),
            wide=constants["TILE"].wide,
            num_warps=config.num_warps,
            max_registers=config.max_registers,
        )

    def ladder_constants(self, config: TuringConfig, problem: Problem, arch: int) -> dict[str, Any]:
        c = config
        # Both or neither: a kernel with masks on one side only would need another compile.
        even = problem.M % c.block_m == 0 and problem.N % out_columns(c, problem) == 0
        mma = gluon.mma_layout(self.target(c, arch), (c.warps_m, c.warps_n))
        if self._direct:
            a_load = OperandLayout(gluon.dot_operand(0, mma))
            b_load = OperandLayout(gluon.dot_operand(1, mma), k_axis=0)
        else:
            a_load, b_load = (_operand_layout(c, problem, name) for name in "ab")
        return {
            "TILE": TileTraits(
                name=self.kernel.name.replace(".", "_"),
                block_m=c.block_m,
                block_n=c.block_n,
                block_k=c.block_k,
                group_m=group_m(c, problem),
                even_m=even,
                even_n=even,
                even_k=self.steps == 1 and problem.K % c.block_k == 0,
                wide=needs_int64(problem, c),
            ),
            "OUTPUTS": _output_layout(c, problem, mma),
            "A_LOAD": a_load,
            "B_LOAD": b_load,
            "STAGES": c.stages,
            "AHEAD": c.ahead,
            "EPILOGUE": launch.epilogue_traits(problem),
        }


@dataclass(frozen=True)
class _Divisibility:
    """Divisors only as far as wide loads and stores need them: `most` elements of each tensor."""

    most: dict[str, int]

    def of_pointer(self, tensor: str, alignment: int) -> int:
        return math.gcd(alignment, WIDEST)

    def of_stride(self, tensor: str, stride: int) -> int:
        return math.gcd(stride, self.most[tensor])

    def of_size(self, name: str, size: int) -> int:
        return math.gcd(size, 8)


def _operand_layout(c: TuringConfig, problem: Problem, name: str) -> OperandLayout:
    """Returns how k-blocks of operand "a" or "b" [rows, K] are copied to shared memory. Elements
    are copied one by one where rows are not aligned to 4 bytes, the minimum for asynchronous
    copies.
    """
    rows = c.block_m if name == "a" else c.block_n
    along_k = launch.contiguous(problem, name) == "k"
    order = (1, 0) if along_k else (0, 1)
    if c.swizzle:
        shared = gluon.swizzled(c.block_k if along_k else rows, ITEM, order)
    else:
        shared = gluon.padded((rows, c.block_k), c.pad, order)
    copy = copied(c, problem, name)
    return OperandLayout(
        copy=gluon.registers(copy),
        shared=shared,
        single=width(c, problem, name) == 1,
        # stmatrix needs whole warps
        threads=copy.holders if copy.holders % WARP == 0 else c.threads,
    )


def _output_layout(c: TuringConfig, problem: Problem, mma: Any) -> OutputLayout:
    if not c.stage_out:
        return OutputLayout(sums=mma, rows=mma)
    return OutputLayout(
        sums=mma,
        rows=_rows(c, problem),
        shared=gluon.padded((c.block_m, c.block_n), STAGED_PAD),
        halves=problem.epilogue != NONE,
    )


def _rows(c: TuringConfig, problem: Problem) -> Any:
    """Returns which thread stores which outputs; with an epilogue, one half of the columns after
    the other. Neighbouring lanes go along the contiguous axis of the outputs, with 16 bytes each.
    """
    wide = WIDEST // problem.out_dtype.itemsize
    columns = c.block_n if problem.epilogue == NONE else c.block_n // 2
    if problem.out[-2] == 1 and problem.out[-1] != 1:
        return gluon.registers(copies((columns, c.block_m), wide, c.num_warps).transposed())
    return gluon.registers(copies((c.block_m, columns), wide, c.num_warps))


# ---- loads, predicted without a GPU
# Which thread holds which of 16×16 elements, rows of A or columns of B by K: groups of four lanes
# along K, two elements each.
FRAGMENT = Mapping((16, 16), ((0, 1), (8, 0), (0, 8)), ((0, 2), (0, 4), (1, 0), (2, 0), (4, 0)), ())


def width(config: TuringConfig, problem: Problem, name: str) -> int:
    """Returns the number of elements that one load of operand "a" or "b" moves."""
    return min(config.vector, problem.vector(name))


def copied(config: TuringConfig, problem: Problem, name: str) -> Mapping:
    """Returns which thread loads which elements of a k-block, rows of A or columns of B by K.
    Neighbouring lanes go along the operand's contiguous axis.
    """
    rows = config.block_m if name == "a" else config.block_n
    wide = width(config, problem, name)
    if launch.contiguous(problem, name) == "k":
        return copies((rows, config.block_k), wide, config.num_warps, spread=False)
    return copies((config.block_k, rows), wide, config.num_warps, spread=False).transposed()


def _lines(c: TuringConfig, problem: Problem, name: str, direct: bool) -> float:
    """Returns the cache lines of 128 bytes that all warps of a CTA look up for one k-block of an
    operand. `direct`: fragments are loaded straight from global memory, and each warp loads its
    own, even where warps side by side need the same.
    """
    rows, again = (c.block_m, c.warps_n) if name == "a" else (c.block_n, c.warps_m)
    # along rows of A or columns of B, along K
    strides = problem.a[-2:] if name == "a" else problem.b[-2:][::-1]
    wide = width(c, problem, name)
    if direct:
        mapping, wide = FRAGMENT, min(wide, 2) if launch.contiguous(problem, name) == "k" else 1
    else:
        mapping, again = copied(c, problem, name), 1

    def byte(row: int, k: int) -> int:
        return (row * strides[0] + k * strides[1]) * ITEM

    requests = rows * c.block_k / (access.WARP * wide) * again
    return requests * access.touched(mapping, byte, wide * ITEM, access.LINE)
