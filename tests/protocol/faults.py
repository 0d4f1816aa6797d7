"""Faults to plant in the kernels' source, which the model has to find."""

from typing import NamedTuple


class Change(NamedTuple):
    """A change of a module's source: its text, and what to put in its place."""

    module: str
    old: str
    new: str


class Fault(NamedTuple):
    """What goes wrong, the schedule in which it does, and the change that makes it, with others."""

    what: str
    schedule: str
    module: str
    old: str
    new: str
    also: tuple[Change, ...] = ()

    @property
    def changes(self) -> tuple[Change, ...]:
        return (Change(self.module, self.old, self.new), *self.also)


# As they were shipped.
LOAD_ALONE = (
    Change(
        "gemm.epilogue_load",
        "        if cutlass.const_expr(issues):\n            pipeline.producer_acquire(state)\n",
        "        pipeline.producer_acquire(state)\n        if cutlass.const_expr(issues):\n",
    ),
    Change(
        "gemm.epilogue_load",
        '    cute.arch.inline_ptx(f"barrier.sync {int(NamedBarrier.LOAD_WARPS)}, {2 * 32};")\n',
        "",
    ),
)
TURN_EARLY = (
    Change(
        "gemm.consumer",
        "        epilogue_load.await_all(cta.source, pipeline, state)\n",
        "        pass\n",
    ),
)

