"""hopper.tma_wgmma

Idea: TMA fills shared memory and one warpgroup multiplies it with wgmma.
Parent: none; the first rung of the Hopper ladder.
Changes: against a CUDA-core kernel, one thread starts two bulk tensor copies in place of everyone's
    loads, and one wgmma m64n64k16 per 16 of K reads both operands from shared memory in place of
    thousands of FFMAs.
Why it pays: the tensor cores do 4096 bf16 FLOP per SM and clock against 256 on the FP32 units, and
    TMA swizzles, so reads of shared memory meet no bank conflicts. It still stops at each slice:
    load, wait, multiply, wait (2699 cycles of loading for 204 of wgmma). Only other CTAs on the SM
    hide that. 0.37 of cuBLAS at 4096.
Source: 001 kernel 2 (317 TFLOP/s of cuBLAS's 716), 004 kernel A.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from ..core.registry import Kernel
from .core import entry, roles
from .core.base import HopperGemm
from .core.config import HopperConfig
from .core.phase_clock import LOAD, TENSOR, lap

Config = HopperConfig


class TmaWgmma(HopperGemm):
    """One CTA a tile, one warpgroup, one slot, one mbarrier."""

    def tile(self, k):
        return k.cta % k.tiles_m, k.cta // k.tiles_m  # CTAs that start together share columns of B

    @cute.jit
    def body(self, k, ring):
        self.become_consumer(k, 0)
        m, n = self.tile(k)
        slot = ring.start()
        self.clear(k)
        for at in cutlass.range(k.k_tiles, unroll=1):
            if k.warp == 0:
                ring.acquire(slot)
                roles.load_slice(k, ring, slot, m, n, at)
            ring.wait(slot)
            lap(k, LOAD)
            roles.multiply_slot(k, slot.index)
            warpgroup.wait_group(0)
            ring.release(slot.index)
            lap(k, TENSOR)
            slot = ring.next(slot)
        self.store(k, m, n)


KERNEL = Kernel(
    name="hopper.tma_wgmma",
    ladder="hopper",
    idea="TMA loads, one warpgroup, wgmma m64n64k16 on 64x64x64 tiles",
    parent=None,
    source="001 kernel 2, 004 kernel A",
    dtypes=("bfloat16", "float16"),
    min_arch=90,
    max_arch=90,
    dsl="cute",
)

unsupported, plan, artifact, phases, precompile, space = entry.entry(KERNEL, TmaWgmma, Config)
