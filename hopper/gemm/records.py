"""Typed records of the device code of `hopper.gemm`. Records that the kernel takes as arguments are
NamedTuples, which the DSL flattens; the others are created on the device and frozen, as
`parts.records` explains.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from outblas.hopper.gemm.traits import KernelTraits
from outblas.hopper.parts import records
from outblas.hopper.parts.config import HopperConfig
from outblas.hopper.parts.records import MmaFragments, WarpContext


# ---- arguments of the kernel
class TmaTensor(NamedTuple):
    """A TMA atom and its tensor of coordinates; both are None for a tensor that a call does not
    have.
    """

    atom: Any
    tensor: Any


class EpilogueTma(NamedTuple):
    """The TMA operations of the epilogue: stores of C and of aux, loads of the epilogue's source.
    `subtile_layout` is the layout of one epilogue subtile in shared memory, `layout` that of all
    buffers, (64, columns, BUFFER of all consumers).
    """

    c: TmaTensor
    aux: TmaTensor
    source: TmaTensor
    subtile_layout: Any
    layout: Any


class EpilogueTensors(NamedTuple):
    """The tensors of the epilogue that are read or written without TMA, None for those that a call
    does not have, and its two factors. `KernelTraits` says how each tensor is accessed.

    scatter_index, scatter_weights: of a grouped product, int32 and fp32 (M): the row of C in which
    a row of the product is stored, and what it is multiplied by.
    scale_out: fp32 (M, N/128): the scales of C in fp8, which are written.
    """

    addend: Any
    bias: Any
    residual: Any
    aux: Any
    scale_a: Any
    scale_b: Any
    alpha: Any
    beta: Any
    scatter_index: Any = None
    scatter_weights: Any = None
    scale_out: Any = None


class SplitKWorkspace(NamedTuple):
    """The split-K workspace: partial sums, fp32, and counters of the consumers that have written
    theirs, int32 and initially 0. None without split-K and stream-K.
    """

    sums: Any
    counters: Any


# ---- on the device
@dataclass(frozen=True)
class ClusterCoord(records.MulticastCoord):
    """`cta_k_in_cluster` is the partition of K that this CTA computes. The CTAs that load for each
    other have consecutive ranks: `multicast_base` is the rank of the first of them,
    `multicast_rank` this CTA's index among them.
    """

    cta_k_in_cluster: Any
    multicast_base: Any
    multicast_rank: Any


@dataclass(frozen=True)
class MmaOperands:
    """A and B in shared memory in the layout that wgmma reads, (bM, bK, STAGE) and (bN, bK, STAGE),
    their dtypes and major modes. TMA moves words of `word_dtype`. For fp8 a word is a pair of
    values, while these tensors hold single values.
    """

    sA: Any
    sB: Any
    dtypes: tuple[Any, Any]
    majors: tuple[Any, Any]
    word_dtype: Any


@dataclass(frozen=True)
class OperandLoads:
    """The loads of A and B by the CTA.

    tAsA, tAgA: A from `tma_partition`, (TMA, STAGE) and (TMA, RestM, RestK[, L]). Tiles of B may
    begin at any column, so B is partitioned for each work tile: `operand_b` and `sB` are whole, and
    `multicast_b` CTAs load a part of the same tile.
    """

    atom_a: Any
    tAsA: Any
    tAgA: Any
    operand_b: TmaTensor
    sB: Any
    multicast_b: int


@dataclass(frozen=True)
class CtaEpilogue:
    """What the epilogue of every tile reads.

    `config` is the config of the part of C that a CTA stores (`HopperConfig.epilogue_config`). mC:
    (M, N[, L]), of `extents` (M, N) and `dtype`. C is stored through `tma`, an EpilogueTma, and
    `sC`, (64, columns, BUFFER of all consumers); both are None where C is stored from registers.
    """

    traits: KernelTraits
    config: HopperConfig
    tensors: EpilogueTensors
    mC: Any
    extents: Any
    dtype: Any
    tma: Any
    sC: Any

    @property
    def size(self) -> int:
        """The bytes of an element of C."""
        return int(self.dtype.width // 8)


@dataclass(frozen=True)
class EpilogueSource:
    """The epilogue's source, an addend or a residual that TMA loads into stages of the pipeline.
    `stages` points to the memory of all stages; `config` is the kernel's, `epilogue_config` that of
    the part of C that a CTA stores.
    """

    tma: TmaTensor
    stages: Any
    subtile_layout: Any
    config: HopperConfig
    epilogue_config: HopperConfig
    dtype: Any
    batched: bool

    @property
    def size(self) -> int:
        """The bytes of an element of C."""
        return int(self.dtype.width // 8)


@dataclass(frozen=True)
class SplitKReduction:
    """The split-K state of a consumer. Each consumer warpgroup of each CTA in a cluster has its own
    sums and counters; this one has index `unit` of `units`. `arrived`: shared memory, int32
    (consumers), in which a consumer's first thread tells the others how many partitions arrived
    before. `lane`: the thread's index in its warpgroup.
    """

    workspace: SplitKWorkspace
    arrived: Any
    lane: Any
    unit: Any
    units: int


@dataclass(frozen=True)
class ClusterReduction:
    """The shared memory of a reduction within the cluster: the memory that receives peers' partial
    sums, and the barriers, `landed` of each consumer, then `free` of each.
    """

    received: Any
    barriers: Any


@dataclass(frozen=True)
class Consumer:
    """A thread of a consumer warpgroup.

    `index` is the warpgroup's index among the consumers. `warpgroup_in_tile` is its index among
    those that share a tile (0 in pingpong, where each computes separate tiles), `thread_in_tile`
    the thread's index among their threads. `writer` writes C to shared memory; it is None where C
    is stored from registers.
    """

    index: Any
    warpgroup_in_tile: Any
    thread_in_tile: Any
    context: WarpContext
    writer: Any


@dataclass(frozen=True)
class TileMma:
    """The instructions and registers with which a consumer computes tiles of one width. `partial`
    has the accumulator of a single stage where fp8 sums are promoted; otherwise it is None.
    """

    width: int
    fragments: MmaFragments
    partial: MmaFragments | None


@dataclass(frozen=True)
class Cta:
    """The state that all roles of a CTA read. `scheduler` is a TileScheduler and `loads` an
    OperandLoads, or what takes their place in a grouped product.

    `source`: an EpilogueSource, or None; it takes `source_stages` stages of each tile.
    `cluster_reduction`: a ClusterReduction, None without cluster_k. `scales`: the BlockScales of
    fp8 operands, None where scales do not vary along K.
    """

    config: HopperConfig
    traits: KernelTraits
    context: WarpContext
    coord: ClusterCoord
    scheduler: Any
    loads: Any
    operands: MmaOperands
    epilogue: CtaEpilogue
    source: Any
    source_stages: int
    splitk: SplitKWorkspace
    arrived: Any
    cluster_reduction: Any
    scales: Any = None
