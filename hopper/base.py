"""What every Hopper rung shares: operand layouts, tensor maps, shared memory, launch."""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from . import sync
from .config import WARPGROUP, HopperConfig, invalid_reason


class HopperGemm:
    """C[M, N] = A[M, K] B[K, N], fp32 accumulate. A rung overrides `body`, or a policy method.

    The layouts of A and B (either major), and the dtypes, come from the tensors that `cute.compile` is given; sizes and
    strides stay symbolic. `pairs`: rows of C start at even, aligned columns, so elements can be written two at a time.
    """

    slots = 1

    def __init__(self, config: HopperConfig, *, pairs: bool):
        if reason := invalid_reason(config):
            raise ValueError(f"config: {reason}")
        self.config = config
        self.pairs = pairs

    def threads(self):
        return WARPGROUP

    def grid(self, tiles):
        """CTAs launched for a number of tiles."""
        return tiles

    @cute.jit
    def body(self, k, ring):
        """What one CTA does, barriers initialised."""
        raise TypeError("a rung defines body")

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream):
        """a: (M, K), b: (K, N), c: (M, N)."""
        config = self.config
        b = cute.make_tensor(b.iterator, cute.select(b.layout, mode=[1, 0]))  # (N, K), as wgmma and TMA name B
        major_a, major_b = LayoutEnum.from_tensor(a), LayoutEnum.from_tensor(b)
        tile = (config.tile_m, config.tile_n, config.tile_k)
        layout_a = hopper_helpers.make_smem_layout_a(major_a, tile, a.element_type, self.slots)
        layout_b = hopper_helpers.make_smem_layout_b(major_b, tile, b.element_type, self.slots)
        one = (None, None, 0)
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_a, mA = cpasync.make_tiled_tma_atom(load, a, cute.slice_(layout_a, one), (config.tile_m, config.tile_k))
        tma_b, mB = cpasync.make_tiled_tma_atom(load, b, cute.slice_(layout_b, one), (config.tile_n, config.tile_k))
        mma = hopper_helpers.make_trivial_tiled_mma(
            a.element_type,
            b.element_type,
            major_a.mma_major_mode(),
            major_b.mma_major_mode(),
            Float32,
            (1, 1, 1),
            (64, config.tile_n),
        )
        mma.set(warpgroup.Field.ACCUMULATE, True)
        tiles_m, tiles_n = cute.ceil_div(c.shape[0], config.tile_m), cute.ceil_div(c.shape[1], config.tile_n)
        k_tiles = cute.ceil_div(a.shape[1], config.tile_k)
        self.kernel(tma_a, mA, tma_b, mB, c, a.element_type, mma, layout_a, layout_b, tiles_m, k_tiles).launch(
            grid=(self.grid(tiles_m * tiles_n), 1, 1), block=(self.threads(), 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        tma_a: cute.CopyAtom,
        mA: cute.Tensor,
        tma_b: cute.CopyAtom,
        mB: cute.Tensor,
        mC: cute.Tensor,
        dtype: cutlass.Constexpr,
        mma: cute.TiledMma,
        layout_a: cute.ComposedLayout,
        layout_b: cute.ComposedLayout,
        tiles_m: Int32,
        k_tiles: Int32,
    ):
        config = self.config
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)

        smem = SmemAllocator()
        full = smem.allocate_array(Int64, self.slots)
        sA = smem.allocate_tensor(dtype, layout_a.outer, 1024, swizzle=layout_a.inner)  # (bM, bK, SLOT)
        sB = smem.allocate_tensor(dtype, layout_b.outer, 1024, swizzle=layout_b.inner)  # (bN, bK, SLOT)
        one = (None, None, 0)
        landed = sum(cute.size_in_bytes(dtype, cute.slice_(layout, one)) for layout in (layout_a, layout_b))
        assert landed == config.slot_bytes, f"{landed} bytes land in a slot, the config announces {config.slot_bytes}"
        ring = sync.Ring(full, self.slots, config.slot_bytes)

        gA = cute.local_tile(mA, (config.tile_m, config.tile_k), (None, None))  # (bM, bK, RestM, RestK)
        gB = cute.local_tile(mB, (config.tile_n, config.tile_k), (None, None))  # (bN, bK, RestN, RestK)
        alone = cute.make_layout(1)
        tAsA, tAgA = cpasync.tma_partition(tma_a, 0, alone, cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2))
        tBsB, tBgB = cpasync.tma_partition(tma_b, 0, alone, cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2))
        thread = mma.get_slice(0)  # wgmma reads whole tiles of shared memory: every thread holds the same descriptors
        k = SimpleNamespace(
            tidx=tidx,
            cta=cta,
            warp=warp,
            tiles_m=tiles_m,
            k_tiles=k_tiles,
            tile_m=config.tile_m,
            tile_n=config.tile_n,
            tma_a=tma_a,
            tma_b=tma_b,
            tAsA=tAsA,
            tAgA=tAgA,
            tBsB=tBsB,
            tBgB=tBgB,
            mma=mma,
            tCrA=mma.make_fragment_A(thread.partition_A(sA)),  # (MMA, MMA_M, MMA_K, SLOT)
            tCrB=mma.make_fragment_B(thread.partition_B(sB)),  # (MMA, MMA_N, MMA_K, SLOT)
            acc=cute.make_rmem_tensor(mma.partition_shape_C((config.tile_m, config.tile_n)), Float32),
            mC=mC,
            pairs=self.pairs,
        )

        if warp == 0:
            with cute.arch.elect_one():
                ring.init()
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        self.body(k, ring)
