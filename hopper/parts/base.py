"""The base class of the Hopper rungs: operand layouts, tensor maps, shared memory, barriers,
launch.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass.cute.nvgpu import StoreCacheMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from outblas.hopper.parts import phase_clock, roles
from outblas.hopper.parts.config import WARPGROUP, HopperConfig
from outblas.hopper.parts.config_limits import invalid_reason
from outblas.hopper.parts.phase_clock import STORE, lap
from outblas.hopper.parts.pipeline import Pipeline
from outblas.hopper.parts.records import (
    MmaFragments,
    MulticastCoord,
    RungConsumer,
    RungCta,
    TileCounts,
    TiledMmas,
    TmaLoad,
    TmaOperand,
    WarpContext,
    WarpRole,
)

ONE_STAGE = (None, None, 0)


class HopperGemm:
    """C[M, N] = A[M, K] B[K, N], accumulated in fp32. A rung overrides `body` or a policy method.

    The layouts of A and B (either may be row- or column-major) and the dtypes come from the tensors
    that `cute.compile` receives; sizes and strides stay symbolic. `width` is the number of elements
    of a row of C that can be written at once: 1, 2, or as many as fit 16 bytes.
    """

    # The fields of HopperConfig that this rung introduces. A rung uses its own fields and its
    # parents'; all other fields must keep their defaults in HopperConfig.
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
        """Returns the config fields that this rung or a parent introduces."""
        return {name for parent in cls.__mro__ for name in vars(parent).get("introduces", ())}

    @classmethod
    def invalid_reason(cls, config: HopperConfig) -> str | None:
        """Returns why this rung cannot be built from a config, or None."""
        understood = cls.understood()
        for name, field in HopperConfig.__dataclass_fields__.items():
            value = getattr(config, name)
            if name not in understood and value != field.default:
                return (
                    f"{name} is {value}, expected {field.default}: a later rung of the ladder "
                    "introduces it"
                )
        return invalid_reason(config)

    # ---- policies
    @property
    def warpgroups(self) -> int:
        return 1

    def grid(self, tiles, table):
        """Returns the number of CTAs to launch for `tiles` tiles, or for a table of tiles."""
        return tiles

    def load_operations(self):
        """Returns the TMA operations that load A and B, each with the number of CTAs that load a
        part of the same tile.
        """
        return (cpasync.CopyBulkTensorTileG2SOp(), 1), (cpasync.CopyBulkTensorTileG2SOp(), 1)

    def load_operands(self, a, b, major_a, major_b) -> list[TmaOperand]:
        """Host: prepares the arguments from which the kernel loads A (M, K) and B (N, K)."""
        return make_operands(self.config, self.load_operations(), a, b, major_a, major_b)

    def cluster_coord(self, context: WarpContext) -> MulticastCoord:
        """Returns the position of the CTA in its cluster."""
        return MulticastCoord(0, 0, None, None)

    def store_operand(self, c):
        """Host: prepares the arguments from which the kernel stores C by TMA; () where it stores
        from registers.
        """
        return ()

    def alloc_epilogue(self, smem, operand, dtype):
        """Allocates the shared memory through which C is stored; returns None where there is
        none.
        """
        return None

    @cute.jit
    def cluster_sync(self):
        """Makes the initialised barriers visible to every thread that uses them."""
        cute.arch.sync_threads()

    @cute.jit
    def cluster_exit(self):
        """Waits for everything that must have happened before the CTA exits."""

    @cute.jit
    def body(self, cta: RungCta, pipeline: Pipeline):
        """Runs one CTA after its barriers are initialised."""
        raise TypeError("a rung defines body")

    @cute.jit
    def clear_accumulator(self, fragments: MmaFragments):
        """Clears the accumulator before the first product of a tile."""
        fragments.acc.fill(0.0)

    @cute.jit
    def store_tile(self, cta: RungCta, consumer, m, n):
        """Writes the accumulator to row tile m, column tile n of C."""
        tile, width = (self.config.tile_m, self.config.tile_n), min(self.width, 2)
        roles.store_registers(consumer, cta.mC, m, n, tile, width, StoreCacheMode.WRITE_BACK)
        lap(cta.timers, STORE)

    def make_consumer(self, cta: RungCta, index) -> RungConsumer:
        """Returns the operands of a thread in consumer warpgroup `index`: its rows of every stage,
        and its accumulator.
        """
        c, mma = self.config, cta.mma
        # Shared-memory descriptors are the same for all threads of a warpgroup.
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
        return RungConsumer(index, thread_in_tile, cta.context, fragments)

    # ---- host
    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, table, trace, stream):
        """Launches the kernel on a: (M, K), b: (K, N), c: (M, N).

        `table` holds cluster tiles, int32 (steps, clusters), or is None. `trace` is int64 (CTAs,
        warpgroups, phases), or None.
        """
        config = self.config
        # (N, K): the shape of B for wgmma and TMA.
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
            TileCounts(tiles_m, tiles_n, k_tiles, table),
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
        grid: TileCounts,
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
        cta = RungCta(context, coord, grid, load_a, load_b, mma, sA, sB, mC, epilogue, timers)
        self.body(cta, pipeline)
        phase_clock.finish(timers)
        self.cluster_exit()
        pipeline.check_arrival_counts()

    def alloc_pipeline(self, smem, dtype, layout_a, layout_b) -> Pipeline:
        """Allocates the barriers in shared memory and returns the pipeline over them. Raises
        AssertionError where the bytes that the config announces differ from the bytes that arrive
        in a stage.
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

    def partition_loads(self, operand_a, operand_b, sA, sB, coord: MulticastCoord) -> list[TmaLoad]:
        """Partitions the tiles of A and B into the parts that this CTA loads."""
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
    """Raises AssertionError where the bytes that the config announces differ from those that
    arrive.
    """
    landing = sum(
        cute.size_in_bytes(dtype, cute.slice_(layout, ONE_STAGE)) for layout in (layout_a, layout_b)
    )
    assert landing == config.stage_bytes, (
        f"{landing} bytes arrive in a stage, but the config announces {config.stage_bytes}"
    )


def make_operands(config, operations, a, b, major_a, major_b) -> list[TmaOperand]:
    """Host: prepares A (M, K) and B (N, K), which the TMA operations `operations` load."""
    tile = (config.tile_m, config.stage_n, config.tile_k)
    layout_a = hopper_helpers.make_smem_layout_a(major_a, tile, a.element_type, config.stages)
    layout_b = hopper_helpers.make_smem_layout_b(major_b, tile, b.element_type, config.stages)
    operands = []
    for tensor, layout, rows, (load, multicast) in zip(
        (a, b), (layout_a, layout_b), tile[:2], operations, strict=True
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
