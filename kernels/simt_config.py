"""The configuration of every rung of the CUDA-core ladder: tiles of a CTA, a warp and a thread, and
their limits.
"""

from dataclasses import dataclass, fields

from outblas.base.space import Axes
from outblas.device.grid import MAX_THREADS, WARP, max_registers

SM_THREADS = 2048
# Registers per thread; fragments, k-blocks in flight and addresses share the other 127.
MAX_ACCUMULATORS = 128
FP32 = 4  # bytes; shared memory holds fp32, and copies to it widen 16-bit operands


@dataclass(frozen=True)
class SimtConfig:
    """The config of a CUDA-core kernel: tiles of a CTA, a warp and a thread, and how they load.

    Each rung's own `Config` is this class with the defaults of that rung. Sizes are in elements
    and powers of two. `invalid_reason` in this module says which combinations cannot be built.

    Attributes:
        block_m: Rows of C in the tile of a CTA.
        block_n: Columns of C in the tile of a CTA.
        block_k: Terms of K in a k-block; 1 for operands that are not staged in shared memory.
        warp_m: Rows of C in the tile of a warp.
        warp_n: Columns of C in the tile of a warp.
        thread_m: Rows of C that a thread computes.
        thread_n: Columns of C that a thread computes.
        piece_m: Rows of a thread's fragment. Fragments of the lanes of a warp alternate.
        piece_n: Columns of a thread's fragment.
        interleave: Whether neighbouring lanes step along columns and rows in turn, instead of
            along columns first.
        vector: Elements of a row that a load takes at most: 1, 2 or 4.
        transpose_a: Whether the k-block of A is transposed in shared memory, so that the rows of a
            term lie side by side.
        pad: Words that lengthen each row of A's k-block in shared memory, and of B's if `pad` is a
            multiple of 4: 0, 1, 2, 4, 8 or 16.
        group_m: Rows of tiles that are walked together, so that neighbours in time share operands
            in L2.
        prefetch: Whether the next k-block is loaded while one is multiplied.
        store_at: The term of the k-block at which the next one is written to shared memory, where
            that has room for two.
        ctas: CTAs that an SM must have registers for. It limits the registers of a thread on sm_90
            and newer, where A is contiguous along K or `transpose_a` is set.

    Example:
        >>> from outblas.kernels.simt_config import SimtConfig
        >>> config = SimtConfig(
        ...     block_m=128, block_n=128, block_k=8, warp_m=32, warp_n=64, thread_m=8, thread_n=8
        ... )
        >>> config.threads, config.accumulators, config.k_block_bytes
        (256, 64, 8192)
    """

    block_m: int = 32
    block_n: int = 32
    block_k: int = 1
    warp_m: int = 32
    warp_n: int = 1
    thread_m: int = 1
    thread_n: int = 1
    piece_m: int = 1
    piece_n: int = 1
    interleave: bool = False
    vector: int = 1
    transpose_a: bool = False
    pad: int = 0
    group_m: int = 1
    prefetch: bool = False
    store_at: int = 0
    ctas: int = 1

    @property
    def num_warps(self) -> int:
        """Warps of a CTA."""
        return (self.block_m // self.warp_m) * (self.block_n // self.warp_n)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return WARP * self.num_warps

    @property
    def accumulators(self) -> int:
        """The float32 sums that a thread holds."""
        return self.thread_m * self.thread_n

    @property
    def max_registers(self) -> int:
        """The registers that a thread may take."""
        return max_registers(self.threads, self.ctas)

    @property
    def pad_b(self) -> int:
        """The words that lengthen the rows of B's k-block, which are read 16 bytes at a time."""
        return self.pad if self.pad % 4 == 0 else 0

    @property
    def k_block_bytes(self) -> int:
        """Shared memory of one k-block of A and one of B, in bytes."""
        rows = self.block_k if self.transpose_a else self.block_m
        a = self.block_m * self.block_k + rows * self.pad
        return (a + self.block_k * (self.block_n + self.pad_b)) * FP32


def invalid_reason(
    config: SimtConfig, shared_memory_limit: int | None = None, buffers: int = 1
) -> str | None:
    """Returns why no kernel can be built from a config, with `buffers` k-blocks in this much shared
    memory (None: any amount), or None if one can.
    """
    return _sizes(config) or _hierarchy(config) or _budgets(config, shared_memory_limit, buffers)


def _sizes(c: SimtConfig) -> str | None:
    for field in fields(c):
        value = getattr(c, field.name)
        if isinstance(value, bool) or field.name in ("pad", "group_m", "store_at", "ctas"):
            continue
        if value < 1 or value & (value - 1) or value > 1024:
            return f"{field.name} is {value}, expected a power of two from 1 to 1024"
    if c.pad not in (0, 1, 2, 4, 8, 16):
        return f"pad is {c.pad}, expected 0, 1, 2, 4, 8 or 16 words"
    if c.pad % 4 and c.transpose_a:
        return (
            f"pad is {c.pad}, expected a multiple of 4 where A is transposed: its rows are read "
            "16 bytes at a time"
        )
    if c.vector > 4:
        return f"vector is {c.vector}, expected 1, 2 or 4"
    if c.pad % c.vector:
        return (
            f"vector is {c.vector}, expected a divisor of pad ({c.pad}): rows of A are written "
            "that many words at a time"
        )
    if not 0 <= c.store_at < c.block_k:
        return f"store_at is {c.store_at}, expected a term of the k-block, 0 to {c.block_k - 1}"
    for name, most in (("group_m", 1024), ("ctas", 32)):
        if not 1 <= getattr(c, name) <= most:
            return f"{name} is {getattr(c, name)}, expected 1 to {most}"
    return None


def _hierarchy(c: SimtConfig) -> str | None:
    for axis in "mn":
        block, warp, thread, piece = (
            getattr(c, f"{name}_{axis}") for name in ("block", "warp", "thread", "piece")
        )
        if not piece <= thread <= warp <= block:
            names = ", ".join(f"{name}_{axis}" for name in ("piece", "thread", "warp", "block"))
            return (
                f"{names} are {piece}, {thread}, {warp}, {block}, expected each to divide the next"
            )
    lanes = c.warp_m // c.thread_m * (c.warp_n // c.thread_n)
    if lanes != WARP:
        return (
            f"a warp tile of {c.warp_m}x{c.warp_n} outputs has {lanes} threads of "
            f"{c.thread_m}x{c.thread_n}, expected {WARP}"
        )
    if c.threads > MAX_THREADS:
        return f"the tile takes {c.threads} threads, expected at most {MAX_THREADS}"
    return None


def _budgets(c: SimtConfig, limit: int | None, buffers: int) -> str | None:
    if c.accumulators > MAX_ACCUMULATORS:
        return (
            f"thread_m x thread_n is {c.accumulators} sums per thread, expected at most "
            f"{MAX_ACCUMULATORS}"
        )
    if c.ctas * c.threads > SM_THREADS:
        return f"ctas is {c.ctas}: {c.ctas * c.threads} threads, but an SM has at most {SM_THREADS}"
    if c.max_registers < c.accumulators + 24:
        return (
            f"ctas is {c.ctas}: {c.max_registers} registers per thread, too few for "
            f"{c.accumulators} sums"
        )
    for name, rows in (("m", c.block_m), ("n", c.block_n)):
        if c.block_k > 1 and rows * c.block_k // c.threads > 64:
            return (
                f"block_{name} x block_k is {rows * c.block_k // c.threads} elements per thread, "
                "expected at most 64"
            )
    needed = buffers * c.k_block_bytes if c.block_k > 1 else 0
    if limit is not None and needed > limit:
        return f"needs {needed} bytes of shared memory, but the device has {limit}"
    return None


# The values that a sweep tries. Tiles of a warp, tiles of a thread and fragments are only valid
# together.
AXES: Axes = {
    "block_m": (32, 64, 128, 256),
    "block_n": (32, 64, 128, 256),
    "block_k": (8, 16, 32),
    ("warp_m", "warp_n", "thread_m", "thread_n", "piece_m", "piece_n"): (
        (1, 32, 1, 1, 1, 1),
        (8, 32, 8, 1, 8, 1),
        (32, 16, 4, 4, 4, 4),
        (32, 32, 8, 4, 4, 4),
        (16, 128, 8, 8, 8, 4),
        (32, 64, 8, 8, 4, 4),
        (64, 64, 8, 16, 4, 4),
        (64, 64, 16, 8, 4, 4),
    ),
    "group_m": (1, 8),
    "prefetch": (False, True),
    "ctas": (1, 2),
}
