"""The variants of `hopper.gemm`, one per compile, and the choice of a variant for a problem."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

import torch

from outblas.call import fp8
from outblas.call.epilogue import TENSORS, View
from outblas.call.problem import Problem
from outblas.device import clusters
from outblas.hopper.gemm import scale_layout, subtiles
from outblas.hopper.gemm.canonical import (
    CanonicalProblem,
    TensorView,
    canonicalize,
    operand_strides,
    output_strides,
)
from outblas.hopper.gemm.schedule import TileGrid, tile_grid
from outblas.hopper.gemm.traits import KernelTraits, resolve_activation
from outblas.hopper.parts import compile
from outblas.hopper.parts.config import HopperConfig, compile_key

# The tensors of the epilogue in the order in which the kernel takes them.
EPILOGUE_TENSORS = ("addend", *TENSORS)


@dataclass(frozen=True)
class Variant:
    """The key of one compile. `layout` is that of A and B ("nt")."""

    keeper: ClassVar[str] = "outblas.hopper.gemm.packed:keep"
    config: HopperConfig
    traits: KernelTraits
    dtype: torch.dtype
    out_dtype: torch.dtype
    layout: str

    @property
    def name(self) -> str:
        """The kernel's name in profilers, which no other variant has, neither as a module nor as a
        function.
        """
        c, traits = self.config, self.traits
        parts = [
            "outblas_hopper_grouped" if traits.form else "outblas_hopper_gemm",
            f"{c.tile_m}x{c.tile_n}x{c.tile_k}x{c.stages}",
            f"{c.cluster_m}x{c.cluster_n}x{c.cluster_k}" if c.cluster > 1 else "",
            self.layout,
            compile.SHORT[self.dtype],
            compile.SHORT[self.out_dtype],
        ]
        return compile.full_name(self, [*parts, *_flags(traits), *_flags(c)])

    @property
    def cache_key_fields(self) -> dict[str, object]:
        """Returns the facts that the compiled kernel on disk depends on."""
        fields = compile.cache_key_fields(self.name, self.config, self.dtype, self.out_dtype)
        return fields | {"traits": str(self.traits)}


def _flags(record: KernelTraits | HopperConfig) -> Iterator[str]:
    """Yields the names of the fields that are true, and of texts other than the default their
    values as well.
    """
    for field in fields(record):
        value = getattr(record, field.name)
        if value is True:
            yield field.name
        elif isinstance(value, str) and value != field.default:
            yield f"{field.name}_{value}"


class WaveTraits(NamedTuple):
    """Fields of `KernelTraits`."""

    single_wave: bool
    ordered: bool


@dataclass(frozen=True)
class OutputAccess:
    """How C is written; the fields are those of `KernelTraits` with the same names."""

    width: int
    by_columns: bool
    staged: bool


def variant_of(
    problem: Problem,
    transposed: bool,
    config: HopperConfig,
    waves: WaveTraits,
) -> Variant:
    """Returns the variant for a launch's problem (`CanonicalProblem.launch`). `transposed` says
    whether that is the transpose of the caller's.
    """
    layout = "".join("n" if strides[-1] == 1 else "t" for strides in operand_strides(problem))
    output = output_access(problem, config)
    traits = KernelTraits(
        width=output.width,
        by_columns=output.by_columns,
        staged=output.staged,
        transposed=transposed,
        batched=bool(problem.batch),
        ordered=waves.ordered,
        single_wave=waves.single_wave,
        scaled=problem.scaled,
        function=resolve_activation(
            problem.epilogue.function, problem.out_dtype.itemsize, problem.K
        ),
        gated=problem.epilogue.gated,
        formats=problem.formats,
        power_of_two=problem.epilogue.power_of_two,
        **epilogue_access(problem, config, output),
    )
    if _staggers_tail(problem, config, traits):
        traits = replace(traits, staggered_tail=True)
    # Whoever loads A must not read scales that a previous call may still write.
    if traits.block_a == 1 and not config.weights_ready and _are_scales_wide(problem, traits):
        traits = replace(traits, wide_scales=True)
    if traits.gated and traits.block_b == fp8.BLOCK and problem.N % fp8.BLOCK == 0:
        traits = replace(traits, whole_halves=True)
    return Variant(compile_key(config), traits, problem.dtype, problem.out_dtype, layout)


def example_variant(problem: Problem, config: HopperConfig, sms: int = 132) -> Variant:
    """Returns the variant that a GPU with `sms` SMs would run; needs no GPU."""
    canonical = canonicalize(problem, config)
    resident = clusters.at_once(min(sms, config.sms or sms), config.cluster)
    grid = tile_grid(canonical.launch, config)
    waves = waves_of(grid, config, resident)
    return variant_of(canonical.launch, canonical.transposed, config, waves)


def output_access(problem: Problem, config: HopperConfig) -> OutputAccess:
    """Returns how a launch writes C."""
    *batch, row, column = output_strides(problem)
    size, start = problem.out_dtype.itemsize, problem.alignment[2]
    by_columns = column != 1 and row == 1
    outer, inner = (column, problem.M) if by_columns else (row, problem.N)
    widest = 16 // size  # TMA writes granules of 16 bytes, beyond the edge of the matrix
    fitting = [
        width
        for width in (widest, 2)
        if 1 in (row, column)
        and start % (width * size) == 0
        and all(extent % width == 0 for extent in (inner, outer, *batch))
    ]
    width = fitting[0] if fitting else 1
    # stmatrix can transpose only 16-bit elements
    staged = width == widest and (size == 2 or not by_columns) and config.epilogue_stages > 0
    # Columns that TMA does not store are written element by element.
    return OutputAccess(1 if by_columns and not staged else width, by_columns, staged)


def waves_of(grid: TileGrid, config: HopperConfig, resident: int) -> WaveTraits:
    """Returns how many waves of tiles there are, and whether a table numbers them: in several waves
    always, in a single wave for GPC-local neighbours. `resident`: the number of clusters that run
    at the same time, as far as known.
    """
    single_wave = grid.work_tiles <= resident and not config.stream_k
    by_gpc = single_wave and grid.work_tiles > 1 and config.gpc_local and not config.split
    return WaveTraits(single_wave, grid.tiles_of_matrix > resident or by_gpc)


def varies_with_rows(problem: Problem) -> bool:
    """Returns whether the variant depends on what divides the number of rows, and not on `waves_of`
    alone: where something is contiguous along rows. C must be row-major, and there must be several
    rows and no scales of blocks.
    """
    strides = [problem.out, problem.c or (0, 0)]
    strides += [view.strides for view in problem.epilogue.views.values()]
    return problem.N == 1 or any(row == 1 for *_, row, _ in strides)


def _staggers_tail(problem: Problem, config: HopperConfig, traits: KernelTraits) -> bool:
    """Returns whether the consumers of a tile multiply its last k tiles one after the other
    (`stagger`).
    """
    if config.stagger == "never" or not _can_stagger(problem, config, traits):
        return False
    if config.stagger == "always" or traits.single_wave:
        return True
    return config.consumers == 2 and not traits.plain


def _can_stagger(problem: Problem, config: HopperConfig, traits: KernelTraits) -> bool:
    """Returns whether consumers can multiply a tile's last k tiles in turn: CTAs must have whole
    tiles, and K must be long. In a single wave C must be stored through shared memory, where each
    consumer writes memory that no other consumer reads.
    """
    whole_tiles = config.cluster_k == 1 and not config.split
    last = config.staggered_k_tiles
    if not whole_tiles or config.warpgroups_per_tile == 1 or traits.promoted:
        return False
    if last == 0 or 2 * last * config.tile_k >= problem.K:
        return False
    if not traits.single_wave:
        return True
    stored, size = config.epilogue_config(traits.gated), problem.out_dtype.itemsize
    apart = not subtiles.overlays_stages(stored, size, traits)
    moves_more = traits.source or traits.aux == "staged"
    return bool(traits.staged and not moves_more) and (
        apart or subtiles.fits_own_rows(stored, size)
    )


def _are_scales_wide(problem: Problem, traits: KernelTraits) -> bool:
    """Returns `KernelTraits.wide_scales` for a launch whose A has a scale for each row."""
    of_a, of_b = problem.epilogue.scale_a, problem.epilogue.scale_b
    if traits.transposed:
        of_a, of_b = of_b, of_a
    if traits.block_b == 1 and not scale_layout.are_columns_wide(of_b, problem.N):
        return False
    return scale_layout.are_rows_wide(of_a, problem.M)


def tensor_view(problem: Problem, name: str) -> View | None:
    """Returns the layout of a tensor of `EPILOGUE_TENSORS`; None where the call does not have
    it.
    """
    if name == "addend":
        if problem.c is None or not problem.scaled:
            return None
        return View(problem.c, problem.alignment[3])
    view: View | None = getattr(problem.epilogue, name)
    return view


def epilogue_access(problem: Problem, config: HopperConfig, output: OutputAccess) -> dict[str, Any]:
    """Returns how the kernel accesses each of `EPILOGUE_TENSORS`, as in `KernelTraits`."""
    epilogue = problem.epilogue
    loads_source = output.staged and can_load_source(problem, config)
    loads_source = loads_source and not epilogue.scale_out  # a source of four times C's bytes
    one_source = not (epilogue.residual or epilogue.aux or epilogue.gated)
    may_be_staged = {
        "addend": loads_source and one_source,
        "residual": loads_source,
        "aux": output.staged,
    }
    return {
        name: _access(problem, name, may_be_staged.get(name, False), output.by_columns)
        for name in EPILOGUE_TENSORS
    }


def _access(problem: Problem, name: str, may_be_staged: bool, by_columns: bool) -> str:
    """Returns how the kernel accesses a tensor of the epilogue, as in `KernelTraits`.
    `may_be_staged`: TMA may move it if it has C's layout.
    """
    view, is_scale = tensor_view(problem, name), "scale" in name
    if view is None:
        return ""
    if name == "scale_out" or (is_scale and fp8.formats(problem.formats).block_a):
        return "blocks"
    matrix = "batch" if problem.batch else "matrix"
    *batch, row, column = view.strides
    if not any(view.strides):
        return "one" if is_scale else matrix
    size = 4 if is_scale or problem.epilogue.scale_out else problem.out_dtype.itemsize
    outer, inner = (column, row) if by_columns else (row, column)
    single = problem.N == 1 if by_columns else problem.M == 1
    steps = batch if single else [outer, *batch]
    in_granules = all(step and step * size % 16 == 0 for step in steps)
    if may_be_staged and inner == 1 and in_granules and view.alignment >= 16:
        return "staged"
    if name != "aux" and not any(batch):  # a vector is read, never written
        if (row == 0 or problem.M == 1) and column == 1:
            return "pairs" if problem.N % 2 == 0 and view.alignment >= 2 * size else "columns"
        if column == 0 and row == 1:
            return "rows"
    return matrix


def can_load_source(problem: Problem, config: HopperConfig) -> bool:
    """Returns whether TMA can load a source of the epilogue through the stages of the pipeline.

    A stage must have room for an epilogue subtile, there must be two stages, and a tile must be
    computed by one CTA. In pingpong all subtiles of a tile must arrive before the other consumer
    multiplies, while the last k tile is still in its stage.
    """
    epilogue_config = config.epilogue_config(problem.epilogue.gated)
    size = problem.out_dtype.itemsize
    whole_tiles = not config.split and config.cluster_k == 1
    if not whole_tiles or config.stages == 1:
        return False
    if subtiles.subtiles_per_stage(config, epilogue_config, size) == 0:
        return False
    if not config.pingpong:
        return True
    stages = subtiles.stages_per_tile(config, epilogue_config, size)
    return stages + config.in_flight <= config.stages


def epilogue_tensor_view(
    canonical: CanonicalProblem, traits: KernelTraits, name: str
) -> TensorView | None:
    """Returns the shape and strides with which a tensor of the epilogue is passed to a launch; None
    where the call does not have it.
    """
    problem = canonical.launch
    access, view = getattr(traits, name), tensor_view(problem, name)
    columns = problem.N if name == "residual" else problem.columns
    match access:
        case "":
            return None
        case "one":
            return TensorView((1,), (1,))
        case "blocks" if name == "scale_out":
            assert view, "the traits have scales of the output, but the problem does not"
            return TensorView((problem.M, problem.N // fp8.BLOCK), view.strides)
        case "blocks":
            return _block_scale_view(canonical.given, name)
        case "columns" | "pairs" | "rows":
            return TensorView((problem.M if access == "rows" else columns,), (1,))
    assert view, f"the traits have {name}, but the problem does not"
    *batch, row, column = view.strides
    if access == "staged":  # the stride of an extent of 1 is free, and 8 suits TMA
        if traits.by_columns:
            row, column = 1, column if problem.N > 1 else 8
        else:
            row, column = row if problem.M > 1 else 8, 1
    return canonical.view((problem.M, columns), (*batch, row, column))


def _block_scale_view(given: Problem, name: str) -> TensorView:
    """Returns the shape and strides of a scale that varies along K, as the caller has it."""
    formats, view = fp8.formats(given.formats), getattr(given.epilogue, name)
    blocks = -(-2 * given.K // fp8.BLOCK)  # two terms are one element
    if name == "scale_a":
        return TensorView((-(-given.M // formats.block_a), blocks), view.strides)
    return TensorView((blocks, -(-given.columns // formats.block_b)), view.strides)
