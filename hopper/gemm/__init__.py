"""hopper.gemm

Idea: one kernel for every shape and layout, tuned.
Parent: hopper.hilbert
Changes: the ladder's last rung loses its limits, and gains these levers.

    - What a tile is, and which cluster computes it, is arithmetic on the problem
      (`tile_scheduler`): tiles of variable width, operands swapped for few rows and for widths,
      batches, alpha and beta.
    - K can be cut into partitions, within a cluster through shared memory (`cluster_reduce`), or
      across the GPU through memory, where the CTA that ends last adds them in their order
      (`splitk_reduce`).
    - Consumers share a tile or take turns (pingpong). Every other tile of a CTA may walk K
      backwards. A wgmma group stays in flight, and its stage is released one k tile later.
    - Where no CTA has two tiles, those of a GPC are neighbours (`gpc_placement`).
    - Each operand has a warp that loads it (`tma_load`), and CTAs end without a barrier
      (`pipeline`).
    - C leaves through shared memory at any width, by rows or by columns (`epilogue_store`). What
      follows the product is done in registers (`epilogue_math`), and a source that lies as C does
      is loaded through the pipeline's stages (`epilogue_load`).
    - Two fp8 values are moved as one value of 16 bits. Their sums are added up outside the tensor
      cores, 64 rows of a consumer after the other (`promotion`), multiplied by scales that may vary
      along K (`block_scales`). An output in fp8 gets its scales in the epilogue
      (`block_quantize`).

    `kernel.Gemm` says which warp does what, and when.
Why it pays: at 8192 columns of variable width make 16 whole waves where 128×256 tiles make 15.5:
    1.04 of cuBLAS, and 1.025 without. Walking K backwards in every other tile is worth 0.5% there.

    Neighbours in a GPC ask L2 for a line together: 1024 in 64×128 tiles reaches 1.12, and 0.89
    without. Two partitions of K in a cluster take 16×4096×4096 from 0.89 to 1.25. What a short call
    does before its first product and after its last takes 0.3 to 1.5 µs less than it did.
    WORKLOG.md has each lever's figures.
Source: none; it is beyond the documents. The levers are those of 001's last kernels and of
    `hopper.hilbert`, without their limits.
"""

from outblas.base.facts import version_of
from outblas.base.registry import Kernel
from outblas.hopper.gemm.config import Config, invalid_reason
from outblas.hopper.gemm.host import (
    artifact,
    packed_plan,
    plan,
    precompile,
    quantizes,
    unsupported,
)
from outblas.hopper.gemm.operand_copies import remarks
from outblas.hopper.gemm.packed import computed as pack_problem
from outblas.hopper.gemm.packed import keep as keep_variant
from outblas.hopper.gemm.packed import variants as pack_variants
from outblas.hopper.gemm.search_space import space

__all__ = [
    "KERNEL",
    "Config",
    "artifact",
    "invalid_reason",
    "keep_variant",
    "pack_problem",
    "pack_variants",
    "packed_plan",
    "plan",
    "precompile",
    "quantizes",
    "remarks",
    "space",
    "unsupported",
]

for _package in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
    version_of(_package)  # planning imports neither, but no kernel is made or launched without them

BATCH_INVARIANT = True
EPILOGUES = True
FP8 = True

KERNEL = Kernel(
    name="hopper.gemm",
    ladder="hopper",
    idea="one production kernel for every shape and layout, tuned",
    parent="hopper.hilbert",
    source="beyond the seeds",
    min_arch=90,
    max_arch=90,
    dsl="cute",
    config={
        "stages": 4,
        "in_flight": 1,
        "producer_registers": 40,
        "consumer_registers": 232,
        "order": "serpentine",
        "group_m": 8,
        "sms": 0,
        "gpc_local": True,
        "epilogue_stages": 2,
        "stagger": "rule",
        "k_serpentine": True,
    },
)
