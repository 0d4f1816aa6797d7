"""What every Hopper rung shares: operand layouts, tensor maps, shared memory, barriers, launch."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass.cute.nvgpu import StoreCacheMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from . import phase_clock, roles
from .config import WARPGROUP, HopperConfig, invalid_reason
from .phase_clock import STORE, lap
from .pipeline import Pipeline
from .records import (
    ClusterCoord,
    Consumer,
    Cta,
    MmaFragments,
    TiledMmas,
    TileGrid,
    TmaLoad,
    TmaOperand,
    WarpContext,
    WarpRole,
)

ONE_STAGE = (None, None, 0)


class HopperGemm:
    """C[M, N] = A[M, K] B[K, N], fp32 accumulate. A rung overrides `body`, or a policy method.

    The layouts of A and B (either major), and the dtypes, come from the tensors that `cute.compile`
    is given; sizes and strides stay symbolic. `width`: elements of a row of C that can be written
    at once, 1, 2, or what 16 bytes hold.
    """

    # Fields of HopperConfig that the rung itself brings in; it understands these and its parents'.
    # The others must keep the value that HopperConfig gives them.
    introduces = frozenset({"tile_m", "tile_n", "tile_k", "mma_n", "jitter", "phases"})
    pipeline_type: type[Pipeline] = Pipeline
    persistent = False

    def __init__(self, config: HopperConfig, *, width: int):
        if reason := self.invalid_reason(config):
            raise ValueError(f"config: {reason}")
        self.config = config
        self.width = width

    @classmethod
    def understood(cls) -> set[str]:
        """Fields of a config that the rung or a parent introduces."""
        return {name for parent in cls.__mro__ for name in vars(parent).get("introduces", ())}

    @classmethod
    def invalid_reason(cls, config: HopperConfig) -> str | None:
        """Why this rung cannot be built from a config, or None."""
        understood = cls.understood()
        for name, field in HopperConfig.__dataclass_fields__.items():
            value = getattr(config, name)
            if name not in understood and value != field.default:
                return (
                    f"{name} is {value}, expected {field.default}: a later rung of the ladder "
                    "brings it in"
                )
        return invalid_reason(config)

    # ---- policies
    @property
    def warpgroups(self) -> int:
        return 1

    def grid(self, tiles, table):
        """CTAs launched for a number of tiles, or for a table of tiles."""
        return tiles

    def load_operations(self):
        """The TMA operation that loads A and that which loads B, each with the number of CTAs that
        load a part of the same tile.
        """
        return (cpasync.CopyBulkTensorTileG2SOp(), 1), (cpasync.CopyBulkTensorTileG2SOp(), 1)

    def load_operands(self, a, b, major_a, major_b) -> list[TmaOperand]:
        """Host: what the kernel is given to load A (M, K) and B (N, K)."""
        config = self.config
        tile = (config.tile_m, config.stage_n, config.tile_k)
        layout_a = hopper_helpers.make_smem_layout_a(major_a, tile, a.element_type, config.stages)
        layout_b = hopper_helpers.make_smem_layout_b(major_b, tile, b.element_type, config.stages)
        operands = []
        for tensor, layout, rows, (load, multicast) in zip(
            (a, b), (layout_a, layout_b), tile[:2], self.load_operations(), strict=True
        ):
            atom, coordinates = cpasync.make_tiled_tma_atom(
                load,
                tensor,
                cute.slice_(layout, ONE_STAGE),
                (rows, config.tile_k),
                num_multicast=multicast,
            )
            operands.append(TmaOperand(atom, coordinates, layout))
        return operands

    def cluster_coord(self, context: WarpContext) -> ClusterCoord:
        """Where the CTA stands in its cluster."""
        return ClusterCoord(0, 0, None, None)

    def store_operand(self, c):
        """Host: what the kernel is given to store C by TMA, () where it leaves from registers."""
        return ()

    def alloc_epilogue(self, smem, operand, dtype):
        """The shared memory through which C leaves, or None."""
        return None

    @cute.jit
    def cluster_sync(self):
        """Barriers are initialised, for all who use them."""
        cute.arch.sync_threads()

    @cute.jit
    def cluster_exit(self):
        """What a CTA waits for before it ends."""

    @cute.jit
    def body(self, cta: Cta, pipeline: Pipeline):
        """What one CTA does, barriers initialised."""
        raise TypeError("a rung defines body")

    @cute.jit
    def clear_accumulator(self, fragments: MmaFragments):
        """Before the first product of a tile."""
        fragments.acc.fill(0.0)

    @cute.jit
    def store_tile(self, cta: Cta, consumer, m, n):
        """Writes the accumulator to row tile m, column tile n of C."""
        tile, width = (self.config.tile_m, self.config.tile_n), min(self.width, 2)
        roles.store_registers(consumer, cta.mC, m, n, tile, width, StoreCacheMode.WRITE_BACK)
        lap(cta.timers, STORE)

    def make_consumer(self, cta: Cta, index) -> Consumer:
        """What a thread of consumer warpgroup `index` multiplies with: its rows of every stage, its
        accumulator.
        """
        c, mma = self.config, cta.mma
        # Descriptors of shared memory: those of a warpgroup's threads are all the same.
        thread = mma.accumulating.get_slice(index * WARPGROUP)
        thread_in_tile = index * WARPGROUP + cta.context.thread % WARPGROUP
        fragments = MmaFragments(
            mma,
            tCrA=mma.accumulating.make_fragment_A(thread.partition_A(cta.sA)),
            tCrB=mma.accumulating.make_fragment_B(thread.partition_B(cta.sB)),
            acc=cute.make_rmem_tensor(
                mma.accumulating.partition_shape_C((c.tile_m, c.tile_n)), Float32
            ),
        )
        return Consumer(index, thread_in_tile, cta.context, fragments)

    # ---- host
    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, table, trace, stream):
        """a: (M, K), b: (K, N), c: (M, N). `table`: (steps, clusters) of cluster tiles, int32, or
        None; `trace`: int64 (CTAs, warpgroups, phases) or None.
        """
        config = self.config
        # (N, K), as wgmma and TMA name B.
        b = cute.make_tensor(b.iterator, cute.select(b.layout, mode=[1, 0]))
        major_a, major_b = LayoutEnum.from_tensor(a), LayoutEnum.from_tensor(b)
        operand_a, operand_b = self.load_operands(a, b, major_a, major_b)
        mma, mma_overwriting = (
            hopper_helpers.make_trivial_tiled_mma(
                a.element_type,
                b.element_type,
                major_a.mma_major_mode(),
                major_b.mma_major_mode(),
                Float32,
                (config.consumers, 1, 1),
                (64, config.instruction_n),
            )
            for _ in range(2)
        )
        mma.set(warpgroup.Field.ACCUMULATE, True)
        mma_overwriting.set(warpgroup.Field.ACCUMULATE, False)
        tiles_m = cute.ceil_div(c.shape[0], config.tile_m * config.cluster_m)
        tiles_n = cute.ceil_div(c.shape[1], config.tile_n * config.cluster_n)
        k_tiles = cute.ceil_div(a.shape[1], config.tile_k)
        self.kernel(
            operand_a,
            operand_b,
            c,
            a.element_type,
            TiledMmas(mma, mma_overwriting),
            TileGrid(tiles_m, tiles_n, k_tiles, table),
            trace,
            self.store_operand(c),
        ).launch(
            grid=(self.grid(tiles_m * tiles_n, table), 1, 1),
            block=(WARPGROUP * self.warpgroups, 1, 1),
            cluster=(config.cluster, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    # ---- device
    @cute.kernel
    def kernel(
        self,
        operand_a: TmaOperand,
        operand_b: TmaOperand,
        mC: cute.Tensor,
        dtype: cutlass.Constexpr,
        mma: TiledMmas,
        grid: TileGrid,
        trace,
        store_operand: tuple[Any, ...],
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == WarpRole.LOAD:
            cpasync.prefetch_descriptor(operand_a.atom)
            cpasync.prefetch_descriptor(operand_b.atom)

        smem = SmemAllocator()
        pipeline = self.alloc_pipeline(smem, dtype, operand_a.layout, operand_b.layout)
        sA, sB = (
            smem.allocate_tensor(dtype, layout.outer, 1024, swizzle=layout.inner)
            for layout in (operand_a.layout, operand_b.layout)
        )
        warpgroup_index = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        context = WarpContext(tidx, block, warp, warpgroup_index)
        coord = self.cluster_coord(context)
        load_a, load_b = self.partition_loads(operand_a, operand_b, sA, sB, coord)
        epilogue = self.alloc_epilogue(smem, store_operand, mC.element_type)

        if warp == WarpRole.LOAD:
            with cute.arch.elect_one():
                pipeline.init_barriers()
            cute.arch.mbarrier_init_fence()
        self.cluster_sync()
        timers = phase_clock.start(trace, context)
        cta = Cta(context, coord, grid, load_a, load_b, mma, sA, sB, mC, epilogue, timers)
        self.body(cta, pipeline)
        phase_clock.finish(timers)
        self.cluster_exit()
        pipeline.check_arrival_counts()

    def alloc_pipeline(self, smem, dtype, layout_a, layout_b) -> Pipeline:
        """The barriers in shared memory, and the pipeline over them. Raises AssertionError where
        the bytes that the config announces are not those that land in a stage.
        """
        config = self.config
        barriers = smem.allocate_array(Int64, 2 * config.stages)
        check_stage_bytes(config, dtype, layout_a, layout_b)
        return self.pipeline_type(
            barriers,
            barriers + config.stages,
            config.stages,
            config.stage_bytes,
            config.consumers,
            config.cluster,
            config.jitter,
        )

    def partition_loads(self, operand_a, operand_b, sA, sB, coord: ClusterCoord) -> list[TmaLoad]:
        """How the CTA loads its part of the tiles of A and of B."""
        config = self.config
        (_, multicast_a), (_, multicast_b) = self.load_operations()
        gA = cute.local_tile(operand_a.tensor, (config.tile_m, config.tile_k), (None, None))
        gB = cute.local_tile(operand_b.tensor, (config.tile_n, config.tile_k), (None, None))
        tAsA, tAgA = cpasync.tma_partition(
            operand_a.atom,
            coord.cta_n_in_cluster,
            cute.make_layout(multicast_a),
            cute.group_modes(sA, 0, 2),
            cute.group_modes(gA, 0, 2),  # (bM, bK, RestM, RestK)
        )
        tBsB, tBgB = cpasync.tma_partition(
            operand_b.atom,
            coord.cta_m_in_cluster,
            cute.make_layout(multicast_b),
            cute.group_modes(sB, 0, 2),
            cute.group_modes(gB, 0, 2),  # (bN, bK, RestN, RestK)
        )
        return [
            TmaLoad(operand_a.atom, tAsA, tAgA, coord.mask_a),
            TmaLoad(operand_b.atom, tBsB, tBgB, coord.mask_b),
        ]


def check_stage_bytes(config, dtype, layout_a, layout_b):
    """Raises AssertionError where the bytes that the config announces are not those that land."""
    landing = sum(
        cute.size_in_bytes(dtype, cute.slice_(layout, ONE_STAGE)) for layout in (layout_a, layout_b)
    )
    assert landing == config.stage_bytes, (
        f"{landing} bytes land in a stage, the config announces {config.stage_bytes}"
    )
