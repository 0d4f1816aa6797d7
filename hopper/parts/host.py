"""The host side of the Hopper rungs: supported problems, compilation, launch.

One compiled kernel serves every size of a layout and dtype, because sizes and strides are symbolic.
TMA's requirements on them are checked here, before anything compiles. A column-major C is computed
as C^T = B^T A^T, without copies.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_tensor

from outblas.call.artifact import Artifact
from outblas.call.problem import Launch, Problem, has_row_major_output, with_row_major_output
from outblas.hopper.parts import bounds, compile, tile_order
from outblas.hopper.parts.base import HopperGemm
from outblas.hopper.parts.build import NUMERIC, compact, compiled
from outblas.hopper.parts.compile import SHORT, cache_key_fields, full_name, keep, load
from outblas.hopper.parts.config import HopperConfig, compile_key
from outblas.hopper.parts.phase_clock import PHASES
from outblas.hopper.parts.tma_views import tma_strides, view


@dataclass(frozen=True)
class RungVariant:
    """The key of one compiled kernel.

    layout: the layout of A and B ("nt").
    row_major: whether C's rows are contiguous.
    width: elements of a row that can be written at once: 1, 2, or as many as fit 16 bytes.
    """

    kernel: str
    config: HopperConfig
    dtype: torch.dtype
    out_dtype: torch.dtype
    layout: str
    row_major: bool
    width: int

    @property
    def name(self) -> str:
        """The kernel's name in profilers, which no other variant has, neither as a module nor as a
        function.
        """
        c = self.config
        tile = f"{c.tile_m}x{c.tile_n}x{c.tile_k}"
        cluster = (f"{c.cluster_m}x{c.cluster_n}",) if c.cluster > 1 else ()
        parts = [
            "outblas",
            self.kernel.replace(".", "_"),
            tile,
            *cluster,
            self.layout,
            SHORT[self.dtype],
            SHORT[self.out_dtype],
        ]
        flags = {
            "strided": not self.row_major,
            f"by{self.width}": self.row_major and self.width * self.out_dtype.itemsize < 16,
            "jitter": c.jitter,
            "phases": c.phases,
        }
        return full_name(self, parts + [flag for flag, on in flags.items() if on])

    @property
    def cache_key_fields(self) -> dict[str, object]:
        """Returns the facts that the compiled kernel on disk depends on."""
        return cache_key_fields(self.name, self.config, self.dtype, self.out_dtype)


def unsupported(
    gemm: type[HopperGemm], problem: Problem, config: HopperConfig | None = None
) -> str | None:
    """Returns why this rung, TMA or wgmma cannot compute this problem, or None. The message says
    what is needed and what was given.
    """
    if config is not None and (reason := gemm.invalid_reason(config)):
        return f"config: {reason}"
    if problem.scaled:
        return "it computes only A @ B, but was given an addend or a scale (addmm)"
    if problem.batch:
        return (
            "it supports matrices, or a batch that shares B, but was given batches of shape "
            f"{problem.batch}"
        )
    if reason := bounds.extents(problem):
        return reason
    if config is not None and (reason := bounds.tiles(with_row_major_output(problem)[0], config)):
        return reason
    for name, rows, columns, strides, alignment in (
        ("a", problem.M, problem.K, problem.a, problem.alignment[0]),
        ("b", problem.K, problem.N, problem.b, problem.alignment[1]),
    ):
        if alignment < 16:
            return (
                f"TMA needs addresses that are multiples of 16 bytes, but {name}'s is "
                f"a multiple of only {alignment}"
            )
        if tma_strides(rows, columns, strides) is None:
            return (
                "TMA needs one stride of 1 and the other a multiple of 8 elements (16 bytes), "
                f"but {name} has strides {strides} for {rows}x{columns}"
            )
    return None


@dataclass(frozen=True)
class HopperRung:
    """A kernel's registry name, the class that builds it, and its default config."""

    name: str
    gemm: type[HopperGemm]
    config: HopperConfig


def plan(rung: HopperRung, problem: Problem, config: HopperConfig | None = None) -> Launch:
    """Compiles or loads the kernel for a supported problem, and returns its launch."""
    return trace(rung, problem, config)[0]


def trace(
    rung: HopperRung, problem: Problem, config: HopperConfig | None = None
) -> tuple[Launch, torch.Tensor | None]:
    """Returns the launch that `plan` returns, and the tensor to which calls write their cycles if
    the config has `phases`, else None. The tensor is int64 (CTAs, warpgroups,
    `phase_clock.PHASES`).
    """
    config = config or rung.config
    problem, swap = with_row_major_output(problem)
    variant = _variant(rung.name, problem, config)
    rows, columns = tile_order.cluster_tiles(config, problem.M, problem.N)
    table = None
    if rung.gemm.persistent:
        fit = tile_order.clusters(problem.device, config.sms, config.cluster)
        table = tile_order.table(config, rows, columns, fit, problem.device)
    run = load(variant, lambda: compile_variant(rung.gemm, variant))
    phase_cycles = None
    if config.phases:
        ctas = rows * columns if table is None else table.shape[1] * config.cluster
        shape = ctas, rung.gemm(config, width=1).warpgroups, len(PHASES)
        phase_cycles = torch.zeros(shape, dtype=torch.int64, device=problem.device)
    launch = _launch(run, problem, variant, swap, table, phase_cycles)
    return tile_order.when_copied(launch, table), phase_cycles


