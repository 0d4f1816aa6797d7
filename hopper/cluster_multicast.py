"""hopper.cluster_multicast

Idea: CTAs of a cluster that need the same slice load a part of it each, and TMA delivers every part
to all of them.
Parent: hopper.lean_barriers
Changes: clusters of 2×1 CTAs share B; multicast loads with masks; a slot is released to every CTA
that writes to it.
Why it pays: B, the larger operand of a 128×256 tile, is read from L2 once for two SMs: a third
    fewer reads. 5% at 4096, 9% at 8192. Sharing A (`cluster_m=1,cluster_n=2`) saves half as much:
    0.8% less. Clusters of four lose 17%: they do not fit all 132 SMs, and every slot waits for the
    slowest of four CTAs.
Source: 001 kernel 8 (734 TFLOP/s of cuBLAS's 716), 004.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int16, Int32
from cutlass.cute.nvgpu import cpasync

from ..core.registry import Kernel
from . import lean_barriers
from .core import entry, pipeline
from .core.config import WARPGROUP


@dataclass(frozen=True)
class Config(lean_barriers.Config):
    cluster_m: int = 2


@dataclass(frozen=True)
class ClusterRing(lean_barriers.LeanRing):
    """full[s]: as the parent's; `tx_bytes` are those of a whole slot, whoever loads them. empty[s]:
    1 by each consumer warpgroup of each CTA of the cluster: thread r of a warpgroup arrives at CTA
    r.
    """

    def contract(self) -> dict[str, int]:
        return {"full": 1, "empty": self.consumers * self.cluster}

    @cute.jit
    def release(self, index: Int32):
        pipeline.jitter(self.jitter)
        self.note("empty", "consumers", self.consumers * self.cluster)
        lane = cute.arch.thread_idx()[0] % WARPGROUP
        if lane < self.cluster:
            cute.arch.mbarrier_arrive(self.empty + index, lane)


class ClusterMulticast(lean_barriers.LeanBarriers):
    """CTA r of a cluster stands at row r % cluster_m, column r // cluster_m of it."""

    introduces = frozenset({"cluster_m", "cluster_n"})
    ring_type = ClusterRing

    def cluster_id(self, k):
        return k.cta // self.config.cluster

    def loads(self):
        """A is shared along a row of the cluster, B along a column."""
        one, many = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileG2SMulticastOp()
        return tuple(
            (many if n > 1 else one, n) for n in (self.config.cluster_n, self.config.cluster_m)
        )

    def share(self, k):
        rows, columns = self.config.cluster_m, self.config.cluster_n
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        k.part_b, k.part_a = rank % rows, rank // rows
        k.mask_a = Int16(sum(1 << rows * i for i in range(columns))) << Int16(k.part_b)
        k.mask_b = Int16((1 << rows) - 1) << Int16(k.part_a * rows)

    def tile(self, k, step):
        m, n = lean_barriers.LeanBarriers.tile(self, k, step)
        return m * self.config.cluster_m + k.part_b, n * self.config.cluster_n + k.part_a

    @cute.jit
    def meet(self):
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()

    @cute.jit
    def leave(self):
        """A CTA must not end while its peers may still write to its shared memory."""
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


KERNEL = Kernel(
    name="hopper.cluster_multicast",
    ladder="hopper",
    idea="clusters of 2x1 CTAs share an operand by multicast",
    parent="hopper.lean_barriers",
    source="001 kernel 8, 004",
    dtypes=("bfloat16", "float16"),
    min_arch=90,
    max_arch=90,
    dsl="cute",
)

unsupported, plan, artifact, phases, precompile, space = entry.entry(
    KERNEL, ClusterMulticast, Config
)
