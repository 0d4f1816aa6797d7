"""Faults in the operator of grouped products, in its gradients and in the portable kernel."""

from ..fault import Check, Fault

PORTABLE = (Check("test_grouped_mm.py"),)
EPILOGUE = (Check("test_grouped_mm_epilogue.py", "epilogues"),)
GATHERED = (Check("test_grouped_mm_epilogue.py", "gathered"),)
STORED = (Check("test_grouped_mm_epilogue.py", "outside or behind"),)
ARGUMENTS = (Check("test_grouped_mm_epilogue.py", "beyond or memory or once"),)
GRADIENTS = (Check("test_grouped_mm_gradients.py"),)
MASKED = (Check("test_grouped_mm_masked.py", "there"),)
UNTOUCHED = (Check("test_grouped_mm_masked.py", "is_stored"),)
STRIDES = (Check("test_grouped_mm_masked.py", "strides"),)
REFUSED = (Check("test_grouped_mm_masked.py", "does_not_fit or need_gradients"),)
LOOKUP = (Check("test_lookup_grouped.py"),)

_PORTABLE = "kernels/grouped.py"
_DEVICE = "kernels/grouped_device.py"
_CORE = "src/outblas/core/grouped.py"
_ROWS = "src/outblas/core/grouped_rows.py"
_OPERATOR = "src/outblas/torch_ops/grouped_mm.py"
_BY_TORCH = "src/outblas/torch_ops/grouped_by_torch.py"
_GRADIENTS = "src/outblas/torch_ops/grouped_gradients.py"

