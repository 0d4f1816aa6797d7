"""hopper.persistent

Idea: as many CTAs as SMs, each of which walks a list of tiles, so that the order of tiles is the
    kernel's own choice.
Parent: hopper.two_consumers
Changes: producer and consumers loop over the column of a table (`device.raster.schedule`) that
    belongs to their CTA. By default 128 CTAs take super-groups of 16×8 tiles: the 128 tiles of a
    group run at the same time.
Why it pays: the producer loads the next tile while the consumers store this one, and barriers are
    set up once. CTAs that run together read the same rows of A and columns of B, so that L2 serves
    them: 82% of the requests at 4096 (76% in the parent) and 83% at 8192. The kernel reaches 0.81
    of cuBLAS at 4096 and 0.85 at 8192, 1.5% and 2% more than its parent.

    The order matters. With `order=consecutive,sms=0` each CTA has neighbouring tiles, and different
    CTAs have distant ones: at 8192 L2 serves 44% of the requests, and the kernel reaches 0.74. All
    132 SMs (`sms=0`) spoil the groups, which have 128 tiles: 0.80 and 0.81.
Source: 001 kernel 6 (660 TFLOP/s of cuBLAS's 716; consecutive 400, 132 SMs 655), 004.
"""

import cutlass
import cutlass.cute as cute

from outblas.base import registry
from outblas.base.registry import Kernel
from outblas.hopper import two_consumers
from outblas.hopper.parts import entry, roles
from outblas.hopper.parts.config import HopperConfig
from outblas.hopper.parts.pipeline import Pipeline
from outblas.hopper.parts.records import RungCta, WarpContext

Config = registry.config_type(HopperConfig, "hopper.persistent")


class Persistent(two_consumers.TwoConsumers):
    """`table[step, cluster]`: the cluster's tiles in order, as row · columns + column, -1 where it
    has none left.
    """

    introduces = frozenset({"order", "group_m", "group_n", "sms"})
    persistent = True

    def grid(self, tiles, table):
        return table.shape[1] * self.config.cluster

    def cluster_id(self, context: WarpContext):
        """The number of the CTA's cluster."""
        return context.cta

    def tile_coord(self, cta: RungCta, step=0):
        """Row and column tile of the CTA's step `step`."""
        tile = cta.grid.table[step, self.cluster_id(cta.context)]
        return tile // cta.grid.tiles_n, tile % cta.grid.tiles_n

    @cute.jit
    def steps(self, cta: RungCta):
        """How many tiles this cluster has: only the last may be missing."""
        count = cta.grid.table.shape[0]
        if cta.grid.table[count - 1, self.cluster_id(cta.context)] < 0:
            count -= 1
        return count

    @cute.jit
    def producer(self, cta: RungCta, pipeline: Pipeline):
        state = pipeline.initial_state()
        for step in cutlass.range(self.steps(cta), unroll=1):
            m, n = self.tile_coord(cta, step)
            state = roles.load_tile(
                cta.load_a, cta.load_b, pipeline, state, m, n, cta.grid.k_tiles, cta.timers
            )

    @cute.jit
    def consumer(self, cta: RungCta, consumer, pipeline: Pipeline):
        state = pipeline.initial_state()
        for step in cutlass.range(self.steps(cta), unroll=1):
            m, n = self.tile_coord(cta, step)
            self.clear_accumulator(consumer.fragments)
            state = roles.mma_tile(
                consumer.fragments,
                pipeline,
                state,
                cta.grid.k_tiles,
                self.config.in_flight,
                self.config.accumulate_flag,
                cta.timers,
            )
            self.store_tile(cta, consumer, m, n)


KERNEL = Kernel(
    name="hopper.persistent",
    ladder="hopper",
    idea="persistent CTAs on 128 SMs, super-groups of 16x8 tiles",
    parent="hopper.two_consumers",
    source="001 kernel 6, 004",
    min_arch=90,
    max_arch=90,
    dsl="cute",
    config={"order": "grouped", "sms": 128},
)

unsupported, plan, artifact, phases, precompile, space = entry.entry(KERNEL, Persistent, Config)
