"""hopper.warp_specialized

Idea: one warpgroup only loads, another only multiplies, and a ring of slots lies between them.
Parent: hopper.large_tile
Changes: the body splits into `producer` and `consumer`; five slots; each slot gets a second
barrier, "empty".
Why it pays: TMA fills up to five slices ahead while wgmma reads, so latency is paid once a tile and
    not once a slice. 0.70 of cuBLAS at 4096, 1.07 of the parent. It gains no more because L2 gives
    no more: 128×128 tiles ask it for 2.15 GB, at its peak of 5120 bytes a clock 237 µs, and this
    takes 250; one group in flight (`in_flight=1`) 239. Everyone who waits on a barrier also arrives
    at it, as with cuda::barrier (`sync.TokenRing`). At 8192 it loses 7%: 132 CTAs run at a time
    where the parent has 396, so the same order of tiles shares fewer columns of B; L2 serves 54% of
    requests, not 76%, and DRAM reads are 5.1 GB, not 2.0 GB. `hopper.persistent` orders the tiles.
Source: 001 kernel 4 (498 TFLOP/s of cuBLAS's 716), 004 kernel C.
"""

from dataclasses import dataclass

import cutlass.cute as cute

from ..core.registry import Kernel
from . import large_tile
from .core import entry, pipeline, roles


@dataclass(frozen=True)
class Config(large_tile.Config):
    slots: int = 5


class WarpSpecialized(large_tile.LargeTile):
    """Warpgroup 0 is the producer, by its first warp; the others are consumers."""

    introduces = frozenset({"slots", "consumers", "in_flight"})
    ring_type: type[pipeline.Ring] = pipeline.TokenRing

    @property
    def warpgroups(self) -> int:
        return 1 + self.config.consumers

    @cute.jit
    def body(self, k, ring):
        if k.warpgroup == 0:
            self.give_registers()
            if k.warp == 0:
                self.producer(k, ring)
        else:
            self.take_registers()
            self.become_consumer(k, k.warpgroup - 1)
            self.consumer(k, ring)

    @cute.jit
    def give_registers(self):
        """The producer keeps what the compiler gave it."""

    @cute.jit
    def take_registers(self):
        """So do the consumers."""

    @cute.jit
    def producer(self, k, ring):
        m, n = self.tile(k)
        roles.load_tile(k, ring, ring.start(), m, n)

    @cute.jit
    def consumer(self, k, ring):
        m, n = self.tile(k)
        self.clear(k)
        roles.multiply_tile(
            k, ring, ring.start(), self.config.in_flight, self.config.accumulate_flag
        )
        self.store(k, m, n)


KERNEL = Kernel(
    name="hopper.warp_specialized",
    ladder="hopper",
    idea="a producer and a consumer warpgroup over a ring of five slots",
    parent="hopper.large_tile",
    source="001 kernel 4, 004 kernel C",
    dtypes=("bfloat16", "float16"),
    min_arch=90,
    max_arch=90,
    dsl="cute",
)

unsupported, plan, artifact, phases, precompile, space = entry.entry(
    KERNEL, WarpSpecialized, Config
)
