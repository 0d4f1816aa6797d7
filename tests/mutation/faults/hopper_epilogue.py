"""Faults in what the production kernel does to sums before it stores them."""

from ..fault import Check, Fault

MATH = (Check("test_epilogue_math.py"),)
QUANTIZED = (Check("test_block_quantize.py"),)

_MATH = "hopper/gemm/epilogue_math.py"
_QUANTIZE = "hopper/gemm/block_quantize.py"

FAULTS = (
    Fault(
        "hopper_alpha_ignored",
        _MATH,
        "values[v] *= tensors.alpha",
        "values[v] *= 1.0",
        MATH,
        "The production kernel ignores alpha.",
    ),
    Fault(
        "hopper_beta_ignored",
        _MATH,
        "add_tensor(tile, values, tensors.addend, traits.addend, tensors.beta, coord, half)",
        "add_tensor(tile, values, tensors.addend, traits.addend, None, coord, half)",
        MATH,
        "The production kernel adds C as it is.",
    ),
    Fault(
        "hopper_beta_ignored_where_tma_loads",
        _MATH,
        "add_scaled(values, epilogue.tensors.beta, to_fp32(load_source()))",
        "add_scaled(values, None, to_fp32(load_source()))",
        MATH,
        "The production kernel adds a C that TMA loads as it is.",
    ),
    Fault(
        "hopper_bias_added_twice",
        _MATH,
        '    elif cutlass.const_expr(traits.bias != ""):\n',
        '    if cutlass.const_expr(traits.bias != ""):\n',
        MATH,
        "A bias that is read in pairs is added again element by element.",
    ),
    Fault(
        "hopper_bias_of_the_part_before",
        _MATH,
        "            self.bias = self.read_bias() if half == 0 else bias\n",
        "            self.bias = bias\n",
        MATH,
        "All parts of a tile get the bias of the first.",
    ),
    Fault(
        "hopper_residual_before_activation",
        _MATH,
        '    if cutlass.const_expr(traits.residual not in ("", "staged")):\n'
        "        residual, coord = tile.epilogue.tensors.residual, tile.first_coord(i, start)\n"
        "        add_tensor(tile, values, residual, traits.residual, None, coord, 0)\n",
        '    if cutlass.const_expr(traits.residual not in ("", "staged")):\n'
        "        residual, coord = tile.epilogue.tensors.residual, tile.first_coord(i, start)\n"
        "        add_tensor(tile, values, residual, traits.residual, None, coord, 0)\n"
        '        if cutlass.const_expr(traits.function != ""):\n'
        "            activate(traits.function, values, tile.epilogue.dtype)\n",
        MATH,
        "The activation is that of the sum with the residual.",
    ),
    Fault(
        "hopper_gate_does_not_multiply",
        _MATH,
        "            values[v] *= others[v]\n",
        "            values[v] *= values[v]\n",
        MATH,
        "Gated pairs are multiplied with themselves.",
    ),
    Fault(
        "hopper_bias_of_the_gate",
        _MATH,
        "first = [cutlass.min(coord.column + v * 2, N - 2) + half * N for v in range(0, count, 4)]",
        "first = [cutlass.min(coord.column + v * 2, N - 2) for v in range(0, count, 4)]",
        MATH,
        "Both halves of gated pairs get the bias of the gate.",
    ),
    Fault(
        "hopper_lower_rows_read_early",
        _MATH,
        "rows = scattered or [cutlass.min(row + i * 8, M - 1) for i in range(2)]",
        "rows = scattered or [cutlass.min(row + i * 4, M - 1) for i in range(2)]",
        MATH,
        "What is added to the lower of a thread's rows is that of another row.",
    ),
    Fault(
        "hopper_scales_swapped",
        _MATH,
        "multiply_tensor(tile, values, tensors.scale_b, traits.scale_b, coord, half)",
        "multiply_tensor(tile, values, tensors.scale_a, traits.scale_a, coord, half)",
        MATH,
        "fp8 products have the scale of A twice.",
    ),
    Fault(
        "hopper_quantized_infinities_saturate",
        _QUANTIZE,
        "values[v] = finite_or_nan(values[v])",
        "values[v] = values[v]",
        QUANTIZED,
        "An infinite output in fp8 becomes the largest finite value, and spoils its block.",
    ),
    Fault(
        "hopper_quantized_rows_of_two_lanes",
        _QUANTIZE,
        "for distance in (1, 2):",
        "for distance in (1,):",
        QUANTIZED,
        "A scale is that of half of a block.",
    ),
    Fault(
        "hopper_quantized_scales_of_other_rows",
        _QUANTIZE,
        "    if lane == 1:\n",
        "    if lane == 0:\n",
        QUANTIZED,
        "The two rows of a quad have each other's scales.",
    ),
    Fault(
        "hopper_quantized_by_a_reciprocal",
        _QUANTIZE,
        "cute.arch.fmax(divide(largest, Float32(LARGEST)), Float32(LEAST_SCALE))",
        "cute.arch.fmax(largest * Float32(1 / LARGEST), Float32(LEAST_SCALE))",
        QUANTIZED,
        "Scales are rounded twice, so that some differ from those of `quantize` in the last bit.",
    ),
    Fault(
        "hopper_quantized_scales_beyond_c",
        _QUANTIZE,
        "if lane < 2 and row < M and column < N:",
        "if lane < 2:",
        QUANTIZED,
        "Scales of rows that C does not have are written behind the last one.",
    ),
    Fault(
        "hopper_quantized_single_row_unstaged",
        "hopper/gemm/canonical.py",
        "free = max(8, 16 // problem.out_dtype.itemsize)",
        "free = 8",
        QUANTIZED,
        "A single row of bytes is not stored by TMA, without which it has no scales.",
    ),
    Fault(
        "hopper_quantized_in_half_blocks",
        "hopper/gemm/heuristic.py",
        "(c for c in candidates if quantized_reason(c.config, gated) is None)",
        "(c for c in candidates)",
        QUANTIZED,
        "The rule takes tiles in which no CTA holds the 128 columns that share a scale.",
    ),
    Fault(
        "hopper_quantized_as_fp8",
        "hopper/gemm/launcher.py",
        "out.view(torch.uint8), alpha",
        "out, alpha",
        QUANTIZED,
        "A launch hands an output to a kernel in a type that it was not compiled for.",
    ),
)
