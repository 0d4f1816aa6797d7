"""Faults in layers of experts: which row a token's copy is, what is summed, and what is swapped."""

from ..fault import Check, Fault

KERNELS = (Check("test_moe_kernels.py"),)
OPERATOR = (Check("test_moe.py"),)
PATCH = (Check("test_nn_experts.py"),)
LATER = (Check("test_nn_experts_later.py"),)

_KERNELS = "kernels/moe.py"
_OPERATOR = "src/outblas/torch_ops/moe.py"
_PATCH = "src/outblas/patching/experts.py"

FAULTS = (
    Fault(
        "moe_negative_experts_exist",
        _KERNELS,
        "tl.where((e >= 0) & (e < experts), e, experts)",
        "tl.where(e < experts, e, experts)",
        KERNELS,
        "A slot whose expert is -1 takes a row of another one.",
    ),
    Fault(
        "moe_experts_narrowed_before_the_check",
        _KERNELS,
        "e = tl.load(expert + slot, mask=slot < slots, other=-1)",
        "e = tl.load(expert + slot, mask=slot < slots, other=-1).to(tl.int32)",
        KERNELS,
        "An expert beyond 32 bits is taken for another one.",
    ),
    Fault(
        "moe_sort_is_not_stable",
        _KERNELS,
        "earlier = other[None, :] < slot[:, None]",
        "earlier = other[None, :] > slot[:, None]",
        KERNELS,
        "The slots of an expert lie in the reverse order within a block.",
    ),
    Fault(
        "moe_missing_rows_are_read",
        _KERNELS,
        "        value = tl.load(rows + row * columns + column, mask=column < end, other=0.0)",
        "        value = tl.load(rows + row * columns + column, mask=column < columns, other=0.0)",
        KERNELS,
        "An expert that does not exist adds what lies before the rows.",
    ),
    Fault(
        "moe_infinite_weights_of_missing_rows",
        _KERNELS,
        "w = tl.load(weights + token * K + j, mask=row >= 0, other=0.0)",
        "w = tl.load(weights + token * K + j)",
        KERNELS,
        "An infinite weight of an expert that does not exist makes NaN.",
    ),
    Fault(
        "moe_gradient_of_weights_is_weighted",
        _KERNELS,
        "total += tl.reduce(g * value, 1, _add)",
        "total += tl.reduce(g * w * value, 1, _add)",
        KERNELS,
        "The gradient of a weight is multiplied by the weight.",
    ),
    Fault(
        "moe_bias_misses_the_gradient_of_weights",
        _OPERATOR,
        "of_weights = of_weights + _products_with_bias(grad, down_bias, expert_index)",
        "of_weights = of_weights + 0",
        OPERATOR,
        "The gradient of weights leaves out the second bias.",
    ),
    Fault(
        "moe_gradients_in_another_order",
        _OPERATOR,
        "return weight.mT.is_contiguous() and not weight.is_contiguous()",
        "return False",
        OPERATOR,
        "autograd copies the gradient of a matrix that is stored transposed.",
    ),
    Fault(
        "moe_second_gradients_without_x",
        _OPERATOR,
        "ctx.save_for_backward(*kept, *tensors)",
        "ctx.save_for_backward(*kept, tensors[0].detach(), *tensors[1:])",
        OPERATOR,
        "A second gradient is missing in place of being refused.",
    ),
    Fault(
        "moe_swaps_experts_with_a_gate_of_their_own",
        _PATCH,
        'getattr(gate, "__module__", "") != "transformers.integrations.moe"',
        "gate is None",
        PATCH,
        "Experts that clamp before their gate are computed as if they did not.",
    ),
    Fault(
        "moe_takes_matrices_as_stored",
        _PATCH,
        "    if not names.is_transposed:\n",
        "    if names.is_transposed:\n",
        PATCH,
        "Matrices are multiplied in the order in which checkpoints hold them.",
    ),
    Fault(
        "moe_keeps_the_activation_that_it_found",
        _PATCH,
        "function_of(module.act_fn) != names.function",
        "function_of(module.act_fn) is None",
        LATER,
        "Experts whose activation was replaced compute the old one.",
    ),
    Fault(
        "moe_replicas_take_the_tensors_of_the_original",
        _PATCH,
        "    held = module.__dict__.get(name)\n",
        "    held = None\n",
        LATER,
        "Replicas of nn.DataParallel, and pruned experts, have no matrices.",
    ),
    Fault(
        "moe_ignores_autocast",
        _PATCH,
        'is_autocast(hidden_states) and _implementation(module) != "grouped_mm"',
        "False",
        PATCH,
        "Experts in float32 are computed in it under autocast, which took bfloat16 before patch.",
    ),
)
