"""The configuration of every Hopper rung, and its budgets as formulas."""

from dataclasses import dataclass

SHARED_MEMORY = 232448  # bytes one CTA may use on sm_90
BARRIER_BYTES = 1024  # mbarriers, padded so that the first tile starts at a swizzle boundary
WARPGROUP = 128
ACCUMULATOR_LIMIT = 208  # registers of one thread that may hold accumulators: 255 less addresses and loop state


@dataclass(frozen=True)
class HopperConfig:
    """Tile of one CTA, in elements.

    `jitter` makes every role sleep a random time at each barrier, to shake out races: never for speed.
    """

    tile_m: int = 64
    tile_n: int = 64
    tile_k: int = 64
    jitter: bool = False

    @property
    def slot_bytes(self) -> int:
        """Shared memory of one slice of A and one of B, 16-bit elements."""
        return (self.tile_m + self.tile_n) * self.tile_k * 2

    @property
    def shared_memory_bytes(self) -> int:
        return BARRIER_BYTES + self.slot_bytes

    @property
    def accumulator_registers(self) -> int:
        """Registers a thread of the one consuming warpgroup holds for the fp32 tile."""
        return self.tile_m * self.tile_n // WARPGROUP


def invalid_reason(config: HopperConfig) -> str | None:
    """Why no kernel can be built from this config, or None."""
    if config.tile_m not in (64, 128, 192, 256):
        return f"tile_m is {config.tile_m}, expected 64, 128, 192 or 256 (wgmma has 64 rows)"
    if config.tile_n not in range(16, 257, 16):
        return f"tile_n is {config.tile_n}, expected a multiple of 16 from 16 to 256 (one wgmma)"
    if config.tile_k not in (16, 32, 64, 128):
        return f"tile_k is {config.tile_k}, expected 16, 32, 64 or 128 (wgmma steps of 16, TMA boxes of whole swizzles)"
    if config.accumulator_registers > ACCUMULATOR_LIMIT:
        return (
            f"tile {config.tile_m}x{config.tile_n} needs {config.accumulator_registers} accumulator registers, "
            f"expected at most {ACCUMULATOR_LIMIT} a thread"
        )
    if config.shared_memory_bytes > SHARED_MEMORY:
        return f"the tile needs {config.shared_memory_bytes} bytes of shared memory, expected at most {SHARED_MEMORY}"
    return None
