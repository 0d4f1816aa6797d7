"""Faults in quantization to fp8, and in the layers that need it."""

from ..fault import Check, Fault

KERNELS = (Check("test_quantize_kernels.py"),)
OPERATOR = (Check("test_quantize.py"),)
LAYER = (Check("test_fp8_linear.py"),)
PATCH = (Check("test_nn_fp8.py"),)
MLP = (Check("test_nn_fp8_fuse.py"),)

_KERNELS = "kernels/quantize.py"
_CORE = "src/outblas/core/quantization.py"
_OPERATOR = "src/outblas/torch_ops/quantize.py"
_LAYER = "src/outblas/fp8_linear.py"
_PATCH = "src/outblas/patching/fp8_linears.py"
_MLPS = "src/outblas/patching/fp8_mlps.py"

FAULTS = (
    Fault(
        "quantize_rounds_ties_away_from_even",
        _KERNELS,
        "half = ((1 << (SHIFT - 1)) - 1) + ((size >> SHIFT) & 1)",
        "half = 1 << (SHIFT - 1)",
        KERNELS,
        "The software rounds values between two of fp8 up, and the instruction to the even one.",
    ),
    Fault(
        "quantize_subnormal_values_are_normal",
        _KERNELS,
        "code = tl.where(size < LEAST_NORMAL, subnormal, normal)",
        "code = normal",
        KERNELS,
        "Values below the least normal one of fp8 become others.",
    ),
    Fault(
        "quantize_infinities_saturate",
        _KERNELS,
        'return tl.where(tl.abs(x) < float("inf"), code, other)',
        "return code",
        KERNELS,
        "An infinity becomes the largest finite value, and nobody sees it.",
    ),
    Fault(
        "quantize_special_values_have_a_scale",
        _KERNELS,
        'return tl.where(size < float("inf"), size, 0.0)',
        "return size",
        KERNELS,
        "An infinity makes the scale of its block infinite.",
    ),
    Fault(
        "quantize_long_rows_have_the_last_maximum",
        _KERNELS,
        "size = tl.maximum(size, _magnitude(value))",
        "size = _magnitude(value)",
        KERNELS,
        "The scale of a row that no program holds is that of its last columns.",
    ),
    Fault(
        "quantize_blocks_reach_into_the_next_matrix",
        _KERNELS,
        'if recipe == "128x128" and x.dim() > 2 and rows % BLOCK:',
        'if recipe == "128x128" and x.dim() > 3 and rows % BLOCK:',
        (Check("test_quantize_kernels.py"),),
        "Rows of two experts share a block, and there are fewer scales than blocks.",
    ),
    Fault(
        "quantize_reciprocal_overflows",
        _CORE,
        "LEAST_SCALE = 2.0**-126",
        "LEAST_SCALE = 2.0**-149",
        OPERATOR,
        "The reciprocal of a small scale is infinite, and zeros beside it become NaN.",
    ),
    Fault(
        "quantize_columns_of_scales_are_not_aligned",
        _CORE,
        "ROWS_MULTIPLE = 4",
        "ROWS_MULTIPLE = 1",
        OPERATOR,
        "TMA cannot read the scales of a row number that is no multiple of four.",
    ),
    Fault(
        "quantize_powers_of_two_round_down",
        _OPERATOR,
        "((found.view(torch.int32) + 0x7FFFFF) & 0x7F800000)",
        "(found.view(torch.int32) & 0x7F800000)",
        OPERATOR,
        "Scales that are powers of two are too small, so that the largest values saturate.",
    ),
    Fault(
        "fp8_linear_gradient_without_scales",
        _LAYER,
        "wide = weight.float() * spread(scale, _RECIPE, weight.shape)",
        "wide = weight.float()",
        LAYER,
        "The gradient of the input is that of another weight.",
    ),
    Fault(
        "fp8_layers_of_other_blocks_are_swapped",
        _PATCH,
        "if size is None or tuple(size) != (BLOCK, BLOCK):",
        "if size is None:",
        PATCH,
        "A layer whose scales may lie otherwise is computed as if they were those of 128 by 128.",
    ),
    Fault(
        "fp8_layers_with_a_static_scale_are_swapped",
        _PATCH,
        'if scheme != "dynamic" or getattr(module, "activation_scale", None) is not None:',
        "if False:",
        PATCH,
        "A layer that was calibrated ignores the scale of its activations.",
    ),
    Fault(
        "fp8_layers_slow_down_other_gpus",
        _PATCH,
        "torch.compiler.is_compiling() or not _no_kernel_reason(device)",
        "True",
        PATCH,
        "A GPU without the kernel dequantizes at each call, where transformers has a kernel.",
    ),
    Fault(
        "fp8_mlp_of_half_blocks",
        _MLPS,
        "and bool(gate.weight.shape[0] % BLOCK == 0)",
        "and True",
        MLP,
        "Rows of up share the scales of the last rows of gate.",
    ),
    Fault(
        "fp8_mlp_with_halves_that_are_apart",
        "src/outblas/patching/halves.py",
        "if memory is None or not _are_halves(memory, first, second):",
        "if memory is None:",
        MLP,
        "Weights and scales of a fused MLP are read as halves of matrices, which they are no more.",
    ),
    Fault(
        "fp8_mlp_without_gradients",
        _MLPS,
        "and not _needs_gradients(x, *(layer.bias for layer in layers))",
        "and True",
        MLP,
        "The input of a fused MLP gets no gradient.",
    ),
    Fault(
        "passes_start_with_constants_in_any_order",
        "kernels/passes.py",
        "(constants[name] for name in kernel.arg_names[len(given) :])",
        "constants.values()",
        (Check("test_passes.py"),),
        "A kernel that is started again has its constants in the order of the call.",
    ),
    Fault(
        "composed_plan_is_not_quantized",
        "src/outblas/torch_ops/eager_scaled.py",
        "    if is_wide:\n",
        "    if False:\n",
        (Check("test_scaled_mm_quantized.py", "warm_calls"),),
        "A warm call whose result another kernel quantizes is planned as one kernel.",
    ),
)
