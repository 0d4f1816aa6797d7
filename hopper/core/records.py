"""Typed records of device code: who a thread is, what its CTA computes, and where operands lie.

They are built while a kernel is traced and hold CuTe values. All are frozen: the DSL takes a method
call on an unfrozen object as a write to it. Those that a kernel takes as an argument are
NamedTuples, which the DSL flattens.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from .config import WARPGROUP


class WarpRole(IntEnum):
    """The warps of a CTA by what they do. Warpgroup 0 loads, the others multiply and store.

    A rung has one warp that loads both operands (LOAD); `hopper.gemm` has one for each (LOAD_A,
    LOAD_B). The other warps of warpgroup 0 only give their registers away. MMA is the first warp of
    the first consumer warpgroup.
    """

    LOAD = 0
    LOAD_A = 0
    LOAD_B = 1
    MMA = WARPGROUP // 32


class NamedBarrier(IntEnum):
    """The hardware's named barriers, `bar.sync ID, THREADS`.

    CTA: all threads of the CTA (`sync_threads`).
    CONSUMER + c: the 128 threads of consumer warpgroup c, for c from 0 to 2.
    MMA_ORDER + c: ordered sequence of consumers, for c from 0 to 2. Consumer c waits, the one
        before it arrives: 256 threads. The one that passes may multiply.
    LOAD_WARPS: the two warps that load, 64 threads.
    ALL_CONSUMERS: the threads of all consumer warpgroups that share a tile.
    """

    CTA = 0
    CONSUMER = 1
    MMA_ORDER = 4
    LOAD_WARPS = 7
    ALL_CONSUMERS = 8


class TmaOperand(NamedTuple):
    """An operand as the host prepares it: its TMA atom, the tensor of TMA coordinates, and the
    shared-memory layout of its stages, (rows, bK, STAGE).
    """

    atom: Any
    tensor: Any
    layout: Any


class TiledMmas(NamedTuple):
    """The same wgmma twice: one adds to the accumulator, the other overwrites it. The flag must not
    be set inside a dynamic loop.
    """

    accumulating: Any
    overwriting: Any


class TileGrid(NamedTuple):
    """Tiles of the problem: rows and columns of cluster tiles, k tiles of each, and the table of
    a persistent kernel, int32 (steps, clusters) or None.
    """

    tiles_m: Any
    tiles_n: Any
    k_tiles: Any
    table: Any


@dataclass(frozen=True)
class WarpContext:
    """Who a thread is: its index in the CTA, and its CTA, warp and warpgroup."""

    thread: Any
    cta: Any
    warp: Any
    warpgroup: Any


@dataclass(frozen=True)
class ClusterCoord:
    """Where a CTA stands in its cluster.

    CTAs of one row of the cluster load the same tile of A, so `cta_n_in_cluster` says which part of
    it this CTA loads; `cta_m_in_cluster` does so for B. The masks name the CTAs that receive what
    this one loads; they are None without multicast.
    """

    cta_m_in_cluster: Any
    cta_n_in_cluster: Any
    mask_a: Any
    mask_b: Any


@dataclass(frozen=True)
class TmaLoad:
    """An operand as a CTA loads it: its TMA atom; its shared and global tensors as `tma_partition`
    made them, (TMA, STAGE) and (TMA, RestM, RestK); the mask of the CTAs that receive it.
    """

    atom: Any
    shared: Any
    source: Any
    mask: Any


@dataclass(frozen=True)
class MmaFragments:
    """What a consumer multiplies with: wgmma, descriptors of its part of every stage, and its
    accumulator. tCrA: (MMA, MMA_M, MMA_K, STAGE), tCrB: (MMA, MMA_N, MMA_K, STAGE).
    """

    mma: TiledMmas
    tCrA: Any
    tCrB: Any
    acc: Any


@dataclass(frozen=True)
class Consumer:
    """A thread of a consumer warpgroup.

    `index` is the warpgroup's number among the consumers, `thread_in_tile` the thread's number
    among all that share the tile, `context` who it is in the CTA. `writer` says how it writes C to
    shared memory, None where C leaves from registers.
    """

    index: Any
    thread_in_tile: Any
    context: WarpContext
    fragments: MmaFragments
    writer: Any = None


@dataclass(frozen=True)
class Cta:
    """What all roles of a CTA of a rung read. sA: (bM, bK, STAGE), sB: (bN, bK, STAGE), mC: (M, N).
    `epilogue` is the shared memory through which C leaves, or None; `timers` those of
    `phase_clock`, or None.
    """

    context: WarpContext
    coord: ClusterCoord
    grid: TileGrid
    load_a: TmaLoad
    load_b: TmaLoad
    mma: TiledMmas
    sA: Any
    sB: Any
    mC: Any
    epilogue: Any
    timers: Any
