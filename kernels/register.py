"""simt.register

Idea: a thread computes 8×8 outputs as an outer product from registers.
Parent: simt.strip
Changes: 128×128 tiles, with 256 threads of 8×8 outputs. For each term a thread reads 8 values of A
    and 8 of B into registers and multiplies each with each. K-blocks have 4 terms, half of the
    documents': with 8 terms to read ahead, two CTAs an SM would spill.
Why it pays: 64 FFMAs take 16 values from shared memory, which is a quarter of a load each, in place
    of 9/8. The kernel reaches 0.590 of cuBLAS.
Source: 002 2D tile per thread (25.93 TFLOP/s), 003 v04 (2.1 to 2.7 on a T4), 000 kernel 5.
"""

from outblas.base import registry
from outblas.base.registry import Kernel
from outblas.kernels import simt_host
from outblas.kernels.shared import staged
from outblas.kernels.simt_config import SimtConfig

Config = registry.config_type(SimtConfig, "simt.register")


KERNEL = Kernel(
    name="simt.register",
    ladder="simt",
    idea="an outer product of 8x8 outputs per thread",
    parent="simt.strip",
    source="002 2D tile per thread, 003 v04, 000 kernel 5",
    dtypes=("float32", "bfloat16", "float16"),
    min_arch=75,
    max_arch=None,
    dsl="gluon",
    config={
        "block_m": 128,
        "block_n": 128,
        "block_k": 4,
        "warp_m": 16,
        "warp_n": 128,
        "thread_n": 8,
        "piece_n": 8,
        "pad": 0,
    },
)

unsupported, plan, artifact, precompile, space = simt_host.entry(KERNEL, staged, Config)
