"""Faults in scales of fp8 operands that vary along K, as the Hopper kernels move and read them."""

from ..fault import Check, Fault


def _schedules(names: str) -> tuple[Check, ...]:
    """The clean runs of schedules with these words in their names."""
    return (Check("test_protocol_scales.py", f"in_every_timing and ({names})"),)


LOADED = _schedules("loaded and not order")
COPIED = _schedules("copied and not order")
COLUMNS = _schedules("columns")
GROUPED = (Check("test_grouped_protocol.py", "scales_of_groups"),)
REFUSED = (Check("test_gemm_block_scales.py", "refused"),)
WIDE = (Check("test_gemm_block_scales.py", "granules or any_address"),)

_SCALES = "hopper/gemm/block_scales.py"
_LOADS = "hopper/gemm/scale_loads.py"
_PROMOTION = "hopper/gemm/promotion.py"
_LAYOUT = "hopper/gemm/scale_layout.py"
_VARIANT = "hopper/gemm/variant.py"
_CONFIG_LIMITS = "hopper/core/config_limits.py"
_RELEASE = "        pipeline.consumer_release(state.index)\n"
_ADD = "    add(cta, row, groups[-1], state, factors, boundaries)\n"

FAULTS = (
    Fault(
        "block_scales_released_unread",
        _PROMOTION,
        "    if cutlass.const_expr(cta.traits.block_b != 1):\n"
        + _RELEASE
        + _ADD
        + "    if cutlass.const_expr(cta.traits.block_b == 1):"
        "  # its scales were read for the additions\n" + _RELEASE,
        "    if True:\n" + _RELEASE + _ADD,
        COLUMNS,
        "A stage is released before its scales of columns are read.",
    ),
    Fault(
        "block_scales_of_a_stage_not_full",
        _PROMOTION,
        "        pipeline.consumer_wait(after)\n",
        "",
        LOADED,
        "Scales of the next stage are read before it is full.",
    ),
    Fault(
        "block_scales_of_b_a_stage_off",
        _PROMOTION,
        "block_scales.read_blocks(factors, 0)",
        "block_scales.read_blocks(factors, 1)",
        LOADED,
        "The scales of B are those of the next stage.",
    ),
    Fault(
        "block_scales_of_b_one_way",
        _SCALES,
        "Int32(along_k) * (1 - 2 * backwards)",
        "Int32(along_k)",
        LOADED,
        "The scales of B come in the order of K where k tiles come in the other.",
    ),
    Fault(
        "block_scales_of_b_from_the_beginning",
        _SCALES,
        "Int64(begin + backwards * (work.partition.count - 1))",
        "Int64(backwards * (work.partition.count - 1))",
        _schedules("split"),
        "Every partition of K has the scales of the first one's columns.",
    ),
    Fault(
        "block_scales_of_the_other_consumer",
        _SCALES,
        "consumer.warpgroup_in_tile * 64 + thread",
        "thread",
        COPIED,
        "Consumers that share a tile read the scales of the first one's rows.",
    ),
    Fault(
        "block_scales_one_arrival_expected",
        _LOADS,
        'counts["empty"] * (WARPGROUP // LANES)',
        'counts["empty"]',
        LOADED,
        "A stage is empty when one warp of each consumer has read its scales.",
    ),
    Fault(
        "block_scales_lanes_still_read",
        _LOADS,
        "        cute.arch.sync_warp()\n",
        "",
        _schedules("both and shared"),
        "A lane releases a stage for a peer while others of its warp read scales.",
    ),
    Fault(
        "block_scales_copied_over_others",
        _LOADS,
        "            pipeline.producer_acquire(state)\n            k_tile",
        "            k_tile",
        COPIED,
        "The warp that copies scales does not wait until a stage is empty.",
    ),
    Fault(
        "block_scales_lack_a_source_s_stages",
        _LOADS,
        "in cutlass.range_constexpr(cta.source_stages):",
        "in ():",
        _schedules("copied and residual"),
        "The warp that copies scales skips the stages of the epilogue's source.",
    ),
    Fault(
        "block_scales_unannounced",
        _LOADS,
        "self.tx_bytes + count * 4",
        "self.tx_bytes",
        LOADED,
        "The bytes of scales that TMA loads are not announced.",
    ),
    Fault(
        "block_scales_of_no_group",
        _SCALES,
        "    return replace(cta, scales=cta.scheduler.scales_of(cta.scales, work))\n",
        "    return cta\n",
        GROUPED,
        "A work tile of a group has the scales of the whole call.",
    ),
    Fault(
        "promoted_sums_in_one_stage",
        _CONFIG_LIMITS,
        "    if c.stages == 1:\n        return",
        "    if c.stages == 0:\n        return",
        REFUSED,
        "A consumer waits for the next stage, which is the one that it holds.",
    ),
    Fault(
        "block_scales_need_no_memory",
        _CONFIG_LIMITS,
        "c.shared_memory_bytes + 4 * c.stages * stage_scales(c, block_b)",
        "c.shared_memory_bytes",
        REFUSED,
        "Scales are not counted in the shared memory of a config.",
    ),
    Fault(
        "block_scales_loaded_by_any_rows",
        _LAYOUT,
        "for step in (*extents, along_k))",
        "for step in (along_k,))",
        WIDE,
        "TMA loads scales of rows that end inside of 16 bytes.",
    ),
    Fault(
        "block_scales_loaded_from_any_address",
        _LAYOUT,
        "along == 1 and whole and alignment >= 16",
        "along == 1 and whole",
        WIDE,
        "TMA loads scales that begin between multiples of 16 bytes.",
    ),
    Fault(
        "scales_of_columns_loaded_from_anywhere",
        _VARIANT,
        "if traits.block_b == 1 and not scale_layout.are_columns_wide(of_b, problem.N):",
        "if False:",
        WIDE,
        "TMA loads scales of columns that are no neighbours.",
    ),
    Fault(
        "scales_of_columns_unannounced",
        _LOADS,
        "sum(run.count for run in runs)",
        "runs[0].count",
        _schedules("columns and loaded"),
        "The bytes of scales of columns that TMA loads are not announced.",
    ),
    Fault(
        "pairs_take_tiles_that_select_factors",
        "hopper/gemm/heuristic.py",
        "half % fp8.BLOCK and fp8.BLOCK % half",
        "False",
        (Check("test_gemm_block_scales.py", "select_no_factors"),),
        "Gated pairs take tiles whose columns select their scales one by one.",
    ),
    Fault(
        "scales_of_any_row_read_from_a_granule_on",
        _SCALES,
        "row += work.first_row(cta.config.tile_m) % GRANULE",
        "row += 0",
        (Check("test_grouped_protocol.py", "begin_anywhere"),),
        "Rows of a group that begins between multiples of 4 have the scales of others.",
    ),
    Fault(
        "scales_of_the_last_rows_not_loaded",
        _LOADS,
        "first - first % GRANULE, most + GRANULE",
        "first - first % GRANULE, most",
        (Check("test_grouped_scales.py", "whole_granules"),),
        "The last rows of a tile that begins between multiples of 4 have no scales.",
    ),
    Fault(
        "halves_of_pairs_end_inside_of_a_block",
        _VARIANT,
        "traits.block_b == fp8.BLOCK and problem.N % fp8.BLOCK == 0",
        "traits.block_b == fp8.BLOCK",
        (Check("test_block_quantize.py", "halves_of_whole_blocks"),),
        "Of gated pairs the second half's columns have the scales of the block before.",
    ),
)
