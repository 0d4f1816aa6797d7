"""turing.vectorized

Idea: 128-bit loads, and so an eighth of the load instructions.
Parent: turing.double_buffer
Changes: a thread moves 8 elements at once. The tile stays 32×64×16, which is 64 such loads of A and
    128 of B for 256 threads.
Why it pays: there are an eighth of the load instructions. The kernel reaches 0.089 of cuBLAS, 1.17
    times its parent.

    The document lost 4% by the same step on a T4: 192 of 256 threads have nothing to load of A and
    128 nothing of B, and wait at the barrier.
Source: 003 v10 (2.984 TFLOP/s on a T4 at 2048; 12.380 at 4096).
"""

from outblas.base import registry
from outblas.base.registry import Kernel
from outblas.turing import double_buffer, host
from outblas.turing.config import TuringConfig

Config = registry.config_type(TuringConfig, "turing.vectorized")


KERNEL = Kernel(
    name="turing.vectorized",
    ladder="turing",
    idea="128-bit loads with a 32x64 tile: fewer instructions, idle threads",
    parent="turing.double_buffer",
    source="003 v10",
    dtypes=("float16", "bfloat16"),
    min_arch=75,
    max_arch=None,
    dsl="gluon",
    config={"vector": 8},
)

unsupported, plan, artifact, precompile, space = host.entry(
    KERNEL, double_buffer.buffered, Config, steps=2
)