FAULTS = (
    Fault(
        "portable_group_begins_early",
        _DEVICE,
        "_first_row(offs, middle, size, MASKED) // ROWS + middle <= slot",
        "_first_row(offs, middle, size, MASKED) // ROWS + middle < slot",
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
        _DEVICE,
        "mask_m = (m < end)[:, None]\n        row",
        "mask_m = (m < size.M)[:, None]\n        row",
        PORTABLE,
        "A tile writes over the rows of the next group.",
    ),
    Fault(
        "grouped_gradients_keep_what_no_group_covers",
        _GRADIENTS,
        "choice = out_dtype, kernel_name, True",
        "choice = out_dtype, kernel_name, False",
        PORTABLE,
        "The gradient of rows that belong to no group is whatever lay there.",
    ),
    Fault(
        "portable_gate_takes_its_own_columns",
        _DEVICE,
        "columns = size.N // 2\n        n, b_column = gated_columns(",
        "columns = size.N\n        n, b_column = gated_columns(",
        EPILOGUE,
        "The columns that a gate multiplies are looked for beyond those of B.",
    ),
    Fault(
        "portable_aux_of_the_value_overwrites_the_gate",
        _DEVICE,
        "n + columns,\n                has_x,",
        "n,\n                has_x,",
        EPILOGUE,
        "Bias and aux of the second half are those of the first.",
    ),
    Fault(
        "portable_reads_beyond_the_rows_of_a",
        _DEVICE,
        "row = tl.minimum(tl.maximum(index, 0), size.rows_of_a - 1)",
        "row = tl.maximum(index, 0)",
        ARGUMENTS,
        "An index beyond the rows of A is followed.",
    ),
    Fault(
        "portable_scatters_outside",
        _DEVICE,
        "mask_m &= (target >= 0) & (target < size.M)",
        "mask_m &= target >= 0",
        STORED,
        "A row is stored behind the result.",
    ),
    Fault(
        "portable_residual_in_the_order_of_groups",
        _DEVICE,
        "at += target * strides.residual_m",
        "at += m * strides.residual_m",
        GATHERED,
        "Scattered rows get the residual of other rows.",
    ),
    Fault(
        "portable_aux_in_every_other_row",
        _DEVICE,
        "at = pointers.aux + group * strides.aux_g + m * strides.aux_m",
        "at = pointers.aux + group * strides.aux_g + m // 2 * 2 * strides.aux_m",
        EPILOGUE,
        "Every other row of x is written over the one before.",
    ),
    Fault(
        "portable_epilogue_behind_the_last_group",
        _DEVICE,
        "has_x = in_group & mask_n",
        "has_x = mask_m & mask_n",
        STORED,
        "Rows that belong to no group get a residual and an aux.",
    ),
    Fault(
        "portable_weights_are_forgotten",
        _DEVICE,
        "        if pointers.scatter_weights is not None:\n            y *= weight\n",
        "",
        GATHERED,
        "The weights of rows are forgotten.",
    ),
    Fault(
        "portable_too_few_columns_of_a_gated_tile",
        _PORTABLE,
        "width = tile.n // 2 if problem.epilogue.gated else tile.n",
        "width = tile.n",
        EPILOGUE,
        "Half of the result of a gated activation is not computed.",
    ),
    Fault(
        "grouped_index_wraps",
        _ROWS,
        "index = index.clamp(low, high).to(torch.int32)",
        "index = index.to(torch.int32)",
        ARGUMENTS,
        "An int64 index beyond 32 bits names another row.",
    ),
    Fault(
        "grouped_aux_overlaps",
        _OPERATOR,
        "problem.check_overlap(tensors.aux",
        "(lambda *_, **__: None)(tensors.aux",
        ARGUMENTS,
        "x is written over an operand that is still read.",
    ),
    Fault(
        "grouped_fallback_rounds_twice",
        _BY_TORCH,
        "wide = dtype if is_bare else torch.float32",
        "wide = dtype",
        ARGUMENTS,
        "torch rounds a product before its bias is added.",
    ),
    Fault(
        "grouped_gradients_of_rows_that_are_not_stored",
        _GRADIENTS,
        "is_stored = (scatter_index >= 0) & (scatter_index < count)",
        "is_stored = scatter_index == scatter_index",
        GRADIENTS,
        "A row that is not stored gets the gradient of another one.",
    ),
    Fault(
        "grouped_gradients_without_weights",
        _GRADIENTS,
        "return is_stored if weights is None else torch.where(is_stored, weights, 0)",
        "return is_stored",
        GRADIENTS,
        "The gradient of a row is not multiplied by its weight.",
    ),
    Fault(
        "grouped_gradients_of_weights_behind_the_last_group",
        _GRADIENTS,
        '    is_stored = is_stored & _covered("ragged_m", offs, x).squeeze(1)\n',
        "",
        GRADIENTS,
        "The gradient of a weight that no group has is whatever x holds there.",
    ),
    Fault(
        "grouped_second_gradients_read_what_no_group_covers",
        _GRADIENTS,
        "x = torch.where(_covered(saved.form, offs, x), x, 0)",
        "x = x + 0",
        GRADIENTS,
        "A NaN behind the last group passes through products with zero.",
    ),
    Fault(
        "grouped_gathered_gradients_in_16_bits",
        _GRADIENTS,
        "wide = product(g, mat_b.mT, torch.float32)",
        "wide = product(g, mat_b.mT)",
        GRADIENTS,
        "The gradients of a row that is gathered often are added in 16 bits.",
    ),
    Fault(
        "grouped_weights_of_experts_see_ungathered_rows",
        _GRADIENTS,
        "mat_a = mat_a.index_select(0, _clamped(a_index, saved.rows_of_a))",
        "mat_a = mat_a.index_select(0, (_clamped(a_index, saved.rows_of_a) + 1) % len(mat_a))",
        GRADIENTS,
        "The gradient of mat_b is made of other rows of mat_a.",
    ),
    Fault(
        "portable_masked_group_begins_at_the_one_before",
        _DEVICE,
        "group * size.capacity if MASKED else",
        "tl.maximum(group - 1, 0) * size.capacity if MASKED else",
        MASKED,
        "A group of a fixed capacity has the place of the one before.",
    ),
    Fault(
        "portable_masked_group_has_any_number_of_rows",
        _DEVICE,
        "tl.minimum(tl.maximum(count, 0), size.capacity)",
        "tl.minimum(tl.maximum(count, 0), size.M)",
        UNTOUCHED,
        "A count for which there is no room reaches into the next group's place.",
    ),
    Fault(
        "grouped_fallback_of_counts_follows_the_group_before",
        _BY_TORCH,
        'begin = 0 if form == "masked" else end',
        "begin = end",
        MASKED,
        "torch begins a group of a fixed capacity where the one before it ends.",
    ),
    Fault(
        "grouped_counts_beside_ends",
        _CORE,
        'for name, t in (("offs", offs), *list(tensors._asdict().items())[3:6]):',
        "for name, t in list(tensors._asdict().items())[3:6]:",
        REFUSED,
        "A call with counts ignores its ends of groups.",
    ),
    Fault(
        "grouped_counts_lose_gradients",
        _GRADIENTS,
        "    if counts is None:\n        return aux, *given\n",
        "    if aux in (True, False):\n        return aux, *given\n",
        REFUSED,
        "A call with counts has gradients of rows that are not there.",
    ),
    Fault(
        "grouped_aux_of_counts_is_a_copy",
        _OPERATOR,
        "return out, aux.copy_(copied)",
        "return out, copied",
        STRIDES,
        "x is written to a copy of an aux whose groups lie between each other.",
    ),
    Fault(
        "grouped_counts_take_what_full_groups_take",
        "autotune/lookup_grouped.py",
        "rows = problem.expected_rows if is_rows else problem.K",
        "rows = problem.M if is_rows else problem.K",
        LOOKUP,
        "A call with counts takes a config that was tuned for full groups.",
    ),
    Fault(
        "grouped_results_take_what_slower_dram_takes",
        "autotune/lookup_grouped.py",
        "if entry.origin == COUSIN and problem.writes_more_than_it_reads:",
        "if entry.origin == COUSIN and problem.M < 0:",
        LOOKUP,
        "Results that wait for DRAM take the config of a GPU whose DRAM is slower.",
    ),
)
