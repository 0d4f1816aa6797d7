"""What one compile of hopper.gemm serves."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...core.epilogue import View
from ...core.problem import Problem
from ...device import clusters
from ..core import compile, tile_order
from ..core.config import (
    HopperConfig,
    unscheduled,
)
from . import (
    epilogue_load,
    epilogue_math,
    operand_copies,
)
from .canonical import _given, _one_batch, _operand_strides, _out_strides, _pieces, _turned

_ADDED = (
    "addend",
    "bias",
    "residual",
    "aux",
    "scale_a",
    "scale_b",
)  # tensors of the epilogue, as the kernel takes them


@dataclass(frozen=True)
class Variant:
    """What one compile serves: `form` is a `gemm.KernelTraits`, `layout` that of A and B ("nt")."""

    config: HopperConfig
    form: Any
    dtype: torch.dtype
    out_dtype: torch.dtype
    layout: str

    @property
    def name(self) -> str:
        """The kernel's name in profilers, and no other variant's: as a module and in it, too."""
        c, f = self.config, self.form
        cluster = f"{c.cluster_m}x{c.cluster_n}x{c.cluster_k}" if c.cluster > 1 else ""
        flags = {
            "elastic": c.elastic,
            "pingpong": c.pingpong,
            "split": c.split_k > 1,
            "stream": c.stream_k,
            "pdl": c.pdl,
            "serpentine": c.k_serpentine,
            "columns": f.by_columns,
            "crossed": f.transposed,
            "batched": f.batched,
            "ordered": f.ordered,
            "once": f.single_wave,
            "scaled": f.scaled,
            f"by{f.width}": not f.staged,
            "jitter": c.jitter,
            f"addend_{f.addend}": f.addend,
            f"bias_{f.bias}": f.bias,
            f.function: f.function,
            f.formats.replace(" ", "_"): f.formats,
            "gated": f.gated,
            "in_turn": f.staggered_tail,
            f"scales_{f.scale_a}_{f.scale_b}": f.formats,
            f"residual_{f.residual}": f.residual,
            f"aux_{f.aux}": f.aux,
        }
        kinds = compile.SHORT[self.dtype], compile.SHORT[self.out_dtype]
        parts = [
            "outblas_hopper_gemm",
            f"{c.tile_m}x{c.tile_n}x{c.tile_k}x{c.slots}",
            cluster,
            self.layout,
            *kinds,
        ]
        return compile.full_name(self, parts + [flag for flag, on in flags.items() if on])

    @property
    def facts(self) -> dict[str, object]:
        """What the compiled kernel on disk depends on."""
        return compile.compile_facts(self.name, self.config, self.dtype, self.out_dtype) | {
            "form": str(self.form)
        }


@dataclass(frozen=True)
class Rung:
    """The class that builds the kernel, that of its forms, and its own config."""

    gemm: Any
    form: Any
    config: HopperConfig


def _view(problem: Problem, name: str) -> View | None:
    """Of a tensor of the epilogue, by its name in `gemm.KernelTraits`."""
    if name == "addend":
        return (
            View(problem.c, problem.alignment[3])
            if problem.c is not None and problem.scaled
            else None
        )
    view: View | None = getattr(problem.epilogue, name)
    return view


def _added(
    problem: Problem, form: Any, name: str
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shape and strides in which a tensor of the epilogue is handed over, None for one that there
    is not.
    """
    kind, view = getattr(form, name), _view(problem, name)
    columns = problem.N if name == "residual" else problem.columns
    match kind:
        case "":
            return None
        case "one":
            return (1,), (1,)
        case "columns" | "pairs" | "rows":
            return (problem.M if kind == "rows" else columns,), (1,)
    assert view, f"the form has {name}, and the problem has not"
    *batch, row, column = view.strides
    if kind == "staged":  # the stride of an extent of 1 is free, and TMA takes 8
        row, column = (
            (1, column if problem.N > 1 else 8)
            if form.by_columns
            else (row if problem.M > 1 else 8, 1)
        )
    shape, strides = (*problem.batch, problem.M, columns), (*batch, row, column)
    return _given(shape, form.transposed), _given(strides, form.transposed)


