"""Which variant of the kernel a product of groups takes."""

from outblas.call import fp8
from outblas.call.grouped import GroupedProblem
from outblas.hopper.gemm import group_layouts as layouts
from outblas.hopper.gemm import subtiles
from outblas.hopper.gemm.scale_layout import is_wide
from outblas.hopper.gemm.traits import CAPACITIES, KernelTraits, resolve_activation
from outblas.hopper.gemm.variant import Variant
from outblas.hopper.parts.config import HopperConfig, compile_key


def variant_of(problem: GroupedProblem, config: HopperConfig) -> Variant:
    """Returns the variant for a supported product, whose fp8 operands are in words."""
    usable = [strides for strides in layouts.matrix_strides(problem) if strides is not None]
    assert len(usable) == 2, "`unsupported` refuses other strides"
    layout = "".join("n" if strides[1] == 1 else "t" for strides in usable)
    is_ragged_k = problem.form == "ragged_k"
    wide = are_scales_wide(problem)
    rows_begin_anywhere = problem.form == "ragged_m" and not problem.capacity
    groups = problem.groups + layouts.has_tail(problem)
    epilogue, scales, formats = problem.epilogue, problem.scales, ""
    if scales:
        formats = str(fp8.Formats(*scales.formats, True, block_a=1, block_b=scales.columns))
    traits = KernelTraits(
        width=1 if problem.exchanged else layouts.granule(problem),
        by_columns=problem.exchanged,
        staged=not problem.exchanged,
        batched=is_ragged_k,
        function=resolve_activation(
            epilogue.function, problem.out_dtype.itemsize, 0 if is_ragged_k else problem.K
        ),
        formats=formats,
        scale_a="blocks" if scales else "",
        scale_b="blocks" if scales else "",
        wide_scales=wide,
        from_any_row=wide and rows_begin_anywhere,
        whole_halves=has_whole_halves(problem),
        gated=epilogue.gated,
        bias=_bias_access(problem),
        residual=_residual_access(problem, config),
        aux=("matrix" if problem.exchanged else "staged") if epilogue.aux else "",
        form=problem.form,
        capacity=next(capacity for capacity in CAPACITIES if capacity >= groups),
        zero_tail=layouts.has_tail(problem),
        masked=problem.capacity > 0,
        gathers=problem.gathers,
        scatters=problem.scatters,
        weighted=problem.weighted,
        row_order=is_ragged_k and config.order == "row",
        turns=turns(problem, config),
    )
    return Variant(compile_key(config), traits, problem.dtype, problem.out_dtype, layout)


def turns(problem: GroupedProblem, config: HopperConfig) -> bool:
    """Returns `KernelTraits.turns`. Where rows are gathered, no cluster shares them."""
    is_upright = (config.cluster_m, config.cluster_n) == (2, 1)
    return problem.form == "ragged_m" and not problem.gathers and is_upright


def has_whole_halves(problem: GroupedProblem) -> bool:
    """Returns `KernelTraits.whole_halves`."""
    scales, gated = problem.scales, problem.epilogue.gated
    return bool(
        gated and scales and scales.columns == fp8.BLOCK and problem.columns % fp8.BLOCK == 0
    )


def are_scales_wide(problem: GroupedProblem) -> bool:
    """Returns `KernelTraits.wide_scales`: whether TMA loads the scales of rows, and of columns that
    have scales of their own, in granules of 16 bytes.
    """
    scales = problem.scales
    if scales is None:
        return False
    group, row, block = scales.a
    extents = (group, problem.capacity) if problem.capacity else (problem.M,)
    of_rows = is_wide(row, block, extents, scales.alignment[0])
    if scales.columns > 1:
        return of_rows
    _, block, column = scales.b
    return of_rows and is_wide(column, block, (problem.columns,), scales.alignment[1])


def _bias_access(problem: GroupedProblem) -> str:
    """Returns how the vector of a group is read. The result has an even number of columns."""
    bias, size = problem.epilogue.bias, problem.out_dtype.itemsize
    if bias is None:
        return ""
    group, _, column = bias.strides
    whole_pairs = column == 1 and group % 2 == 0 and bias.alignment >= 2 * size
    return "pairs" if whole_pairs else "columns"


def _residual_access(problem: GroupedProblem, config: HopperConfig) -> str:
    """Returns how a residual is read. TMA may load rows of the next group, which are not used."""
    residual = problem.epilogue.residual
    if residual is None:
        return ""
    if problem.scatters:
        return "scattered"
    if problem.exchanged or problem.gathers:  # whose stages have other arrivals
        return "matrix"
    stored, size = config.epilogue_config(problem.epilogue.gated), problem.out_dtype.itemsize
    has_room = subtiles.subtiles_per_stage(config, stored, size) > 0
    if has_room and config.stages > 1 and layouts.in_granules(problem, residual):
        return "staged"
    return "batch" if problem.form == "ragged_k" else "matrix"
