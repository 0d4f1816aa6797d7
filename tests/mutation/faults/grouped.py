"""Faults in grouped products: who computes which tile of which group, and what it stores."""

from ..fault import Check, Fault

SCHEDULE = (Check("test_grouped_schedule.py"),)
HOST = (Check("test_grouped_host.py"),)

_SCHEDULE = "hopper/grouped/schedule.py"
_HOST = "hopper/grouped/host.py"

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
        "return [_row_major(*shape_a, problem.a), along_n",
        "return [_row_major(*shape_a, problem.a) or _column_major(*shape_a, problem.a), along_n",
        HOST,
        "The Hopper kernel takes operands for which TMA would end the launch.",
    ),
)