FAULTS = (
    Fault(
        "the turn passes before the addend has landed", "pingpong, addend fetched", *TURN_EARLY[0]
    ),
    Fault(
        "a warp waits for stages that nothing of it holds",
        "staggered turns, residual fetched",
        *LOAD_ALONE[0],
        LOAD_ALONE[1:],
    ),
    Fault(
        "a warp skips stages that it does not know to be empty",
        "pingpong, one k tile",
        *LOAD_ALONE[1],
    ),
    Fault(
        "the turn passes before the products",
        "pingpong",
        "gemm.consumer",
        "    state, previous = multiply(cta,",
        "    if config.pingpong:\n"
        "        mma_order_arrive(cta, consumer)\n"
        "    state, previous = multiply(cta,",
        (
            Change(
                "gemm.consumer",
                "    if cutlass.const_expr(config.pingpong or traits.staggered_tail):\n"
                "        mma_order_arrive(cta, consumer)\n",
                "    if cutlass.const_expr(traits.staggered_tail):\n"
                "        mma_order_arrive(cta, consumer)\n",
            ),
        ),
    ),
    Fault(
        "nobody gives the first turn",
        "pingpong",
        "gemm.consumer",
        "        mma_order_begin(cta, consumer)\n",
        "        pass\n",
    ),
    Fault(
        "consumers skip one stage too few",
        "pingpong",
        "gemm.consumer",
        "state = pipeline.advance_by(state, stages_per_tile)",
        "state = pipeline.advance_by(state, stages_per_tile - 1)",
    ),
    Fault(
        "phases do not turn over in a skip",
        "pingpong",
        "parts.pipeline",
        "state.phase ^ (wraps & 1))",
        "state.phase)",
    ),
    Fault(
        "consumers do not wait for a stage",
        "cooperative",
        "parts.roles",
        "        pipeline.consumer_wait(state)\n"
        "        lap(timers, WAIT)\n"
        "        mma_stage(fragments, state.index)\n",
        "        mma_stage(fragments, state.index)\n",
    ),
    Fault(
        "the loading warp of B does not wait for a stage",
        "cooperative",
        "gemm.tma_load",
        "        pipeline.producer_acquire(state)\n",
        "        if announces:\n            pipeline.producer_acquire(state)\n",
    ),
    Fault(
        "consumers wait for the other phase",
        "cooperative",
        "parts.pipeline",
        "mbarrier_wait(self.full + state.index, state.phase)",
        "mbarrier_wait(self.full + state.index, state.phase ^ 1)",
    ),
    Fault(
        "loading warps wait for the other phase",
        "cooperative",
        "gemm.pipeline",
        "mbarrier_wait(self.empty + state.index, state.phase ^ 1)\n\n",
        "mbarrier_wait(self.empty + state.index, state.phase)\n\n",
    ),
    Fault(
        "phases do not turn over",
        "cooperative",
        "parts.pipeline",
        "(state.phase ^ 1) if wrapped else state.phase",
        "state.phase",
    ),
    Fault(
        "a stage is released before its products are done",
        "cooperative",
        "parts.roles",
        "        done = previous if cutlass.const_expr(in_flight > 0) else state.index\n",
        "        done = state.index\n",
    ),
    Fault(
        "the last stage is not released",
        "cooperative",
        "parts.roles",
        "        warpgroup.wait_group(0)\n        pipeline.consumer_release(previous)\n",
        "        warpgroup.wait_group(0)\n",
    ),
    Fault(
        "accumulators are stored before the last product is done",
        "cooperative",
        "parts.roles",
        "        warpgroup.wait_group(0)\n        pipeline.consumer_release(previous)\n",
        "        pipeline.consumer_release(previous)\n",
    ),
    Fault(
        "one arrival too few is expected",
        "multicast",
        "gemm.pipeline",
        'counts["empty"])',
        'counts["empty"] - 1)',
    ),
    Fault(
        "one arrival too many is expected",
        "cooperative",
        "gemm.pipeline",
        'counts["empty"])',
        'counts["empty"] + 1)',
    ),
    Fault(
        "a peer is not told of a release",
        "multicast",
        "gemm.pipeline",
        "if lane < self.cluster:",
        "if lane < self.cluster - 1:",
    ),
    Fault(
        "CTAs do not meet before they load",
        "multicast",
        "gemm.kernel",
        "        self.cluster_sync()\n",
        "",
    ),
    Fault(
        "a CTA ends while peers still arrive",
        "multicast",
        "gemm.kernel",
        "            pipeline.producer_tail(state)\n",
        "            pass\n",
    ),
    Fault(
        "a CTA ends while its stores read shared memory",
        "cooperative",
        "gemm.kernel",
        "        tma_store.wait_stores_read()",
        "        pass",
    ),
    Fault(
        "more bytes are announced than land",
        "cooperative",
        "parts.pipeline",
        "self.tx_bytes if tx_bytes is None",
        "self.tx_bytes + 16 if tx_bytes is None",
    ),
    Fault(
        "a buffer of C is written while a store reads it",
        "cooperative",
        "gemm.epilogue_store",
        "    if cutlass.const_expr(waits and plain):\n        await_buffers(tile.consumer)\n",
        "",
    ),
    Fault(
        "stores are issued before all have written",
        "cooperative",
        "gemm.epilogue_store",
        '        cute.arch.fence_proxy("async.shared", space="cta")\n'
        "        sync_consumer(tile.consumer.index)\n",
        '        cute.arch.fence_proxy("async.shared", space="cta")\n',
    ),
    Fault(
        "stores are issued without a fence",
        "cooperative",
        "gemm.epilogue_store",
        '        cute.arch.fence_proxy("async.shared", space="cta")\n',
        "",
    ),
    Fault(
        "C goes over stages that the other consumer still reads",
        "one wave, not staggered",
        "gemm.consumer",
        "        epilogue_store.wait_mainloop_done(cta.epilogue)\n",
        "        pass\n",
    ),
    Fault(
        "a consumer's C goes over rows that another one still reads",
        "one wave",
        "gemm.epilogue_store",
        "    if overlays_own_rows(config, epilogue.size, traits):\n",
        "    if False:\n",
    ),
    Fault(
        "a consumer's C goes over rows of the next one",
        "one wave, three consumers",
        "gemm.epilogue_store",
        "stride=(config.consumers,)",
        "stride=(config.consumers - 1,)",
    ),
    Fault(
        "C goes over rows of A before the last products are done",
        "one wave",
        "gemm.consumer",
        "    roles.mma_tail(pipeline, previous, in_flight, None)\n    if",
        "    pipeline.consumer_release(previous)\n    if",
    ),
    Fault(
        "a turn comes before the last loads have their stages",
        "one wave",
        "gemm.consumer",
        "    last = config.staggered_k_tiles\n",
        "    last = config.stages\n",
    ),
    Fault(
        "the last consumer of three is not let go on",
        "one wave, three consumers",
        "gemm.consumer",
        "        last = cta.config.consumers - 1\n",
        "        last = cta.config.consumers - 2\n",
    ),
    Fault(
        "a consumer multiplies before its buffers are free",
        "staggered turns, nothing after the product",
        "gemm.consumer",
        "        epilogue_store.await_stores(consumer)\n",
        "        pass\n",
    ),
    Fault(
        "what was fetched is read before it lands",
        "addend fetched",
        "gemm.epilogue_load",
        "    if cutlass.const_expr(number % per == 0):\n        pipeline.consumer_wait(state)\n",
        "",
    ),
    Fault(
        "an addend leaves its stage before all have read it",
        "addend fetched",
        "gemm.epilogue_load",
        "    sync_consumer(consumer.index)\n    pipeline.consumer_release",
        "    pipeline.consumer_release",
    ),
    Fault(
        "C is stored over an addend that has not been fetched",
        "elastic columns, addend in place",
        "gemm.epilogue_load",
        "            pipeline.consumer_wait(states[(number + 1) // per])\n",
        "            pass\n",
    ),
    Fault(
        "stages that a narrow tile leaves empty are not released",
        "elastic columns, few to a stage",
        "gemm.epilogue_store",
        "epilogue_load.release_rest(source, tile.consumer, pipeline, states, count)",
        "pass",
    ),
    Fault(
        "a consumer keeps its turn",
        "staggered turns",
        "gemm.consumer",
        "    if cutlass.const_expr(config.pingpong or traits.staggered_tail):\n"
        "        mma_order_arrive(cta, consumer)\n",
        "    if cutlass.const_expr(config.pingpong):\n        mma_order_arrive(cta, consumer)\n",
    ),
    Fault(
        "sums of the cluster are read before they land",
        "cluster-K",
        "gemm.cluster_reduce",
        "    cute.arch.mbarrier_wait(landed, iteration & 1)\n",
        "",
    ),
    Fault(
        "sums of the cluster are awaited in one phase for ever",
        "cluster-K",
        "gemm.cluster_reduce",
        "    cute.arch.mbarrier_wait(landed, iteration & 1)\n",
        "    cute.arch.mbarrier_wait(landed, 0)\n",
    ),
    Fault(
        "sums are sent before the peer has read the last ones",
        "cluster-K",
        "gemm.cluster_reduce",
        "        await_free(free, iteration)\n",
        "        pass\n",
    ),
    Fault(
        "a peer too few has to be free",
        "cluster-K",
        "gemm.cluster_reduce",
        "consumer, config.cluster_k - 1",
        "consumer, config.cluster_k - 2",
    ),
    Fault(
        "fewer sums are announced than land",
        "cluster-K",
        "gemm.cluster_reduce",
        "mbarrier_arrive_and_expect_tx(landed, peer_sums * 4)",
        "mbarrier_arrive_and_expect_tx(landed, peer_sums * 4 - count * WARPGROUP * 4)",
    ),
    Fault(
        "partial sums are counted before they are written",
        "split-K",
        "gemm.splitk_reduce",
        "        cute.arch.fence_acq_rel_gpu()\n",
        "",
        (Change("gemm.splitk_reduce", 'sem="acq_rel"', 'sem="relaxed"'),),
    ),
    Fault(
        "partial sums of one warp are not waited for",
        "split-K",
        "gemm.splitk_reduce",
        "    sync_consumer(consumer.index)\n    count_arrival",
        "    count_arrival",
    ),
    Fault(
        "a counter is left for the next call",
        "split-K",
        "gemm.splitk_reduce",
        "            counters[index] = Int32(0)\n",
        "            pass\n",
    ),
    Fault(
        "whoever comes before the last adds up",
        "split-K",
        "gemm.splitk_reduce",
        "    return reduction.arrived[consumer.index] == partition.total - 1",
        "    return reduction.arrived[consumer.index] == partition.total - 2",
    ),
    Fault(
        "whoever has seen all others but one arrive adds up",
        "stream-K, five clusters",
        "gemm.splitk_reduce",
        "seen == partition.total - 1)",
        "seen == partition.total - 2)",
    ),
    Fault(
        "only the thread that has seen all others arrive knows of it",
        "stream-K, five clusters",
        "gemm.splitk_reduce",
        "last = sync_consumer_any(consumer.index, seen == partition.total - 1)",
        "last = seen == partition.total - 1",
    ),
    Fault(
        "who has seen all others arrive leaves the counter for the next call",
        "stream-K, five clusters",
        "gemm.splitk_reduce",
        "                reduction.workspace.counters[counter_index(reduction, "
        "partition)] = Int32(0)\n",
        "                pass\n",
    ),
    Fault(
        "a counter of another tile is looked at",
        "stream-K, five clusters",
        "gemm.splitk_reduce",
        "counters.iterator + counter_index(reduction, partition)\n        seen",
        "counters.iterator + reduction.unit\n        seen",
    ),
    Fault(
        "a call starts early and waits for nothing",
        "dependent launch",
        "gemm.kernel",
        "        else:\n            cute.arch.griddepcontrol_wait()\n",
        "        else:\n            pass\n",
    ),
    Fault(
        "activations are loaded as early as weights",
        "weights ready",
        "gemm.kernel",
        "            if warp != self.weights_warp:\n",
        "            if warp > WarpRole.LOAD_B:\n",
    ),
    Fault(
        "the caller's A is taken for weights",
        "weights ready, transposed",
        "gemm.kernel",
        "return WarpRole.LOAD_A if self.traits.transposed else WarpRole.LOAD_B",
        "return WarpRole.LOAD_B",
    ),
    Fault(
        "the source of an epilogue is loaded as early as weights",
        "weights ready, transposed, one k tile",
        "gemm.kernel",
        'traits.source != "" and is_early',
        'traits.source == "none" and is_early',
    ),
)
