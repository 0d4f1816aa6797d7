"""hopper.tma_store

Idea: C leaves through shared memory, by TMA, while the next tile is multiplied.
Parent: hopper.store_tuning
Changes: each consumer writes its half of the tile to shared memory with stmatrix, in subtiles of
    64×64. One thread starts the TMA stores. Nobody waits for them but the store of the next tile.
Why it pays: TMA writes whole lines, computes addresses and edges itself, and lets the consumers go
    on at once: they store for 900 cycles a tile where the parent's take 2100. That is worth 0.5% at
    4096 and 1% at 8192.

    Two rules keep it right (`parts.epilogue_store`). Every thread fences its writes for the async
    proxy before the store is issued, and a buffer is written again only when the store that reads
    it has done so.

    TMA writes granules of 16 bytes, past the edge of C too. So a C whose rows do not start and end
    at multiples of 16 bytes is stored as the parent does.
Source: 001 kernel 10 (758 TFLOP/s of cuBLAS's 716), 004.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute

from outblas.base import registry
from outblas.base.registry import Kernel
from outblas.hopper import store_tuning
from outblas.hopper.parts import entry, epilogue_store
from outblas.hopper.parts.config import SUBTILE_N, HopperConfig
from outblas.hopper.parts.records import RungCta

Config = registry.config_type(HopperConfig, "hopper.tma_store")


class TmaStore(store_tuning.StoreTuning):
    """`store_buffers` subtiles of 8 KiB a consumer: by default all of its half tile, in 16 bits."""

    introduces = frozenset({"epilogue_stages"})

    @classmethod
    def invalid_reason(cls, config):
        if reason := super().invalid_reason(config):
            return reason
        if config.epilogue_stages and (
            config.tile_n % SUBTILE_N or config.instruction_n % SUBTILE_N
        ):
            tile = f"tile_n is {config.tile_n} and mma_n {config.instruction_n}"
            return f"{tile}, expected multiples of {SUBTILE_N} for a staged store"
        return None

    @property
    def staged(self):
        return self.width >= 4 and self.config.epilogue_stages > 0

    def store_operand(self, c):
        return epilogue_store.make_operand(self.config, c) if self.staged else ()

    def alloc_epilogue(self, smem, operand, dtype):
        return epilogue_store.alloc_smem(smem, operand, dtype) if self.staged else None

    def make_consumer(self, cta: RungCta, index):
        consumer = store_tuning.StoreTuning.make_consumer(self, cta, index)
        if not self.staged:
            return consumer
        writer = epilogue_store.make_writer(self.config, cta.epilogue, consumer)
        return replace(consumer, writer=writer)

    @cute.jit
    def store_tile(self, cta: RungCta, consumer, m, n):
        if cutlass.const_expr(self.staged):
            epilogue_store.store(consumer, self.config, m, n, cta.timers)
        else:
            store_tuning.StoreTuning.store_tile(self, cta, consumer, m, n)

    @cute.jit
    def cluster_exit(self):
        epilogue_store.wait_stores_read()  # shared memory must outlive the stores that read it
        store_tuning.StoreTuning.cluster_exit(self)


KERNEL = Kernel(
    name="hopper.tma_store",
    ladder="hopper",
    idea="C staged in shared memory, asynchronous TMA store",
    parent="hopper.store_tuning",
    source="001 kernel 10, 004",
    min_arch=90,
    max_arch=90,
    dsl="cute",
    config={"epilogue_stages": 4},
)

unsupported, plan, artifact, phases, precompile, space = entry.entry(KERNEL, TmaStore, Config)
