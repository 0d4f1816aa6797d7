"""Launches a compiled `hopper.gemm` with a caller's tensors.

This module determines the host's cost per call besides the launch itself. A launch is therefore a
closure over the results of planning, and rarely needed steps wrap it only where a call needs them.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from outblas.call import ffi_call
from outblas.call.ffi_call import FfiArgument, FfiCall, FfiView
from outblas.call.problem import Launch
from outblas.hopper.gemm import operand_copies, workspace
from outblas.hopper.gemm.canonical import ROWS, CanonicalProblem, TensorView, batch_offset
from outblas.hopper.gemm.schedule import TileSchedule
from outblas.hopper.gemm.variant import EPILOGUE_TENSORS, Variant, epilogue_tensor_view, tensor_view
from outblas.hopper.parts import tile_order
from outblas.hopper.parts.tma_views import view

# Where the tensors of the epilogue that an `FfiCall` can view stand among those of a call.
EPILOGUE_INDEX = {"addend": 2, "bias": 4, "residual": 5}
WITHOUT_GROUPS = (None, None, None)  # scatter_index, scatter_weights, a_index
_NOTHING = (None,) * len(EPILOGUE_TENSORS) + WITHOUT_GROUPS
Views = tuple[tuple[TensorView, TensorView, TensorView], tuple[TensorView | None, ...]]


@dataclass(frozen=True)
class Launcher:
    """A compiled kernel, and the views of a problem's tensors that it takes.

    run: the compiled kernel, which takes the arguments of `Gemm.__call__`.
    matrix_views: the views of A, B and C.
    epilogue_views: the view of each of `EPILOGUE_TENSORS`, None for those that the call does not
        have.
    """

    run: Callable[..., None]
    canonical: CanonicalProblem
    variant: Variant
    matrix_views: tuple[TensorView, TensorView, TensorView]
    epilogue_views: tuple[TensorView | None, ...]

    def bind(self, rows: int, schedule: TileSchedule, table: torch.Tensor | None) -> Launch:
        """Returns the function that launches the kernel for a number of rows, with this schedule
        and table of tiles.
        """
        canonical = self.canonical
        make = self._plain_launch if self.is_plain else self._launch
        launch = make(self.views(rows), schedule, table)
        if self.is_one_call:
            ffi_call.describe(launch, functools.partial(self._ffi_call, rows, schedule, table))
            return tile_order.when_copied(launch, table)
        if self.variant.traits.scale_out:
            launch = _with_bytes(launch)
        if canonical.loops:
            launch = self._over_batches(launch)
        if any(canonical.copies):
            launch = self._with_copies(launch)
        return tile_order.when_copied(launch, table)

    def views(self, rows: int) -> Views:
        """Returns the views of A, B and C, and those of `EPILOGUE_TENSORS`, with a number of rows
        in the place of `ROWS`.
        """

        def filled(view: TensorView) -> TensorView:
            if ROWS not in view.shape:
                return view
            return TensorView(tuple([rows if n == ROWS else n for n in view.shape]), view.strides)

        a, b, out = map(filled, self.matrix_views)
        epilogue = self.epilogue_views
        if not self.is_plain:
            epilogue = tuple(None if view is None else filled(view) for view in epilogue)
        return (a, b, out), epilogue

    @functools.cached_property
    def is_one_launch(self) -> bool:
        """Whether a call is one launch on the caller's own A, B and C, without a workspace."""
        canonical = self.canonical
        return not (canonical.loops or any(canonical.copies) or self.variant.config.split)

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether a call is one launch on the caller's own A, B and C, without an epilogue and a
        workspace.
        """
        return self.is_one_launch and bool(self.variant.traits.plain)

    @functools.cached_property
    def is_one_call(self) -> bool:
        """Whether a call is one launch with views of the caller's own tensors, none of them in
        fp8.
        """
        viewed = zip(EPILOGUE_TENSORS, self.epilogue_views, strict=True)
        is_viewed = all(how is None or name in EPILOGUE_INDEX for name, how in viewed)
        return self.is_one_launch and is_viewed and not self.canonical.given.formats

    def _ffi_call(self, rows: int, schedule: TileSchedule, table: torch.Tensor | None) -> FfiCall:
        """Returns what `_launch` calls, as data."""
        problem = self.canonical.launch
        (a, b, out), epilogue_views = self.views(rows)
        a_index, b_index = (1, 0) if self.canonical.transposed else (0, 1)
        epilogue: list[FfiArgument] = [
            None if how is None else FfiView(EPILOGUE_INDEX[name], problem.out_dtype, *how)
            for name, how in zip(EPILOGUE_TENSORS, epilogue_views, strict=True)
        ]
        return FfiCall(
            self.run,
            (
                FfiView(a_index, problem.dtype, *a),
                FfiView(b_index, problem.dtype, *b),
                FfiView(3, problem.out_dtype, *out),
                table,
                *epilogue,
                *WITHOUT_GROUPS,
                None,
                None,
                schedule.grid.partitions,
                schedule.clusters,
                "alpha" if problem.scaled else 1.0,
                "beta" if problem.scaled else 0.0,
            ),
        )

    def _plain_launch(
        self, views: Views, schedule: TileSchedule, table: torch.Tensor | None
    ) -> Launch:
        """Returns the launch for warm calls of matmul: `_launch` without its look-ups, in one
        frame.
        """
        run, swap, clusters = self.run, self.canonical.transposed, schedule.clusters
        (shape_a, strides_a), (shape_b, strides_b), (shape_out, strides_out) = views[0]
        nothing = _NOTHING

        def launch(
            a: torch.Tensor, b: torch.Tensor, c: Any, out: torch.Tensor, alpha: float, beta: float
        ) -> None:
            if swap:
                a, b = b, a
            run(
                view(a, shape_a, strides_a),
                view(b, shape_b, strides_b),
                view(out, shape_out, strides_out),
                table,
                *nothing,
                None,
                None,
                1,
                clusters,
                1.0,
                0.0,
            )

        return launch

    def _launch(self, views: Views, schedule: TileSchedule, table: torch.Tensor | None) -> Launch:
        """Returns the function for one launch. It takes operands in the caller's order, except
        where the host loops over batches: `_over_batches` has already swapped them then.
        """
        run, clusters = self.run, schedule.clusters
        swap = self.canonical.transposed and not self.canonical.loops
        (shape_a, strides_a), (shape_b, strides_b), (shape_out, strides_out) = views[0]
        epilogue_views, size = views[1], schedule.workspace
        partitions, scaled = schedule.grid.partitions, self.canonical.launch.scaled
        index = self.canonical.launch.device.index or 0

        def launch(
            a: Any, b: Any, c: Any, out: Any, alpha: float, beta: float, *extra: Any
        ) -> None:
            if swap:
                a, b = b, a
            if not scaled:
                alpha, beta = 1.0, 0.0
            space = (
                workspace.NO_WORKSPACE if size is None else workspace.get_workspace(index, *size)
            )
            tensors = (
                None if how is None else view(t, *how)
                for t, how in itertools.zip_longest((c, *extra), epilogue_views)
            )
            try:
                run(
                    view(a, shape_a, strides_a),
                    view(b, shape_b, strides_b),
                    view(out, shape_out, strides_out),
                    table,
                    *tensors,
                    *WITHOUT_GROUPS,
                    space.sums,
                    space.counters,
                    partitions,
                    clusters,
                    alpha,
                    beta,
                )
            finally:
                if space.done is not None:
                    space.launched()

        return launch

    def _over_batches(self, launch: Launch) -> Launch:
        """Returns a function that launches once for each index of the batch dimensions that a
        launch does not cover.
        """
        canonical, product = self.canonical, self.canonical.product
        indices, batch_dim = list(canonical.batch_indices()), canonical.batch_dim
        matrices = zip(self.matrix_views, (product.a, product.b, product.out), strict=True)
        of_epilogue = [tensor_view(product, name) for name in EPILOGUE_TENSORS]
        batch_strides = [() if found is None else found.strides for found in of_epilogue]
        ways = (*matrices, *zip(self.epilogue_views, batch_strides, strict=True))
        swap = canonical.transposed

        def launch_each(
            a: Any, b: Any, c: Any, out: Any, alpha: float, beta: float, *extra: Any
        ) -> None:
            if swap:
                a, b = b, a
            tensors = list(itertools.zip_longest((a, b, out, c, *extra), ways))
            for at in indices:
                a_, b_, out_, c_, *extra_ = (
                    how
                    and t.as_strided(
                        *how, t.storage_offset() + batch_offset(strides, at, batch_dim)
                    )
                    for t, (how, strides) in tensors
                )
                launch(a_, b_, c_, out_, alpha, beta, *extra_)

        return launch_each

    def _with_copies(self, launch: Launch) -> Launch:
        """Returns a function that first copies the operands that TMA cannot load."""
        given, aligned = self.canonical.given, self.canonical.aligned
        copy_a, copy_b = self.canonical.copies
        shape_a = (*given.batch, given.M, given.K)
        shape_b = (*given.batch, given.K, given.columns)

        def launch_with_copies(
            a: Any, b: Any, c: Any, out: Any, alpha: float, beta: float, *extra: Any
        ) -> None:
            if copy_a:
                a = operand_copies.copy(a, shape_a, given.a, aligned.a)
            if copy_b:
                b = operand_copies.copy(b, shape_b, given.b, aligned.b)
            launch(a, b, c, out, alpha, beta, *extra)

        return launch_with_copies


def _with_bytes(launch: Launch) -> Launch:
    """Returns a function that hands an output in fp8 to a launch as the bytes that it is made
    of.
    """

    def launch_with_bytes(
        a: Any, b: Any, c: Any, out: torch.Tensor, alpha: float, beta: float, *extra: Any
    ) -> None:
        launch(a, b, c, out.view(torch.uint8), alpha, beta, *extra)

    return launch_with_bytes


def launcher_of(
    run: Callable[..., None], canonical: CanonicalProblem, variant: Variant
) -> Launcher:
    """Returns the launcher of a compiled kernel for a problem, with no schedule yet."""
    views: tuple[TensorView | None, ...] = (None,) * len(EPILOGUE_TENSORS)
    if not variant.traits.plain:
        views = tuple(
            epilogue_tensor_view(canonical, variant.traits, name) for name in EPILOGUE_TENSORS
        )
    return Launcher(run, canonical, variant, canonical.matrix_views(), views)
