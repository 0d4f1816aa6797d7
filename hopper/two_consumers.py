"""hopper.two_consumers

Idea: a 128×256 tile, half of it in the registers of each of two consumer warpgroups.
Parent: hopper.warp_specialized
Changes: 128×256 tiles, multiplied by m64n256k16, in three stages of 48 KiB. setmaxnreg moves
    registers from the producer (24 a thread) to the consumers (240).
Why it pays: a FLOP takes a quarter fewer bytes from L2, which bound the parent. The kernel reaches
    0.80 of cuBLAS at 4096 and 0.83 at 8192. It gains no more because the consumers arrive at "full"
    as well as wait there: each k tile starts when the slower of them is ready.

    One consumer cannot hold the tile. Its 256 accumulators a thread exceed the 255 registers that
    there are, spill, and serialise wgmma: 0.05 with
    `consumers=1,producer_registers=0,consumer_registers=0`.

    setmaxnreg is worth 0.2% here, not the document's 3%: 168 registers hold everything without it.
Source: 001 kernel 5 (610 TFLOP/s, 631 with setmaxnreg, of cuBLAS's 716), 004 kernel D.
"""

import cutlass
import cutlass.cute as cute

from outblas.base import registry
from outblas.base.registry import Kernel
from outblas.hopper import warp_specialized
from outblas.hopper.parts import entry
from outblas.hopper.parts.config import HopperConfig

Config = registry.config_type(HopperConfig, "hopper.two_consumers")


class TwoConsumers(warp_specialized.WarpSpecialized):
    """Its parent with another config, and setmaxnreg."""

    introduces = frozenset({"producer_registers", "consumer_registers"})

    @cute.jit
    def decrease_registers(self):
        if cutlass.const_expr(self.config.producer_registers > 0):
            cute.arch.setmaxregister_decrease(self.config.producer_registers)

    @cute.jit
    def increase_registers(self):
        if cutlass.const_expr(self.config.consumer_registers > 0):
            cute.arch.setmaxregister_increase(self.config.consumer_registers)


KERNEL = Kernel(
    name="hopper.two_consumers",
    ladder="hopper",
    idea="128x256x64 tiles over two consumers, three stages, setmaxnreg 24/240",
    parent="hopper.warp_specialized",
    source="001 kernel 5, 004 kernel D",
    min_arch=90,
    max_arch=90,
    dsl="cute",
    config={
        "tile_n": 256,
        "stages": 3,
        "consumers": 2,
        "producer_registers": 24,
        "consumer_registers": 240,
    },
)

unsupported, plan, artifact, phases, precompile, space = entry.entry(KERNEL, TwoConsumers, Config)
