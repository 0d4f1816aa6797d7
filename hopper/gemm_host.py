"""The host side of `hopper.gemm`: what it takes, how operands are turned, compiling, launching.

A C stored by columns is computed as C^T = B^T A^T, and so is one whose config says `swap`; the two
undo each other. An operand that TMA cannot stride over is copied first (`copies`).
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ..artifact import Artifact
from ..device import clusters
from ..epilogue import View
from ..operands import Launch, Problem, oriented, transposed
from . import (
    bounds,
    copies,
    epilogue,
    fetched,
    gemm_space,
    host,
    partial_sums,
    placement,
    rules,
    schedule,
    transform,
)
from .config import SLAB_BYTES, WARPGROUP, HopperConfig, gated_reason, promoted_reason, unscheduled

MOST_SLICES = bounds.MOST_SLICES

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
    """What one compile serves: `form` is a `gemm.Form`, `layout` that of A and B ("nt")."""

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
            "crossed": f.crossed,
            "batched": f.batched,
            "ordered": f.ordered,
            "once": f.once,
            "scaled": f.scaled,
            f"by{f.width}": not f.staged,
            "jitter": c.jitter,
            f"addend_{f.addend}": f.addend,
            f"bias_{f.bias}": f.bias,
            f.function: f.function,
            f.formats.replace(" ", "_"): f.formats,
            "gated": f.gated,
            "in_turn": f.in_turn,
            f"scales_{f.scale_a}_{f.scale_b}": f.formats,
            f"residual_{f.residual}": f.residual,
            f"aux_{f.aux}": f.aux,
        }
        kinds = host.SHORT[self.dtype], host.SHORT[self.out_dtype]
        parts = [
            "outblas_hopper_gemm",
            f"{c.tile_m}x{c.tile_n}x{c.tile_k}x{c.slots}",
            cluster,
            self.layout,
            *kinds,
        ]
        return host.full_name(self, parts + [flag for flag, on in flags.items() if on])

    @property
    def facts(self) -> dict[str, object]:
        """What the compiled kernel on disk depends on."""
        return host.compile_facts(self.name, self.config, self.dtype, self.out_dtype) | {
            "form": str(self.form)
        }


@dataclass(frozen=True)
class Rung:
    """The class that builds the kernel, that of its forms, and its own config."""

    gemm: Any
    form: Any
    config: HopperConfig


def entry(gemm: Any, form: Any, kind: type[HopperConfig]) -> tuple[Callable[..., Any], ...]:
    """What the kernel's module offers: `unsupported`, `plan`, `artifact`, `precompile`, `space` and
    `remarks`.
    """
    rung = Rung(gemm, form, kind())
    return (
        functools.partial(unsupported, gemm),
        functools.partial(plan, rung),
        functools.partial(artifact, rung),
        functools.partial(precompile, rung),
        functools.partial(
            gemm_space.space, gemm, rung.config, functools.partial(unsupported, gemm)
        ),
        copies.remarks,
    )


def unsupported(gemm: Any, problem: Problem, config: HopperConfig | None = None) -> str | None:
    """Why the kernel cannot take this problem: what it needs, and what it was given. It takes any
    strides.
    """
    if config is not None and (reason := gemm.invalid_reason(config)):
        return f"config: {reason}"
    if reason := bounds.extents(problem):
        return reason
    if problem.epilogue.gated and copies.aligned(problem).b[-1] == 1 and problem.N % 8:
        return (
            "it takes gated pairs in multiples of 8 columns where b's rows are contiguous, and "
            f"was given {problem.N}"
        )
    return None if config is None else _refused(problem, config)


def _refused(problem: Problem, config: HopperConfig) -> str | None:
    """Why this problem cannot be computed in the order of K that a config asks for."""
    if problem.epilogue.gated and (reason := gated_reason(config)):
        return f"config: {reason}"
    if "promoted" in problem.formats and (reason := promoted_reason(config)):
        return f"config: {reason}"
    slices = -(-problem.K // config.tile_k)
    if problem.batch_invariant and (config.split or config.cluster_k > 1 or config.k_serpentine):
        wanted = "split_k and cluster_k 1, stream_k and k_serpentine False"
        return f"batch_invariant needs one order of K ({wanted}), and was given another"
    if slices < config.cluster_k:
        return (
            f"cluster_k is {config.cluster_k}, and K = {problem.K} has fewer slices of "
            f"{config.tile_k}"
        )
    return bounds.tiles(_turned(problem, config)[0], config)


def plan(rung: Rung, problem: Problem, config: HopperConfig | None = None) -> Launch:
    """Compiles or loads what the problem needs and returns its launch. The problem must be
    supported. Raises ValueError where its own config is none for the problem.
    """
    if config is None:
        config = rules.config(problem, schedule.clusters(problem.device, 0, 1), rung.config)
        if reason := _refused(problem, config):
            raise ValueError(f"kernel 'hopper.gemm': {reason}")
    straight, made, (copy_a, copy_b) = problem, copies.aligned(problem), copies.copied(problem)
    problem, crossed = _turned(made, config)
    outer = problem
    lead = problem.batch
    if len(lead) > 1:
        problem, inner = _one_batch(problem)
    rows, columns = schedule.cluster_tiles(config, problem.M, problem.columns)
    tiles = rows * columns * (problem.batch[0] if problem.batch else 1)
    fit = schedule.clusters(problem.device, config.sms, config.cluster)
    pieces = _pieces(problem, config)
    sms = schedule.clusters(problem.device, config.sms, 1)
    variant = _variant(
        rung, problem, crossed, config, min(fit, clusters.at_once(sms, config.cluster))
    )
    launched = min(fit, tiles * (-(-problem.K // config.tile_k) if config.stream_k else pieces))
    if not config.split:
        launched = schedule.level(launched, tiles)
    # Before the compile, which takes seconds: a capture of a CUDA graph ends here.
    table, placed = None, None
    if variant.form.ordered and variant.form.once:
        placed = placement.Placed(config, tiles // columns, columns, problem.device)
        table = placed.table
    elif variant.form.ordered:
        # Only of "consecutive" does the number of clusters change more than where rows of the table
        # end.
        apart = launched if config.order == "consecutive" else fit
        table = schedule.table(config, rows, columns, apart, problem.device).view(-1)
    run = host.load(variant, lambda: compile_variant(rung.gemm, variant))
    shape_a, shape_b, shape_out = (_given(shape, crossed) for shape in _shapes(problem))
    a_strides, b_strides = (_given(strides, crossed) for strides in _operand_strides(problem))
    out_strides = _given(_out_strides(problem), crossed)
    sums = None
    if config.split:
        cut = tiles % launched if config.stream_k else tiles
        parts = config.cluster * config.sharing
        places = (launched + cut if config.stream_k else tiles * pieces) * parts
        sums = places * config.accumulator_registers * WARPGROUP, max(cut, 1) * parts
    scaled = problem.scaled
    added = [_added(problem, variant.form, name) for name in _ADDED]
    steps = [view.strides if (view := _view(outer, name)) else () for name in _ADDED]
    index = problem.device.index or 0

    def renew(better: torch.Tensor) -> None:
        nonlocal table
        table = better

    def call(a: Any, b: Any, c: Any, out: Any, alpha: float, beta: float, *extra: Any) -> None:
        space = partial_sums.NOTHING if sums is None else partial_sums.borrow(index, *sums)
        tensors = (
            None if way is None else host.view(t, *way)
            for t, way in itertools.zip_longest((c, *extra), added)
        )
        try:
            run(
                host.view(a, shape_a, a_strides),
                host.view(b, shape_b, b_strides),
                host.view(out, shape_out, out_strides),
                table,
                *tensors,
                space.sums,
                space.counters,
                pieces,
                launched,
                alpha,
                beta,
            )
        finally:
            if space.done is not None:
                space.launched()

    def prepared(a: Any, b: Any, c: Any, out: Any, alpha: float, beta: float, *extra: Any) -> None:
        if copy_a:
            shape = (*straight.batch, straight.M, straight.K)
            a = copies.copy(a, shape, straight.a, made.a)
        if copy_b:
            shape = (*straight.batch, straight.K, straight.columns)
            b = copies.copy(b, shape, straight.b, made.b)
        if crossed:
            a, b = b, a
        if not scaled:
            alpha, beta = 1.0, 0.0
        if len(lead) < 2:
            call(a, b, c, out, alpha, beta, *extra)
            return
        for at in itertools.product(
            *(range(extent) for i, extent in enumerate(lead) if i != inner)
        ):
            a_, b_, out_, *others = (
                way and t.as_strided(*way, t.storage_offset() + _offset(strides, at, inner))
                for t, way, strides in (
                    (a, (shape_a, a_strides), outer.a),
                    (b, (shape_b, b_strides), outer.b),
                    (out, (shape_out, out_strides), outer.out),
                    *itertools.zip_longest((c, *extra), added, steps),
                )
            )
            call(a_, b_, others[0], out_, alpha, beta, *others[1:])

    plain = not (copy_a or copy_b or sums or len(lead) > 1) and variant.form.plain
    if not plain:
        return placement.watched(prepared, placed, renew) if placed else prepared

    nothing = (None,) * len(_ADDED)

    # Warm calls of matmul come here: `call` without what it looks up, in one frame.
    def launch(
        a: torch.Tensor, b: torch.Tensor, c: Any, out: torch.Tensor, alpha: float, beta: float
    ) -> None:
        if crossed:
            a, b = b, a
        run(
            host.view(a, shape_a, a_strides),
            host.view(b, shape_b, b_strides),
            host.view(out, shape_out, out_strides),
            table,
            *nothing,
            None,
            None,
            1,
            launched,
            1.0,
            0.0,
        )

    return placement.watched(launch, placed, renew) if placed else launch


def _turned(problem: Problem, config: HopperConfig) -> tuple[Problem, bool]:
    """The product as the kernel computes it, and whether that is the transposed one."""
    problem, crossed = oriented(problem)
    return (transposed(problem), not crossed) if config.swap else (problem, crossed)


def _one_batch(problem: Problem) -> tuple[Problem, int]:
    """The problem with its longest batch dimension alone, and which that is; the others are walked
    call by call.
    """
    inner = max(range(len(problem.batch)), key=lambda i: problem.batch[i])

    def keep(strides: tuple[int, ...]) -> tuple[int, ...]:
        return (strides[inner], *strides[-2:])

    def aligned(strides: tuple[int, ...], alignment: int) -> int:
        """Of every call's tensor."""
        others = (stride for i, stride in enumerate(strides[:-2]) if i != inner)
        return math.gcd(alignment, *(stride * problem.out_dtype.itemsize for stride in others))

    def kept(view: View) -> View:
        return View(keep(view.strides), aligned(view.strides, view.alignment))

    a, b, out, *others = problem.alignment
    alone = replace(
        problem,
        batch=(problem.batch[inner],),
        a=keep(problem.a),
        b=keep(problem.b),
        out=keep(problem.out),
        epilogue=problem.epilogue.mapped(kept),
        alignment=(a, b, aligned(problem.out, out), *others),
    )
    return alone, inner


