"""Faults in the device code of the CUDA-core and Turing ladders."""

from ..fault import Check, Fault

BODIES = (Check("test_gluon_bodies.py"),)

_TILES = "src/outblas/device/tiles.py"
_SIMT = "src/outblas/device/simt.py"
_PIPELINED = "kernels/pipelined.py"
_SHARED = "kernels/shared.py"
_CP_ASYNC = "turing/cp_async.py"
_BUFFERS = "turing/double_buffer.py"

FAULTS = (
    Fault(
        "block_strides_swapped",
        _TILES,
        "        (strides.col, strides.row),\n",
        "        (strides.row, strides.col),\n",
        BODIES,
        "K-blocks of B are read transposed.",
    ),
    Fault(
        "block_advances_along_rows",
        _TILES,
        "a_offsets = a_next.offsets + TILE.block_k * strides.a.col",
        "a_offsets = a_next.offsets + TILE.block_k * strides.a.row",
        BODIES,
        "The next k-block of A is that of other rows.",
    ),
    Fault(
        "block_pointer_advances_along_columns",
        _TILES,
        "b_ptr = b_next.ptr + TILE.block_k * strides.b.row",
        "b_ptr = b_next.ptr + TILE.block_k * strides.b.col",
        BODIES,
        "The next k-block of B is that of other columns.",
    ),
    Fault(
        "block_edge_by_the_first_tile",
        _TILES,
        "    row = indices(first, ROWS, ROW_LAYOUT, TILE.wide)\n",
        "    row = indices(0, ROWS, ROW_LAYOUT, TILE.wide)\n",
        BODIES,
        "All tiles multiply the first rows and columns.",
    ),
    Fault(
        "block_k_edge_unmasked",
        _TILES,
        "    return block.mask & k_mask if LOAD.k_axis == 1 else k_mask & block.mask\n",
        "    return block.mask\n",
        BODIES,
        "The last k-block multiplies what lies behind K.",
    ),
    Fault(
        "right_half_stored_as_the_left",
        _TILES,
        "n = indices(tile.first_n + part * COLUMNS, COLUMNS, COLUMN_LAYOUT, TILE.wide)",
        "n = indices(tile.first_n, COLUMNS, COLUMN_LAYOUT, TILE.wide)",
        BODIES,
        "Where a tile leaves in halves, both leave to the left one's place.",
    ),
    Fault(
        "fragments_of_the_first_terms",
        _TILES,
        "    a_fragment = a_smem.slice(k, TERMS, 1).load(",
        "    a_fragment = a_smem.slice(0, TERMS, 1).load(",
        BODIES,
        "Every mma of a k-block takes the first terms of A.",
    ),
    Fault(
        "naive_steps_along_columns",
        "kernels/naive.py",
        "        b_ptr += strides.b.row\n",
        "        b_ptr += strides.b.col\n",
        BODIES,
        "The naive kernel walks along a row of B.",
    ),
    Fault(
        "simt_column_of_the_first_term",
        _SIMT,
        "        column = a_smem.slice(k, 1, 1).load(SUMS)\n",
        "        column = a_smem.slice(0, 1, 1).load(SUMS)\n",
        BODIES,
        "Every product of a k-block takes the first column of A.",
    ),
    Fault(
        "simt_transposed_block_stored_straight",
        _SIMT,
        "        column = a_smem.slice(k, 1, 0).permute([1, 0]).load(SUMS)\n",
        "        column = a_smem.slice(0, 1, 0).permute([1, 0]).load(SUMS)\n",
        BODIES,
        "Every product of a transposed k-block takes the first row of A.",
    ),
    Fault(
        "simt_prefetch_one_block_late",
        _SHARED,
        "a_next, b_next, left - BLOCK_K, A_LOAD, B_LOAD, False",
        "a_next, b_next, left, A_LOAD, B_LOAD, False",
        BODIES,
        "The edge of a k-block that is loaded ahead is that of the one before.",
    ),
    Fault(
        "simt_pipeline_reads_the_stage_it_fills",
        _PIPELINED,
        "                    after = simt.load_fragments(a_free, b_free, 0, A_LOAD, SUMS)\n",
        "                    after = simt.load_fragments(a_smem, b_smem, 0, A_LOAD, SUMS)\n",
        BODIES,
        "The first term of a k-block is that of the k-block before.",
    ),
    Fault(
        "simt_pipeline_stages_swapped",
        _PIPELINED,
        "a_smem, a_free = (a_odd, a_even) if odd else (a_even, a_odd)",
        "a_smem, a_free = (a_even, a_odd) if odd else (a_even, a_odd)",
        BODIES,
        "Odd k-blocks of A are read from the stage of the even ones.",
    ),
    Fault(
        "simt_pipeline_remainder_off",
        _PIPELINED,
        "    a_ptr += (left - BLOCK_K) * strides.a.col\n",
        "    a_ptr += BLOCK_K * strides.a.col\n",
        BODIES,
        "After the remainder of K, A goes on at the wrong term.",
    ),
    Fault(
        "simt_pipeline_loses_a_pair",
        _PIPELINED,
        "pairs = (size.K + 2 * BLOCK_K - 1) // (2 * BLOCK_K)",
        "pairs = (size.K + BLOCK_K - 1) // (2 * BLOCK_K)",
        BODIES,
        "The last pair of k-blocks is left out where it is not half full.",
    ),
    Fault(
        "turing_stage_of_the_next_block",
        _BUFFERS,
        "acc = tiles.mma_k_block(acc, a_smem[odd], b_smem[odd], BLOCK_K, MMA)",
        "acc = tiles.mma_k_block(acc, a_smem[odd], b_smem[1 - odd], BLOCK_K, MMA)",
        BODIES,
        "A k-block of A is multiplied with the one of B that comes next.",
    ),
    Fault(
        "turing_missing_wait_for_copies",
        _CP_ASYNC,
        "                if k == BLOCK_K:\n                    wait_copies(STAGES - 2)\n",
        "                if k == BLOCK_K:\n                    wait_copies(STAGES - 1)\n",
        BODIES,
        "A k-block is read before its asynchronous copies have landed.",
    ),
    Fault(
        "turing_first_copies_not_awaited",
        _CP_ASYNC,
        "    wait_copies(STAGES - 2)\n    a_fragment, b_fragment",
        "    wait_copies(STAGES)\n    a_fragment, b_fragment",
        BODIES,
        "The first k-block is read before its asynchronous copies have landed.",
    ),
    Fault(
        "turing_copies_into_the_stage_in_use",
        _CP_ASYNC,
        "                a_smem[(stage + STAGES - 1) % STAGES],\n",
        "                a_smem[stage],\n",
        BODIES,
        "A copy ahead goes over the k-block that is multiplied.",
    ),
)
