"""hopper.grouped: the products of all groups in one launch, whose sizes lie on the device.

Idea: the persistent kernel of `hopper.gemm`, whose schedule each CTA derives from the ends of
    groups before its first load.
Why it pays: the host reads no size, and no descriptor is written for a group. Tiles begin at the
    first row of a group, at any coordinate that TMA takes; a tile that reaches into the next
    group multiplies its rows as well, and stores only its own. The epilogue is that of
    `hopper.gemm`, with a bias for each group; rows of the result may be scattered, so that the
    products of experts need no pass over memory that puts them back in order.
"""

from outblas.hopper.gemm.config import Config
from outblas.hopper.gemm.group_host import artifact, run, unsupported
from outblas.hopper.gemm.group_host import gathered as pack_problem
from outblas.hopper.gemm.packed import group_variant_on as pack_variant

__all__ = [
    "Config",
    "artifact",
    "pack_problem",
    "pack_variant",
    "run",
    "unsupported",
]
