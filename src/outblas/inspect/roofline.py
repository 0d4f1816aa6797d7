"""The arithmetic intensity of a kernel at each level of memory, and the speed that each level
allows on a machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outblas.base.machines import Machine
from outblas.inspect import sass

PASS = 128  # bytes


@dataclass(frozen=True)
class Intensity:
    """FLOP per byte at each level.

    dram: A and B are read and C is written once, none of it from L2.
    l2: the slices of A and B of each CTA, fetched separately by every CTA (multicast, and requests
        of neighbours that merge on the way to L2, raise the intensity).
    l1: 128-byte lines that loads from global memory look up; None: the kernel does not report it.
    shared: 128 bytes per pass through shared memory where the kernel reports the passes of its
        accesses, otherwise what the main loop reads, by `sass.shared_bytes`; None if it reads
        nothing.
    """

    dram: float
    l2: float
    l1: float | None
    shared: float | None


@dataclass(frozen=True)
class Bound:
    """The highest TFLOP/s that a machine allows, the level that limits it ("compute", "dram", "l1"
    or "shared"), and the limit of every level.

    "l2" is one of the ceilings but never the bound: data that neighbouring SMs request together
    leaves L2 only once, and a kernel whose CTAs run in step has exceeded this ceiling by 7% on an
    H100.
    """

    tflops: float
    by: str
    ceilings: Mapping[str, float]


def intensity(
    shape: tuple[int, int, int],
    tile: tuple[int, int, int],
    itemsize: int,
    out_itemsize: int,
    instructions: Sequence[sass.Instruction],
    passes: Mapping[str, float] | None = None,
) -> Intensity:
    """Returns the intensity of M, N, K = `shape` with CTA tiles of M, N, K = `tile`. Sizes of
    elements are in bytes; `passes` is as in `Artifact`.
    """
    (M, N, K), (tile_m, tile_n, tile_k) = shape, tile
    slab = {level: 2 * tile_m * tile_n * tile_k / (PASS * n) for level, n in (passes or {}).items()}
    loop = sass.hot_loop(instructions)
    read = sum(map(sass.shared_bytes, loop))
    return Intensity(
        dram=2 * M * N * K / ((M * K + K * N) * itemsize + M * N * out_itemsize),
        l2=2 * tile_m * tile_n / ((tile_m + tile_n) * itemsize),
        l1=slab.get("l1"),
        shared=slab.get("shared", sum(map(sass.flops, loop)) / read if read else None),
    )


def bound(machine: Machine, given: Intensity, unit: str, clock_mhz: float | None = None) -> Bound:
    """Returns what a machine allows at a clock, by the peak of `unit` (`sass.unit`) and the
    bandwidth of each level.

    The default clock is the data sheet's. A GPU that runs faster (an H100 reaches 1980 MHz instead
    of 1830) raises every ceiling except DRAM's. Raises ValueError for a unit that the machine
    lacks.
    """
    clock = (machine.boost_mhz if clock_mhz is None else clock_mhz) * 1e6
    ceilings = {
        "compute": machine.peak_tflops(unit, clock_mhz),
        "dram": given.dram * machine.dram_gbs / 1e3,
        "l2": given.l2 * machine.l2_bytes_per_clock * clock / 1e12,
    }
    port = machine.shared_bytes_per_clock * machine.sms * clock / 1e12  # of both in one memory
    for level, intensity in (("l1", given.l1), ("shared", given.shared)):
        if intensity is not None:
            ceilings[level] = intensity * port
    by = min((level for level in ceilings if level != "l2"), key=lambda level: ceilings[level])
    return Bound(ceilings[by], by, ceilings)
