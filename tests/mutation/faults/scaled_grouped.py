"""Faults in grouped products of fp8 operands with scales of blocks."""

from ..fault import Check, Fault

VALUES = (Check("test_scaled_grouped_mm.py", "product or edge or strides or terms"),)
EVERY_VALUE = (Check("test_scaled_grouped_mm.py", "every_fp8_value"),)
OUTSIDE = (Check("test_scaled_grouped_mm.py", "does_not_matter"),)
GATHERED = (Check("test_scaled_grouped_mm.py", "gathered"),)
REFUSED = (Check("test_scaled_grouped_mm.py", "fit or divided"),)
PROMISE = (Check("test_scaled_grouped_mm.py", "promise"),)
GRADIENTS = (Check("test_scaled_grouped_mm.py", "gradient"),)
SCHEDULE = (Check("test_grouped_schedule.py", "fp8"),)
TILES = (Check("test_grouped_schedule.py", "scales or place"),)
WIDE = (Check("test_grouped_scales.py", "tma_loads"),)
HOST = (Check("test_grouped_scales.py", "words or supported or refused or gathered or room"),)
LOOKUP = (Check("test_lookup_grouped.py", "do_not_measure"),)

_CORE = "src/outblas/core/grouped_scales.py"
_BY_TORCH = "src/outblas/torch_ops/grouped_by_torch.py"
_OPERATOR = "src/outblas/torch_ops/scaled_grouped_mm.py"
_GROUPED = "src/outblas/torch_ops/grouped_mm.py"
_PORTABLE = "kernels/grouped.py"
_DEVICE = "kernels/grouped_scaled.py"
_SCHEDULE = "hopper/grouped/schedule.py"
_LAYOUTS = "hopper/grouped/layouts.py"
_HOST = "hopper/grouped/host.py"

