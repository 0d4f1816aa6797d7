"""Faults in the device code of the Triton kernel and in what the ladders share with it."""

from ..fault import Check, Fault

PORTABLE = (Check("test_portable.py"),)
GUARDED = (Check("test_portable.py", "surroundings"),)
FORMS = (Check("test_epilogue.py", "every_form or launches_of_a_part"),)
SIMT_MAPS = (Check("test_simt_maps.py", "maps or owns or lanes or copies or passes"),)

_PORTABLE = "kernels/portable.py"
_FUSED = "src/outblas/device/fused.py"
_TILE = "src/outblas/device/work_tile.py"
_MAPPING = "src/outblas/device/mapping.py"

FAULTS = (
    Fault(
        "portable_a_strides_swapped",
        _PORTABLE,
        "m[:, None] * strides.a.row + k[None, :] * strides.a.col",
        "m[:, None] * strides.a.col + k[None, :] * strides.a.row",
        PORTABLE,
        "The portable kernel reads A transposed.",
    ),
    Fault(
        "portable_b_steps_along_rows",
        _PORTABLE,
        "b_ptr += terms * strides.b.row",
        "b_ptr += terms * strides.b.col",
        PORTABLE,
        "The portable kernel steps along B's columns in place of K.",
    ),
    Fault(
        "portable_k_edge_one_too_far",
        _PORTABLE,
        "else k < size.K - start",
        "else k <= size.K - start",
        PORTABLE,
        "The portable kernel multiplies one term past K.",
    ),
    Fault(
        "portable_stores_past_the_edge",
        _PORTABLE,
        "mask_n = tl.full((1, PART), 1, tl.int1) if TILE.even_n else n[None, :] < size.N",
        "mask_n = tl.full((1, PART), 1, tl.int1) if TILE.even_n else n[None, :] <= size.N",
        GUARDED,
        "The portable kernel writes one column past C.",
    ),
    Fault(
        "portable_sums_not_carried",
        _PORTABLE,
        "return acc + product.to(tl.float32)",
        "return product.to(tl.float32)",
        PORTABLE,
        "Only the last k-block counts.",
    ),
    Fault(
        "alpha_ignored",
        _FUSED,
        "x = acc * alpha",
        "x = acc",
        PORTABLE,
        "Kernels ignore alpha.",
    ),
    Fault(
        "beta_ignored",
        _FUSED,
        "x += beta * tl.load(c_ptr, mask=mask, other=0.0).to(tl.float32)",
        "x += tl.load(c_ptr, mask=mask, other=0.0).to(tl.float32)",
        PORTABLE,
        "Kernels add C as it is.",
    ),
    Fault(
        "bias_added_twice",
        _FUSED,
        "            x += load_source(epilogue_tensors.bias, coord, mask)\n",
        "            x += 2 * load_source(epilogue_tensors.bias, coord, mask)\n",
        FORMS,
        "Kernels add the bias twice.",
    ),
    Fault(
        "bias_after_aux",
        _FUSED,
        "        if epilogue_tensors.bias.ptr is not None:\n"
        "            x += load_source(epilogue_tensors.bias, coord, mask)\n"
        "        if epilogue_tensors.aux.ptr is not None:\n"
        "            aux_ptr = element_ptr(epilogue_tensors.aux, coord)\n"
        "            tl.store(aux_ptr, round_to(x, aux_ptr.dtype.element_ty, INTERPRETED), "
        "mask=mask)\n",
        "        if epilogue_tensors.aux.ptr is not None:\n"
        "            aux_ptr = element_ptr(epilogue_tensors.aux, coord)\n"
        "            tl.store(aux_ptr, round_to(x, aux_ptr.dtype.element_ty, INTERPRETED), "
        "mask=mask)\n"
        "        if epilogue_tensors.bias.ptr is not None:\n"
        "            x += load_source(epilogue_tensors.bias, coord, mask)\n",
        FORMS,
        "x is stored before the bias is added.",
    ),
    Fault(
        "activation_after_residual",
        _FUSED,
        "        y = activate(y, FUNCTION)\n        if EPILOGUE.gated:\n",
        "        if epilogue_tensors.residual.ptr is not None:\n"
        "            y += load_source(epilogue_tensors.residual, coord, mask)\n"
        "        y = activate(y, FUNCTION)\n"
        "        if epilogue_tensors.residual.ptr is not None:\n"
        "            y -= load_source(epilogue_tensors.residual, coord, mask)\n"
        "        if EPILOGUE.gated:\n",
        FORMS,
        "The activation is that of the sum with the residual.",
    ),
    Fault(
        "gated_pairs_of_one_half",
        _FUSED,
        "return index, index + second_half * N",
        "return index, index",
        FORMS,
        "Both halves of gated pairs come from the gate's columns.",
    ),
    Fault(
        "bf16_truncated",
        _FUSED,
        "nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000)",
        "nearest = (bits & -0x10000)",
        PORTABLE,
        "Outputs in bf16 are truncated.",
    ),
    Fault(
        "last_tile_row_of_a_group_wraps",
        _TILE,
        "rows = tl.minimum(tiles_m - top, GROUP_M)",
        "rows = GROUP_M",
        PORTABLE,
        "The last group of rows of tiles is walked as if it were whole.",
    ),
    Fault(
        "tile_columns_rounded_down",
        _TILE,
        "tiles_n = (size.N + BLOCK_N - 1) // BLOCK_N",
        "tiles_n = tl.maximum(size.N // BLOCK_N, 1)",
        PORTABLE,
        "Tiles are numbered as if the last, partial column were none.",
    ),
    Fault(
        "inner_batch_stride_ignored",
        _TILE,
        "return ptr + tile.outer * strides.outer + tile.inner * strides.inner",
        "return ptr + tile.outer * strides.outer",
        PORTABLE,
        "All matrices along the inner batch dimension multiply the first operands.",
    ),
    Fault(
        "batch_strides_swapped",
        "src/outblas/device/launch.py",
        "outer, inner = ([0, 0] + [strides[i] for i in kept_dims(problem)])[-2:]",
        "inner, outer = ([0, 0] + [strides[i] for i in kept_dims(problem)])[-2:]",
        PORTABLE,
        "Kernels get the strides of the two batch dimensions in the wrong order.",
    ),
    Fault(
        "chunk_offsets_of_the_first",
        "src/outblas/device/launch.py",
        "return torch.as_strided(t, (1,), (1,), t.storage_offset() + offset) if offset else t",
        "return t",
        PORTABLE,
        "Every launch of a call that takes several computes the first one's products.",
    ),
    Fault(
        "chunk_one_product_short",
        "src/outblas/device/grid.py",
        "products = min(rows, outer - first_outer) * min(columns, inner - first_inner)",
        "products = max(1, min(rows, outer - first_outer) - 1) * min(columns, inner - first_inner)",
        PORTABLE,
        "Launches of several rows of products leave out the last row.",
    ),
    Fault(
        "vector_wider_than_the_alignment",
        "src/outblas/device/launch.py",
        "return math.gcd(max(alignment, 1), extents[unit], *others)",
        "return math.gcd(WIDEST // problem.dtype.itemsize, extents[unit], *others)",
        (
            Check("test_simt_maps.py", "aligned"),
            Check("test_portable_config.py", "vector"),
        ),
        "Loads are as wide as strides allow, at whatever address.",
    ),
    Fault(
        "simt_warps_overlap",
        _MAPPING,
        "            powers(warp[axis], block[axis]),\n",
        "            powers(span, span * block[axis] // warp[axis]),\n",
        SIMT_MAPS,
        "Warps of the CUDA-core ladder lie over each other.",
    ),
    Fault(
        "simt_transposed_map_is_not",
        _MAPPING,
        "        return Mapping(self.shape[::-1], *parts)\n",
        "        return Mapping(self.shape[::-1], self.registers, self.lanes, self.warps)\n",
        SIMT_MAPS,
        "The map of a transposed tile moves along the wrong axes.",
    ),
)
