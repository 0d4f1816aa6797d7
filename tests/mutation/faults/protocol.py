"""Faults in the barriers, stages and partial sums of the Hopper kernels."""

from ..fault import Check, Fault


def _schedules(names: str) -> tuple[Check, ...]:
    """The clean runs of schedules with these words in their names. Tests that plant faults of
    their own in the same sources would fail for want of a text to replace.
    """
    return (Check("test_protocol.py", f"({names}) and not planted"),)


ALL = _schedules("cooperative or consumer")
SOURCE = _schedules("fetched")
PINGPONG = _schedules("pingpong")
TURNS = _schedules("staggered")
MULTICAST = _schedules("multicast")
ELASTIC = _schedules("elastic")
SPLIT = _schedules("split-K or stream-K")
SUMS = (Check("test_splitk_reduce.py"),)
CLUSTER = _schedules("cluster-K")
BATCH = (Check("test_protocol.py", "batch_runs_clean"),)
RUNGS = (Check("test_protocol.py", "rung_of_the_ladder"),)

_CONSUMER = "hopper/gemm/consumer.py"
_MMA_ORDER = "hopper/gemm/mma_order.py"
_SOURCE = "hopper/gemm/epilogue_load.py"
_GROUP = "hopper/gemm/pipeline.py"
_PIPELINE = "hopper/core/pipeline.py"
_LOADS = "hopper/gemm/tma_load.py"
_SPLIT = "hopper/gemm/splitk_reduce.py"
_CLUSTER = "hopper/gemm/cluster_reduce.py"

