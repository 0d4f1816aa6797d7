"""hopper.grouped: the products of all groups in one launch, whose sizes lie on the device.

Idea: the persistent kernel of `hopper.gemm`, whose schedule each CTA derives from the ends of
    groups before its first load.
Why it pays: the host reads no size, and no descriptor is written for a group. Tiles begin at the
    first row of a group, at any coordinate that TMA takes; a tile that reaches into the next
    group multiplies its rows as well, and stores only its own. The epilogue is that of
    `hopper.gemm`, with a bias for each group; rows of the result may be scattered, so that the
    products of experts need no pass over memory that puts them back in order.
"""

from ..gemm.kernel import Config
from .host import run, unsupported
from .packed import keep_variant, pack_problem, pack_variant
from .variant import GroupedVariant

__all__ = [
    "Config",
    "GroupedVariant",
    "keep_variant",
    "pack_problem",
    "pack_variant",
    "run",
    "unsupported",
]
