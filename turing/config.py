"""The configuration of every rung of the tensor-core ladder: tiles, warps, copies, shared memory,
and their limits.
"""

from dataclasses import dataclass

from outblas.base.space import Axes
from outblas.device.grid import MAX_THREADS, WARP, max_registers

MMA_M, MMA_N, MMA_K = 16, 8, 16  # shape of one mma.sync; on sm_75 two of K = 8
# Registers per thread; fragments, k-blocks in flight and addresses share the other 127.
MAX_ACCUMULATORS = 128
ITEM = 2  # bytes of a 16-bit operand
FP32 = 4
# Padding of a row of outputs in shared memory, in words: eight rows of pairs then use all banks.
STAGED_PAD = 8
ARCHS = (0, 75, 80)  # the driver assembles PTX of these architectures for every newer GPU


@dataclass(frozen=True)
class TuringConfig:
    """The config of a kernel on mma.sync: tiles of a CTA and its warps, and how they load.

    Each rung's own `Config` is this class with the defaults of that rung. Sizes are in elements
    and powers of two. `invalid_reason` in this module says which combinations cannot be built.

    Attributes:
        block_m: Rows of C in the tile of a CTA.
        block_n: Columns of C in the tile of a CTA.
        block_k: Terms of K in a k-block: 16 to 128.
        warps_m: Warps of a CTA along M.
        warps_n: Warps of a CTA along N. The 16x8 outputs of one mma.sync of each warp lie side by
            side, and repeat over the tile.
        vector: Elements of a row that a load takes at most: 1, 2, 4 or 8.
        pad: Elements that lengthen each row of a k-block in shared memory: 0, 2, 4, 8 or 16.
        swizzle: Whether k-blocks are swizzled in shared memory for ldmatrix, instead of padded.
        stages: k-blocks in shared memory at a time.
        ahead: Whether a k-block is loaded during the products of the one before.
        stage_out: Whether outputs go through shared memory, so that whole rows are stored.
        group_m: Rows of tiles that are walked together, so that neighbours in time share operands
            in L2.
        ctas: CTAs that an SM must have registers for, which limits the registers of a thread.
        arch: The architecture to compile for: 75 (sm_75), 80, or 0 for the GPU's own. The driver
            compiles the PTX of an older architecture for a newer GPU.

    Example:
        >>> from outblas.turing.config import TuringConfig
        >>> config = TuringConfig(block_m=128, block_n=128, block_k=32, stages=2)
        >>> config.threads, config.accumulators
        (256, 64)
    """

    block_m: int = 32
    block_n: int = 64
    block_k: int = 16
    warps_m: int = 2
    warps_n: int = 4
    vector: int = 2
    pad: int = 0
    swizzle: bool = False
    stages: int = 1
    ahead: bool = False
    stage_out: bool = False
    group_m: int = 1
    ctas: int = 1
    arch: int = 0

    @property
    def num_warps(self) -> int:
        """Warps of a CTA."""
        return self.warps_m * self.warps_n

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return WARP * self.num_warps

    @property
    def accumulators(self) -> int:
        """The float32 sums that a thread holds."""
        return self.block_m * self.block_n // self.threads

    @property
    def max_registers(self) -> int:
        """The registers that a thread may take."""
        return max_registers(self.threads, self.ctas)

    @property
    def k_block_bytes(self) -> int:
        """The most bytes of shared memory that one k-block of A and one of B take, whichever way
        their rows lie.
        """
        sides = self.block_m, self.block_n
        return (
            sum(side * self.block_k + self.pad * max(side, self.block_k) for side in sides) * ITEM
        )

    @property
    def staged_bytes(self) -> int:
        """Bytes of shared memory of a tile of outputs."""
        return self.block_m * (self.block_n + STAGED_PAD) * FP32


def invalid_reason(config: TuringConfig, shared_memory_limit: int | None = None) -> str | None:
    """Returns why no kernel can be built from a config with this much shared memory (None: any
    amount), or None if one can.
    """
    return _sizes(config) or _warps(config) or _budgets(config, shared_memory_limit)


def _sizes(c: TuringConfig) -> str | None:
    for name in ("block_m", "block_n", "block_k", "warps_m", "warps_n", "vector"):
        value = getattr(c, name)
        if value < 1 or value & (value - 1) or value > 256:
            return f"{name} is {value}, expected a power of two from 1 to 256"
    if not MMA_K <= c.block_k <= 128:
        return f"block_k is {c.block_k}, expected 16 to 128"
    if c.vector > 8:
        return f"vector is {c.vector}, expected 1, 2, 4 or 8"
    if c.pad not in (0, 2, 4, 8, 16):
        return f"pad is {c.pad}, expected 0, 2, 4, 8 or 16 elements"
    if c.pad % c.vector:
        return (
            f"vector is {c.vector}, expected a divisor of pad ({c.pad}): rows are written "
            "that many elements at a time"
        )
    if c.swizzle and c.pad:
        return f"pad is {c.pad}, expected 0 where k-blocks are swizzled"
    if c.arch not in ARCHS:
        return f"arch is {c.arch}, expected one of {', '.join(map(str, ARCHS))}"
    for name, most in (("stages", 8), ("group_m", 1024), ("ctas", 16)):
        if not 1 <= getattr(c, name) <= most:
            return f"{name} is {getattr(c, name)}, expected 1 to {most}"
    return None


def _warps(c: TuringConfig) -> str | None:
    for axis, least in (("m", MMA_M), ("n", MMA_N)):
        block, warps = getattr(c, f"block_{axis}"), getattr(c, f"warps_{axis}")
        if block < warps * least:
            return (
                f"block_{axis} is {block}, expected at least {warps * least}: {warps} warps with "
                f"{least} each"
            )
    if c.threads > MAX_THREADS:
        return f"warps_m x warps_n is {c.num_warps} warps, expected at most {MAX_THREADS // WARP}"
    return None


def _budgets(c: TuringConfig, limit: int | None) -> str | None:
    if c.accumulators > MAX_ACCUMULATORS:
        return (
            f"block_m x block_n is {c.accumulators} sums per thread, expected at most "
            f"{MAX_ACCUMULATORS}"
        )
    if c.max_registers < c.accumulators + 32:
        return (
            f"ctas is {c.ctas}: {c.max_registers} registers per thread, too few for "
            f"{c.accumulators} sums"
        )
    for name, rows in (("m", c.block_m), ("n", c.block_n)):
        if rows * c.block_k // c.threads > 64:
            return (
                f"block_{name} x block_k is {rows * c.block_k // c.threads} elements per thread, "
                "expected at most 64"
            )
    needed = max(c.stages * c.k_block_bytes, c.staged_bytes if c.stage_out else 0)
    if limit is not None and needed > limit:
        return f"needs {needed} bytes of shared memory, but the device has {limit}"
    return None


# The values that a sweep tries.
AXES: Axes = {
    "block_m": (32, 64, 128, 256),
    "block_n": (32, 64, 128, 256),
    "block_k": (16, 32, 64),
    ("warps_m", "warps_n"): ((1, 2), (2, 2), (2, 4), (4, 2)),
    "stages": (2, 3, 4, 5),
    "group_m": (1, 8),
}
