"""The host side of the Hopper rungs: what they can take, compiling, the compile cache, launching.

One compile serves every size of a layout and dtype: sizes and strides are symbolic, and TMA's
demands on them are checked here, before anything compiles. A column-major C is computed as C^T =
B^T A^T, without copies.
"""

import functools
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import (
    make_fake_stream,
    make_fake_tensor,
)

from ...core.artifact import Artifact
from ...core.problem import Launch, Problem, has_row_major_output, with_row_major_output
from . import bounds, tile_order
from .base import HopperGemm
from .compile import (
    NUMERIC,
    OPTIONS,
    SHORT,
    cache_key_fields,
    compact,
    compiled,
    full_name,
    keep,
    load,
    target_arch,
)
from .config import HopperConfig, compile_key
from .phase_clock import PHASES


@dataclass(frozen=True)
class Variant:
    """What one compile serves. `layout` is that of A and B ("nt").

    `row_major`: C's rows are contiguous; `width`: so many elements of a row can be written at once,
    1, 2, or what 16 bytes hold.
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
        """The kernel's name in profilers, and no other variant's: as a module and in it, too."""
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
        """What the compiled kernel on disk depends on."""
        return cache_key_fields(self.name, self.config, self.dtype, self.out_dtype)


def unsupported(
    gemm: type[HopperGemm], problem: Problem, config: HopperConfig | None = None
) -> str | None:
    """Why this rung, TMA and wgmma cannot take this problem: what they need, and what they were
    given.
    """
    if config is not None and (reason := gemm.invalid_reason(config)):
        return f"config: {reason}"
    if problem.scaled:
        return "it computes A @ B alone, and was given an addend or a scale (addmm)"
    if problem.batch:
        return (
            "it takes matrices, or a batch that shares B, and was given batches of shape "
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
                f"TMA needs addresses that are multiples of 16 bytes, and {name}'s is a "
                f"multiple of {alignment}"
            )
        if tma_strides(rows, columns, strides) is None:
            return (
                "TMA needs one stride of 1 and the other a multiple of 8 elements (16 bytes), "
                f"and {name} has strides {strides} for {rows}x{columns}"
            )
    return None


def tma_strides(rows: int, columns: int, strides: tuple[int, ...]) -> tuple[int, int] | None:
    """Strides under which TMA can read a matrix, the stride of an extent of 1 chosen freely; None
    if there are none.
    """
    row, column = strides

    if (column == 1 or columns == 1) and (rows == 1 or row % 8 == 0):
        return (row if rows > 1 else 8), 1
    if (row == 1 or rows == 1) and (columns == 1 or column % 8 == 0):
        return 1, (column if columns > 1 else 8)
    return None


@dataclass(frozen=True)
class Rung:
    """A kernel by its registry name, the class that builds it, and its own config."""

    name: str
    gemm: type[HopperGemm]
    config: HopperConfig


def plan(rung: Rung, problem: Problem, config: HopperConfig | None = None) -> Launch:
    """Compiles or loads what the problem needs and returns its launch. The problem must be
    supported.
    """
    return trace(rung, problem, config)[0]


def trace(
    rung: Rung, problem: Problem, config: HopperConfig | None = None
) -> tuple[Launch, torch.Tensor | None]:
    """As `plan`, with the tensor to which each call of a config with `phases` writes cycles, else
    None: int64 (CTAs, warpgroups, `phases.PHASES`).
    """
    config = config or rung.config
    problem, swapped = with_row_major_output(problem)
    a_strides, b_strides = _operand_strides(problem)
    variant = _variant(rung.name, problem, config)
    rows, columns = tile_order.cluster_tiles(config, problem.M, problem.N)
    table = None
    if rung.gemm.persistent:
        fit = tile_order.clusters(problem.device, config.sms, config.cluster)
        table = tile_order.table(config, rows, columns, fit, problem.device)
    run = load(variant, lambda: compile_variant(rung.gemm, variant))
    shape_a, shape_b, shape_out = (
        (problem.M, problem.K),
        (problem.K, problem.N),
        (problem.M, problem.N),
    )
    out_strides = (_row_stride(problem), 1) if variant.row_major else problem.out
    laps = None
    if config.phases:
        ctas = rows * columns if table is None else table.shape[1] * config.cluster
        warpgroups = rung.gemm(config, width=1).warpgroups
        laps = torch.zeros(ctas, warpgroups, len(PHASES), dtype=torch.int64, device=problem.device)

    def launch(
        a: torch.Tensor, b: torch.Tensor, c: Any, out: torch.Tensor, alpha: float, beta: float
    ) -> None:
        if swapped:
            a, b = b, a
        run(
            view(a, shape_a, a_strides),
            view(b, shape_b, b_strides),
            view(out, shape_out, out_strides),
            table,
            laps,
        )

    return launch, laps


def precompile(rung: Rung, problem: Problem, config: HopperConfig, arch: int) -> None:
    """Compiles to disk what `plan` would load for a supported problem; needs no GPU, and loads
    nothing on one.
    """
    variant = _variant(rung.name, with_row_major_output(problem)[0], config)
    keep(variant, lambda: compile_variant(rung.gemm, variant))


def _variant(kernel: str, problem: Problem, config: HopperConfig) -> Variant:
    """The compile that serves a supported problem: the order of tiles is a table, and no part of
    it.
    """
    config = compile_key(config)
    a_strides, b_strides = _operand_strides(problem)
    layout = ("n" if a_strides[1] == 1 else "t") + ("n" if b_strides[1] == 1 else "t")
    row_major = has_row_major_output(problem)
    size, start, row = problem.out_dtype.itemsize, problem.alignment[2], _row_stride(problem)
    # N too: TMA writes rows in granules of 16 bytes, past the edge of the matrix.
    fits = [
        w
        for w in (16 // size, 2)
        if start % (w * size) == 0 and row % w == 0 and problem.N % w == 0
    ]
    width = fits[0] if row_major and fits else 1
    return Variant(kernel, config, problem.dtype, problem.out_dtype, layout, row_major, width)


def _operand_strides(problem: Problem) -> tuple[tuple[int, int], tuple[int, int]]:
    a_strides = tma_strides(problem.M, problem.K, problem.a)
    b_strides = tma_strides(problem.K, problem.N, problem.b)
    assert a_strides, "plan() takes problems for which unsupported() is None"
    assert b_strides, "plan() takes problems for which unsupported() is None"
    return a_strides, b_strides


def _row_stride(problem: Problem) -> int:
    return problem.out[0] if problem.M > 1 else 8


def view(t: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    return t if t.shape == shape and t.stride() == strides else t.as_strided(shape, strides)


def compile_variant(gemm: type[HopperGemm], variant: Variant, options: str = "") -> Any:
    """Compiles for sm_90a, with or without a GPU. Returns CuTe DSL's compiled function."""
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
    laps = compact(cutlass.Int64, 3) if variant.config.phases else None
    gemm.kernel.set_name_prefix(variant.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    built = gemm(variant.config, width=variant.width)
    with target_arch():
        return cute.compile(built, a, b, c, table, laps, stream, options=f"{OPTIONS} {options}")


def artifact(rung: Rung, config: HopperConfig | None = None, **asked: Any) -> Artifact:
    """What `plan` would launch for aligned, row-major operands; needs no GPU. Arguments and errors
    are `compiled`'s.
    """

    def build(problem: Problem, config: HopperConfig, options: str) -> Any:
        return compile_variant(rung.gemm, _variant(rung.name, problem, config), options)

    return compiled(
        rung.name, config or rung.config, functools.partial(unsupported, rung.gemm), build, **asked
    )
