"""The device code of `hopper.gemm`: what each warp does, from first load to last store."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, Int64
from cutlass.cute.nvgpu import StoreCacheMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from .. import hilbert, tma_store
from ..core import epilogue_store as staging
from ..core import roles
from ..core.base import ONE_SLOT
from ..core.config import MOST_SLOTS, WARPGROUP, HopperConfig, invalid_reason
from . import (
    cluster_reduce,
    epilogue_math,
    epilogue_store,
    epilogue_tile,
    tile_scheduler,
    tma_load,
)
from . import epilogue_load as fetched
from . import splitk_reduce as pieces
from .pipeline import GroupRing
from .traits import KernelTraits, batch_last, split_gated

FORMATS = {"e4m3": cutlass.Float8E4M3FN, "e5m2": cutlass.Float8E5M2}
BESIDE = 4  # slots' barriers, as much as what pieces of K say and wait for takes
TURN = 4  # named barriers TURN and TURN + 1: consumer 0 or 1 may multiply


@dataclass(frozen=True)
class Config(hilbert.Config):
    slots: int = 4
    in_flight: int = 1
    producer_registers: int = 40
    consumer_registers: int = 232
    order: str = "serpentine"
    group_m: int = 8
    sms: int = 0
    gpc: bool = True
    store_buffers: int = 2
    k_serpentine: bool = True


class Gemm(tma_store.TmaStore):
    """C = alpha A B + beta C. Who multiplies what is `work`'s."""

    ring_type = GroupRing
    introduces = frozenset(
        {
            "swap",
            "elastic",
            "pingpong",
            "k_serpentine",
            "split_k",
            "stream_k",
            "cluster_k",
            "gpc",
            "pdl",
        }
    )

    def __init__(self, config: HopperConfig, form: KernelTraits):
        if reason := self.invalid_reason(config):
            raise ValueError(f"config: {reason}")
        self.config, self.form = config, form

    @classmethod
    def invalid_reason(cls, config):
        if config.phases:
            return "phases is True, expected False: a rung of the ladder counts cycles"
        if config.slots > MOST_SLOTS - BESIDE:
            return (
                f"slots is {config.slots}, expected at most {MOST_SLOTS - BESIDE}: other words "
                "lie beside barriers"
            )
        return invalid_reason(config)

    @property
    def staged(self):
        return self.form.staged and self.config.store_buffers > 0

    @property
    def stored(self):
        return self.config.stored(self.form.gated)

    def share(self, k):
        rows, columns = self.config.cluster_m, self.config.cluster_n
        rank = Int32(0)
        if self.config.cluster > 1:
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        k.part_b, k.part_a = rank % rows, rank // rows % columns
        k.part_k = rank // self.config.group
        k.first = k.part_k * self.config.group  # rank of the first CTA that has the same part of K
        k.first_part = (
            rank - k.first
        )  # and of the one that has the first part of K of the same tile
        k.mask_a = Int16(sum(1 << rows * i for i in range(columns))) << Int16(k.first + k.part_b)
        k.mask_b = Int16((1 << rows) - 1) << Int16(k.first + k.part_a * rows)

    def maps(self, a, b, major_a, major_b):
        """Of gated pairs, a slot holds columns of B's first half, then as many of its second: B is
        (N, K, 2).
        """
        made = super().maps(a, b, major_a, major_b)
        if not self.form.gated:
            return made
        config, dtype = self.config, b.element_type
        half, along_k = config.slot_n // 2, major_b.is_k_major_b()
        kind = hopper_helpers.get_smem_layout_atom(
            major_b, dtype, config.tile_k if along_k else half
        )
        atom, order = (
            warpgroup.make_smem_layout_atom(kind, dtype),
            (0, 1, 2) if along_k else (1, 0, 2),
        )
        slots = cute.tile_to_shape(atom, (config.slot_n, config.tile_k, config.slots), order)
        one = cute.tile_to_shape(atom, (half, config.tile_k), order[:2])
        _, (load, shared) = self.loads()
        loaded = cpasync.make_tiled_tma_atom(
            load, b, one, (half, config.tile_k), num_multicast=shared
        )
        return *made[:3], *loaded, slots

    # host
    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        c: cute.Tensor,
        table,
        addend,
        bias,
        residual,
        aux,
        scale_a,
        scale_b,
        sums,
        counters,
        pieces: Int32,
        clusters: Int32,
        alpha: Float32,
        beta: Float32,
        stream,
    ):
        """a: (L, M, K), b: (L, K, N), c: (L, M, N), without L where there is no batch; of a transposed
        product the last two of each change places. `table`: tiles in their order, int32, or None;
        `addend`, `bias`, `residual`, `aux`: a vector, or as c, or None, as `form` says; of gated
        pairs they have 2 N columns as b has, but for the residual. `sums`, fp32, and `counters`,
        int32 and 0: of pieces of K, or None. `clusters` at most are launched.
        """
        config, form = self.config, self.form
        a, c = batch_last(a, form.transposed), batch_last(c, form.transposed)
        b = batch_last(b, not form.transposed)  # (N, K), as wgmma and TMA name B
        addend, bias, residual, aux, scale_a, scale_b = (
            t if t is None or cute.rank(t) == 1 else batch_last(t, form.transposed)
            for t in (addend, bias, residual, aux, scale_a, scale_b)
        )
        if cutlass.const_expr(form.gated):
            b = split_gated(b, 0, c.shape[1])
            if cutlass.const_expr(form.aux == "staged"):
                aux = split_gated(aux, 1, c.shape[1])
        major_a, major_b = LayoutEnum.from_tensor(a), LayoutEnum.from_tensor(b)
        tma_a, mA, layout_a, tma_b, mB, layout_b = self.maps(a, b, major_a, major_b)
        fetched = addend if form.source == "addend" else residual
        maps_c = (
            epilogue_store.maps(self.stored, c, aux, fetched, form)
            if cutlass.const_expr(self.staged)
            else ()
        )
        tiles_m = cute.ceil_div(c.shape[0], config.tile_m * config.cluster_m)
        wide, columns = (
            Int32(0),
            cute.ceil_div(c.shape[1] * (2 if form.gated else 1), config.tile_n),
        )
        if cutlass.const_expr(config.elastic):
            columns = c.shape[1] // (config.tile_n - 8)
            columns += 1 if columns * config.tile_n < c.shape[1] else 0
            wide = cutlass.min(
                cute.ceil_div(cutlass.max(c.shape[1] - columns * (config.tile_n - 8), 0), 8),
                columns,
            )
        tiles_n = cute.ceil_div(columns, config.cluster_n)
        matrices = c.shape[2] if cutlass.const_expr(self.form.batched) else Int32(1)
        tiles = tiles_m * tiles_n * matrices
        k_tiles = cute.ceil_div(a.shape[1], config.tile_k)
        line = tiles_n if cutlass.const_expr(self.form.ordered) else tiles_m
        divisors = tuple(
            cute.fast_divmod_create_divisor_v2(divisor)
            for divisor in (line, tiles_m * tiles_n, clusters, pieces)
        )
        self.kernel(
            tma_a,
            mA,
            tma_b,
            mB,
            c,
            a.element_type,
            major_a,
            major_b,
            layout_a,
            layout_b,
            divisors,
            tiles,
            wide,
            k_tiles,
            table,
            addend,
            bias,
            residual,
            aux,
            scale_a,
            scale_b,
            sums,
            counters,
            pieces,
            clusters,
            alpha,
            beta,
            maps_c,
        ).launch(
            grid=(clusters * config.cluster, 1, 1),
            block=(WARPGROUP * self.warpgroups, 1, 1),
            cluster=(config.cluster, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=config.pdl,
        )

    # device
    @cute.kernel
    def kernel(
        self,
        tma_a: cute.CopyAtom,
        mA: cute.Tensor,
        tma_b: cute.CopyAtom,
        mB: cute.Tensor,
        mC: cute.Tensor,
        dtype: cutlass.Constexpr,
        major_a: cutlass.Constexpr,
        major_b: cutlass.Constexpr,
        layout_a: cute.ComposedLayout,
        layout_b: cute.ComposedLayout,
        divisors: tuple[Any, ...],
        tiles: Int32,
        wide: Int32,
        k_tiles: Int32,
        table,
        addend,
        bias,
        residual,
        aux,
        scale_a,
        scale_b,
        sums,
        counters,
        pieces: Int32,
        clusters: Int32,
        alpha: Float32,
        beta: Float32,
        maps_c: tuple[Any, ...],
    ):
        config = self.config
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        cluster, only = cta // config.cluster, None
        if cutlass.const_expr(self.form.ordered and self.form.single_wave):
            only = table[cluster]  # 600 cycles away: asked for before all else
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == WARPGROUP // 32:
            for descriptor in (tma_a, tma_b, *maps_c[:-2:2]):
                if cutlass.const_expr(descriptor is not None):
                    cpasync.prefetch_descriptor(descriptor)
        smem = SmemAllocator()
        bars = smem.allocate_array(Int64, 2 * config.slots)
        said = smem.allocate_array(Int32, 4)
        exchanged = smem.allocate_array(Int64, 2 * config.sharing)
        slots = smem.allocate(config.slots * config.slot_bytes, 1024)
        sA = at(slots, dtype, layout_a)  # (bM, bK, SLOT)
        sB = at(slots + cute.size_in_bytes(dtype, layout_a), dtype, layout_b)  # (bN, bK, SLOT)
        landed = sum(
            cute.size_in_bytes(dtype, cute.slice_(layout, ONE_SLOT))
            for layout in (layout_a, layout_b)
        )
        assert landed == config.slot_bytes, (
            f"{landed} bytes land in a slot, the config announces {config.slot_bytes}"
        )
        k = SimpleNamespace(
            tidx=tidx,
            cta=cta,
            warp=warp,
            warpgroup=cute.arch.make_warp_uniform(tidx // WARPGROUP),
            cluster=cluster,
            only=only,
            clusters=clusters,
            by=tile_scheduler.Divisors(*divisors),
            tiles=tiles,
            wide=wide,
            k_tiles=k_tiles,
            tma_a=tma_a,
            tma_b=tma_b,
            mA=mA,
            mB=mB,
            mC=mC,
            sA=sA,
            sB=sB,
            table=table,
            addend=addend,
            bias=bias,
            residual=residual,
            aux=aux,
            scale_a=scale_a,
            scale_b=scale_b,
            slots=slots,
            sums=sums,
            counters=counters,
            pieces=pieces,
            alpha=alpha,
            beta=beta,
            operand_type=dtype,
            trace=None,
            majors=(major_a.mma_major_mode(), major_b.mma_major_mode()),
            batched=self.form.batched,
            single_wave=self.form.single_wave,
            form=self.form,
            columns=config.tile_n // (2 if self.form.gated else 1),
            extents=mC.shape[:2],
            said=cute.make_tensor(said, 4),
        )
        k.kinds, k.multiplied = (dtype, dtype), (sA, sB)
        if cutlass.const_expr(self.form.formats != ""):
            k.kinds = tuple(FORMATS[name] for name in self.form.formats.split()[:2])
            shape = (config.tile_m, config.slot_n, 2 * config.tile_k)
            layouts = (
                hopper_helpers.make_smem_layout_a(major_a, shape, k.kinds[0], config.slots),
                hopper_helpers.make_smem_layout_b(major_b, shape, k.kinds[1], config.slots),
            )
            starts = (slots, slots + cute.size_in_bytes(dtype, layout_a))
            k.multiplied = tuple(at(*each) for each in zip(starts, k.kinds, layouts, strict=True))
        self.share(k)
        ring = self.ring_type(
            bars,
            bars + config.slots,
            config.slots,
            config.slot_bytes,
            config.sharing,
            config.group,
            config.jitter,
            first=k.first,
        )
        (_, share_a), (_, share_b) = self.loads()
        gA = cute.local_tile(
            mA, (config.tile_m, config.tile_k), (None,) * cute.rank(mA)
        )  # (bM, bK, RestM, RestK, L)
        k.tAsA, k.tAgA = cpasync.tma_partition(
            tma_a,
            k.part_a,
            cute.make_layout(share_a),
            cute.group_modes(sA, 0, 2),
            cute.group_modes(gA, 0, 2),
        )
        k.share_b = share_b
        k.slots_a_tile = k_tiles + self.fetches(k)
        if cutlass.const_expr(self.staged):
            epilogue_store.place(k, self.stored, smem, maps_c, slots)
        if cutlass.const_expr(config.cluster_k > 1):
            cluster_reduce.place(k, smem, config, exchanged)
            if warp == 0:
                with cute.arch.elect_one():
                    cluster_reduce.init(k, config)
        ring.init()
        self.meet()
        if cutlass.const_expr(config.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        self.body(k, ring)
        self.leave()
        ring.settle()

    @cute.jit
    def meet(self):
        if cutlass.const_expr(self.config.cluster > 1):
            tma_store.TmaStore.meet(self)
        else:
            cute.arch.sync_threads()

    @cute.jit
    def leave(self):
        staging.finish()

    def columns_of_b(self, k, column, matrix):
        """Where the CTA's parts of B's slices go in shared memory, and come from: columns from
        `column` on, of gated pairs those of either half.
        """
        parts = 2 if self.form.gated else 1
        box = (self.config.slot_n // parts, self.config.tile_k)
        layout = cute.make_layout(k.share_b)
        found = []
        for part in range(parts):
            rest = (part,) * (parts - 1) + (matrix,) * self.form.batched
            from_column = cute.domain_offset((column, 0, *(0 for _ in rest)), k.mB)
            gB, sB = (
                cute.local_tile(from_column, box, (0, None, *rest)),
                cute.local_tile(k.sB, box, (part, 0, None)),
            )
            found.append(
                cpasync.tma_partition(
                    k.tma_b,
                    k.part_b,
                    layout,
                    cute.group_modes(sB, 0, 2),
                    cute.group_modes(gB, 0, 2),
                )
            )
        return found

    @cute.jit
    def body(self, k, ring):
        if k.warpgroup == 0:
            self.give_registers()
            if k.warp == 0:
                self.producer(k, ring, 0)
            if k.warp == 1:
                self.producer(k, ring, 1)
        else:
            self.take_registers()
            self.become_consumer(k, k.warpgroup - 1)
            self.consumer(k, ring)

    @cute.jit
    def producer(self, k, ring, operand: cutlass.Constexpr):
        """One warp: all slices of A (operand 0) or of B (1)."""
        slot = ring.start()
        for step in cutlass.range(tile_scheduler.steps(k, self.config), unroll=1):
            mine = tile_scheduler.at(k, self.config, step)
            back = step & 1 if cutlass.const_expr(self.config.k_serpentine) else Int32(0)
            if cutlass.const_expr(operand == 0):
                source = (
                    k.tAgA[None, mine.m, None, mine.matrix]
                    if self.form.batched
                    else k.tAgA[None, mine.m, None]
                )
                load = tma_load.Load(k.tma_a, ((k.tAsA, source),), k.mask_a)
            else:
                load = tma_load.Load(
                    k.tma_b, self.columns_of_b(k, mine.column, mine.matrix), k.mask_b
                )
            if cutlass.const_expr(operand == 0 and self.form.bias == "pairs"):
                epilogue_math.warm(k, mine)
            slot = tma_load.slices(load, ring, slot, mine.begin, mine.count, back, operand == 0)
            if cutlass.const_expr(self.form.source != ""):
                slot = fetched.load(k, self.config, self.stored, ring, slot, mine, operand == 0)
        if cutlass.const_expr(operand == 0):
            ring.close(slot)

    def become_consumer(self, k, consumer):
        config = self.config
        k.consumer = consumer
        k.share = Int32(0) if config.pingpong else consumer
        k.consumer_thread = k.share * WARPGROUP + k.tidx % WARPGROUP
        k.parts = config.cluster * config.sharing
        k.part = (k.part_b + k.part_a * config.cluster_m) * config.sharing + k.share
        k.staged = self.staged
        if self.staged:
            epilogue_store.become_writer(k, self.stored, consumer, self.form.by_columns)

    def view(self, k, width):
        """`k` for tiles so many columns wide: instructions, fragments, accumulators."""
        config = self.config
        view = SimpleNamespace(**vars(k) | {"width": width})
        view.mma, view.mma_overwriting = (
            self.instructions(k, config.mma_n or width) for _ in range(2)
        )
        view.mma.set(warpgroup.Field.ACCUMULATE, True)
        view.mma_overwriting.set(warpgroup.Field.ACCUMULATE, False)
        thread = view.mma.get_slice(
            k.share * WARPGROUP
        )  # descriptors: all threads of a warpgroup hold the same
        view.tCrA = view.mma.make_fragment_A(
            thread.partition_A(k.multiplied[0])
        )  # (MMA, MMA_M, MMA_K, SLOT)
        whole = self.instructions(
            k, config.mma_n or config.slot_n
        )  # the slot's columns, of which a tile has the first
        view.tCrB = whole.make_fragment_B(
            whole.get_slice(0).partition_B(k.multiplied[1])
        )  # (MMA, MMA_N, MMA_K, SLOT)
        shape = view.mma.partition_shape_C((config.tile_m, width))
        view.acc = cute.make_rmem_tensor(shape, Float32)
        if self.form.promoted:
            view.own = SimpleNamespace(
                **vars(view) | {"acc": cute.make_rmem_tensor(shape, Float32)}
            )
        return view

    def instructions(self, k, columns):
        shape = (self.config.sharing, 1, 1)
        return hopper_helpers.make_trivial_tiled_mma(
            *k.kinds, *k.majors, Float32, shape, (64, columns)
        )

    @cute.jit
    def consumer(self, k, ring):
        config = self.config
        views = [self.view(k, width) for width in config.widths]
        slot, first, stride = ring.start(), Int32(0), 1
        if cutlass.const_expr(config.pingpong):
            first, stride = k.consumer, 2
            slot = ring.skip(slot, k.consumer * k.slots_a_tile)
        if cutlass.const_expr(config.pingpong or self.form.staggered_tail):
            self.give_first_turn(k)
        turns = (tile_scheduler.steps(k, config) - first + stride - 1) // stride
        for turn in cutlass.range(turns, unroll=1):
            mine = tile_scheduler.at(k, config, first + turn * stride)
            if cutlass.const_expr(config.pingpong):
                cute.arch.barrier(barrier_id=TURN + k.consumer, number_of_threads=2 * WARPGROUP)
            if cutlass.const_expr(config.elastic):
                if mine.narrow == 0:
                    slot = self.compute(views[0], ring, slot, mine, config.tile_n, turn, turns)
                else:
                    slot = self.compute(views[1], ring, slot, mine, config.tile_n - 8, turn, turns)
            else:
                slot = self.compute(views[0], ring, slot, mine, config.tile_n, turn, turns)
            if cutlass.const_expr(config.pingpong):
                slot = ring.skip(slot, k.slots_a_tile)

    @cute.jit
    def give_first_turn(self, k):
        if k.consumer == 1:
            cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def compute(self, k, ring, slot, mine, width: cutlass.Constexpr, turn, turns):
        """One tile, or a piece of one: products, sums, C. Returns the slot after the last."""
        config = self.config
        part, own = width // config.cluster_k, mine
        if cutlass.const_expr(config.cluster_k > 1):
            own = mine._replace(column=mine.column + k.part_k * part)
        if cutlass.const_expr(self.form.promoted):
            slot, in_flight, previous = (
                roles.multiply_promoted(k, ring, slot, mine.count),
                0,
                Int32(0),
            )
        else:
            in_flight, last = config.in_flight, config.last if self.form.staggered_tail else 0
            slot, previous = roles.multiply_slots(k, ring, slot, mine.count - last, in_flight, True)
            if cutlass.const_expr(last > 0):
                roles.drain(k, ring, previous, in_flight)
                epilogue_store.free_buffers(k)
                cute.arch.barrier(barrier_id=TURN + k.consumer, number_of_threads=2 * WARPGROUP)
                rest = cutlass.min(
                    mine.count, last
                )  # of a constant, compilers make what they take for divergent
                slot, previous = roles.multiply_slots(k, ring, slot, rest, in_flight, False)
        if cutlass.const_expr(config.pingpong and self.form.source != ""):
            fetched.await_full(k, config, self.stored, ring, slot)
        if cutlass.const_expr(config.pingpong or self.form.staggered_tail):
            cute.arch.barrier_arrive(
                barrier_id=TURN + 1 - k.consumer, number_of_threads=2 * WARPGROUP
            )
        steps = None
        if cutlass.const_expr(not config.split and config.cluster_k == 1):
            steps = epilogue_math.Steps(k, self.stored, mine, width)
        roles.drain(k, ring, previous, in_flight)
        if cutlass.const_expr(self.staged):
            epilogue_store.settle(k, self.stored)
        if cutlass.const_expr(config.split):
            if mine.pieces == 1:
                self.finish(k, mine, width, ring, slot, None)
            else:
                if pieces.combine(k, mine, config.accumulator_registers):
                    self.finish(k, mine, width, ring, slot, None)
        elif cutlass.const_expr(config.cluster_k > 1):
            sums = cluster_reduce.combine(k, config, turn, turns)
            self.finish(self.held(k, sums, part), own, part, ring, slot, None)
        else:
            self.finish(k, mine, width, ring, slot, steps)
        for _ in cutlass.range_constexpr(self.fetches(k)):
            slot = ring.next(slot)
        return slot

    def fetches(self, k) -> int:
        """Slots of a tile in which what is fetched comes."""
        return fetched.slots(self.config, self.stored, k.mC.element_type) if self.form.source else 0

    def held(self, k, registers, width):
        """`k` for a tile so many columns wide, whose accumulators are these registers."""
        view = self.view(k, width)
        view.acc = cute.make_tensor(registers.iterator, view.acc.layout)
        return view

    @cute.jit
    def finish(self, k, mine, width: cutlass.Constexpr, ring, slot, steps):
        """A complete accumulator becomes a tile of C. `slot`: the one after the tile's last slice;
        `steps`: those that its epilogue has to take, if some of it was begun.
        """
        config, form = self.stored, self.form
        steps = epilogue_math.Steps(k, config, mine, width) if steps is None else steps
        if cutlass.const_expr(form.gated):
            width = width // 2
        if cutlass.const_expr(form.aux not in ("", "staged")):
            epilogue_math.store_sums(k, config, mine, steps)
        if cutlass.const_expr(self.staged):
            epilogue_store.store(k, self.config, config, mine, width, ring, slot, steps)
        elif cutlass.const_expr(form.plain):
            self.store_registers(k, config, mine, width)
        else:
            outputs = epilogue_math.in_registers(k, config, width, steps)
            self.store_registers(self.held(k, outputs, width), config, mine, width)

    @cute.jit
    def store_registers(self, k, config: cutlass.Constexpr, mine, width: cutlass.Constexpr):
        """The accumulator straight to C."""
        shape = (config.tile_m, width)
        row = mine.m * config.tile_m
        gC = epilogue_tile.tile_of(k, k.mC, row, mine.column, mine.matrix, shape)
        coordinates = cute.make_identity_tensor(k.extents)
        cC = cute.local_tile(cute.domain_offset((row, mine.column), coordinates), shape, (0, 0))
        together = self.form.width
        if cutlass.const_expr(
            together > 2 and not (together == 8 and (config.mma_n or width) % 32 == 0)
        ):
            together = 2
        roles.store_pieces(k, gC, cC, k.extents, together, StoreCacheMode.WRITE_THROUGH)


def at(memory, dtype, layout):
    """A swizzled tensor in shared memory."""
    return cute.make_tensor(cute.recast_ptr(memory, layout.inner, dtype), layout.outer)
