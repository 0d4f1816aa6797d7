"""Typed records of device code: a thread's place in the CTA and cluster, its CTA's tiles, and the
tensors of the operands.

They are created while a kernel is traced and hold CuTe values. All are frozen, because the DSL
treats a method call on an unfrozen object as a write to it. Records that a kernel takes as
arguments are NamedTuples, which the DSL flattens.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from outblas.hopper.parts.config import WARPGROUP


class WarpRole(IntEnum):
    """The warps of a CTA by role. Warpgroup 0 loads; the others multiply and store.

    A rung has one warp that loads both operands (LOAD); `hopper.gemm` has one per operand (LOAD_A,
    LOAD_B), and one for scales that vary along K (LOAD_SCALES). The other warps of warpgroup 0
    only release their registers, but for those of `hopper.grouped` that gather rows of A (GATHER is
    the first). MMA is the first warp of the first consumer warpgroup.
    """

    LOAD = 0
    LOAD_A = 0
    LOAD_B = 1
    LOAD_SCALES = 2
    GATHER = 2
    MMA = WARPGROUP // 32


class NamedBarrier(IntEnum):
    """The hardware's named barriers, `bar.sync ID, THREADS`.

    CTA: all threads of the CTA (`sync_threads`).
    CONSUMER + c: the 128 threads of consumer warpgroup c, for c from 0 to 2.
    MMA_ORDER + c: the ordered sequence of consumers, for c from 0 to 2. Consumer c waits and the
        previous consumer arrives: 256 threads. The consumer that passes may multiply.
    LOAD_WARPS: the two warps that load, 64 threads.
    ALL_CONSUMERS: the threads of all consumer warpgroups that share a tile.
    """

    CTA = 0
    CONSUMER = 1
    MMA_ORDER = 4
    LOAD_WARPS = 7
    ALL_CONSUMERS = 8


class TmaOperand(NamedTuple):
    """An operand in the form that the host prepares: its TMA atom, the tensor of TMA coordinates,
    and the shared-memory layout of its stages, (rows, bK, STAGE).
    """

    atom: Any
    tensor: Any
    layout: Any


class TiledMmas(NamedTuple):
    """The same wgmma twice: one adds to the accumulator, the other overwrites it. There are two
    because the flag must not be set inside a dynamic loop.
    """

    accumulating: Any
    overwriting: Any


class TileCounts(NamedTuple):
    """The tiles of the problem: rows and columns of cluster tiles, k tiles per tile, and the table
    of a persistent kernel, int32 (steps, clusters) or None.
    """

    tiles_m: Any
    tiles_n: Any
    k_tiles: Any
    table: Any


@dataclass(frozen=True)
class WarpContext:
    """A thread's index in its CTA, and the indices of its CTA, warp and warpgroup."""

    thread: Any
    cta: Any
    warp: Any
    warpgroup: Any


@dataclass(frozen=True)
class MulticastCoord:
    """The position of a CTA in its cluster.

    CTAs in one row of the cluster load the same tile of A, and `cta_n_in_cluster` selects the part
    that this CTA loads; `cta_m_in_cluster` does so for B. The masks select the CTAs that receive
    what this CTA loads; they are None without multicast.
    """

    cta_m_in_cluster: Any
    cta_n_in_cluster: Any
    mask_a: Any
    mask_b: Any


@dataclass(frozen=True)
class TmaLoad:
    """An operand in the form that a CTA loads it: its TMA atom; its shared and global tensors from
    `tma_partition`, (TMA, STAGE) and (TMA, RestM, RestK); the mask of the CTAs that receive it.
    """

    atom: Any
    shared: Any
    source: Any
    mask: Any


@dataclass(frozen=True)
class MmaFragments:
    """The operands of a consumer: wgmma, descriptors of its part of every stage, and its
    accumulator. tCrA: (MMA, MMA_M, MMA_K, STAGE), tCrB: (MMA, MMA_N, MMA_K, STAGE).
    """

    mma: TiledMmas
    tCrA: Any
    tCrB: Any
    acc: Any


@dataclass(frozen=True)
class RungConsumer:
    """A thread of a consumer warpgroup.

    `index` is the warpgroup's index among the consumers, `thread_in_tile` the thread's index among
    all that share the tile, `context` its place in the CTA. `writer` writes C to shared memory; it
    is None where C is stored from registers.
    """

    index: Any
    thread_in_tile: Any
    context: WarpContext
    fragments: MmaFragments
    writer: Any = None


@dataclass(frozen=True)
class RungCta:
    """The state that all roles of a rung's CTA read. sA: (bM, bK, STAGE), sB: (bN, bK, STAGE), mC:
    (M, N). `epilogue` is the shared memory through which C is stored, or None; `timers` are those
    of `phase_clock`, or None.
    """

    context: WarpContext
    coord: MulticastCoord
    grid: TileCounts
    load_a: TmaLoad
    load_b: TmaLoad
    mma: TiledMmas
    sA: Any
    sB: Any
    mC: Any
    epilogue: Any
    timers: Any
