"""Faults in what the production kernel does to sums before it stores them."""

from ..fault import Check, Fault

MATH = (Check("test_epilogue_math.py"),)

_MATH = "hopper/gemm/epilogue_math.py"

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
)
