"""Faults in gradients, fakes, autocast, vmap, fp8 and what torch computes for us."""

from ..fault import Check, Fault

GRADIENTS = (
    Check("test_autograd.py"),
    Check("test_autograd_memory.py"),
    Check("test_autograd_random.py"),
    Check("torch_ops"),
)
FAKES = (Check("test_ops.py"),)
TRANSFORMS = (Check("test_autocast_vmap.py"),)
FP8 = (Check("test_fp8_calls.py"),)
WARM_FP8 = (Check("test_scaled_mm_eager.py"),)
SCALED = (Check("test_scaled_mm.py"),)
QUANTIZED = (Check("test_scaled_mm_quantized.py"),)
BLOCKS = (Check("test_block_scales.py"),)
RECIPES = (Check("test_scaled_mm_recipes.py"),)

_AUTOGRAD = "src/outblas/torch_ops/autograd.py"
_OPS = "src/outblas/torch_ops/ops.py"
_LINEAR = "src/outblas/torch_ops/linear.py"
LAYERS = (Check("test_linear_autograd.py"),)
_FUSION = "src/outblas/patching/fusion.py"
FUSED = (Check("test_nn_fuse.py"),)
_ATEN = "src/outblas/torch_ops/aten.py"
_ATEN_CALLS = "src/outblas/torch_ops/aten_calls.py"
_ATEN_CHOICE = "src/outblas/torch_ops/aten_choice.py"

ENABLE = (Check("test_enable.py"),)
ENABLED_FP8 = (Check("test_enable_scaled.py"),)
ENABLED_GROUPED = (Check("test_enable_grouped.py"),)
GROUPED_CHOICE = (Check("test_enable_grouped_choice.py"),)
_ATEN_GROUPED = "src/outblas/torch_ops/aten_grouped.py"
GROUPED_PLANS = (Check("test_grouped_plans.py"),)
_GROUPED_PLANS = "src/outblas/torch_ops/grouped_plans.py"
_ATEN_SCALED = "src/outblas/torch_ops/aten_scaled.py"
_AUTOCAST = "src/outblas/torch_ops/autocast_vmap.py"
_SCALED = "src/outblas/torch_ops/scaled_mm.py"
_OUTPUT = "src/outblas/torch_ops/scaled_output.py"
_BLOCKS = "src/outblas/torch_ops/block_scales.py"
_FALLBACK = "src/outblas/runtime/fallback.py"