def _offset(strides: tuple[int, ...], at: tuple[int, ...], inner: int) -> int:
    others = [stride for i, stride in enumerate(strides[:-2]) if i != inner]
    return sum(i * stride for i, stride in zip(at, others, strict=True))


def _shapes(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Of A, B and C."""
    pairs = (problem.M, problem.K), (problem.K, problem.columns), (problem.M, problem.N)
    return tuple((*problem.batch, *pair) for pair in pairs)


def _given(extents: tuple[int, ...], crossed: bool) -> tuple[int, ...]:
    """Of a shape or strides, those of the tensor that a call gives: rows and columns the other way
    if crossed.
    """
    return (*extents[:-2], extents[-1], extents[-2]) if crossed else extents


def _operand_strides(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    a = host.tma_strides(problem.M, problem.K, problem.a[-2:])
    b = host.tma_strides(problem.K, problem.columns, problem.b[-2:])
    assert a, "aligned() leaves operands that TMA can stride over"
    assert b, "aligned() leaves operands that TMA can stride over"
    return (*problem.a[:-2], *a), (*problem.b[:-2], *b)


def _out_strides(problem: Problem) -> tuple[int, ...]:
    """C's rows or columns contiguous, as they are: those of a single row or column along its
    length. The stride of an extent of 1 is free, and TMA takes 8.
    """
    row, column = problem.out[-2:]
    by_rows, by_columns = column == 1 or problem.N == 1, row == 1 or problem.M == 1
    pair = (row, column)
    if by_columns and (problem.M > problem.N or not by_rows):
        pair = (1, column if problem.N > 1 else 8)
    elif by_rows:
        pair = (row if problem.M > 1 else 8, 1)
    return (*problem.out[:-2], *pair)


def _view(problem: Problem, name: str) -> View | None:
    """Of a tensor of the epilogue, by its name in `gemm.Form`."""
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
    return _given(shape, form.crossed), _given(strides, form.crossed)


def _kind(problem: Problem, name: str, staged: bool, by_columns: bool) -> str:
    """How a tensor of the epilogue comes or goes, as in `gemm.Form`. `staged`: it may be
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
    stored, dtype = config.stored(problem.epilogue.gated), host.NUMERIC[problem.out_dtype]
    whole = not config.split and config.cluster_k == 1 and config.slots > 1
    if not whole or fetched.per_slot(config, stored, dtype) == 0:
        return False
    return (
        not config.pingpong
        or fetched.slots(config, stored, dtype) + config.in_flight <= config.slots
    )


def _pieces(problem: Problem, config: HopperConfig) -> int:
    return min(config.split_k, -(-problem.K // config.tile_k))


def _variant(
    rung: Rung, problem: Problem, crossed: bool, config: HopperConfig, fit: int
) -> Variant:
    """Of a problem as the kernel computes it. `fit`: clusters that surely run at the same time."""
    rows, columns = schedule.cluster_tiles(config, problem.M, problem.columns)
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
        crossed=crossed,
        batched=bool(problem.batch),
        ordered=rows * columns > fit or (once and items > 1 and config.gpc and not config.split),
        once=once,
        scaled=problem.scaled,
        function=transform.function(
            problem.epilogue.function, problem.out_dtype.itemsize, problem.K
        ),
        gated=problem.epilogue.gated,
        formats=problem.formats,
        **kinds,
    )
    pair = config.sharing == 2 and config.cluster_k == 1 and not (config.split or form.promoted)
    if pair and not (form.plain or form.once) and 2 * config.last * config.tile_k < problem.K:
        form = replace(form, in_turn=config.last > 0)
    return Variant(unscheduled(config), form, problem.dtype, problem.out_dtype, layout)


def precompile(rung: Rung, problem: Problem, config: HopperConfig, arch: int) -> None:
    """Compiles to disk what `plan` would load for a supported problem; needs no GPU, and loads
    nothing on one.
    """
    del arch
    variant = example_variant(rung, problem, config)
    host.keep(variant, lambda: compile_variant(rung.gemm, variant))


def example_variant(rung: Rung, problem: Problem, config: HopperConfig, sms: int = 132) -> Variant:
    """What a GPU of so many SMs would run."""
    turned, crossed = _turned(copies.aligned(problem), config)
    turned = _one_batch(turned)[0] if len(turned.batch) > 1 else turned
    return _variant(
        rung, turned, crossed, config, clusters.at_once(min(sms, config.sms or sms), config.cluster)
    )


def compile_variant(gemm: Any, variant: Variant, options: str = "") -> Any:
    """Compiles for sm_90a, with or without a GPU. Returns CuTe DSL's compiled function."""
    form = variant.form
    M, K, L = (cute.sym_int() for _ in range(3))
    N = cute.sym_int(divisibility=form.granule(variant.layout, variant.out_dtype.itemsize))
    columns = cute.sym_int() if form.gated else N  # of B

    def tensor(
        dtype: torch.dtype, rows: Any, columns: Any, pair: tuple[Any, Any], divisor: int
    ) -> Any:
        shape, strides = _given((rows, columns), form.crossed), _given(pair, form.crossed)
        if form.batched:
            shape, strides = (L, *shape), (cute.sym_int64(divisibility=divisor), *strides)
        align = divisor * dtype.itemsize
        return make_fake_tensor(host.NUMERIC[dtype], shape, strides, assumed_align=align)

    def operand(rows: Any, columns: Any, letter: str) -> Any:
        outer = cute.sym_int64(divisibility=8)
        return tensor(variant.dtype, rows, columns, (outer, 1) if letter == "n" else (1, outer), 8)

    a, b = operand(M, K, variant.layout[0]), operand(K, columns, variant.layout[1])

    def like_c(columns: Any, width: int) -> Any:
        """A matrix, or batch of them, of which so many elements of a row or column can be had at
        once.
        """
        outer = cute.sym_int64(divisibility=width)
        pair = (1, outer) if form.by_columns else (outer, 1)
        if width == 1 and not form.by_columns:
            pair = (outer, cute.sym_int64())
        return tensor(variant.out_dtype, M, columns, pair, width)

    def one_by_one(dtype: torch.dtype, shape: tuple[Any, ...], strides: Any) -> Any:
        return make_fake_tensor(host.NUMERIC[dtype], shape, strides, assumed_align=dtype.itemsize)

    def added(kind: str, columns: Any, dtype: torch.dtype) -> Any:
        match kind:
            case "":
                return None
            case "one":
                return one_by_one(dtype, (1,), (1,))
            case "staged":
                return like_c(columns, form.width)
            case "columns" | "pairs" | "rows":
                return one_by_one(dtype, (M if kind == "rows" else columns,), (1,))
        lead = (L,) * (kind == "batch")
        shape = (*lead, *_given((M, columns), form.crossed))
        return one_by_one(dtype, shape, tuple(cute.sym_int64() for _ in shape))

    c = like_c(N, form.width)
    dtypes = [torch.float32 if "scale" in name else variant.out_dtype for name in _ADDED]
    extra = [
        added(getattr(form, name), N if name == "residual" else columns, dtype)
        for name, dtype in zip(_ADDED, dtypes, strict=True)
    ]
    table = host.compact(cutlass.Int32, 1) if form.ordered else None
    split = variant.config.split
    sums = host.compact(cutlass.Float32, 1) if split else None
    counters = host.compact(cutlass.Int32, 1) if split else None
    scalars = cutlass.Int32(1), cutlass.Int32(1), cutlass.Float32(1.0), cutlass.Float32(0.0)
    gemm.kernel.set_name_prefix(variant.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    built = gemm(variant.config, form)
    with host.target_arch():
        return cute.compile(
            built,
            a,
            b,
            c,
            table,
            *extra,
            sums,
            counters,
            *scalars,
            stream,
            options=f"{host.OPTIONS} {options}",
        )


def artifact(rung: Rung, config: HopperConfig | None = None, **asked: Any) -> Artifact:
    """What `plan` would launch for aligned, row-major operands on a GPU of 132 SMs; needs none.
    Arguments and errors are those of `host.compiled`.
    """

    built = []

    def build(problem: Problem, config: HopperConfig, options: str) -> Any:
        built.append(example_variant(rung, problem, config))
        return compile_variant(rung.gemm, built[-1], options)

    made = host.compiled(
        "hopper.gemm",
        config or rung.config,
        functools.partial(unsupported, rung.gemm),
        build,
        **asked,
    )
    return replace(made, smem_bytes=shared_memory(rung.gemm, built[-1]))


def shared_memory(gemm: Any, variant: Variant) -> int:
    """Bytes of one CTA: of slabs of C only those that do not lie over the ring, narrow ones as they
    are.
    """
    config, form, dtype = variant.config, variant.form, host.NUMERIC[variant.out_dtype]
    stored = gemm(config, form).stored
    slab = 64 * epilogue.slab_columns(stored, dtype) * variant.out_dtype.itemsize
    own = slab if form.staged and not epilogue.over_ring(stored, dtype, form) else 0
    return config.shared_memory_bytes - config.consumers * config.store_buffers * (SLAB_BYTES - own)
