"""turing.ldmatrix

Idea: fragments by ldmatrix, and a tile large enough that every thread loads.
Parent: turing.vectorized
Changes: tiles of 128×128×32, with one k-block of each operand in shared memory (16 KB). A thread
    makes two 128-bit loads of A and two of B. K-blocks are swizzled, so that one ldmatrix brings
    four 8×8 matrices without bank conflicts. Sums leave from registers: a tile of them would take
    64 KB, all that an SM of a T4 has.
Why it pays: there are a third of the bytes (2.1 GB in place of 6.4), every thread has two loads of
    each operand in flight, and a product of 16×8×16 takes 0.4 instructions to fetch. The kernel
    reaches 0.347 of cuBLAS, 3.9 times its parent; compiled for sm_75 it reaches 0.302.

    Now nothing but other CTAs hides the time that a k-block's loads take, and the tensor cores are
    busy 41% of the time.
Source: 003 v11 (17.058 TFLOP/s on a T4 at 4096).
"""

from outblas.base import registry
from outblas.base.registry import Kernel
from outblas.turing import host
from outblas.turing.config import TuringConfig
from outblas.turing.shared import staged

Config = registry.config_type(TuringConfig, "turing.ldmatrix")


KERNEL = Kernel(
    name="turing.ldmatrix",
    ladder="turing",
    idea="128x128x32, one buffer, ldmatrix, every thread loads twice",
    parent="turing.vectorized",
    source="003 v11",
    dtypes=("float16", "bfloat16"),
    min_arch=75,
    max_arch=None,
    dsl="gluon",
    config={
        "block_m": 128,
        "block_n": 128,
        "block_k": 32,
        "pad": 0,
        "swizzle": True,
        "stages": 1,
        "stage_out": False,
        "ctas": 2,
    },
)

unsupported, plan, artifact, precompile, space = host.entry(KERNEL, staged, Config)
