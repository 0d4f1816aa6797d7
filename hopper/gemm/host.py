"""The host side of `hopper.gemm`: what it takes, how operands are turned, compiling, launching.

A C stored by columns is computed as C^T = B^T A^T, and so is one whose config says `swap`; the two
undo each other. An operand that TMA cannot stride over is copied first (`copies`).
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...core.artifact import Artifact
from ...core.problem import Launch, Problem
from ...device import clusters
from ..core import bounds, compile, host, tile_order
from ..core.config import (
    WARPGROUP,
    HopperConfig,
    gated_reason,
    promoted_reason,
)
from . import (
    gpc_placement,
    heuristic,
    operand_copies,
    search_space,
    workspace,
)
from .canonical import (
    _given,
    _offset,
    _one_batch,
    _operand_strides,
    _out_strides,
    _pieces,
    _shapes,
    _turned,
)
from .compile import compile_variant, shared_memory
from .variant import _ADDED, Rung, _added, _variant, _view, example_variant

MOST_SLICES = bounds.MOST_SLICES


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
            search_space.space, gemm, rung.config, functools.partial(unsupported, gemm)
        ),
        operand_copies.remarks,
    )


def unsupported(gemm: Any, problem: Problem, config: HopperConfig | None = None) -> str | None:
    """Why the kernel cannot take this problem: what it needs, and what it was given. It takes any
    strides.
    """
    if config is not None and (reason := gemm.invalid_reason(config)):
        return f"config: {reason}"
    if reason := bounds.extents(problem):
        return reason
    if problem.epilogue.gated and operand_copies.aligned(problem).b[-1] == 1 and problem.N % 8:
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
        config = heuristic.config(problem, tile_order.clusters(problem.device, 0, 1), rung.config)
        if reason := _refused(problem, config):
            raise ValueError(f"kernel 'hopper.gemm': {reason}")
    straight, made, (copy_a, copy_b) = (
        problem,
        operand_copies.aligned(problem),
        operand_copies.copied(problem),
    )
    problem, crossed = _turned(made, config)
    outer = problem
    lead = problem.batch
    if len(lead) > 1:
        problem, inner = _one_batch(problem)
    rows, columns = tile_order.cluster_tiles(config, problem.M, problem.columns)
    tiles = rows * columns * (problem.batch[0] if problem.batch else 1)
    fit = tile_order.clusters(problem.device, config.sms, config.cluster)
    pieces = _pieces(problem, config)
    sms = tile_order.clusters(problem.device, config.sms, 1)
    variant = _variant(
        rung, problem, crossed, config, min(fit, clusters.at_once(sms, config.cluster))
    )
    launched = min(fit, tiles * (-(-problem.K // config.tile_k) if config.stream_k else pieces))
    if not config.split:
        launched = tile_order.level(launched, tiles)
    # Before the compile, which takes seconds: a capture of a CUDA graph ends here.
    table, placed = None, None
    if variant.form.ordered and variant.form.single_wave:
        placed = gpc_placement.Placed(config, tiles // columns, columns, problem.device)
        table = placed.table
    elif variant.form.ordered:
        # Only of "consecutive" does the number of clusters change more than where rows of the table
        # end.
        apart = launched if config.order == "consecutive" else fit
        table = tile_order.table(config, rows, columns, apart, problem.device).view(-1)
    run = compile.load(variant, lambda: compile_variant(rung.gemm, variant))
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
        space = workspace.NOTHING if sums is None else workspace.borrow(index, *sums)
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
            a = operand_copies.copy(a, shape, straight.a, made.a)
        if copy_b:
            shape = (*straight.batch, straight.K, straight.columns)
            b = operand_copies.copy(b, shape, straight.b, made.b)
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
        return gpc_placement.watched(prepared, placed, renew) if placed else prepared

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

    return gpc_placement.watched(launch, placed, renew) if placed else launch


def precompile(rung: Rung, problem: Problem, config: HopperConfig, arch: int) -> None:
    """Compiles to disk what `plan` would load for a supported problem; needs no GPU, and loads
    nothing on one.
    """
    del arch
    variant = example_variant(rung, problem, config)
    compile.keep(variant, lambda: compile_variant(rung.gemm, variant))


def artifact(rung: Rung, config: HopperConfig | None = None, **asked: Any) -> Artifact:
    """What `plan` would launch for aligned, row-major operands on a GPU of 132 SMs; needs none.
    Arguments and errors are those of `host.compiled`.
    """

    built = []

    def build(problem: Problem, config: HopperConfig, options: str) -> Any:
        built.append(example_variant(rung, problem, config))
        return compile_variant(rung.gemm, built[-1], options)

    made = compile.compiled(
        "hopper.gemm",
        config or rung.config,
        functools.partial(unsupported, rung.gemm),
        build,
        **asked,
    )
    return replace(made, smem_bytes=shared_memory(rung.gemm, built[-1]))