FAULTS = (
    Fault(
        "gate_and_up_in_the_other_order",
        _FUSION,
        "        return name, up_name, function\n",
        "        return up_name, name, function\n",
        FUSED,
        "The activation of a fused MLP is that of the other half.",
    ),
    Fault(
        "gradients_of_gate_and_up_are_swapped",
        _FUSION,
        "        return g[:rows], g[rows:]\n",
        "        return g[rows:], g[:rows]\n",
        FUSED,
        "The gradients of a fused MLP's halves are exchanged.",
    ),
    Fault(
        "fused_though_another_reads_the_output",
        _FUSION,
        " or len(given.users) != 1:\n",
        ":\n",
        FUSED,
        "A layer computes an activation, though another module reads its output.",
    ),
    Fault(
        "fused_past_a_hook",
        _FUSION,
        'not any(has_hooks(layer) or "forward" in vars(layer) for layer in (gate, up))',
        "True",
        FUSED,
        "A hook on a layer of a fused MLP is not called.",
    ),
    Fault(
        "weights_that_are_apart_taken_for_one_matrix",
        _FUSION,
        "(_are_stacked(gate.weight, up.weight) or _stacked_again(mlp, gate.weight, up.weight))",
        "True",
        FUSED,
        "A fused MLP reads past the weight of its gate after that has moved.",
    ),
    Fault(
        "residual_of_a_layer_gets_the_gradient_of_x",
        _LINEAR,
        "d_residual = g_out if needs_residual else None",
        "d_residual = g if needs_residual else None",
        LAYERS,
        "The gradient of a residual passes through the activation.",
    ),
    Fault(
        "second_derivative_of_a_layer_without_its_activation",
        _LINEAR,
        "        return y if x is None else (y, x)\n",
        "        return y if x is None else (y, x.clone())\n",
        LAYERS,
        "Second derivatives of a layer's activation are zero.",
    ),
    Fault(
        "backward_of_a_layer_is_not_batch_invariant",
        _LINEAR,
        "d_weight = product(g.mT, input, layer.choice)",
        "d_weight = product(g.mT, input, OperatorChoice(batch_invariant=False))",
        LAYERS,
        "The gradient of a weight does not keep the promise of batch invariance.",
    ),
    Fault(
        "layer_s_common_layouts",
        _LINEAR,
        "        and weight.is_contiguous()\n",
        "",
        LAYERS,
        "The gradient of a weight by columns lies by rows.",
    ),
    Fault(
        "gradient_of_b_without_alpha",
        _AUTOGRAD,
        "d_b = _gradient_of_b(g, a, saved)",
        "d_b = _gradient_of_b(g, a, saved._replace(alpha=1))",
        GRADIENTS,
        "The gradient of B lacks alpha.",
    ),
    Fault(
        "gradient_of_c_without_beta",
        _AUTOGRAD,
        "d_c = summed(g if saved.beta == 1 else g * saved.beta, saved.shape_c)",
        "d_c = summed(g, saved.shape_c)",
        GRADIENTS,
        "The gradient of C lacks beta.",
    ),
    Fault(
        "gradient_of_a_broadcast_operand",
        _AUTOGRAD,
        "return t.sum(tuple(range(lead))) if t.shape[lead:] == shape else t.sum_to_size(shape)",
        "return t[(0,) * lead] if t.shape[lead:] == shape else t.sum_to_size(shape)",
        GRADIENTS,
        "The gradient of a repeated operand is that of its first repetition.",
    ),
    Fault(
        "gradient_of_the_bias_behind_the_activation",
        _AUTOGRAD,
        "d_bias = summed(g, saved.shape_bias)",
        "d_bias = summed(g if g_out is None or g_out.shape != g.shape else g_out, "
        "saved.shape_bias)",
        GRADIENTS,
        "The gradient of the bias does not go through the activation.",
    ),
    Fault(
        "gradient_of_the_residual_through_the_activation",
        _AUTOGRAD,
        "d_residual = summed(g_out, saved.shape_residual)",
        "d_residual = summed(g_out * saved.alpha, saved.shape_residual)",
        GRADIENTS,
        "The gradient of the residual has a factor of alpha.",
    ),
    Fault(
        "gradient_of_x_dropped",
        _AUTOGRAD,
        "return through if g is None else g + through",
        "return through",
        GRADIENTS,
        "What x itself was used for does not count.",
    ),
    Fault(
        "gradient_transposed_in_memory",
        _AUTOGRAD,
        "return type(row) is int and row == 1 and (type(column) is not int or column > 1)",
        "return False",
        GRADIENTS,
        "The gradient of an operand by columns lies by rows.",
    ),
    Fault(
        "gradient_of_silu",
        "src/outblas/torch_ops/activation_backward.py",
        "return grad * s * (1 + x * (1 - s))",
        "return grad * s * (1 + x * s)",
        GRADIENTS,
        "The slope of silu is wrong.",
    ),
    Fault(
        "gradient_of_a_gate",
        "src/outblas/torch_ops/activation_backward.py",
        "return torch.cat((d_gate, grad * FUNCTIONS[function](gate)), -1).to(dtype)",
        "return torch.cat((d_gate, grad * gate), -1).to(dtype)",
        GRADIENTS,
        "The gradient of a gated value lacks the activation of its gate.",
    ),
    Fault(
        "fake_of_the_operands_dtype",
        _OPS,
        "    return a.new_empty(problem.check_pair(a, b), "
        "dtype=problem.check_out_dtype(out_dtype, a.dtype))\n",
        "    return a.new_empty(problem.check_pair(a, b))\n",
        FAKES,
        "The fake of a product ignores out_dtype.",
    ),
    Fault(
        "fake_of_x_for_the_output",
        _OPS,
        "return call.a.new_empty(result, dtype=dtype), call.a.new_empty(shape, dtype=dtype)",
        "return call.a.new_empty(shape, dtype=dtype), call.a.new_empty(shape, dtype=dtype)",
        FAKES,
        "The fake of a gated product has the columns of x.",
    ),
    Fault(
        "fake_of_any_addend",
        _OPS,
        "    return a.new_empty(problem.check_addend(c, a, b))\n",
        "    return a.new_empty(problem.check_pair(a, b))\n",
        (Check("test_fake_addend.py"),),
        "The fake of addmm takes an addend of any shape.",
    ),
    Fault(
        "autocast_of_the_bias",
        _AUTOCAST,
        'wanted = out_dtype if name in ("bias", "residual") else dtype',
        "wanted = dtype",
        TRANSFORMS,
        "Autocast gives bias and residual the operands' dtype.",
    ),
    Fault(
        "autocast_of_float64",
        _AUTOCAST,
        "                and value.dtype != torch.float64\n",
        "",
        TRANSFORMS,
        "Autocast narrows float64 operands.",
    ),
    Fault(
        "vmap_of_the_wrong_dimension",
        _AUTOCAST,
        "return t if dim is None else t.movedim(dim, 0)",
        "return t if dim is None else t.movedim(dim, -1).movedim(0, -1)",
        TRANSFORMS,
        "vmap takes another dimension for the mapped one.",
    ),
    Fault(
        "vmap_ignores_beta",
        _AUTOCAST,
        "x + _lifted(_first(c, dim_c), dim_c, 2).to(x.dtype) * beta",
        "x + _lifted(_first(c, dim_c), dim_c, 2).to(x.dtype)",
        TRANSFORMS,
        "A mapped addmm ignores beta.",
    ),
    Fault(
        "fp8_scale_of_a_ignored",
        _SCALED,
        "scale_a * a.float(), scale_b * b.float()",
        "a.float(), scale_b * b.float()",
        SCALED,
        "The scale of A is ignored.",
    ),
    Fault(
        "fp8_square_blocks_read_as_rows",
        _BLOCKS,
        "if dim == terms or recipe == SQUARE:",
        "if dim == terms:",
        BLOCKS,
        "A scale of 128 by 128 values is taken for that of one row.",
    ),
    Fault(
        "fp8_blocks_before_rows",
        _BLOCKS,
        "    if whole_a and whole_b:\n        return None\n",
        "    if whole_a and whole_b and K > BLOCK:\n        return None\n",
        BLOCKS,
        "Scales of rows and columns are taken for scales of blocks where K has one block.",
    ),
    Fault(
        "fp8_one_row_in_square_blocks",
        _BLOCKS,
        "BY_ROW if shape_a == by_row_a else SQUARE if shape_a == square_a",
        "SQUARE if shape_a == square_a else BY_ROW if shape_a == by_row_a",
        BLOCKS,
        "A single row has another kernel than several rows.",
    ),
    Fault(
        "fp8_blocks_with_fast_sums",
        _SCALED,
        "scale_a, scale_b) and use_fast_accum:",
        "scale_a, scale_b) and False:",
        BLOCKS,
        "Scales of blocks are taken with sums that no kernel has.",
    ),
    Fault(
        "fp8_padding_of_scales_kept",
        _BLOCKS,
        "return scale.narrow(0, 0, count(K)).t()",
        "return scale.t()",
        RECIPES,
        "Rows that pad torch's scales are taken for blocks.",
    ),
    Fault(
        "fp8_recipes_not_asked_for",
        _SCALED,
        '" ".join(("", *found)) if found else ""',
        '""',
        FP8,
        "The kernel is not told of scales of blocks.",
    ),
    Fault(
        "warm_scaled_mm_flattens_one_block",
        "src/outblas/torch_ops/eager_scaled.py",
        "    if not in_blocks:\n",
        "    if True:\n",
        WARM_FP8,
        "A warm call hands the only block of an operand to the kernel as a number.",
    ),
    Fault(
        "fp8_sums_not_promoted",
        _SCALED,
        'promotion = "" if use_fast_accum else " promoted"',
        'promotion = " promoted" if use_fast_accum else ""',
        FP8,
        "Sums are added up in fp32 only where a call asks for fast ones.",
    ),
    Fault(
        "warm_scaled_mm_forgets_its_options",
        "src/outblas/torch_ops/eager_scaled.py",
        "*rest, shared, options)",
        "*rest, shared)",
        WARM_FP8,
        "Warm calls of one shape share a plan, whatever dtype and sums they ask for.",
    ),
    Fault(
        "fp8_fake_dtype",
        _SCALED,
        "    shape, dtype, *_ = _checked(a, *given)\n    return a.new_empty(shape, dtype=dtype)\n",
        "    shape, dtype, *_ = _checked(a, *given)\n"
        "    return a.new_empty(shape, dtype=torch.bfloat16)\n",
        FP8,
        "The fake of an fp8 product is bf16, whatever is asked for.",
    ),
    Fault(
        "fp8_result_rounded_twice",
        _SCALED,
        "a, b, scale_a, scale_b, bias, torch.float32, use_fast_accum, activation, residual\n    )",
        "a, b, scale_a, scale_b, bias, torch.float32, use_fast_accum, activation, residual\n"
        "    ).bfloat16()",
        QUANTIZED,
        "A result in fp8 is rounded to bf16 before.",
    ),
    Fault(
        "fp8_result_forgets_powers_of_two",
        _OUTPUT,
        "return quantize.compute(x, recipe, DTYPE, power_of_two)",
        "return quantize.compute(x, recipe, DTYPE, False)",
        QUANTIZED,
        "Scales of a result in fp8 are not rounded, whatever is asked for.",
    ),
    Fault(
        "fp8_result_of_another_format",
        _OUTPUT,
        "if out_dtype != DTYPE:",
        "if False:",
        QUANTIZED,
        "A call that asks for e5m2, or for nothing, gets a result in e4m3.",
    ),
    Fault(
        "fallback_ignores_beta",
        _FALLBACK,
        "    if out is None:\n        return torch.addmm(c, a, b, alpha=alpha, beta=beta)\n",
        "    if out is None:\n        return torch.addmm(c, a, b, alpha=alpha)\n",
        (Check("test_api.py"),),
        "Where torch takes a call, beta is ignored.",
    ),
    Fault(
        "fallback_activation_after_residual",
        "src/outblas/core/epilogue.py",
        "    elif activation:\n        x = FUNCTIONS[activation](x)\n"
        "    return x if residual is None else x + residual\n",
        "    elif activation:\n        x = x if residual is None else x + residual\n"
        "        return FUNCTIONS[activation](x)\n"
        "    return x if residual is None else x + residual\n",
        (Check("test_epilogue.py", "every_activation or forms or form"),),
        "torch's epilogue activates the sum with the residual.",
    ),
    Fault(
        "enabled_beta_not_in_key",
        _ATEN_CALLS,
        "_address(c) & 15, alpha == 1, alpha == 0, beta == 0)",
        "_address(c) & 15, alpha == 1, alpha == 0)",
        ENABLE,
        "addmm takes the plan of a call whose beta was 0.",
    ),
    Fault(
        "enabled_layouts_not_compared",
        _ATEN_CALLS,
        "    guard = None if is_repeated else tensor_guard(tensors)\n",
        "    return lambda *given: True\n",
        ENABLE,
        "A product takes the plan of operands with other strides.",
    ),
    Fault(
        "enabled_batches_broadcast",
        _ATEN_CHOICE,
        "    if call.a.shape[:-2] != call.b.shape[:-2]:",
        "    if False:",
        ENABLE,
        "bmm multiplies batches of which torch refuses one.",
    ),
    Fault(
        "enabled_choice_not_marked",
        _ATEN_CALLS,
        "    _thread.inside = True\n",
        "    _thread.inside = False\n",
        ENABLE,
        "A filter that multiplies is asked about its own products for ever.",
    ),
    Fault(
        "enabled_fp8_unasked",
        _ATEN,
        "if operator != SCALED or takes_fp8]",
        "]",
        ENABLED_FP8,
        "Products of fp8 operands are overridden though nobody asked for them.",
    ),
    Fault(
        "enabled_fp8_sums_not_in_key",
        _ATEN_SCALED,
        "self.out_dtype, self.use_fast_accum\n",
        "self.out_dtype\n",
        ENABLED_FP8,
        "An fp8 product with sums in float32 takes the plan of one with sums in tensor cores.",
    ),
    Fault(
        "enabled_fp8_takes_what_torch_refuses",
        _ATEN_SCALED,
        "return self._refusal() or scaled_mm._no_kernel_reason(a)",
        "return scaled_mm._no_kernel_reason(a)",
        ENABLED_FP8,
        "An fp8 product that torch refuses has a result under enable.",
    ),
    Fault(
        "enabled_fp8_recipes_ignored",
        _ATEN_SCALED,
        "    return recipe == _ROW_WISE and tuple(scale.shape) == by_row\n",
        "    return tuple(scale.shape) == by_row\n",
        ENABLED_FP8,
        "Scales of blocks are taken for scales of rows.",
    ),
    Fault(
        "enabled_fp8_blocks_that_torch_refuses",
        _ATEN_SCALED,
        "            return self._refusal_of_blocks(*recipes)\n",
        '            return ""\n',
        (Check("test_enable_blocks.py"),),
        "An fp8 product whose scales of blocks torch refuses has a result under enable.",
    ),
    Fault(
        "enabled_for_good",
        _ATEN,
        "    _library = None  # its registrations end with it\n",
        "    pass\n",
        ENABLE,
        "disable leaves the operators overridden.",
    ),
    Fault(
        "enabled_decisions_of_other_rules",
        _ATEN_CALLS,
        "        _decided.clear()\n",
        "        pass\n",
        ENABLE,
        "What was decided by one set of rules holds for the next.",
    ),
    Fault(
        "enabled_grouped_rows_not_padded",
        _ATEN_GROUPED,
        "    row = -(-shape[-1] // granule) * granule\n",
        "    row = shape[-1]\n",
        ENABLED_GROUPED,
        "A grouped product has rows that are nearer than those of torch's result.",
    ),
    Fault(
        "enabled_grouped_takes_what_torch_refuses",
        _ATEN_GROUPED,
        "        return refusal(a, b)\n",
        '        return ""\n',
        ENABLED_GROUPED,
        "A grouped product that torch refuses has a result under enable.",
    ),
    Fault(
        "enabled_grouped_addresses_not_in_key",
        _ATEN_GROUPED,
        "shape, b.shape, *addresses, bias is None",
        "shape, b.shape, bias is None",
        ENABLED_GROUPED,
        "A grouped product takes the plan of operands at other addresses.",
    ),
    Fault(
        "enabled_grouped_slower_taken",
        _ATEN_GROUPED,
        "        if reason := slower_reason(product, rules.min_gain):\n",
        "        if reason := slower_reason(product, 0):\n",
        GROUPED_CHOICE,
        "A grouped product that was measured to be slower than torch's is taken.",
    ),
    Fault(
        "enabled_grouped_breaks_the_promise",
        _ATEN_CALLS,
        "            raise invariance.unsupported(GROUPED_NOT_INVARIANT)\n",
        "            pass\n",
        GROUPED_CHOICE,
        "Batch invariance is promised, and torch computes a grouped product.",
    ),
    Fault(
        "grouped_plan_of_another_address",
        _GROUPED_PLANS,
        "given[1].shape, *addresses, there, options)",
        "given[1].shape, there, options)",
        GROUPED_PLANS,
        "A grouped product takes the plan of operands at other addresses.",
    ),
    Fault(
        "grouped_plan_of_other_options",
        _GROUPED_PLANS,
        "given[1].shape, *addresses, there, options)",
        "given[1].shape, *addresses, there)",
        GROUPED_PLANS,
        "A grouped product takes the plan of one with another activation.",
    ),
    Fault(
        "grouped_plan_records_nothing",
        _GROUPED_PLANS,
        "    if requires_grad and _gradients_enabled():\n",
        "    if False:\n",
        GROUPED_PLANS,
        "A grouped product that ran without gradients never has any.",
    ),
    Fault(
        "grouped_plan_of_another_tensor",
        _GROUPED_PLANS,
        "    there = None if tensors is NO_TENSORS else tuple([t is None for t in tensors])\n",
        "    there = None\n",
        GROUPED_PLANS,
        "A grouped product with a residual takes the plan of one with a bias.",
    ),
    Fault(
        "grouped_plan_unseen",
        _GROUPED_PLANS,
        "    has_modes = _dispatch_modes() > 0 or",
        "    has_modes =",
        GROUPED_PLANS,
        "A mode that observes operators does not see a grouped product that has a plan.",
    ),
    Fault(
        "grouped_plan_unused",
        _GROUPED_PLANS,
        "    return found and found[1]\n",
        "    return None\n",
        GROUPED_PLANS,
        "Every call of the operator is checked and described again.",
    ),
)