FAULTS = (
    Fault(
        "scaled_groups_share_a_scale_too_long",
        _DEVICE,
        "block = ((first + start) // 128).to(tl.int64)",
        "block = ((first + start) // 256).to(tl.int64)",
        VALUES,
        "Two blocks of terms have the scales of one.",
    ),
    Fault(
        "scaled_groups_forget_the_scale_of_b",
        _DEVICE,
        "tl.fma(product, scale_a * scale_b, acc)",
        "tl.fma(product, scale_a, acc)",
        VALUES,
        "Sums are multiplied by the scales of A alone.",
    ),
    Fault(
        "scaled_groups_begin_between_blocks",
        _DEVICE,
        "first = begin // BLOCK_K * BLOCK_K",
        "first = begin",
        VALUES,
        "A step of a group that begins between blocks has terms of two of them.",
    ),
    Fault(
        "scaled_groups_read_foreign_terms",
        _DEVICE,
        "mask_k = (term >= begin) & (term < end)",
        "mask_k = term < end",
        VALUES,
        "A group of terms has those before it in its first block.",
    ),
    Fault(
        "scaled_groups_read_scales_behind_the_end",
        _DEVICE,
        "+ first + start < end",
        "+ first + start >= 0",
        OUTSIDE,
        "Scales of blocks that are not a group's are read, and may be NaN.",
    ),
    Fault(
        "e4m3_nan_is_a_number",
        _DEVICE,
        "tl.where(magnitude == 0x7F, 0x7E00, bits)",
        "tl.where(magnitude == 0x80, 0x7E00, bits)",
        EVERY_VALUE,
        "NaN in e4m3 becomes 480.",
    ),
    Fault(
        "e4m3_signs_are_lost",
        _DEVICE,
        "bits = (magnitude << 7) | ((word & 0x80) << 8)",
        "bits = (magnitude << 7) | ((word & 0x80) << 7)",
        EVERY_VALUE,
        "The sign of an e4m3 value becomes a bit of its exponent.",
    ),
    Fault(
        "masked_scales_are_those_of_other_rows",
        _PORTABLE,
        "a_g - problem.capacity * a_m, a_m, a_k",
        "a_g, a_m, a_k",
        VALUES,
        "Rows of groups of a fixed capacity are counted twice where scales are read.",
    ),
    Fault(
        "scaled_fallback_scales_other_terms",
        _BY_TORCH,
        "terms = part.start, part.stop",
        "terms = 0, part.stop - part.start",
        VALUES,
        "torch numbers the scales of a group's terms from the group's beginning.",
    ),
    Fault(
        "scaled_fallback_gathers_rows_alone",
        _BY_TORCH,
        "if tensors.scale_a is not None:\n            tensors =",
        "if False:\n            tensors =",
        GATHERED,
        "Gathered rows keep the scales of the rows in whose place they are.",
    ),
    Fault(
        "scales_of_any_shape",
        _CORE,
        "if not (is_float32 and are_equal(t.shape, shape)):",
        "if not is_float32:",
        REFUSED,
        "Scales of other blocks are read beyond their end.",
    ),
    Fault(
        "scaled_columns_are_divided",
        _CORE,
        'if form == "ragged_n":',
        'if form == "none":',
        REFUSED,
        "A form without scales is computed.",
    ),
    Fault(
        "scaled_promise_is_kept_by_name_only",
        _GROUPED,
        'invariance.refuse_promise("scaled_grouped_mm" if is_scaled else "grouped_mm of groups")',
        'is_scaled or invariance.refuse_promise("grouped_mm of groups")',
        PROMISE,
        "A call within batch_invariant computes what may depend on other rows.",
    ),
    Fault(
        "scaled_gradients_are_silent",
        _OPERATOR,
        "raise NotImplementedError(",
        "return (None,) * len(_ARGUMENTS)\n        raise NotImplementedError(",
        GRADIENTS,
        "A backward pass leaves gradients out without a word.",
    ),
    Fault(
        "scaled_products_take_what_was_tuned",
        "autotune/lookup_grouped.py",
        "is_plain = problem.epilogue == NONE and problem.scales is None",
        "is_plain = problem.epilogue == NONE",
        LOOKUP,
        "A product with scales takes a config that was tuned for 16-bit operands.",
    ),
    Fault(
        "scaled_terms_begin_at_values",
        _SCHEDULE,
        "begin, terms = begin // BLOCK * config.tile_k, Int32(config.tile_k)",
        "begin, terms = begin, Int32(config.tile_k)",
        SCHEDULE,
        "The first word of a group is numbered as a value.",
    ),
    Fault(
        "scaled_terms_of_an_empty_group",
        _SCHEDULE,
        "count = Int32(0) if begin == end else count",
        "count = cutlass.max(count, 1)",
        SCHEDULE,
        "A group without terms has those of the next one.",
    ),
    Fault(
        "scales_of_the_first_matrix",
        _SCHEDULE,
        "b = b[None, None, work.matrix]",
        "b = b[None, None, 0]",
        TILES,
        "Every group has the scales of the first one's columns.",
    ),
    Fault(
        "scales_of_a_place_are_numbered_twice",
        _SCHEDULE,
        "own = cute.domain_offset((-group * rows, 0), scale[None, None, group])",
        "own = scale[None, None, group]",
        TILES,
        "Rows of a group's place have the scales of rows behind it.",
    ),
    Fault(
        "scales_of_a_place_reach_into_the_next",
        _SCHEDULE,
        "cute.make_layout(((group + 1) * rows, own.shape[1])",
        "cute.make_layout(((group + 2) * rows, own.shape[1])",
        TILES,
        "Rows behind a place are read, and those behind the last one lie outside.",
    ),
    Fault(
        "scales_of_terms_from_the_beginning",
        _SCHEDULE,
        "first = work.first_term // BLOCK_WORDS",
        "first = 0",
        TILES,
        "A group of terms has the scales of the first one.",
    ),
    Fault(
        "scales_of_rows_at_any_address_loaded",
        "hopper/grouped/variant.py",
        "from_any_row=wide and rows_begin_anywhere,",
        "from_any_row=False,",
        WIDE,
        "TMA loads the scales of rows of a group that begins anywhere from there on.",
    ),
    Fault(
        "scales_of_odd_places_loaded",
        "hopper/grouped/variant.py",
        "is_wide(row, block, extents, scales.alignment[0])",
        "is_wide(row, block, (), scales.alignment[0])",
        WIDE,
        "TMA loads scales between 16 bytes where groups have places of any number of rows.",
    ),
    Fault(
        "words_of_strided_terms",
        _LAYOUTS,
        "if along_k != 1 or not whole or",
        "if not whole or",
        HOST,
        "Two values that do not follow each other are read as one word.",
    ),
    Fault(
        "words_of_an_odd_row",
        _LAYOUTS,
        "or problem.K % 2 or",
        "or",
        HOST,
        "The last value of a row is left out.",
    ),
    Fault(
        "gathered_rows_keep_foreign_scales",
        _HOST,
        "scale_a = tensors.scale_a.t().index_select(1, chosen).t()",
        "scale_a = tensors.scale_a.t().index_select(1, chosen.sort().values).t()",
        HOST,
        "Rows that the host gathers get the scales of other ones.",
    ),
    Fault(
        "scales_have_no_room",
        _HOST,
        "if config.shared_memory_bytes + scales <= most:",
        "if config.shared_memory_bytes <= most:",
        HOST,
        "A tile has as many stages as without scales.",
    ),
)
