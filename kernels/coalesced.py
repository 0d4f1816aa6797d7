"""simt.coalesced

Idea: neighbouring lanes compute neighbouring columns.
Parent: simt.naive
Changes: a warp walks along a row of C in place of down a column: one swap of the two indices.
Why it pays: the lanes' elements of B, and of C, are one line of 128 bytes, one transaction in place
    of 32; those of A are one element, which is broadcast. 0.090 of cuBLAS, 9.3 times its parent.
Source: 002 coalescing (6.352 TFLOP/s), 003 v01 (0.465 on a T4), 000 kernels 1 and 2.
"""

from dataclasses import dataclass

from ..core.registry import Kernel
from . import naive, simt_host


@dataclass(frozen=True)
class Config(naive.Config):
    warp_m: int = 1
    warp_n: int = 32


KERNEL = Kernel(
    name="simt.coalesced",
    ladder="simt",
    idea="the same with the index swap: a warp walks along a row of C",
    parent="simt.naive",
    source="002 coalescing, 003 v01, 000 kernels 1 and 2",
    dtypes=("float32", "bfloat16", "float16"),
    min_arch=75,
    max_arch=None,
    dsl="gluon",
)

unsupported, plan, artifact, precompile, space = simt_host.entry(KERNEL, naive.direct, Config)