FAULTS = (
    Fault(
        "missing_wait_for_first_stage",
        "hopper/core/roles.py",
        "    if cutlass.const_expr(in_flight > 0 or overwrite):\n"
        "        pipeline.consumer_wait(state)\n",
        "    if cutlass.const_expr(in_flight > 0 or overwrite):\n",
        ALL,
        "Consumers do not wait for the first stage of a tile.",
    ),
    Fault(
        "wrong_phase_of_a_full_stage",
        _PIPELINE,
        "mbarrier_wait(self.full + state.index, state.phase)",
        "mbarrier_wait(self.full + state.index, state.phase ^ 1)",
        ALL,
        "Consumers wait for the phase before the one in which the stage fills.",
    ),
    Fault(
        "pipeline_wraps_early",
        _PIPELINE,
        "wrapped = index == self.stages",
        "wrapped = index == self.stages - 1",
        ALL,
        "The last stage of the pipeline is never used by who advances step by step.",
    ),
    Fault(
        "wrong_phase_at_the_tail",
        _GROUP,
        "cute.arch.mbarrier_wait(self.empty + state.index, state.phase ^ 1)",
        "cute.arch.mbarrier_wait(self.empty + state.index, state.phase)",
        MULTICAST,
        "The producer's tail waits for a phase that never ends.",
    ),
    Fault(
        "stages_without_barriers",
        _GROUP,
        "for first in cutlass.range_constexpr(0, self.stages, 4):",
        "for first in cutlass.range_constexpr(0, self.stages - 3, 4):",
        ALL,
        "The barriers of the last stages are not initialised.",
    ),
    Fault(
        "arrival_count_one_short",
        _GROUP,
        'cute.arch.mbarrier_init(self.empty + stage, counts["empty"])',
        'cute.arch.mbarrier_init(self.empty + stage, max(counts["empty"] - 1, 1))',
        ALL,
        "A stage counts as empty one arrival before all have read it.",
    ),
    Fault(
        "two_warps_announce",
        _LOADS,
        "        if cutlass.const_expr(announces and scales is None):\n"
        "            pipeline.arrive_and_expect_tx(state)\n",
        "        pipeline.arrive_and_expect_tx(state)\n",
        ALL,
        "Both warps that load arrive at a stage that expects one arrival.",
    ),
    Fault(
        "missing_producer_acquire",
        _LOADS,
        "        pipeline.producer_acquire(state)\n"
        "        if cutlass.const_expr(announces and scales is None):\n",
        "        if cutlass.const_expr(announces and scales is None):\n",
        ALL,
        "Stages are filled before they are empty.",
    ),
    Fault(
        "k_tile_one_further_backwards",
        _LOADS,
        "k_tile = begin + i + backwards * (count - 1 - 2 * i)",
        "k_tile = begin + i + backwards * (count - 2 * i)",
        ALL,
        "Backwards along K, every k tile is the one after it.",
    ),
    Fault(
        "multicast_mask_of_the_other_operand",
        _LOADS,
        "cta.loads.operand_b.atom, partition_columns(cta, work.column, work.matrix), "
        "cta.coord.mask_b",
        "cta.loads.operand_b.atom, partition_columns(cta, work.column, work.matrix), "
        "cta.coord.mask_a",
        MULTICAST,
        "B is multicast to the CTAs that share A.",
    ),
    Fault(
        "columns_of_the_next_tile",
        _LOADS,
        "from_column = cute.domain_offset((column, 0, *(0 for _ in rest)), loads.operand_b.tensor)",
        "from_column = cute.domain_offset((column + 8, 0, *(0 for _ in rest)), "
        "loads.operand_b.tensor)",
        ALL,
        "The tensor map of B begins 8 columns too far.",
    ),
    Fault(
        "rows_of_the_first_matrix",
        _LOADS,
        "loads.tAgA[None, work.m, None, work.matrix]",
        "loads.tAgA[None, work.m, None, 0]",
        BATCH,
        "Every matrix of a batch multiplies the first A.",
    ),
    Fault(
        "source_stages_not_skipped",
        _SOURCE,
        "work, epilogue_config.tile_n, number)\n        state = pipeline.advance(state)\n",
        "work, epilogue_config.tile_n, number)\n"
        "        state = pipeline.advance(state) if cutlass.const_expr(issues) else state\n",
        SOURCE,
        "The warp that does not load the source goes on with the source's stages.",
    ),
    Fault(
        "source_bytes_of_one_consumer",
        _SOURCE,
        "state, len(batch) * consumers * subtile_bytes(epilogue_config, dtype)",
        "state, len(batch) * subtile_bytes(epilogue_config, dtype)",
        SOURCE,
        "Of the source's bytes those of one consumer are announced.",
    ),
    Fault(
        "source_stage_not_released",
        _SOURCE,
        "    if cutlass.const_expr((number + 1) % per == 0 or ends):\n",
        "    if cutlass.const_expr((number + 1) % per == 0):\n",
        SOURCE,
        "The last stage of a tile's source is not released where it is not full.",
    ),
    Fault(
        "one_source_stage_awaited",
        _SOURCE,
        "    for each in stage_states(source, pipeline, state):\n",
        "    for each in stage_states(source, pipeline, state)[:1]:\n",
        (Check("test_protocol.py", "one_kind_of_delay"),),
        "In pingpong the turn passes when the first stage of the source has landed.",
    ),
    Fault(
        "empty_source_stage_kept",
        _SOURCE,
        "for state in states[-(-count // per) :]:",
        "for state in states[-(-count // per) + 1 :]:",
        ELASTIC,
        "A narrow tile keeps the first of the source's stages that it leaves empty.",
    ),
    Fault(
        "turn_given_to_oneself",
        _MMA_ORDER,
        "    following = 1 - consumer.index\n",
        "    following = consumer.index\n",
        TURNS,
        "In the ordered sequence a consumer gives the turn to itself.",
    ),
    Fault(
        "named_barrier_too_small",
        _MMA_ORDER,
        "barrier_id=consumer.index + NamedBarrier.MMA_ORDER, number_of_threads=2 * WARPGROUP",
        "barrier_id=consumer.index + NamedBarrier.MMA_ORDER, number_of_threads=WARPGROUP",
        TURNS,
        "A consumer's own threads complete the named barrier on which it awaits its turn.",
    ),
    Fault(
        "pingpong_consumers_share_tiles",
        _CONSUMER,
        "first, stride = consumer.index, 2",
        "first, stride = consumer.index, 1",
        PINGPONG,
        "In pingpong each consumer takes every tile from its first on.",
    ),
    Fault(
        "pingpong_forgets_source_stages",
        _CONSUMER,
        "stages_per_tile = cta.scheduler.params.k_tiles + cta.source_stages",
        "stages_per_tile = cta.scheduler.params.k_tiles",
        PINGPONG,
        "In pingpong a consumer passes over the other's k tiles, and not over its source.",
    ),
    Fault(
        "consumer_forgets_source_stages",
        _CONSUMER,
        "    for _ in cutlass.range_constexpr(cta.source_stages):\n",
        "    for _ in cutlass.range_constexpr(0):\n",
        SOURCE,
        "A consumer takes the source's stages for those of the next tile.",
    ),
    Fault(
        "cluster_k_stores_one_part",
        _CONSUMER,
        "own = work._replace(column=work.column + cta.coord.cta_k_in_cluster * width)",
        "own = work._replace(column=work.column)",
        CLUSTER,
        "All CTAs that share K store their part of the columns at the first one's.",
    ),
    Fault(
        "split_k_partial_lost",
        _SPLIT,
        "for p in cutlass.range(partition.total, unroll=",
        "for p in cutlass.range(partition.total - 1, unroll=",
        SPLIT,
        "Of small tiles whoever comes last adds all partial sums but those of the last partition.",
    ),
    Fault(
        "split_k_first_partial_again",
        _SPLIT,
        "add_partial(reduction, acc, 0, partition.workspace_index + p, stride)",
        "add_partial(reduction, acc, 0, partition.workspace_index, stride)",
        SPLIT,
        "Of small tiles whoever comes last adds the first partition's sums over and over.",
    ),
    Fault(
        "split_k_other_partial_lost",
        _SPLIT,
        "range(partition.index + 1, partition.total, unroll=1)",
        "range(partition.index + 1, partition.total - 1, unroll=1)",
        SPLIT,
        "Of large tiles whoever comes last leaves out the sums of the last partition.",
    ),
    Fault(
        "split_k_own_sums_first",
        _SPLIT,
        "for p in cutlass.range(partition.index, unroll=1):",
        "for p in cutlass.range(partition.index - 1, -1, -1):",
        SUMS,
        "Partitions before the own one are added in the reverse order of K.",
    ),
    Fault(
        "split_k_negative_zero",
        _SPLIT,
        "            before.fill(0.0)\n",
        "            before.fill(-0.0)\n",
        SUMS,
        "A sum of negative zeros is a negative one, if the first partition comes last.",
    ),
    Fault(
        "split_k_negative_zero_of_the_second",
        _SPLIT,
        "Float32(0.0) + received[v] + ",
        "received[v] + ",
        SUMS,
        "A sum of negative zeros is a negative one, if the second partition comes last.",
    ),
    Fault(
        "stream_k_never_written",
        _SPLIT,
        "seen == partition.total - 1)",
        "seen >= 0)",
        SPLIT,
        "Nobody writes partial sums: each takes the others for done.",
    ),
    Fault(
        "stream_k_seen_counter_not_reset",
        _SPLIT,
        "                reduction.workspace.counters[counter_index(reduction, partition)]"
        " = Int32(0)\n",
        "                pass\n",
        SPLIT,
        "Who need not write leaves the counter as it is.",
    ),
    Fault(
        "split_k_counter_shared",
        _SPLIT,
        "return partition.split_tile * reduction.units + reduction.unit",
        "return partition.split_tile * reduction.units",
        SPLIT,
        "Warpgroups that share a tile count on one counter.",
    ),
    Fault(
        "split_k_counter_not_reset",
        _SPLIT,
        "            counters[index] = Int32(0)\n",
        "            pass\n",
        SPLIT,
        "A counter keeps what the last call counted.",
    ),
    Fault(
        "split_k_verdict_of_the_first_consumer",
        _SPLIT,
        "return reduction.arrived[consumer.index] == partition.total - 1",
        "return reduction.arrived[0] == partition.total - 1",
        SPLIT,
        "Every consumer goes by how many came before the first one.",
    ),
    Fault(
        "cluster_k_wrong_phase",
        _CLUSTER,
        "cute.arch.mbarrier_wait(free, (iteration - 1) & 1)",
        "cute.arch.mbarrier_wait(free, iteration & 1)",
        CLUSTER,
        "Sums are sent to a peer that may still read those of the tile before.",
    ),
    Fault(
        "cluster_k_senders_collide",
        _CLUSTER,
        "sender = own - 1 if own > part else own",
        "sender = 0",
        CLUSTER,
        "All peers send their sums to one place.",
    ),
    Fault(
        "cluster_k_wrong_peer",
        _CLUSTER,
        "peer = cta.coord.multicast_rank + part * cta.config.multicast_size",
        "peer = cta.coord.multicast_rank + part",
        CLUSTER,
        "In a cluster that also multicasts, sums go to CTAs of another tile.",
    ),
    Fault(
        "cluster_k_arrives_at_the_end",
        _CLUSTER,
        "    if peer and again:\n",
        "    if peer:\n",
        CLUSTER,
        "After the last tile CTAs arrive at barriers of peers that have ended.",
    ),
    Fault(
        "ladder_steps_one_more",
        "hopper/persistent.py",
        "            count -= 1\n",
        "            count -= 0\n",
        RUNGS,
        "A CTA of the ladder computes tile -1 where it has none left.",
    ),
    Fault(
        "ladder_grid_swapped",
        "hopper/persistent.py",
        "return tile // cta.grid.tiles_n, tile % cta.grid.tiles_n",
        "return tile % cta.grid.tiles_n, tile // cta.grid.tiles_n",
        RUNGS,
        "The ladder takes columns of the table's tiles for rows.",
    ),
    Fault(
        "ladder_wrong_phase",
        "hopper/lean_barriers.py",
        "mbarrier_wait(self.empty + state.index, state.phase ^ 1)",
        "mbarrier_wait(self.empty + state.index, state.phase)",
        RUNGS,
        "The producer of the ladder waits for the phase that it is to begin.",
    ),
    Fault(
        "ladder_missing_arrive",
        "hopper/cluster_multicast.py",
        "        if lane < self.cluster:\n",
        "        if lane < 1:\n",
        RUNGS,
        "Of a cluster's CTAs only the first hears that a stage is empty.",
    ),
)