def _launch(
    run: Callable[..., None],
    problem: Problem,
    variant: RungVariant,
    swap: bool,
    table: torch.Tensor | None,
    phase_cycles: torch.Tensor | None,
) -> Launch:
    """Returns the launch of a compiled kernel. `swap`: its A is the caller's B, for C^T = B^T
    A^T.
    """
    a_strides, b_strides = _operand_strides(problem)
    shape_a, shape_b = (problem.M, problem.K), (problem.K, problem.N)
    shape_out = (problem.M, problem.N)
    out_strides = (_row_stride(problem), 1) if variant.row_major else problem.out

    def launch(
        a: torch.Tensor, b: torch.Tensor, c: Any, out: torch.Tensor, alpha: float, beta: float
    ) -> None:
        if swap:
            a, b = b, a
        run(
            view(a, shape_a, a_strides),
            view(b, shape_b, b_strides),
            view(out, shape_out, out_strides),
            table,
            phase_cycles,
        )

    return launch


def precompile(rung: HopperRung, problem: Problem, config: HopperConfig, arch: int) -> None:
    """Compiles onto disk what `plan` would load for a supported problem. Needs no GPU, and loads
    nothing onto one.
    """
    variant = _variant(rung.name, with_row_major_output(problem)[0], config)
    keep(variant, lambda: compile_variant(rung.gemm, variant))


def _variant(kernel: str, problem: Problem, config: HopperConfig) -> RungVariant:
    """Returns the variant for a supported problem. The order of tiles is a table, and not part of
    it.
    """
    layout = "".join("n" if strides[1] == 1 else "t" for strides in _operand_strides(problem))
    row_major = has_row_major_output(problem)
    width = _width(problem) if row_major else 1
    config = compile_key(config)
    return RungVariant(kernel, config, problem.dtype, problem.out_dtype, layout, row_major, width)


def _width(problem: Problem) -> int:
    """Returns how many elements of a row of C can be written at once. N must be a multiple of it,
    because TMA writes rows in granules of 16 bytes, beyond the edge of the matrix.
    """
    size, start, row = problem.out_dtype.itemsize, problem.alignment[2], _row_stride(problem)
    for width in (16 // size, 2):
        if start % (width * size) == 0 and row % width == 0 and problem.N % width == 0:
            return width
    return 1


def _operand_strides(problem: Problem) -> tuple[tuple[int, int], tuple[int, int]]:
    a_strides = tma_strides(problem.M, problem.K, problem.a)
    b_strides = tma_strides(problem.K, problem.N, problem.b)
    assert a_strides, "plan() takes problems for which unsupported() is None"
    assert b_strides, "plan() takes problems for which unsupported() is None"
    return a_strides, b_strides


def _row_stride(problem: Problem) -> int:
    """Returns the elements from a row of C to the next. A single row may have any stride; 8 suits
    TMA.
    """
    return problem.out[0] if problem.M > 1 else 8


def compile_variant(gemm: type[HopperGemm], variant: RungVariant, options: str = "") -> Any:
    """Compiles for sm_90a, with or without a GPU. Returns the CuTe DSL's compiled function."""
    M, N, K = cute.sym_int(), cute.sym_int(), cute.sym_int()

    def matrix(dtype: torch.dtype, shape: tuple[Any, Any], row_major: bool) -> Any:
        outer = cute.sym_int64(divisibility=8)
        return make_fake_tensor(
            NUMERIC[dtype], shape, (outer, 1) if row_major else (1, outer), assumed_align=16
        )

    a = matrix(variant.dtype, (M, K), variant.layout[0] == "n")
    b = matrix(variant.dtype, (K, N), variant.layout[1] == "n")
    width = variant.width
    c_strides = (cute.sym_int64(divisibility=width), 1 if variant.row_major else cute.sym_int64())
    align = width * variant.out_dtype.itemsize
    c = make_fake_tensor(NUMERIC[variant.out_dtype], (M, N), c_strides, assumed_align=align)
    table = compact(cutlass.Int32, 2) if gemm.persistent else None
    phase_cycles = compact(cutlass.Int64, 3) if variant.config.phases else None
    kernel = gemm(variant.config, width=variant.width)
    return compiled(kernel, variant.name, [a, b, c, table, phase_cycles], options)


def artifact(rung: HopperRung, config: HopperConfig | None = None, **requested: Any) -> Artifact:
    """Compiles what `plan` would launch for aligned operands and a row-major output; needs no GPU.
    The arguments and errors are those of `compile.artifact`.
    """
    return compile.artifact(
        rung.name,
        config or rung.config,
        functools.partial(unsupported, rung.gemm),
        functools.partial(_variant, rung.name),
        functools.partial(compile_variant, rung.gemm),
        lambda variant: variant.config.shared_memory_bytes,
        **requested,
    )
