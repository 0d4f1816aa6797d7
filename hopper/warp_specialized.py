"""hopper.warp_specialized

Idea: one warpgroup only loads, another only multiplies, and a pipeline of stages lies between them.
Parent: hopper.large_tile
Changes: the body splits into `producer` and `consumer`. There are five stages, each with a second
    barrier, "empty", in addition to "full". Every thread that waits on a barrier also arrives at
    it, as with cuda::barrier (`parts.pipeline.TokenPipeline`).
Why it pays: TMA fills up to five k tiles ahead while wgmma reads, so that latency is paid once a
    tile and not once a k tile. The kernel reaches 0.70 of cuBLAS at 4096, 1.07 of its parent.

    It gains no more because L2 gives no more. 128×128 tiles ask it for 2.15 GB, which takes 237 µs
    at its peak of 5120 bytes a clock. The kernel takes 250 µs, and 239 with one wgmma group in
    flight (`in_flight=1`).

    At 8192 it loses 7% to its parent. 132 CTAs run at a time where the parent has 396, so that the
    same order of tiles shares fewer columns of B: L2 serves 54% of the requests in place of 76%,
    and DRAM reads are 5.1 GB in place of 2.0 GB. `hopper.persistent` orders the tiles.
Source: 001 kernel 4 (498 TFLOP/s of cuBLAS's 716), 004 kernel C.
"""

import cutlass.cute as cute

from outblas.base import registry
from outblas.base.registry import Kernel
from outblas.hopper import large_tile
from outblas.hopper.parts import entry, roles
from outblas.hopper.parts.config import HopperConfig
from outblas.hopper.parts.pipeline import Pipeline, TokenPipeline
from outblas.hopper.parts.records import RungCta, WarpRole

Config = registry.config_type(HopperConfig, "hopper.warp_specialized")


class WarpSpecialized(large_tile.LargeTile):
    """Warpgroup 0 is the producer, by its first warp; the others are consumers."""

    introduces = frozenset({"stages", "consumers", "in_flight"})
    pipeline_type: type[Pipeline] = TokenPipeline

    @property
    def warpgroups(self) -> int:
        return 1 + self.config.consumers

    @cute.jit
    def body(self, cta: RungCta, pipeline: Pipeline):
        if cta.context.warpgroup == 0:
            self.decrease_registers()
            if cta.context.warp == WarpRole.LOAD:
                self.producer(cta, pipeline)
        else:
            self.increase_registers()
            self.consumer(cta, self.make_consumer(cta, cta.context.warpgroup - 1), pipeline)

    @cute.jit
    def decrease_registers(self):
        """The producer keeps the registers that the compiler gave it."""

    @cute.jit
    def increase_registers(self):
        """So do the consumers."""

    @cute.jit
    def producer(self, cta: RungCta, pipeline: Pipeline):
        """The warp that loads."""
        m, n = self.tile_coord(cta)
        roles.load_tile(
            cta.load_a,
            cta.load_b,
            pipeline,
            pipeline.initial_state(),
            m,
            n,
            cta.grid.k_tiles,
            cta.timers,
        )

    @cute.jit
    def consumer(self, cta: RungCta, consumer, pipeline: Pipeline):
        """A warpgroup that multiplies and stores."""
        m, n = self.tile_coord(cta)
        self.clear_accumulator(consumer.fragments)
        roles.mma_tile(
            consumer.fragments,
            pipeline,
            pipeline.initial_state(),
            cta.grid.k_tiles,
            self.config.in_flight,
            self.config.accumulate_flag,
            cta.timers,
        )
        self.store_tile(cta, consumer, m, n)


KERNEL = Kernel(
    name="hopper.warp_specialized",
    ladder="hopper",
    idea="a producer and a consumer warpgroup over a pipeline of five stages",
    parent="hopper.large_tile",
    source="001 kernel 4, 004 kernel C",
    min_arch=90,
    max_arch=90,
    dsl="cute",
    config={"stages": 5},
)

unsupported, plan, artifact, phases, precompile, space = entry.entry(
    KERNEL, WarpSpecialized, Config
)
