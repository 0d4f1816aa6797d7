"""hopper.tma_wgmma

Idea: TMA fills shared memory, and one warpgroup multiplies from there with wgmma.
Parent: none; this is the first rung of the Hopper ladder.
Changes: against a CUDA-core kernel, one thread starts two bulk tensor copies in place of the loads
    of all threads, and one wgmma m64n64k16 for every 16 terms of K reads both operands from shared
    memory in place of thousands of FFMAs.
Why it pays: the tensor cores do 4096 bf16 FLOP for each SM and clock, the FP32 units 256. TMA
    swizzles what it writes, so that reads of shared memory meet no bank conflicts. The kernel
    reaches 0.37 of cuBLAS at 4096.

    It still stops at each k tile to load, wait, multiply and wait again: 2699 cycles of loading for
    204 of wgmma. Only other CTAs on the SM hide that.
Source: 001 kernel 2 (317 TFLOP/s of cuBLAS's 716), 004 kernel A.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from outblas.base.registry import Kernel
from outblas.hopper.parts import entry, roles
from outblas.hopper.parts.base import HopperGemm
from outblas.hopper.parts.config import HopperConfig
from outblas.hopper.parts.phase_clock import LOAD, TENSOR, lap
from outblas.hopper.parts.pipeline import Pipeline
from outblas.hopper.parts.records import RungCta, WarpRole

Config = HopperConfig


class TmaWgmma(HopperGemm):
    """One CTA a tile, one warpgroup, one stage, one mbarrier."""

    def tile_coord(self, cta: RungCta, step=0):
        """Row and column tile of a CTA at its step `step`; it has one. CTAs that start together
        share columns of B.
        """
        block, tiles_m = cta.context.cta, cta.grid.tiles_m
        return block % tiles_m, block // tiles_m

    @cute.jit
    def body(self, cta: RungCta, pipeline: Pipeline):
        consumer = self.make_consumer(cta, 0)
        m, n = self.tile_coord(cta)
        state = pipeline.initial_state()
        self.clear_accumulator(consumer.fragments)
        for k_tile in cutlass.range(cta.grid.k_tiles, unroll=1):
            if cta.context.warp == WarpRole.LOAD:
                pipeline.producer_acquire(state)
                pipeline.arrive_and_expect_tx(state)
                roles.load_k_tile(cta.load_a, cta.load_b, pipeline, state, m, n, k_tile)
            pipeline.consumer_wait(state)
            lap(cta.timers, LOAD)
            roles.mma_stage(consumer.fragments, state.index)
            warpgroup.wait_group(0)
            pipeline.consumer_release(state.index)
            lap(cta.timers, TENSOR)
            state = pipeline.advance(state)
        self.store_tile(cta, consumer, m, n)


KERNEL = Kernel(
    name="hopper.tma_wgmma",
    ladder="hopper",
    idea="TMA loads, one warpgroup, wgmma m64n64k16 on 64x64x64 tiles",
    parent=None,
    source="001 kernel 2, 004 kernel A",
    min_arch=90,
    max_arch=90,
    dsl="cute",
)

unsupported, plan, artifact, phases, precompile, space = entry.entry(KERNEL, TmaWgmma, Config)
