"""simt.warptile

Idea: a warp owns a square of the tile.
Parent: simt.vectorized
Changes: 128 threads. A warp computes 64×64 outputs and a thread 8×16 of them, in four fragments of
    8×4. K-blocks have 16 terms, and the next one is loaded while one is multiplied.
Why it pays: for each term a warp reads 128 different values for 4096 products. In its parent, where
    a warp has a stripe of 16×128 outputs, it read 144 values for 2048 products. A thread's 128
    FFMAs take 24 values. The kernel reaches 0.927 of cuBLAS.

    Without the load ahead of time (`prefetch=False`, the documents' form) it loses to its parent,
    with 0.843: 230 registers a thread leave an SM room for 8 warps in place of 16, and all of them
    wait for the k-block. With `pad=0` as well it reaches 0.772.
Source: 002 warp tile (41.50 TFLOP/s, 84% of cuBLAS), 003 v06, 000 kernel 7, 004's 93.7%.
"""

from outblas.base import registry
from outblas.base.registry import Kernel
from outblas.kernels import simt_host
from outblas.kernels.shared import staged
from outblas.kernels.simt_config import SimtConfig

Config = registry.config_type(SimtConfig, "simt.warptile")


KERNEL = Kernel(
    name="simt.warptile",
    ladder="simt",
    idea="block, warp and thread tiles: 64x64 outputs per warp",
    parent="simt.vectorized",
    source="002 warp tile, 003 v06, 000 kernel 7",
    dtypes=("float32", "bfloat16", "float16"),
    min_arch=75,
    max_arch=None,
    dsl="gluon",
    config={"block_k": 16, "warp_m": 64, "warp_n": 64, "thread_n": 16, "prefetch": True, "ctas": 1},
)

unsupported, plan, artifact, precompile, space = simt_host.entry(KERNEL, staged, Config)
