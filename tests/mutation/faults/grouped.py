"""Faults in grouped products: who computes which tile of which group, and what it stores."""

from ..fault import Check, Fault

SCHEDULE = (Check("test_grouped_schedule.py"),)
PORTABLE = (Check("test_grouped_mm.py"),)
HOST = (Check("test_grouped_host.py"),)

_SCHEDULE = "hopper/grouped/schedule.py"
_HOST = "hopper/grouped/layouts.py"
_PORTABLE = "kernels/grouped.py"
_OPERATOR = "src/outblas/torch_ops/grouped_mm.py"

FAULTS = (
    Fault(
        "grouped_tile_rows_rounded_down",
        _SCHEDULE,
        "total = (end - begin + rows - 1) // rows",
        "total = (end - begin) // rows",
        SCHEDULE,
        "Groups leave out the rows of their last tile.",
    ),
    Fault(
        "grouped_scan_skips_a_chunk",
        _SCHEDULE,
        "        total += before\n",
        "",
        SCHEDULE,
        "Tile rows of more than 32 groups are counted from the start again.",
    ),
    Fault(
        "grouped_search_is_one_late",
        _SCHEDULE,
        "params.table[first + lane] <= tile_row",
        "params.table[first + lane] < tile_row",
        SCHEDULE,
        "The first tile row of a group is taken for the group before.",
    ),
    Fault(
        "grouped_ends_unclamped",
        _SCHEDULE,
        "return begin, cutlass.min(cutlass.max(end, begin), params.extent)",
        "return begin, end",
        SCHEDULE,
        "Ends that decrease or leave the operand are taken as they are.",
    ),
    Fault(
        "grouped_tail_multiplies",
        _SCHEDULE,
        "k_begin, k_tiles, matrix = params.k_tiles, Int32(1), group - 1",
        "k_begin, k_tiles, matrix = Int32(0), Int32(1), group - 1",
        SCHEDULE,
        "What is left over gets a product in place of zeros.",
    ),
    Fault(
        "grouped_order_has_ties",
        _SCHEDULE,
        "terms > end - begin or (terms == end - begin and other < group)",
        "terms > end - begin",
        SCHEDULE,
        "Groups with as many terms share a place in the order.",
    ),
    Fault(
        "grouped_empty_group_reads_the_next",
        _SCHEDULE,
        "begin, terms = params.extent, Int32(config.tile_k)",
        "begin, terms = begin, Int32(config.tile_k)",
        SCHEDULE,
        "An empty group of terms multiplies those of the next one.",
    ),
    Fault(
        "grouped_takes_contiguous_rows",
        _HOST,
        "return [row_major(*shape_a, problem.a), along_n",
        "return [row_major(*shape_a, problem.a) or column_major(*shape_a, problem.a), along_n",
        HOST,
        "The Hopper kernel takes operands for which TMA would end the launch.",
    ),
    Fault(
        "portable_group_begins_early",
        _PORTABLE,
        "_group_begin(offs, middle, extent) // ROWS + middle <= slot",
        "_group_begin(offs, middle, extent) // ROWS + middle < slot",
        PORTABLE,
        "The first slot of a group is given to the group before.",
    ),
    Fault(
        "portable_too_few_slots",
        _PORTABLE,
        "(problem.M // tile.m + problem.groups + 1) * columns",
        "(problem.M // tile.m + 1) * columns",
        PORTABLE,
        "Fewer programs are launched than groups of single rows need.",
    ),
    Fault(
        "portable_stores_rows_of_the_next_group",
        _PORTABLE,
        "mask_m, mask_n = (m < end)[:, None], (n < N)[None, :]\n        is_group",
        "mask_m, mask_n = (m < M)[:, None], (n < N)[None, :]\n        is_group",
        PORTABLE,
        "A tile writes over the rows of the next group.",
    ),
    Fault(
        "grouped_gradients_keep_what_no_group_covers",
        _OPERATOR,
        "_operator(a, b, offs, None, None, ctx.kernel_name, True)",
        "_operator(a, b, offs, None, None, ctx.kernel_name, False)",
        PORTABLE,
        "The gradient of rows that belong to no group is whatever lay there.",
    ),
)
