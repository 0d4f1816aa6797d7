"""Faults in grouped products: who computes which tile of which group, and what it stores."""

from ..fault import Check, Fault

SCHEDULE = (Check("test_grouped_schedule.py"),)
HOST = (Check("test_grouped_host.py"),)

_SCHEDULE = "hopper/grouped/schedule.py"
_HOST = "hopper/grouped/layouts.py"

FAULTS = (
    Fault(
        "grouped_tile_rows_rounded_down",
        _SCHEDULE,
        "return (rows + high - 1) // high * params.columns",
        "return rows // high * params.columns",
        SCHEDULE,
        "Groups leave out the rows of their last tile.",
    ),
    Fault(
        "grouped_turned_clusters_leave_a_column_out",
        _SCHEDULE,
        "tile_rows % 2 * ((params.columns + 1) // 2)",
        "tile_rows % 2 * (params.columns // 2)",
        SCHEDULE,
        "The last column of an odd number is not computed in the row left over.",
    ),
    Fault(
        "grouped_turned_tile_comes_after_one_column",
        _SCHEDULE,
        "if m >= height * cutlass.min(params.columns - n, 2):",
        "if m >= height:",
        SCHEDULE,
        "The second column of a pair is computed by turned clusters alone.",
    ),
    Fault(
        "grouped_row_left_over_opens_a_band",
        _SCHEDULE,
        "above = cutlass.min(above, last) * height",
        "above = above * height",
        SCHEDULE,
        "Tiles of a row left over are counted as those of the next band.",
    ),
    Fault(
        "grouped_scan_skips_a_chunk",
        _SCHEDULE,
        "        total += before\n",
        "",
        SCHEDULE,
        "Tiles of more than 32 groups are counted from the start again.",
    ),
    Fault(
        "grouped_search_is_one_late",
        _SCHEDULE,
        "params.table[first + lane] <= tile",
        "params.table[first + lane] < tile",
        SCHEDULE,
        "The first tile of a group is taken for the group before.",
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
        "grouped_masked_group_follows_the_one_before",
        _SCHEDULE,
        "begin = group * params.group_rows",
        "begin = params.offs[group - 1] if group > 0 else Int32(0)",
        SCHEDULE,
        "A group of a fixed capacity begins where the one before it ends.",
    ),
    Fault(
        "grouped_masked_group_has_any_number_of_rows",
        _SCHEDULE,
        "cutlass.min(cutlass.max(params.offs[group], 0), params.group_rows)",
        "cutlass.max(params.offs[group], 0)",
        SCHEDULE,
        "A count for which there is no room reaches into the next group's place.",
    ),
    Fault(
        "grouped_masked_lanes_read_behind_the_counts",
        _SCHEDULE,
        "    if group < params.offs.shape[0]:\n        begin = group",
        "    if group <= params.offs.shape[0]:\n        begin = group",
        SCHEDULE,
        "A lane without a group reads a count that does not exist.",
    ),
    Fault(
        "grouped_takes_contiguous_rows",
        _HOST,
        "return [row_major(*shape_a, problem.a), along_n",
        "return [row_major(*shape_a, problem.a) or column_major(*shape_a, problem.a), along_n",
        HOST,
        "The Hopper kernel takes operands for which TMA would end the launch.",
    ),
)
