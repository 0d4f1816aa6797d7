"""hopper.cluster_multicast

Idea: CTAs of a cluster that need the same k tile load a part of it each, and TMA delivers every
    part to all of them.
Parent: hopper.lean_barriers
Changes: clusters of 2×1 CTAs share B. Loads of B are multicast, with a mask of the CTAs that
    receive them, and a stage is released to every CTA that writes to it.
Why it pays: B, the larger operand of a 128×256 tile, is read from L2 once for two SMs, which is a
    third fewer reads. That is worth 5% at 4096 and 9% at 8192.

    Sharing A (`cluster_m=1,cluster_n=2`) saves half as much, and is 0.8% slower. Clusters of four
    lose 17%: they do not fit all 132 SMs, and every stage waits for the slowest of four CTAs.
Source: 001 kernel 8 (734 TFLOP/s of cuBLAS's 716), 004.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int16, Int32
from cutlass.cute.nvgpu import cpasync

from outblas.base import registry
from outblas.base.registry import Kernel
from outblas.hopper import lean_barriers
from outblas.hopper.parts import entry
from outblas.hopper.parts.config import WARPGROUP, HopperConfig
from outblas.hopper.parts.pipeline import jitter
from outblas.hopper.parts.records import MulticastCoord, RungCta, WarpContext

Config = registry.config_type(HopperConfig, "hopper.cluster_multicast")


@dataclass(frozen=True)
class ClusterPipeline(lean_barriers.LeanPipeline):
    """A stage is filled by all CTAs of the cluster that share an operand.

    full[s], 1 arrival a phase:
        the CTA's own producer arrives and announces `tx_bytes`, those of the whole stage;
        TMA subtracts the bytes as they land, whichever CTA loads them;
        the CTA's consumers wait for the phase, then read the stage.
    empty[s], consumers · cluster arrivals a phase:
        when a consumer warpgroup of any CTA of the cluster has read its stage s, its thread r
        arrives at the barrier of CTA r;
        the CTA's producer waits for the phase before, then loads, into its own stage s and into
        those of its peers.
    """

    def arrival_counts(self) -> dict[str, int]:
        return {"full": 1, "empty": self.consumers * self.cluster}

    @cute.jit
    def consumer_release(self, index: Int32):
        jitter(self.jitter)
        self.record_arrivals("empty", "consumers", self.consumers * self.cluster)
        lane = cute.arch.thread_idx()[0] % WARPGROUP
        if lane < self.cluster:
            cute.arch.mbarrier_arrive(self.empty + index, lane)


class ClusterMulticast(lean_barriers.LeanBarriers):
    """CTA r of a cluster stands at row r % cluster_m, column r // cluster_m of it."""

    introduces = frozenset({"cluster_m", "cluster_n"})
    pipeline_type = ClusterPipeline

    def cluster_id(self, context: WarpContext):
        return context.cta // self.config.cluster

    def load_operations(self):
        """CTAs of a row of the cluster load the same tile of A, those of a column one of B."""
        one, many = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileG2SMulticastOp()
        return tuple(
            (many if n > 1 else one, n) for n in (self.config.cluster_n, self.config.cluster_m)
        )

    def cluster_coord(self, context: WarpContext) -> MulticastCoord:
        rows, columns = self.config.cluster_m, self.config.cluster_n
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        m, n = rank % rows, rank // rows
        return MulticastCoord(
            m,
            n,
            mask_a=Int16(sum(1 << rows * i for i in range(columns))) << Int16(m),
            mask_b=Int16((1 << rows) - 1) << Int16(n * rows),
        )

    def tile_coord(self, cta: RungCta, step=0):
        m, n = lean_barriers.LeanBarriers.tile_coord(self, cta, step)
        return (
            m * self.config.cluster_m + cta.coord.cta_m_in_cluster,
            n * self.config.cluster_n + cta.coord.cta_n_in_cluster,
        )

    @cute.jit
    def cluster_sync(self):
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()

    @cute.jit
    def cluster_exit(self):
        """A CTA must not end while its peers may still write to its shared memory."""
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


KERNEL = Kernel(
    name="hopper.cluster_multicast",
    ladder="hopper",
    idea="clusters of 2x1 CTAs share an operand by multicast",
    parent="hopper.lean_barriers",
    source="001 kernel 8, 004",
    min_arch=90,
    max_arch=90,
    dsl="cute",
    config={"cluster_m": 2},
)

unsupported, plan, artifact, phases, precompile, space = entry.entry(
    KERNEL, ClusterMulticast, Config
)
