"""simt.coalesced

Idea: neighbouring lanes compute neighbouring columns.
Parent: simt.naive
Changes: two indices are swapped: a warp computes 32 columns of one row of C, where it computed 32
    rows of one column.
Why it pays: the lanes' elements of B, and those of C, now lie in one line of 128 bytes, which takes
    one transaction in place of 32. All lanes read the same element of A, which is broadcast. The
    kernel reaches 0.090 of cuBLAS, 9.3 times its parent.

    At 2048 the gain is larger, because L2 serves 97% of the requests there and 60% at 4096.
Source: 002 coalescing (6.352 TFLOP/s), 003 v01 (0.465 on a T4), 000 kernels 1 and 2.
"""

from outblas.base import registry
from outblas.base.registry import Kernel
from outblas.kernels import naive, simt_host
from outblas.kernels.simt_config import SimtConfig

Config = registry.config_type(SimtConfig, "simt.coalesced")


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
    config={"warp_m": 1, "warp_n": 32},
)

unsupported, plan, artifact, precompile, space = simt_host.entry(KERNEL, naive.direct, Config)
