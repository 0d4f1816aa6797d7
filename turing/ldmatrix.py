"""turing.ldmatrix

Idea: fragments by ldmatrix, and a tile large enough that every thread loads.
Parent: turing.vectorized
Changes: tiles of 128×128×32, one slab of each operand (16 KB), two 128-bit loads of A and two of B a thread. Slabs are
    swizzled, so that ldmatrix brings four 8×8 matrices with one instruction and no bank conflicts. Sums leave from
    registers: a tile of them would take 64 KB, all that a T4's SM has.
Why it pays:
Source: 003 v11 (17.058 TFLOP/s on a T4 at 4096).
"""

from dataclasses import dataclass

from ..registry import Kernel
from . import host, vectorized
from .shared import staged


@dataclass(frozen=True)
class Config(vectorized.Config):
    block_m: int = 128
    block_n: int = 128
    block_k: int = 32
    pad: int = 0
    swizzle: bool = True
    stages: int = 1
    stage_out: bool = False
    ctas: int = 2


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
)

unsupported, plan, artifact = host.entry(KERNEL, staged, Config)
