"""simt.strip

Idea: a thread computes a strip of 8 outputs down a column.
Parent: simt.shared
Changes: 64×64 tiles in k-blocks of 8 terms, with 512 threads of 8×1 outputs. Rows of A in shared
    memory are one word longer: from rows of 8 words the assembler reads four terms at once, and two
    CTAs an SM would spill.
Why it pays: one value of B serves 8 FFMAs, so that a product takes 9/8 loads from shared memory in
    place of 2. A tile of twice the edge needs half the bytes from L2. The kernel reaches 0.255 of
    cuBLAS.
Source: 002 1D tile per thread (17.04 TFLOP/s), 003 v03 (1.5 to 1.8 on a T4).
"""

from outblas.base import registry
from outblas.base.registry import Kernel
from outblas.kernels import shared, simt_host
from outblas.kernels.simt_config import SimtConfig

Config = registry.config_type(SimtConfig, "simt.strip")


KERNEL = Kernel(
    name="simt.strip",
    ladder="simt",
    idea="a strip of eight outputs per thread",
    parent="simt.shared",
    source="002 1D tile per thread, 003 v03",
    dtypes=("float32", "bfloat16", "float16"),
    min_arch=75,
    max_arch=None,
    dsl="gluon",
    config={
        "block_m": 64,
        "block_n": 64,
        "block_k": 8,
        "warp_m": 8,
        "thread_m": 8,
        "piece_m": 8,
        "pad": 1,
    },
)

unsupported, plan, artifact, precompile, space = simt_host.entry(KERNEL, shared.staged, Config)
