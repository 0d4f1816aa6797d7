"""The kernel class of `hopper.grouped`."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import LayoutEnum

from outblas.hopper.gemm import epilogue_store, gather, group_scheduler
from outblas.hopper.gemm.group_scheduler import GroupedParams, GroupedScheduler, GroupedWorkTile
from outblas.hopper.gemm.kernel import Gemm
from outblas.hopper.gemm.pipeline import GroupPipeline
from outblas.hopper.gemm.records import (
    ClusterCoord,
    Cta,
    EpilogueTensors,
    SplitKWorkspace,
    TmaTensor,
)
from outblas.hopper.gemm.tma_load import DenseTiles, WorkTileLoad, multicast_operations, smem_tensor
from outblas.hopper.gemm.traits import GroupedTraits, batch_last, split_gated
from outblas.hopper.parts.config import WARPGROUP, HopperConfig
from outblas.hopper.parts.records import WarpContext, WarpRole


@dataclass(frozen=True)
class GroupedLoads:
    """The loads of A and B by the CTA. Tiles of both begin at any row or column, so both are
    partitioned for each work tile. The names are those of `gemm.records.OperandLoads`. `stages`
    points to the memory of all stages.
    """

    operand_a: TmaTensor
    operand_b: TmaTensor
    sA: Any
    sB: Any
    multicast_a: int
    multicast_b: int
    stages: Any


# Fields of a config of `hopper.gemm` that have no meaning where groups divide a product.
_OF_WHOLE_PRODUCTS = ("variable_tile_n", "pingpong", "split_k", "stream_k", "cluster_k", "pdl")


@dataclass(frozen=True)
class GroupedTiles:
    """The scheduler and the loader of groups, in the place of `tma_load.DenseTiles`.

    Before the CTA synchronises, the schedule is written to shared memory; no warp reads it earlier,
    and nobody writes it again.
    """

    config: HopperConfig
    traits: GroupedTraits

    writes_schedule = True

    @property
    def pipeline_type(self) -> type[GroupPipeline]:
        dense = DenseTiles(self.config, self.traits)
        return gather.GatherPipeline if self.traits.gathers else dense.pipeline_type

    @property
    def announced_bytes(self) -> int:
        if self.traits.gathers:  # TMA loads B alone
            return self.config.stage_n * self.config.tile_k * 2
        return self.config.stage_bytes

    @cute.jit
    def begin_schedule(self, smem, params: GroupedParams, context: WarpContext):
        """Makes the schedule in shared memory."""
        config, traits = self.config, self.traits
        if cutlass.const_expr(traits.turns):
            prefetch_descriptors(params.turned, context)
        table = cute.make_tensor(smem.allocate_array(Int32, traits.capacity), traits.capacity)
        params = params._replace(table=table)
        if cutlass.const_expr(traits.divides_terms):
            threads = WARPGROUP * (1 + config.consumers)
            group_scheduler.make_order(params, context.thread, threads, traits.capacity)
        elif context.warp == WarpRole.MMA:
            group_scheduler.make_tile_counts(params, config, traits)
        return params

    def make_scheduler(self, params, cluster, coord: ClusterCoord, table_entry) -> GroupedScheduler:
        return GroupedScheduler(params, cluster, coord, self.traits)

    def make_loads(self, operand_a, operand_b, stages, dtype, coord: ClusterCoord) -> GroupedLoads:
        (_, multicast_a), (_, multicast_b) = multicast_operations(self.config)
        bytes_a = cute.size_in_bytes(dtype, operand_a.layout)
        return GroupedLoads(
            TmaTensor(operand_a.atom, operand_a.tensor),
            TmaTensor(operand_b.atom, operand_b.tensor),
            smem_tensor(stages, dtype, operand_a.layout),
            smem_tensor(stages + bytes_a, dtype, operand_b.layout),
            multicast_a,
            multicast_b,
            stages,
        )

    def load_of_a(self, cta: Cta, work: GroupedWorkTile) -> WorkTileLoad:
        if self.traits.gathers:
            return WorkTileLoad(None, (), None)  # others copy A
        return self.turning_load(cta, work, load_of_a)

    def load_of_b(self, cta: Cta, work: GroupedWorkTile) -> WorkTileLoad:
        return self.turning_load(cta, work, load_of_b)

    def turning_load(self, cta: Cta, work: GroupedWorkTile, load_of: Any) -> WorkTileLoad:
        """Returns the load of an operand, and where clusters turn that of a turned one with it."""
        load: WorkTileLoad = load_of(cta, work)
        if not self.traits.turns:
            return load
        across = load_of(turned_cta(cta, self.traits), work)
        return load._replace(across=across, turned=work.turned)


def turned(config: HopperConfig, traits: GroupedTraits) -> Gemm:
    """Returns the kernel whose clusters of 1×2 load what a cluster of 2×1 does when it turns."""
    config, traits = replace(config, cluster_m=1, cluster_n=2), replace(traits, turns=False)
    return Gemm(config, traits, GroupedTiles(config, traits))


def turned_cta(cta: Cta, traits: GroupedTraits) -> Cta:
    """Returns the CTA as one of a cluster that is turned."""
    kernel = turned(cta.config, traits)
    (_, multicast_a), (_, multicast_b) = multicast_operations(kernel.config)
    operand_a, operand_b = (
        TmaTensor(operand.atom, operand.tensor) for operand in cta.scheduler.params.turned
    )
    loads = replace(
        cta.loads,
        operand_a=operand_a,
        operand_b=operand_b,
        multicast_a=multicast_a,
        multicast_b=multicast_b,
    )
    return replace(cta, coord=kernel.cluster_coord(cta.context), loads=loads)


class GroupedGemm:
    """One product per group: the launch of a `Gemm` with the scheduler and the loader of groups.
    Roles, barriers and timelines are those of `Gemm`.

    Ragged rows: C[m, :] = A[m, :] B[g] for the rows m of each group g. A tile that ends before its
    group does is stored by TMA. Of the last tile of a group, and of every tile where rows are
    scattered, the threads of a consumer copy single rows from its buffers (`gemm.row_stores`),
    between the same waits and barriers; x, which is not scattered, is stored as C is otherwise.
    Rows of the residual that are the next group's are loaded and not used.

    Ragged columns are the ragged rows of the transposed product, whose columns are contiguous: they
    begin at any address, and each thread stores its registers up to the end of the group.

    Ragged terms: C[g] = A[:, k] B[k, :] over the terms k of each group g. The k tile in which a
    group ends is loaded first, and the consumers clear what is not the group's (`gemm.term_mask`):
    all of them wait for its stage, write zeros, fence, and synchronise at ALL_CONSUMERS before they
    multiply.

    Where clusters turn, a CTA takes for each work tile either its own rows of A and a part of B for
    both, or a part of A for both and its own columns of B. Each CTA's stages are written by both in
    either case, as many bytes, so arrivals and waits are the same.

    Rows that an index chooses are copied by two more warps, as `gather` describes.

    fp8 operands have scales that vary along K (`gemm.block_scales`), of which each work tile reads
    its group's. Their groups of terms have whole k tiles, whose 128 terms share scales, so that
    nothing is cleared; a group without terms has no k tile, and its sums stay zero.
    """

    def __init__(self, config: HopperConfig, traits: GroupedTraits):
        if reason := self.invalid_reason(config):
            raise ValueError(f"config: {reason}")
        self.config, self.traits = config, traits
        self.gemm = Gemm(config, traits, GroupedTiles(config, traits))

    @staticmethod
    def invalid_reason(config: HopperConfig) -> str | None:
        """Returns why no kernel can be built from a config, or None."""
        for name in _OF_WHOLE_PRODUCTS:
            value, default = getattr(config, name), getattr(HopperConfig(), name)
            if value != default:
                return f"{name} is {value}, expected {default} where groups are divided"
        if config.epilogue_stages == 0:
            return (
                "epilogue_stages is 0, expected at least 1: rows of a group are stored from there"
            )
        return Gemm.invalid_reason(config)

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        c: cute.Tensor,
        offs,
        bias,
        residual,
        aux,
        scatter_index,
        scatter_weights,
        a_index,
        scale_a,
        scale_b,
        clusters: Int32,
        stream,
    ):
        """Launches the kernel. offs: int32 (groups), their ends, or the numbers of their rows where
        M / groups rows have room in each.

        Ragged rows: a (M, K), b (groups, K, N), c (M, N). Ragged terms: a (M, K), b (K, N), c
        (groups, M, N). The others are None, or bias (groups, N), residual as c, aux as c,
        scatter_index int32 (M), scatter_weights fp32 (M), a_index int32 (M), with which a may have
        any number of rows. For gated pairs b, bias and aux have
        twice as many columns as c.

        Elements of a and b are words of two fp8 values where the traits have formats; then there
        are scale_a, fp32 (M, blocks of K), or (groups, rows, blocks of K) where groups have places
        of their own, and scale_b, fp32 (groups, blocks of K, blocks of columns) or with ragged
        terms (blocks of K, columns).
        """
        config, traits = self.config, self.traits
        epilogue_config = self.gemm.epilogue_config
        b, c = batch_last(b, True), batch_last(c, False)  # (N, K[, groups]), (M, N[, groups])
        residual, aux = (t if t is None else batch_last(t, False) for t in (residual, aux))
        if cutlass.const_expr(traits.gated):
            b = split_gated(b, 0, c.shape[1])
            if cutlass.const_expr(traits.aux != ""):
                aux = split_gated(aux, 1, c.shape[1])
        majors = LayoutEnum.from_tensor(a), LayoutEnum.from_tensor(b)
        operand_a, operand_b = self.gemm.load_operands(a, b, *majors)
        if cutlass.const_expr(traits.block_scaled):
            scale_a, scale_b = batch_last(scale_a, False), batch_last(scale_b, True)
        epilogue_tma = None
        if cutlass.const_expr(self.gemm.staged):
            epilogue_tma = epilogue_store.make_tma(epilogue_config, c, aux, residual, traits)
        rows = cute.ceil_div(c.shape[0], config.tile_m * config.cluster_m)
        columns = cute.ceil_div(c.shape[1], epilogue_config.tile_n * config.cluster_n)
        by_columns, by_matrix, by_band = (
            cute.fast_divmod_create_divisor_v2(divisor)
            for divisor in (columns, rows * columns, columns * group_scheduler.band(config))
        )
        extent = a.shape[0]
        if cutlass.const_expr(traits.divides_terms):
            extent = a.shape[1] * (2 if traits.formats else 1)
        if cutlass.const_expr(traits.gathers):
            extent = a_index.shape[0]
        params = GroupedParams(
            offs,
            extent,
            rows,
            columns,
            by_columns,
            by_matrix,
            by_band,
            cute.ceil_div(a.shape[1], config.tile_k),
            clusters,
            a if traits.gathers else None,
            a_index,
            extent // offs.shape[0] if traits.masked else None,
            turned(config, traits).load_operands(a, b, *majors) if traits.turns else None,
            None,
        )
        tensors = EpilogueTensors(
            addend=None,
            bias=bias,
            residual=residual,
            aux=aux,
            scale_a=scale_a,
            scale_b=scale_b,
            alpha=Float32(1.0),
            beta=Float32(0.0),
            scatter_index=scatter_index,
            scatter_weights=scatter_weights,
        )
        self.gemm.kernel(
            operand_a,
            operand_b,
            c,
            a.element_type,
            majors,
            params,
            tensors,
            SplitKWorkspace(None, None),
            epilogue_tma,
        ).launch(
            grid=(clusters * config.cluster, 1, 1),
            block=(self.gemm.threads, 1, 1),
            cluster=(config.cluster, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )


@cute.jit
def prefetch_descriptors(operands, context: WarpContext):
    """One warp fetches the TMA descriptors of operands."""
    if context.warp == WarpRole.MMA:
        for operand in cutlass.range_constexpr(len(operands)):
            cpasync.prefetch_descriptor(operands[operand].atom)


def load_of_a(cta: Cta, work: GroupedWorkTile) -> WorkTileLoad:
    """Returns the load of A by a CTA at its place in the cluster."""
    loads, config, coord = cta.loads, cta.config, cta.coord
    parts = partition(
        loads.operand_a,
        loads.sA,
        (config.tile_m, config.tile_k),
        (work.row, work.first_term),
        coord.cta_n_in_cluster,
        loads.multicast_a,
    )
    return WorkTileLoad(loads.operand_a.atom, (parts,), coord.mask_a)


def load_of_b(cta: Cta, work: GroupedWorkTile) -> WorkTileLoad:
    """Returns the load of B by a CTA at its place in the cluster."""
    loads, config, coord, traits = cta.loads, cta.config, cta.coord, cta.scheduler.traits
    halves = 2 if traits.gated else 1
    matrix = (work.matrix,) if traits.form == "ragged_m" else ()
    parts = tuple(
        partition(
            loads.operand_b,
            loads.sB,
            (config.stage_n // halves, config.tile_k),
            (work.column, work.first_term, *((half,) * (halves - 1)), *matrix),
            coord.cta_m_in_cluster,
            loads.multicast_b,
            half,
        )
        for half in range(halves)
    )
    return WorkTileLoad(loads.operand_b.atom, parts, coord.mask_b)


def partition(
    operand: TmaTensor,
    shared,
    box: tuple[int, int],
    at,
    cta_in_cluster,
    multicast: int,
    half: int = 0,
):
    """Returns an operand's k tiles in shared and in global memory, from `tma_partition`. `at`: the
    first row, or column, the first term, then the half of gated pairs and the matrix where the
    operand has several. `half`: the part of a stage that holds them.
    """
    first, term, *rest = at
    begins = cute.domain_offset((first, term, *(0 for _ in rest)), operand.tensor)
    return cpasync.tma_partition(
        operand.atom,
        cta_in_cluster,
        cute.make_layout(multicast),
        cute.group_modes(cute.local_tile(shared, box, (half, 0, None)), 0, 2),
        cute.group_modes(cute.local_tile(begins, box, (0, None, *rest)), 0, 2),
    )
