"""Typed records of the device code of `hopper.gemm`. Those that the kernel takes as an argument are
NamedTuples, which the DSL flattens; the others are built on the device and frozen (`core.records`
says why).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..core import records
from ..core.config import HopperConfig
from ..core.records import MmaFragments, WarpContext
from .tile_scheduler import TileScheduler
from .traits import KernelTraits


# ---- arguments of the kernel
class TmaTensor(NamedTuple):
    """A TMA atom and its tensor of coordinates; None and None for a tensor that a call has not."""

    atom: Any
    tensor: Any


class EpilogueTma(NamedTuple):
    """What TMA moves for the epilogue: stores of C and of aux, loads of the epilogue's source.
    `subtile_layout` is that of one epilogue subtile in shared memory, `layout` that of all buffers,
    (64, columns, BUFFER of all consumers).
    """

    c: TmaTensor
    aux: TmaTensor
    source: TmaTensor
    subtile_layout: Any
    layout: Any


class EpilogueTensors(NamedTuple):
    """Tensors of the epilogue that are read or written without TMA, None for those that a call has
    not, and its two factors. `KernelTraits` says how each comes.
    """

    addend: Any
    bias: Any
    residual: Any
    aux: Any
    scale_a: Any
    scale_b: Any
    alpha: Any
    beta: Any


class SplitKWorkspace(NamedTuple):
    """Partial sums, fp32, and the counters of those who have written theirs, int32 and 0; None
    without split-K and stream-K.
    """

    sums: Any
    counters: Any


# ---- on the device
@dataclass(frozen=True)
class ClusterCoord(records.ClusterCoord):
    """`cta_k_in_cluster`: the part of K that this CTA has of its tile. The CTAs that load for each
    other are neighbours: `multicast_base` is the rank of the first of them, `multicast_rank` this
    CTA's number among them.
    """

    cta_k_in_cluster: Any
    multicast_base: Any
    multicast_rank: Any


@dataclass(frozen=True)
class MmaOperands:
    """A and B in shared memory as wgmma reads them, (bM, bK, STAGE) and (bN, bK, STAGE), their
    dtypes and major modes. TMA moves words of `word_dtype`: of fp8 that is a pair of values, and
    the tensors are those of single ones.
    """

    sA: Any
    sB: Any
    dtypes: tuple[Any, Any]
    majors: tuple[Any, Any]
    word_dtype: Any


@dataclass(frozen=True)
class OperandLoads:
    """How the CTA loads A and B.

    tAsA, tAgA: A as `tma_partition` made it, (TMA, STAGE) and (TMA, RestM, RestK[, L]). Tiles of B
    may begin at any column, so B is partitioned for each work tile: `operand_b` and `sB` are whole,
    `multicast_b` CTAs load a part of the same tile.
    """

    atom_a: Any
    tAsA: Any
    tAgA: Any
    operand_b: TmaTensor
    sB: Any
    multicast_b: int


@dataclass(frozen=True)
class Epilogue:
    """What the epilogue of every tile reads.

    `config` is the config of what a CTA stores (`HopperConfig.stored`). mC: (M, N[, L]), of
    `extents` (M, N) and `dtype`. `tma`, an EpilogueTma, and `sC`, (64, columns, BUFFER of all
    consumers), are those through which C leaves; None where it leaves from registers.
    """

    traits: KernelTraits
    config: HopperConfig
    tensors: EpilogueTensors
    mC: Any
    extents: Any
    dtype: Any
    tma: Any
    sC: Any


@dataclass(frozen=True)
class EpilogueSource:
    """The epilogue's source, an addend or a residual that TMA loads into stages of the pipeline.
    `stages` points to the memory of all stages; `config` is the kernel's, `epilogue_config` that of
    what a CTA stores.
    """

    tma: TmaTensor
    stages: Any
    subtile_layout: Any
    config: HopperConfig
    epilogue_config: HopperConfig
    dtype: Any
    batched: bool


@dataclass(frozen=True)
class SplitKReduction:
    """Memory of split-K. Each consumer warpgroup of each CTA of a cluster has sums and counters of
    its own: this one has number `unit` of `units`. `arrived`: shared memory in which a consumer's
    first thread tells the others how many came before, int32 (consumers). `lane`: the thread's
    number in its warpgroup.
    """

    workspace: SplitKWorkspace
    arrived: Any
    lane: Any
    unit: Any
    units: int


@dataclass(frozen=True)
class ClusterReduction:
    """Shared memory of a reduction within the cluster: where partial sums of peers land, and the
    barriers, `landed` of each consumer, then `free` of each.
    """

    received: Any
    barriers: Any


@dataclass(frozen=True)
class Consumer:
    """A thread of a consumer warpgroup.

    `index` is the warpgroup's number among the consumers. `warpgroup_in_tile` is its number among
    those that share a tile (0 in pingpong, where each has its own), `thread_in_tile` the thread's
    number among theirs. `writer` says how it writes C to shared memory, None where C leaves from
    registers.
    """

    index: Any
    warpgroup_in_tile: Any
    thread_in_tile: Any
    context: WarpContext
    writer: Any


@dataclass(frozen=True)
class TileMma:
    """What a consumer computes tiles of one width with. `partial` has the accumulator of a single
    stage where sums are promoted, else it is None.
    """

    width: int
    fragments: MmaFragments
    partial: MmaFragments | None


@dataclass(frozen=True)
class Cta:
    """What all roles of a CTA read.

    `source`: an EpilogueSource, or None; it comes in `source_stages` stages of each tile.
    `cluster_reduction`: a ClusterReduction, None without cluster_k.
    """

    config: HopperConfig
    traits: KernelTraits
    context: WarpContext
    coord: ClusterCoord
    scheduler: TileScheduler
    loads: OperandLoads
    operands: MmaOperands
    epilogue: Epilogue
    source: Any
    source_stages: int
    splitk: SplitKWorkspace
    arrived: Any
    cluster_reduction: Any
