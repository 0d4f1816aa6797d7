"""hopper.large_tile

Idea: four times the tile, with the widest wgmma that spans it.
Parent: hopper.tma_wgmma
Changes: 128×128 tiles, multiplied by m64n128k16.
Why it pays: a tile of twice the edge does twice the FLOP with each byte that comes from L2, which
    bound its parent. A step along K takes 1478 cycles of loading for 688 of wgmma (001: 1415 and
    703), and three CTAs an SM hide part of each other's loads. The kernel reaches 0.65 of cuBLAS at
    4096.

    One n128 beats two n64 by 2% and four n32 by 15%, because A is read from shared memory for each.
Source: 001 kernel 3 (423 TFLOP/s of cuBLAS's 716), 004 kernel B.
"""

from outblas.base import registry
from outblas.base.registry import Kernel
from outblas.hopper import tma_wgmma
from outblas.hopper.parts import entry
from outblas.hopper.parts.config import HopperConfig

Config = registry.config_type(HopperConfig, "hopper.large_tile")


class LargeTile(tma_wgmma.TmaWgmma):
    """Its parent with another config."""


KERNEL = Kernel(
    name="hopper.large_tile",
    ladder="hopper",
    idea="128x128x64 tiles, wgmma m64n128k16",
    parent="hopper.tma_wgmma",
    source="001 kernel 3, 004 kernel B",
    min_arch=90,
    max_arch=90,
    dsl="cute",
    config={"tile_m": 128, "tile_n": 128},
)

unsupported, plan, artifact, phases, precompile, space = entry.entry(KERNEL, LargeTile, Config)
