"""The kernel class of `hopper.gemm`: the host part of a launch, the set-up of a CTA, and the
loading warps.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from outblas.hopper.gemm import (
    block_scales,
    cluster_reduce,
    epilogue_load,
    epilogue_math,
    epilogue_store,
    gather,
    scale_loads,
    tma_load,
)
from outblas.hopper.gemm.block_scales import BlockScales
from outblas.hopper.gemm.config import invalid_reason
from outblas.hopper.gemm.consumer import consumer_loop
from outblas.hopper.gemm.pipeline import GroupPipeline
from outblas.hopper.gemm.records import (
    ClusterCoord,
    Cta,
    CtaEpilogue,
    EpilogueSource,
    EpilogueTensors,
    EpilogueTma,
    MmaOperands,
    SplitKWorkspace,
)
from outblas.hopper.gemm.subtiles import stages_per_tile
from outblas.hopper.gemm.traits import KernelTraits
from outblas.hopper.gemm.views import batch_last, split_gated
from outblas.hopper.parts import epilogue_store as tma_store
from outblas.hopper.parts.base import check_stage_bytes, make_operands
from outblas.hopper.parts.config import WARPGROUP, HopperConfig
from outblas.hopper.parts.records import TmaOperand, WarpContext, WarpRole

FORMATS = {"e4m3": cutlass.Float8E4M3FN, "e5m2": cutlass.Float8E5M2}


class Gemm:
    """The production kernel: C = alpha A B + beta C, with the epilogue of `core.epilogue`.

    Warp roles (`WarpRole`), of a CTA of 1 + consumers warpgroups:

    =====================  ========================================================================
    warp 0, LOAD_A         loads A's k tiles, announces the bytes of every stage, loads the source
    warp 1, LOAD_B         loads B's k tiles
    warp 2, LOAD_SCALES    copies scales that vary along K where TMA cannot load them
    warps 2 and 3          else release their registers and exit
    warpgroups 1 to 3      consumers: wgmma, reduction along K, epilogue, stores
    =====================  ========================================================================

    Consumers share a tile, 64 · n rows each; in pingpong two consumers compute separate tiles.

    Timeline of LOAD_A and of LOAD_B, for each work tile of the CTA::

        for each k tile:
            producer_acquire: wait for the previous phase of empty[s]
            LOAD_A: arrive_and_expect_tx(full[s], bytes of A and B)
            TMA load, whose bytes count on full[s] of every CTA that receives them
        for each stage of the epilogue's source, if there is one:
            LOAD_A: producer_acquire, arrive_and_expect_tx, TMA loads
        with a source: both synchronise at LOAD_WARPS, so LOAD_B knows that its stages were empty
    with scales that vary along K:
        LOAD_A announces and loads those of a tile with each k tile, or LOAD_SCALES waits for
        empty[s] as well, copies them, and arrives at full[s], in stages of a source too
    after the last work tile, LOAD_A:
        producer_tail: wait until every stage has been released; after that no peer arrives

    Timeline of a consumer c, for each of its work tiles::

        pingpong:           wait at MMA_ORDER + c
        for each k tile:    consumer_wait: wait for this phase of full[s]
                            wgmma of stage s, left in flight
                            wait for the previous group, consumer_release of its stage
        staggered tail:     before the last k tiles: mma_tail, wait until this thread's TMA stores
                            have read their buffers (in a single wave there are none, and a group
                            may stay in flight); wait at MMA_ORDER + c
        promoted sums:      instead, for 64 rows after the other: wgmma, wait for it, add; before
                            the last wait consumer_wait of the next stage, then consumer_release
        pingpong, source:   wait until the whole source has arrived
        staggered/pingpong: arrive at MMA_ORDER + the index of the next consumer
        mma_tail:           wait for all groups, consumer_release of the last stage
        C over the stages:  synchronise at ALL_CONSUMERS, unless staggered: then a consumer writes
                            over its own rows of A, which no other consumer reads
        stream-K, large:    before mma_tail one thread reads how many partitions have arrived; then
                            all synchronise at CONSUMER + c, and if all others have arrived, this
                            one is last and neither writes nor counts
        split-K:            write partial sums, synchronise at CONSUMER + c, count, synchronise
                            again; only the last to arrive continues
        cluster-K:          send partial sums to the peers, wait at landed[c], add,
                            arrive at free[c] of every peer
        for each round, which fills every buffer with a subtile:
            operations of the first subtile; with a source: consumer_wait, read, consumer_release
            wait until earlier stores have read their buffers, synchronise at CONSUMER + c
            write this subtile, then the others of the round as they are computed; fence
            synchronise at CONSUMER + c; one thread issues the TMA stores

    Barriers. Waits on the pipeline's barriers use the phase bit of a `PipelineState`; a new barrier
    counts as being in phase 1, because stages start empty:

    ================  ====================================  ======================  ===============
    barrier           arrivals per phase                    who waits               for which phase
    ================  ====================================  ======================  ===============
    full[s]           1: LOAD_A, and the bytes of TMA;      consumers of the stage  state.phase
                      with LOAD_SCALES 32 more
    empty[s]          one of each consumer of the stage in  LOAD_A, LOAD_B          state.phase ^ 1
                      every CTA that loads for this one,
                      when it has read its stage s; of
                      each of its warps with scales
    landed[c]         1: consumer c, and the bytes of       consumer c              iteration & 1
                      cluster_k - 1 peers
    free[c]           cluster_k - 1: consumer c of each     consumer c, before it   that of the
                      peer, when it has read                sends again             iteration before
    CONSUMER + c      128 threads of consumer c             the same
    MMA_ORDER + c     128 threads of the previous consumer  128 of consumer c
    LOAD_WARPS        64: LOAD_A and LOAD_B                 the same
    ALL_CONSUMERS     all consumers of the tile             the same
    ================  ====================================  ======================  ===============

    MMA_ORDER starts with an arrival of the last consumer, which lets the first one multiply.
    With `pdl` every warp waits for the previous call after the barriers are initialised; with
    `weights_ready` all but the one that loads the caller's B do, and the stages that it has filled
    are complete when LOAD_A has announced and loaded the rest.

    `check_arrival_counts` compares the traced arrivals with the pipeline's contract.

    `tile_scheduler` decides which tile, or part of a tile, a CTA computes.
    """

    def __init__(self, config: HopperConfig, traits: KernelTraits, tiles: Any = None):
        if reason := invalid_reason(config):
            raise ValueError(f"config: {reason}")
        self.config, self.traits = config, traits
        self.tiles = tiles or tma_load.DenseTiles(config, traits)

    @property
    def staged(self):
        return self.traits.staged and self.config.epilogue_stages > 0

    @property
    def threads(self) -> int:
        """The threads of a CTA."""
        return WARPGROUP * (1 + self.config.consumers)

    @property
    def epilogue_config(self):
        """The config of the part of C that a CTA stores."""
        return self.config.epilogue_config(self.traits.gated)

    def cluster_coord(self, context: WarpContext) -> ClusterCoord:
        config = self.config
        rows, columns = config.cluster_m, config.cluster_n
        rank = Int32(0)
        if config.cluster > 1:
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        m, n = rank % rows, rank // rows % columns
        k = rank // config.multicast_size
        base = k * config.multicast_size
        return ClusterCoord(
            cta_m_in_cluster=m,
            cta_n_in_cluster=n,
            cta_k_in_cluster=k,
            multicast_base=base,
            multicast_rank=rank - base,
            mask_a=Int16(sum(1 << rows * i for i in range(columns))) << Int16(base + m),
            mask_b=Int16((1 << rows) - 1) << Int16(base + n * rows),
        )

    def load_operands(self, a, b, major_a, major_b) -> list[TmaOperand]:
        """Host: prepares the arguments from which the kernel loads A and B. For gated pairs, a
        stage holds columns of B's first half, then as many of its second: B is (N, K, 2).
        """
        operations = tma_load.multicast_operations(self.config)
        operand_a, operand_b = make_operands(self.config, operations, a, b, major_a, major_b)
        if not self.traits.gated:
            return [operand_a, operand_b]
        config, dtype = self.config, b.element_type
        half, along_k = config.stage_n // 2, major_b.is_k_major_b()
        kind = hopper_helpers.get_smem_layout_atom(
            major_b, dtype, config.tile_k if along_k else half
        )
        atom = warpgroup.make_smem_layout_atom(kind, dtype)
        order = (0, 1, 2) if along_k else (1, 0, 2)
        stages = cute.tile_to_shape(atom, (config.stage_n, config.tile_k, config.stages), order)
        one = cute.tile_to_shape(atom, (half, config.tile_k), order[:2])
        _, (load, multicast) = operations
        atom_b, coordinates = cpasync.make_tiled_tma_atom(
            load, b, one, (half, config.tile_k), num_multicast=multicast
        )
        return [operand_a, TmaOperand(atom_b, coordinates, stages)]

    # ---- host
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
        scale_out,
        scatter_index,
        scatter_weights,
        a_index,
        sums,
        counters,
        partitions: Int32,
        clusters: Int32,
        alpha: Float32,
        beta: Float32,
        stream,
    ):
        """Launches the kernel.

        a: (L, M, K), b: (L, K, N), c: (L, M, N), without L where there is no batch. For a
        transposed product the last two modes of each are exchanged. `table`: tiles in their order,
        int32, or None. `addend`, `bias`, `residual`, `aux`: a vector, or a tensor like c, or None,
        as the traits say; for gated pairs all but the residual have 2 N columns, as b has.
        `scale_out`: (M, N/128), fp32, which is written, or None. `sums`, fp32, and `counters`,
        int32 and 0: the workspace of split-K, or None. At most `clusters` clusters are launched.
        Elements of a and b are words of two fp8 values where the traits have formats.

        Where groups divide the product, `group_kernel` says what these tensors are.
        `scatter_index`, int32 (M), `scatter_weights`, fp32 (M), and `a_index`, int32 (M), are None
        elsewhere.

        The signature is flat because a tuple among the arguments of a compiled function costs the
        host more than a microsecond per call.
        """
        config, traits = self.config, self.traits
        a, c = batch_last(a, traits.transposed), batch_last(c, traits.transposed)
        b = batch_last(b, not traits.transposed)  # (N, K): the shape of B for wgmma and TMA
        addend, bias, residual, aux = (
            t if t is None or cute.rank(t) == 1 else batch_last(t, traits.transposed)
            for t in (addend, bias, residual, aux)
        )
        if cutlass.const_expr(traits.block_scaled):
            scale_a, scale_b = block_scales.orient(scale_a, scale_b, traits.transposed)
        else:
            scale_a, scale_b = (
                t if t is None or cute.rank(t) == 1 else batch_last(t, traits.transposed)
                for t in (scale_a, scale_b)
            )
        if cutlass.const_expr(traits.gated):
            b = split_gated(b, 0, c.shape[1])
            if cutlass.const_expr(traits.aux == "staged"):
                aux = split_gated(aux, 1, c.shape[1])
        majors = LayoutEnum.from_tensor(a), LayoutEnum.from_tensor(b)
        operand_a, operand_b = self.load_operands(a, b, *majors)
        epilogue_tma = None
        if cutlass.const_expr(self.staged):
            source = addend if traits.source == "addend" else residual
            epilogue_tma = epilogue_store.make_tma(self.epilogue_config, c, aux, source, traits)
        self.kernel(
            operand_a,
            operand_b,
            c,
            a.element_type,
            majors,
            self.tiles.make_schedule(a, b, c, majors, table, a_index, partitions, clusters),
            EpilogueTensors(
                *(addend, bias, residual, aux, scale_a, scale_b, alpha, beta),
                *(scatter_index, scatter_weights, scale_out),
            ),
            SplitKWorkspace(sums, counters),
            epilogue_tma,
        ).launch(
            grid=(clusters * config.cluster, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(config.cluster, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=config.pdl,
        )

    # ---- the set-up of a CTA
    @cute.kernel
    def kernel(
        self,
        operand_a: TmaOperand,
        operand_b: TmaOperand,
        mC: cute.Tensor,
        dtype: cutlass.Constexpr,
        majors: cutlass.Constexpr,
        schedule,
        epilogue_tensors: EpilogueTensors,
        workspace: SplitKWorkspace,
        epilogue_tma,
    ):
        config = self.config
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        cluster, table_entry = block // config.cluster, None
        if cutlass.const_expr(self.traits.ordered and self.traits.single_wave):
            table_entry = schedule.table[cluster]  # takes 600 cycles, so it is loaded first
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == WarpRole.MMA:
            for atom in tma_atoms(operand_a, operand_b, epilogue_tma):
                cpasync.prefetch_descriptor(atom)

        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, 2 * config.stages)
        arrived = smem.allocate_array(Int32, 4)
        reduction_barriers = smem.allocate_array(Int64, 2 * config.warpgroups_per_tile)
        stages = smem.allocate(config.stages * config.stage_bytes, 1024)
        operands = self.mma_operands(stages, dtype, majors, operand_a.layout, operand_b.layout)
        warpgroup_index = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        context = WarpContext(tidx, block, warp, warpgroup_index)
        coord = self.cluster_coord(context)
        pipeline = self.make_pipeline(barriers, coord)
        loads = self.tiles.make_loads(operand_a, operand_b, stages, dtype, coord)
        epilogue, source = self.make_epilogue(smem, mC, epilogue_tensors, epilogue_tma, stages)
        cluster_reduction = None
        if cutlass.const_expr(config.cluster_k > 1):
            cluster_reduction = cluster_reduce.alloc_smem(smem, config, reduction_barriers)
            if warp == WarpRole.LOAD_A:
                with cute.arch.elect_one():
                    cluster_reduce.init_barriers(cluster_reduction, config)
        scales = self.make_scales(smem, epilogue_tensors)
        pipeline.init_barriers()
        schedule = self.tiles.begin_schedule(smem, schedule, context)
        self.cluster_sync()
        if cutlass.const_expr(config.pdl):
            self.await_previous_call(warp)

        scheduler = self.tiles.make_scheduler(schedule, cluster, coord, table_entry)
        cta = Cta(
            config,
            self.traits,
            context,
            coord,
            scheduler,
            loads,
            operands,
            epilogue,
            source,
            self.source_stages(epilogue.dtype),
            workspace,
            cute.make_tensor(arrived, 4),
            cluster_reduction,
            scales,
        )
        self.body(cta, pipeline)
        tma_store.wait_stores_read()  # shared memory outlives the stores that read it
        pipeline.check_arrival_counts()

    def mma_operands(self, stages, dtype, majors, layout_a, layout_b) -> MmaOperands:
        """Returns A and B in the memory of the stages, in the layout that wgmma reads."""
        config, words = self.config, cute.size_in_bytes(dtype, layout_a)
        check_stage_bytes(config, dtype, layout_a, layout_b)
        dtypes, layouts = (dtype, dtype), (layout_a, layout_b)
        if self.traits.formats:
            dtypes = tuple(FORMATS[name] for name in self.traits.formats.split()[:2])
            shape = (config.tile_m, config.stage_n, 2 * config.tile_k)
            layouts = (
                hopper_helpers.make_smem_layout_a(majors[0], shape, dtypes[0], config.stages),
                hopper_helpers.make_smem_layout_b(majors[1], shape, dtypes[1], config.stages),
            )
        return MmaOperands(
            sA=tma_load.smem_tensor(stages, dtypes[0], layouts[0]),
            sB=tma_load.smem_tensor(stages + words, dtypes[1], layouts[1]),
            dtypes=dtypes,
            majors=tuple(major.mma_major_mode() for major in majors),
            word_dtype=dtype,
        )

    def make_pipeline(self, barriers, coord: ClusterCoord) -> GroupPipeline:
        """Returns the pipeline over barriers in shared memory: `full` of each stage, then
        `empty`.
        """
        config = self.config
        pipeline: GroupPipeline = self.tiles.pipeline_type(
            barriers,
            barriers + config.stages,
            config.stages,
            self.tiles.announced_bytes,
            config.warpgroups_per_tile,
            config.multicast_size,
            config.jitter,
            first_rank=coord.multicast_base,
        )
        return pipeline

    def make_epilogue(self, smem, mC, tensors, tma, stages):
        """Returns the tensors of the epilogue, and its source or None. Allocates the buffers of
        C.
        """
        config, traits, dtype = self.epilogue_config, self.traits, mC.element_type
        sC = source = None
        if self.staged:
            sC = epilogue_store.alloc_smem(smem, config, tma, dtype, traits, stages)
        epilogue = CtaEpilogue(traits, config, tensors, mC, mC.shape[:2], dtype, tma, sC)
        if traits.source:
            source = EpilogueSource(
                tma.source, stages, tma.subtile_layout, self.config, config, dtype, traits.batched
            )
        return epilogue, source

    def make_scales(self, smem, tensors: EpilogueTensors) -> BlockScales | None:
        """Returns the scales that vary along K, and allocates their memory; None without them."""
        traits = self.traits
        if not traits.block_scaled:
            return None
        count = self.config.stages * block_scales.stage_scales(self.config, traits)
        shared = cute.make_tensor(smem.allocate_array(Float32, count, byte_alignment=16), count)
        return BlockScales(tensors.scale_a, tensors.scale_b, traits.block_a, traits.block_b, shared)

    def source_stages(self, dtype) -> int:
        """Returns the number of stages for the epilogue's source of each tile."""
        if not self.traits.source:
            return 0
        return stages_per_tile(self.config, self.epilogue_config, dtype.width // 8)

    @cute.jit
    def await_previous_call(self, warp):
        """Programmatic dependent launch: waits until the previous call has ended and what it wrote
        is visible, and lets the next call start. The warp that loads the caller's B does not wait
        where those weights are known to be ready; they wait in their stages until the rest comes.
        """
        if cutlass.const_expr(self.config.weights_ready):
            cute.arch.griddepcontrol_launch_dependents()
            if warp != self.weights_warp:
                cute.arch.griddepcontrol_wait()
        else:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def cluster_sync(self):
        """Makes the initialised barriers, and a schedule in shared memory, visible to every thread
        that uses them.
        """
        if cutlass.const_expr(self.config.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
            # The barrier of a cluster does not order what a thread of the CTA wrote to shared
            # memory before it: the schedule, which the other warps read next.
            if cutlass.const_expr(self.tiles.writes_schedule):
                cute.arch.sync_threads()
        else:
            cute.arch.sync_threads()

    @property
    def weights_warp(self):
        """The warp that loads the caller's B."""
        return WarpRole.LOAD_A if self.traits.transposed else WarpRole.LOAD_B

    # ---- roles
    @cute.jit
    def body(self, cta: Cta, pipeline: GroupPipeline):
        """Runs one CTA after its barriers are initialised."""
        config, context = self.config, cta.context
        if context.warpgroup == 0:
            if cutlass.const_expr(config.producer_registers > 0):
                cute.arch.setmaxregister_decrease(config.producer_registers)
            self.load(cta, pipeline)
        else:
            if cutlass.const_expr(config.consumer_registers > 0):
                cute.arch.setmaxregister_increase(config.consumer_registers)
            consumer_loop(cta, pipeline, context.warpgroup - 1)

    @cute.jit
    def load(self, cta: Cta, pipeline: GroupPipeline):
        """Warpgroup 0: the warps that load."""
        if cta.context.warp == WarpRole.LOAD_A:
            self.producer(cta, pipeline, WarpRole.LOAD_A)
        if cta.context.warp == WarpRole.LOAD_B:
            self.producer(cta, pipeline, WarpRole.LOAD_B)
        if cutlass.const_expr(self.traits.block_scaled and not self.traits.wide_scales):
            scale_loads.run(cta, pipeline)
        if cutlass.const_expr(self.traits.gathers):
            gather.run(cta, pipeline)

    @cute.jit
    def producer(self, cta: Cta, pipeline: GroupPipeline, role: cutlass.Constexpr):
        """One warp: loads all k tiles of A (LOAD_A) or of B (LOAD_B). LOAD_A announces the bytes of
        both, and loads the epilogue's source.
        """
        config, traits = self.config, self.traits
        loads_a = role == WarpRole.LOAD_A
        is_early = config.weights_ready and role == self.weights_warp
        state = pipeline.initial_state()
        count = cta.scheduler.work_tile_count(config)
        for step in cutlass.range(count, unroll=1):
            work = cta.scheduler.current_work(config, step)
            backwards = cta.scheduler.backwards(config, work, step)
            if cutlass.const_expr(loads_a):
                load = self.tiles.load_of_a(cta, work)
            else:
                load = self.tiles.load_of_b(cta, work)
            if cutlass.const_expr(loads_a and traits.bias == "pairs" and not is_early):
                epilogue_math.prefetch_bias(cta, work)
            begin, k_tiles = work.partition.begin, work.partition.count
            scales = None
            if cutlass.const_expr(loads_a and traits.wide_scales):
                scales = scale_loads.tile_scales(cta, work)
            state = tma_load.load_k_tiles(
                load, pipeline, state, begin, k_tiles, backwards, loads_a, scales
            )
            if cutlass.const_expr(traits.source != "" and is_early):
                cute.arch.griddepcontrol_wait()
            if cutlass.const_expr(traits.source != ""):
                state = epilogue_load.load(cta.source, pipeline, state, work, loads_a)
        if cutlass.const_expr(loads_a):
            pipeline.producer_tail(state)


def tma_atoms(operand_a: TmaOperand, operand_b: TmaOperand, epilogue_tma: EpilogueTma | None):
    """Returns the atoms of all tensors that a call moves by TMA."""
    atoms = [operand_a.atom, operand_b.atom]
    if epilogue_tma is not None:
        atoms += [epilogue_tma.c.atom, epilogue_tma.aux.atom, epilogue_tma.source.atom]
    return [atom for atom in atoms if atom is not None]
