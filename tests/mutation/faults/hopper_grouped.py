"""Faults in what hopper.grouped does after its products: the epilogue of each group, single rows
that are stored, rows that are scattered.
"""

from ..fault import Check, Fault

SCHEDULE = (Check("test_grouped_schedule.py"),)
ROWS = (Check("test_row_stores.py"),)
MATH = (Check("test_epilogue_math.py"),)
PROTOCOL = (Check("test_grouped_protocol.py", "own or registers"),)
HOST = (Check("test_grouped_host.py"),)
GATHER = (Check("test_gather.py"),)

_SCHEDULE = "hopper/grouped/schedule.py"
_ROWS = "hopper/gemm/row_stores.py"
_MATH = "hopper/gemm/epilogue_math.py"
_STORE = "hopper/gemm/epilogue_store.py"
_HOST = "hopper/grouped/host.py"
_LAYOUTS = "hopper/grouped/layouts.py"
_VARIANT = "hopper/grouped/variant.py"
_GATHER = "hopper/grouped/gather.py"

FAULTS = (
    Fault(
        "grouped_bias_of_the_first_group",
        _SCHEDULE,
        "tensors.bias[work.matrix, None]",
        "tensors.bias[0, None]",
        SCHEDULE,
        "Every group adds the bias of the first one.",
    ),
    Fault(
        "grouped_gated_tiles_leave_columns_out",
        _SCHEDULE,
        "config.tile_n // (2 if scheduler.traits.gated else 1)",
        "config.tile_n",
        SCHEDULE,
        "Tiles of gated pairs begin as far apart as tiles of B.",
    ),
    Fault(
        "grouped_row_behind_the_end_is_stored",
        _ROWS,
        "if row >= tile.work.end_row:",
        "if row > tile.work.end_row:",
        ROWS,
        "The first row of the next group is written over.",
    ),
    Fault(
        "grouped_x_is_scattered",
        _ROWS,
        "is not None and not stores.aux",
        "is not None",
        ROWS,
        "x is stored in the order of the result's rows.",
    ),
    Fault(
        "grouped_negative_index_is_stored",
        _ROWS,
        "if to >= 0 and to < M and c < N:",
        "if to < M and c < N:",
        ROWS,
        "A row whose index leaves the result is stored before it.",
    ),
    Fault(
        "grouped_index_behind_the_result_is_stored",
        _ROWS,
        "if to >= 0 and to < M and c < N:",
        "if to >= 0 and c < N:",
        ROWS,
        "A row whose index leaves the result is stored behind it.",
    ),
    Fault(
        "grouped_residual_of_the_row_before_the_scatter",
        _MATH,
        "own = [index[cutlass.min(row + i * 8, last)] for i in range(2)]",
        "own = [cutlass.min(row + i * 8, last) for i in range(2)]",
        MATH,
        "The residual is read at the row of the product.",
    ),
    Fault(
        "grouped_weights_are_left_out",
        _MATH,
        '        multiply_tensor(tile, values, weights, "rows", tile.first_coord(i, start), 0)\n',
        "        pass\n",
        MATH,
        "Scattered rows are not multiplied by their weights.",
    ),
    Fault(
        "grouped_x_is_written_over_the_next_group",
        _MATH,
        "        M = tile.work.end_row\n",
        "        pass\n",
        MATH,
        "x is written over the next group's where elements are stored one by one.",
    ),
    Fault(
        "grouped_x_of_whole_tiles",
        _STORE,
        "elif cutlass.const_expr(work.end_row is not None):",
        "elif cutlass.const_expr(work.end_row is not None and not stores.aux):",
        PROTOCOL,
        "TMA stores x of a tile that reaches into the next group.",
    ),
    Fault(
        "grouped_registers_of_whole_tiles",
        "hopper/gemm/consumer.py",
        "        extents = (work.end_row, extents[1])\n",
        "        pass\n",
        PROTOCOL,
        "Ragged columns are stored over those of the next group.",
    ),
    Fault(
        "grouped_halves_are_the_gate",
        "hopper/grouped/kernel.py",
        "*((half,) * (halves - 1))",
        "*((0,) * (halves - 1))",
        PROTOCOL,
        "Both halves of a stage have the columns of the gate.",
    ),
    Fault(
        "grouped_takes_any_aux",
        _HOST,
        '        stored["aux"] = problem.epilogue.aux\n',
        "        pass\n",
        HOST,
        "An aux is taken that TMA cannot store.",
    ),
    Fault(
        "grouped_takes_halves_at_any_address",
        _HOST,
        "has_contiguous_rows and problem.columns % 8:",
        "has_contiguous_rows and problem.columns % 4:",
        HOST,
        "TMA would have to read a half of B between multiples of 16 bytes.",
    ),
    Fault(
        "grouped_tail_with_an_epilogue",
        _HOST,
        "if layouts.has_tail(problem) and _beside_the_product(problem):",
        "if problem.gathers and _beside_the_product(problem):",
        HOST,
        "Rows behind the last group would get an epilogue in place of zeros.",
    ),
    Fault(
        "grouped_rows_may_repeat",
        _LAYOUTS,
        "step > 0 and step % granule(problem) == 0",
        "step % granule(problem) == 0",
        HOST,
        "TMA is given a tensor whose rows repeat.",
    ),
    Fault(
        "grouped_scattered_residual_by_tma",
        _VARIANT,
        'return "scattered"',
        'return "staged"',
        HOST,
        "The residual is loaded at the rows of the product.",
    ),
    Fault(
        "grouped_masked_shares_a_variant",
        _VARIANT,
        "masked=problem.capacity > 0,",
        "masked=False,",
        HOST,
        "A kernel that was compiled for groups that follow one another is taken for counts.",
    ),
    Fault(
        "grouped_masked_takes_tiles_of_full_groups",
        "src/outblas/core/grouped.py",
        "return self.groups * min(self.capacity, FEW_ROWS)",
        "return self.groups * self.capacity",
        HOST,
        "Groups with few rows of many take tiles of many rows.",
    ),
    Fault(
        "grouped_results_wait_for_small_tiles",
        _HOST,
        "if taken <= _SMALL_TILES_WRITE or problem.scales is not None:",
        "if taken > 0 or problem.scales is not None:",
        HOST,
        "Results of few terms are written by tiles that are slower than the DRAM of an H200.",
    ),
    Fault(
        "grouped_row_order_walks_columns",
        _SCHEDULE,
        "m, n = divmod(rest, params.by_columns)",
        "n, m = divmod(rest, params.by_columns)",
        SCHEDULE,
        "Tiles that follow each other along rows are numbered by columns.",
    ),
    Fault(
        "grouped_weights_share_a_variant",
        _VARIANT,
        "weighted=problem.weighted,",
        "weighted=False,",
        HOST,
        "A kernel that was compiled without weights is taken for a call with weights.",
    ),
    Fault(
        "grouped_gather_does_not_swizzle",
        _GATHER,
        "(piece ^ row) * 16",
        "piece * 16",
        GATHER,
        "Gathered rows lie otherwise than wgmma reads them.",
    ),
    Fault(
        "grouped_gather_leaves_a",
        _GATHER,
        "cutlass.min(cutlass.max(chosen, 0), extent - 1) * stride",
        "chosen * stride",
        GATHER,
        "An index outside of A reads what lies beside it.",
    ),
    Fault(
        "grouped_gather_reads_the_next_row",
        _GATHER,
        "cutlass.min(cutlass.max(K - first, 0), VECTOR) * 2",
        "VECTOR * 2",
        GATHER,
        "Terms behind the end of K are those of the next row, not zero.",
    ),
    Fault(
        "grouped_gathered_pass_is_not_clamped",
        _HOST,
        "chosen = tensors.a_index.clamp(0, problem.rows_of_a - 1)",
        "chosen = tensors.a_index",
        HOST,
        "An index outside of A ends the pass that gathers before the product.",
    ),
)
