"""The host side of the tensor-core rungs: what they take, layouts from configs, what the compiler
is told.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..core.epilogue import EPILOGUE_ARGS, NONE
from ..core.problem import Problem
from ..core.registry import Kernel
from ..core.space import Axes, Footprint
from ..device import gluon, launch, rung
from ..device.grid import WARP, group_m, needs_int64, out_columns, pieces_of, tiles
from ..device.mapping import copies
from .access import copied, lines, width
from .config import AXES, ITEM, STAGED_PAD, TuringConfig, invalid_reason

# Fields of a config that a kernel does not read.
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
    """What a rung's module offers, for a Gluon kernel that multiplies `steps` slabs an iteration of
    its loop.
    """
    return TuringRung(kernel, body, own, steps).entry()


class TuringRung(rung.Rung[TuringConfig]):
    """A rung of the tensor-core ladder.

    `steps`: slabs that an iteration of its loop multiplies (0: as many as there are stages, two at
    least). `sizes`: configs to choose from, and how fast each is where there are many tiles; none:
    its own.
    """

    base, dtype, layout = TuringConfig, torch.float16, "nt"

    def __init__(
        self, kernel: Kernel, body: Any, own: type[TuringConfig], steps: int, sizes: Sizes = ()
    ) -> None:
        super().__init__(kernel, body, own)
        self.steps, self.sizes = steps, sizes

    def default(self, problem: Problem, sms: int, limit: int) -> TuringConfig:
        """Of `sizes`, what takes least by its waves over the SMs, if it fits in shared memory."""

        def cost(size: tuple[TuringConfig, float]) -> float:
            config, speed = size
            waves = -(-tiles(config, problem) * math.prod(problem.batch) // sms)
            return waves * config.block_m * config.block_n / speed

        fitting = [size for size in self.sizes if invalid_reason(size[0], limit) is None]
        return min(fitting, key=cost)[0] if fitting else self.own()

    @property
    def _direct(self) -> bool:
        """Whether fragments come straight from global memory."""
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

    def refusal(self, problem: Problem, config: TuringConfig, arch: int) -> str | None:
        if config.arch > arch:
            return f"config: arch is {config.arch}, expected at most {arch}, the GPU's"
        if problem.dtype == torch.bfloat16 and self.target(config, arch) < 80:
            return "needs sm_80 for bfloat16 operands: tensor cores of sm_75 take float16"
        if problem.epilogue != NONE and not config.stage_out:
            return (
                "config: stage_out is False, expected True: by way of shared memory an "
                "epilogue "
                "takes half a tile"
            )
        return None

    def described(self, config: TuringConfig, problem: Problem) -> Mapping[str, Any]:
        return {"stages": config.stages, "passes": {"l1": lines(config, problem, self._direct)}}

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
                0 if self._direct else c.stages * c.slab_bytes, c.staged_bytes if c.stage_out else 0
            ),
            in_flight=c.ahead or self.steps != 1,
            group_m=c.group_m,
            store="wide" if c.stage_out else "registers",
        )

    def specialization(
        self, config: TuringConfig, problem: Problem, constants: dict[str, Any], arch: int
    ) -> launch.Specialization:
        """Divisors only as far as wide loads and stores need them: every further one would be
        another compile.
        """
        most = {name: width(config, problem, name) for name in "ab"}
        most |= dict.fromkeys(("c", "out", *EPILOGUE_ARGS), 8)

        def divisor(name: str, value: int) -> int:
            operand, is_stride, _ = name.partition("_")
            if operand not in most:
                return math.gcd(value, 8)
            if not is_stride:
                return math.gcd(value, launch.WIDEST)
            return math.gcd(value, most[operand])

        return launch.specialize(
            problem,
            pieces_of(problem, config),
            constants,
            divisor,
            wide=constants["WIDE"],
            num_warps=config.num_warps,
            max_registers=config.max_registers,
        )

    def constants(self, config: TuringConfig, problem: Problem, arch: int) -> dict[str, Any]:
        c = config
        even_n, even_k = problem.N % out_columns(c, problem) == 0, problem.K % c.block_k == 0
        mma = gluon.mma_layout(self.target(c, arch), (c.warps_m, c.warps_n))
        if self._direct:
            slabs = [(gluon.dot_operand(i, mma), None, False, c.threads) for i in range(2)]
        else:
            slabs = [_slab(c, problem, name) for name in "ab"]
        constants = {
            "BLOCK_M": c.block_m,
            "BLOCK_N": c.block_n,
            "BLOCK_K": c.block_k,
            "GROUP_M": group_m(c, problem),
            "EVEN": problem.M % c.block_m == 0 and even_n,
            "EVEN_K": self.steps == 1 and even_k,
            "WIDE": needs_int64(problem, c),
            "MMA": mma,
            "A_COPY": slabs[0][0],
            "B_COPY": slabs[1][0],
            "A_SHARED": slabs[0][1],
            "B_SHARED": slabs[1][1],
            "ROWS": _rows(c, problem) if c.stage_out else mma,
            "OUT_SHARED": gluon.padded((c.block_m, c.block_n), STAGED_PAD) if c.stage_out else None,
            "STAGES": c.stages,
            "AHEAD": c.ahead,
            "A_SINGLE": slabs[0][2],
            "B_SINGLE": slabs[1][2],
            "A_THREADS": slabs[0][3],
            "B_THREADS": slabs[1][3],
            "RUNG": self.kernel.name.replace(".", "_"),
        }
        return constants | launch.fused(problem) if self.fused else constants


def _slab(c: TuringConfig, problem: Problem, name: str) -> tuple[Any, Any, bool, int]:
    """How operand "a" or "b" is loaded, how its slab [rows, K] lies in shared memory, whether its
    elements go there one by one (asynchronous copies take 4 bytes at least), and how many threads
    have something to load.
    """
    rows = c.block_m if name == "a" else c.block_n
    along_k = launch.contiguous(problem, name) == "k"
    order = (1, 0) if along_k else (0, 1)
    if c.swizzle:
        shared = gluon.swizzled(c.block_k if along_k else rows, ITEM, order)
    else:
        shared = gluon.padded((rows, c.block_k), c.pad, order)
    copy = copied(c, problem, name)
    threads = copy.holders if copy.holders % WARP == 0 else c.threads  # stmatrix wants whole warps
    return gluon.registers(copy), shared, width(c, problem, name) == 1, threads


def _rows(c: TuringConfig, problem: Problem) -> Any:
    """Who writes which outputs, of an epilogue half after half: neighbouring lanes along the axis
    along which they are stored, 16 bytes each.
    """
    wide = launch.WIDEST // problem.out_dtype.itemsize
    columns = c.block_n if problem.epilogue == NONE else c.block_n // 2
    if problem.out[-2] == 1 and problem.out[-1] != 1:
        return gluon.registers(copies((columns, c.block_m), wide, c.num_warps).transposed())
    return gluon.registers(copies((c.block_m, columns), wide, c.num_warps))
