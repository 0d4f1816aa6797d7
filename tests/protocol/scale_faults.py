"""Faults to plant in what moves and reads the scales of fp8 operands, for the model to find."""

from .faults import Change, Fault

SCALES = "gemm.block_scales"
LOADS = "gemm.scale_loads"
PROMOTION = "gemm.promotion"

SCALE_FAULTS = (
    Fault(
        "a stage is released before its scales of columns are read",
        "scales of columns, two rows of wgmma",
        PROMOTION,
        "cutlass.const_expr(cta.traits.block_b != 1)",
        "True",
        (
            Change(
                PROMOTION, "    if cutlass.const_expr(cta.traits.block_b == 1):", "    if False:"
            ),
        ),
    ),
    Fault(
        "a stage is released before its products are done",
        "scales loaded",
        PROMOTION,
        "    warpgroup.wait_group(0)\n    if cutlass",
        "    if cutlass",
    ),
    Fault(
        "sums are added before the products of other rows are done",
        "scales loaded, two rows of wgmma",
        PROMOTION,
        "        warpgroup.wait_group(0)\n        add(",
        "        add(",
    ),
    Fault(
        "scales of the next stage are read before it is full",
        "scales loaded",
        PROMOTION,
        "        pipeline.consumer_wait(after)\n",
        "",
    ),
    Fault(
        "the first stage of a tile is not waited for",
        "scales loaded, residual",
        PROMOTION,
        "        pipeline.consumer_wait(state)\n",
        "",
    ),
    Fault(
        "scales of B are read behind the last k tile",
        "scales loaded",
        PROMOTION,
        "cutlass.const_expr(by_blocks and follows)",
        "by_blocks",
        (Change(PROMOTION, "factors, boundaries, False)", "factors, boundaries, True)"),),
    ),
    Fault(
        "scales of B come in the order of K where k tiles do not",
        "scales loaded",
        SCALES,
        "Int32(along_k) * (1 - 2 * backwards)",
        "Int32(along_k)",
    ),
    Fault(
        "factors are made before the sums of the stage are added",
        "scales loaded",
        PROMOTION,
        "    if cutlass.const_expr(by_blocks and follows):\n"
        "        block_scales.multiply_scales(factors)\n"
        "    return after\n",
        "    return after\n",
        (
            Change(
                PROMOTION,
                "        pipeline.consumer_release(state.index)\n    add(",
                "        pipeline.consumer_release(state.index)\n"
                "    if cutlass.const_expr(by_blocks and follows):\n"
                "        block_scales.multiply_scales(factors)\n"
                "    add(",
            ),
        ),
    ),
    Fault(
        "one arrival of each consumer is expected",
        "scales loaded",
        LOADS,
        'counts["empty"] * (WARPGROUP // LANES)',
        'counts["empty"]',
    ),
    Fault(
        "one warp of each consumer arrives",
        "scales loaded",
        LOADS,
        "            if self.lane == 0:\n",
        "            if cute.arch.thread_idx()[0] % WARPGROUP == 0:\n",
    ),
    Fault(
        "a warp releases a stage for a peer before all of its lanes have read",
        "scales of columns, both shared",
        LOADS,
        "        cute.arch.sync_warp()\n",
        "",
    ),
    Fault(
        "a peer is not told of a release",
        "scales copied, B shared",
        LOADS,
        "            if self.lane < self.cluster:",
        "            if self.lane < 1:",
    ),
    Fault(
        "the warp that copies does not wait for a stage",
        "scales copied",
        LOADS,
        "            pipeline.producer_acquire(state)\n            k_tile",
        "            k_tile",
    ),
    Fault(
        "the warp that copies skips the stages of a residual",
        "scales copied, residual",
        LOADS,
        "        for _ in cutlass.range_constexpr(cta.source_stages):\n",
        "        for _ in ():\n",
    ),
    Fault(
        "stages are full without the scales that are copied",
        "scales copied",
        LOADS,
        'counts["full"] + LANES',
        'counts["full"]',
    ),
    Fault(
        "the warp that copies arrives before its copies have landed",
        "scales copied",
        LOADS,
        "cute.arch.cp_async_mbarrier_arrive_noinc(self.full + state.index)",
        "cute.arch.mbarrier_arrive(self.full + state.index)",
    ),
    Fault(
        "bytes of scales are not announced",
        "scales loaded",
        LOADS,
        "self.tx_bytes + count * 4",
        "self.tx_bytes",
    ),
    Fault(
        "bytes of scales behind the last row are announced",
        "scales loaded, rows end inside of a tile",
        LOADS,
        "pipeline.arrive_and_expect_scales(state, tile.count)",
        "pipeline.arrive_and_expect_scales(state, Int32(tile.cta.config.tile_m))",
    ),
    Fault(
        "scales that are loaded land in the first stage",
        "scales loaded",
        LOADS,
        "state.index * per_stage * 4",
        "0",
    ),
    Fault(
        "only the scales of rows are announced",
        "scales of columns loaded",
        LOADS,
        "sum(run.count for run in runs)",
        "runs[0].count",
    ),
    Fault(
        "scales of columns land on those of rows",
        "scales of columns loaded",
        LOADS,
        "Int32(target + run.place * 4)",
        "Int32(target)",
    ),
    Fault(
        "scales of columns behind the last one are loaded",
        "scales of columns loaded, columns end inside of a tile",
        LOADS,
        "first, width, (half + 1) * N, place)",
        "first, width, first + width, place)",
    ),
)