def _kind(problem: Problem, name: str, staged: bool, by_columns: bool) -> str:
    """How a tensor of the epilogue comes or goes, as in `gemm.KernelTraits`. `staged`: it may be
    as C does.
    """
    view, scale = _view(problem, name), "scale" in name
    if view is None:
        return ""
    *batch, row, column = view.strides
    if not any(view.strides):
        return "one" if scale else "batch" if problem.batch else "matrix"
    size, outer, inner = 4 if scale else problem.out_dtype.itemsize, row, column
    if by_columns:
        outer, inner = column, row
    single = problem.N == 1 if by_columns else problem.M == 1
    whole = all(step and step * size % 16 == 0 for step in ([] if single else [outer]) + batch)
    if staged and inner == 1 and whole and view.alignment >= 16:
        return "staged"
    if name != "aux" and not any(batch):  # a vector is read, never written
        if (row == 0 or problem.M == 1) and column == 1:
            return "pairs" if problem.N % 2 == 0 and view.alignment >= 2 * size else "columns"
        if column == 0 and row == 1:
            return "rows"
    return "batch" if problem.batch else "matrix"


def _fetches(problem: Problem, config: HopperConfig) -> bool:
    """Whether what lies as C does can come through the ring: slots have room, two at once, and a
    tile is one CTA's. In pingpong all of a tile's must land before the other consumer multiplies,
    while the last slice is still in its slot.
    """
    stored, dtype = config.stored(problem.epilogue.gated), compile.NUMERIC[problem.out_dtype]
    whole = not config.split and config.cluster_k == 1 and config.slots > 1
    if not whole or epilogue_load.per_slot(config, stored, dtype) == 0:
        return False
    return (
        not config.pingpong
        or epilogue_load.slots(config, stored, dtype) + config.in_flight <= config.slots
    )


def _variant(
    rung: Rung, problem: Problem, crossed: bool, config: HopperConfig, fit: int
) -> Variant:
    """Of a problem as the kernel computes it. `fit`: clusters that surely run at the same time."""
    rows, columns = tile_order.cluster_tiles(config, problem.M, problem.columns)
    items = rows * columns * math.prod(problem.batch) * _pieces(problem, config)
    layout = "".join("n" if strides[-1] == 1 else "t" for strides in _operand_strides(problem))
    once = items <= fit and not config.stream_k
    out = _out_strides(problem)
    size, start = problem.out_dtype.itemsize, problem.alignment[2]
    by_columns = out[-1] != 1 and out[-2] == 1
    *batch, row, column = out
    outer, inner = (column, problem.M) if by_columns else (row, problem.N)
    whole = 16 // size  # TMA writes granules of 16 bytes, past the edge of the matrix
    fits = [
        w
        for w in (whole, 2)
        if 1 in (row, column)
        and start % (w * size) == 0
        and all(s % w == 0 for s in (inner, outer, *batch))
    ]
    width = fits[0] if fits else 1
    staged = width == whole and (size == 2 or not by_columns) and config.store_buffers > 0
    added = problem.epilogue
    may = {"aux": staged, "residual": staged and _fetches(problem, config)}
    may["addend"] = may["residual"] and not (
        added.residual or added.aux or added.gated
    )  # it is fetched once
    kinds = {name: _kind(problem, name, may.get(name, False), by_columns) for name in _ADDED}
    form = rung.form(
        width=whole if staged else 1 if by_columns else width,
        by_columns=by_columns,
        staged=staged,
        transposed=crossed,
        batched=bool(problem.batch),
        ordered=rows * columns > fit or (once and items > 1 and config.gpc and not config.split),
        single_wave=once,
        scaled=problem.scaled,
        function=epilogue_math.function(
            problem.epilogue.function, problem.out_dtype.itemsize, problem.K
        ),
        gated=problem.epilogue.gated,
        formats=problem.formats,
        **kinds,
    )
    pair = config.sharing == 2 and config.cluster_k == 1 and not (config.split or form.promoted)
    if (
        pair
        and not (form.plain or form.single_wave)
        and 2 * config.last * config.tile_k < problem.K
    ):
        form = replace(form, staggered_tail=config.last > 0)
    return Variant(unscheduled(config), form, problem.dtype, problem.out_dtype, layout)


def example_variant(rung: Rung, problem: Problem, config: HopperConfig, sms: int = 132) -> Variant:
    """What a GPU of so many SMs would run."""
    turned, crossed = _turned(operand_copies.aligned(problem), config)
    turned = _one_batch(turned)[0] if len(turned.batch) > 1 else turned
    return _variant(
        rung, turned, crossed, config, clusters.at_once(min(sms, config.sms or sms), config.cluster)
    )
