"""The kernel class of `hopper.grouped`."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import LayoutEnum

from ..core.config import WARPGROUP
from ..core.records import WarpContext, WarpRole
from ..gemm import epilogue_store
from ..gemm.kernel import Gemm, smem_tensor
from ..gemm.records import ClusterCoord, Cta, EpilogueTensors, SplitKWorkspace, TmaTensor
from ..gemm.tma_load import WorkTileLoad
from ..gemm.traits import batch_last
from . import schedule
from .schedule import BAND, GroupedParams, GroupedScheduler, GroupedWorkTile


@dataclass(frozen=True)
class GroupedLoads:
    """The loads of A and B by the CTA. Tiles of both begin at any row or column, so both are
    partitioned for each work tile. The names are those of `gemm.records.OperandLoads`.
    """

    operand_a: TmaTensor
    operand_b: TmaTensor
    sA: Any
    sB: Any
    multicast_a: int
    multicast_b: int


class Grouped(Gemm):
    """C[m, :] = A[m, :] B[g] for the rows m of each group g. Roles, barriers and timelines are those
    of `Gemm`, whose tiles come from a `GroupedScheduler`.

    Before the CTA synchronises, warp MMA writes the schedule to shared memory; no other warp reads
    it earlier, and nobody writes it again.
    """

    @cute.jit
    def __call__(
        self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, offs, clusters: Int32, stream
    ):
        """Launches the kernel on a: (M, K), b: (groups, K, N), c: (M, N), offs: int32 (groups)."""
        config = self.config
        b = batch_last(b, True)  # (N, K, groups)
        majors = LayoutEnum.from_tensor(a), LayoutEnum.from_tensor(b)
        operand_a, operand_b = self.load_operands(a, b, *majors)
        epilogue_tma = None
        if cutlass.const_expr(self.staged):
            epilogue_tma = epilogue_store.make_tma(self.epilogue_config, c, None, None, self.traits)
        columns = cute.ceil_div(c.shape[1], config.tile_n * config.cluster_n)
        params = GroupedParams(
            offs,
            a.shape[0],
            columns,
            cute.fast_divmod_create_divisor_v2(columns),
            cute.fast_divmod_create_divisor_v2(columns * BAND),
            cute.ceil_div(a.shape[1], config.tile_k),
            clusters,
            None,
        )
        nothing = (None,) * 6
        self.kernel(
            operand_a,
            operand_b,
            c,
            a.element_type,
            majors,
            params,
            EpilogueTensors(*nothing, Float32(1.0), Float32(0.0)),
            SplitKWorkspace(None, None),
            epilogue_tma,
        ).launch(
            grid=(clusters * config.cluster, 1, 1),
            block=(WARPGROUP * self.warpgroups, 1, 1),
            cluster=(config.cluster, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.jit
    def begin_schedule(self, smem, params: GroupedParams, context: WarpContext):
        """Makes the schedule in shared memory."""
        tile_rows = cute.make_tensor(
            smem.allocate_array(Int32, self.traits.capacity), self.traits.capacity
        )
        params = params._replace(tile_rows=tile_rows)
        if context.warp == WarpRole.MMA:
            rows = self.config.tile_m * self.config.cluster_m
            schedule.make_tile_rows(params, rows, self.traits)
        return params

    def make_scheduler(self, params, cluster, coord: ClusterCoord, table_entry) -> GroupedScheduler:
        return GroupedScheduler(params, cluster, coord, self.traits)

    def make_loads(self, operand_a, operand_b, stages, dtype, coord: ClusterCoord) -> GroupedLoads:
        (_, multicast_a), (_, multicast_b) = self.load_operations()
        bytes_a = cute.size_in_bytes(dtype, operand_a.layout)
        return GroupedLoads(
            TmaTensor(operand_a.atom, operand_a.tensor),
            TmaTensor(operand_b.atom, operand_b.tensor),
            smem_tensor(stages, dtype, operand_a.layout),
            smem_tensor(stages + bytes_a, dtype, operand_b.layout),
            multicast_a,
            multicast_b,
        )

    def work_tile_load_a(self, cta: Cta, work: GroupedWorkTile) -> WorkTileLoad:
        loads, config, coord = cta.loads, cta.config, cta.coord
        parts = partition(
            loads.operand_a,
            loads.sA,
            (config.tile_m, config.tile_k),
            (work.row,),
            coord.cta_n_in_cluster,
            loads.multicast_a,
        )
        return WorkTileLoad(loads.operand_a.atom, (parts,), coord.mask_a)

    def work_tile_load_b(self, cta: Cta, work: GroupedWorkTile) -> WorkTileLoad:
        loads, config, coord = cta.loads, cta.config, cta.coord
        parts = partition(
            loads.operand_b,
            loads.sB,
            (config.stage_n, config.tile_k),
            (work.column, work.matrix),
            coord.cta_m_in_cluster,
            loads.multicast_b,
        )
        return WorkTileLoad(loads.operand_b.atom, (parts,), coord.mask_b)


def partition(operand: TmaTensor, shared, box: tuple[int, int], at, cta_in_cluster, multicast: int):
    """Returns an operand's k tiles in shared and in global memory, from `tma_partition`. `at`: the
    first row, or column, and the matrix where the operand has several.
    """
    first, *matrix = at
    begins = cute.domain_offset((first, 0, *(0 for _ in matrix)), operand.tensor)
    return cpasync.tma_partition(
        operand.atom,
        cta_in_cluster,
        cute.make_layout(multicast),
        cute.group_modes(cute.local_tile(shared, box, (0, 0, None)), 0, 2),
        cute.group_modes(cute.local_tile(begins, box, (0, None, *matrix)), 0, 2),
    )
