"""What every Hopper rung shares: operand layouts, tensor maps, shared memory, barriers, launch."""

from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import StoreCacheMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from . import phase_clock, pipeline, roles
from .config import WARPGROUP, HopperConfig, invalid_reason

ONE_SLOT = (None, None, 0)


class HopperGemm:
    """C[M, N] = A[M, K] B[K, N], fp32 accumulate. A rung overrides `body`, or a policy method.

    The layouts of A and B (either major), and the dtypes, come from the tensors that `cute.compile`
    is given; sizes and strides stay symbolic. `width`: elements of a row of C that can be written
    at once, 1, 2, or what 16 bytes hold.
    """

    # Fields of HopperConfig that the rung itself brings in; it understands these and its parents'.
    # The others must keep the value that HopperConfig gives them.
    introduces = frozenset({"tile_m", "tile_n", "tile_k", "mma_n", "jitter", "phases"})
    ring_type: type[pipeline.Ring] = pipeline.Ring
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

    def loads(self):
        """What TMA copies of A and of B are made of: the operation, and how many CTAs share one
        tile.
        """
        return (cpasync.CopyBulkTensorTileG2SOp(), 1), (cpasync.CopyBulkTensorTileG2SOp(), 1)

    def maps(self, a, b, major_a, major_b):
        """Host: of A (M, K) and of B (N, K) the atom and tensor of its TMA loads, and the layout of
        its slots.
        """
        config = self.config
        tile = (config.tile_m, config.slot_n, config.tile_k)
        layout_a = hopper_helpers.make_smem_layout_a(major_a, tile, a.element_type, config.slots)
        layout_b = hopper_helpers.make_smem_layout_b(major_b, tile, b.element_type, config.slots)
        made = []
        for tensor, layout, rows, (load, shared) in zip(
            (a, b), (layout_a, layout_b), tile[:2], self.loads(), strict=True
        ):
            slot, box = cute.slice_(layout, ONE_SLOT), (rows, config.tile_k)
            made += [
                *cpasync.make_tiled_tma_atom(load, tensor, slot, box, num_multicast=shared),
                layout,
            ]
        return made

    def share(self, k):
        """Which part of a tile of A and of B this CTA loads, and the masks of the CTAs that receive
        it.
        """
        k.part_a, k.part_b, k.mask_a, k.mask_b = 0, 0, None, None

    def maps_c(self, c):
        """Atoms and tensors of a TMA store of C."""
        return ()

    def prepare_store(self, k, smem, maps):
        """Shared memory of the store."""

    @cute.jit
    def meet(self):
        """Barriers are initialised for all who use them."""
        cute.arch.sync_threads()

    @cute.jit
    def leave(self):
        """Before a CTA ends."""

    @cute.jit
    def body(self, k, ring):
        """What one CTA does, barriers initialised."""
        raise TypeError("a rung defines body")

    @cute.jit
    def clear(self, k):
        """Before the first product of a tile."""
        k.acc.fill(0.0)

    @cute.jit
    def store(self, k, m, n):
        """Writes the accumulator to row tile m, column tile n of C."""
        roles.store_registers(k, m, n, min(self.width, 2), StoreCacheMode.WRITE_BACK)

    def become_consumer(self, k, consumer):
        """Adds to `k` what consumer warpgroup `consumer` multiplies with: its rows of every slot,
        its accumulator.
        """
        c = self.config
        thread = k.mma.get_slice(
            consumer * WARPGROUP
        )  # descriptors: all threads of a warpgroup hold the same
        k.consumer = consumer
        k.consumer_thread = consumer * WARPGROUP + k.tidx % WARPGROUP
        k.tCrA = k.mma.make_fragment_A(thread.partition_A(k.sA))  # (MMA, MMA_M, MMA_K, SLOT)
        k.tCrB = k.mma.make_fragment_B(thread.partition_B(k.sB))  # (MMA, MMA_N, MMA_K, SLOT)
        k.acc = cute.make_rmem_tensor(k.mma.partition_shape_C((c.tile_m, c.tile_n)), Float32)

    # ---- host
    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, table, trace, stream):
        """a: (M, K), b: (K, N), c: (M, N). `table`: (steps, clusters) of cluster tiles, int32, or
        None; `trace`: int64 (CTAs, warpgroups, phases) or None.
        """
        config = self.config
        b = cute.make_tensor(
            b.iterator, cute.select(b.layout, mode=[1, 0])
        )  # (N, K), as wgmma and TMA name B
        major_a, major_b = LayoutEnum.from_tensor(a), LayoutEnum.from_tensor(b)
        tma_a, mA, layout_a, tma_b, mB, layout_b = self.maps(a, b, major_a, major_b)
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
            tma_a,
            mA,
            tma_b,
            mB,
            c,
            a.element_type,
            mma,
            mma_overwriting,
            layout_a,
            layout_b,
            tiles_m,
            tiles_n,
            k_tiles,
            table,
            trace,
            self.maps_c(c),
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
        tma_a: cute.CopyAtom,
        mA: cute.Tensor,
        tma_b: cute.CopyAtom,
        mB: cute.Tensor,
        mC: cute.Tensor,
        dtype: cutlass.Constexpr,
        mma: cute.TiledMma,
        mma_overwriting: cute.TiledMma,
        layout_a: cute.ComposedLayout,
        layout_b: cute.ComposedLayout,
        tiles_m: Int32,
        tiles_n: Int32,
        k_tiles: Int32,
        table,
        trace,
        maps_c: tuple[Any, ...],
    ):
        config = self.config
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)

        smem = SmemAllocator()
        bars = smem.allocate_array(Int64, 2 * config.slots)
        sA = smem.allocate_tensor(
            dtype, layout_a.outer, 1024, swizzle=layout_a.inner
        )  # (bM, bK, SLOT)
        sB = smem.allocate_tensor(
            dtype, layout_b.outer, 1024, swizzle=layout_b.inner
        )  # (bN, bK, SLOT)
        landed = sum(
            cute.size_in_bytes(dtype, cute.slice_(layout, ONE_SLOT))
            for layout in (layout_a, layout_b)
        )
        assert landed == config.slot_bytes, (
            f"{landed} bytes land in a slot, the config announces {config.slot_bytes}"
        )
        ring = self.ring_type(
            bars,
            bars + config.slots,
            config.slots,
            config.slot_bytes,
            config.consumers,
            config.cluster,
            config.jitter,
        )
        k = SimpleNamespace(
            tidx=tidx,
            cta=cta,
            warp=warp,
            warpgroup=cute.arch.make_warp_uniform(tidx // WARPGROUP),
            tiles_m=tiles_m,
            tiles_n=tiles_n,
            k_tiles=k_tiles,
            tile_m=config.tile_m,
            tile_n=config.tile_n,
            tma_a=tma_a,
            tma_b=tma_b,
            mma=mma,
            mma_overwriting=mma_overwriting,
            sA=sA,
            sB=sB,
            mC=mC,
            table=table,
            trace=trace,
        )
        self.share(k)
        (_, share_a), (_, share_b) = self.loads()
        gA = cute.local_tile(
            mA, (config.tile_m, config.tile_k), (None, None)
        )  # (bM, bK, RestM, RestK)
        gB = cute.local_tile(
            mB, (config.tile_n, config.tile_k), (None, None)
        )  # (bN, bK, RestN, RestK)
        k.tAsA, k.tAgA = cpasync.tma_partition(
            tma_a,
            k.part_a,
            cute.make_layout(share_a),
            cute.group_modes(sA, 0, 2),
            cute.group_modes(gA, 0, 2),
        )
        k.tBsB, k.tBgB = cpasync.tma_partition(
            tma_b,
            k.part_b,
            cute.make_layout(share_b),
            cute.group_modes(sB, 0, 2),
            cute.group_modes(gB, 0, 2),
        )
        self.prepare_store(k, smem, maps_c)

        if warp == 0:
            with cute.arch.elect_one():
                ring.init()
            cute.arch.mbarrier_init_fence()
        self.meet()
        k.laps = phase_clock.start(k)
        self.body(k, ring)
        phase_clock.finish(k)
        self.leave()
        ring.settle()
