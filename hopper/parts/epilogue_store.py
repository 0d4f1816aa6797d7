"""Stores C through shared memory. A consumer writes epilogue subtiles of 64 rows and 128 bytes, and
TMA stores them.

Contract of a subtile's buffer, for each consumer warpgroup:

1. The warpgroup's issuing thread (the first lane of its first warp) waits until the last TMA store
   from this buffer has read it.
2. All 128 threads synchronise at the warpgroup's named barrier, then write the buffer.
3. Each thread fences its writes for the async proxy, and all synchronise at the barrier again.
4. The issuing thread starts the TMA store.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from outblas.hopper.parts import roles
from outblas.hopper.parts.phase_clock import STORE, PhaseTimers, lap


class StoreOperand(NamedTuple):
    """C in the form that the host prepares: the atom and the tensor of its TMA store, and the
    layout of all consumers' buffers, (64 · consumers, columns, BUFFER).
    """

    atom: Any
    tensor: Any
    layout: Any


@dataclass(frozen=True)
class EpilogueSmem:
    """The shared memory through which C is stored. sC: (64 · consumers, columns, BUFFER); gC: C in
    subtiles, (64, columns, RestM, RestN).
    """

    atom: Any
    sC: Any
    gC: Any
    dtype: Any


@dataclass(frozen=True)
class HalfTileWriter:
    """The tensors with which a thread of a consumer writes its warpgroup's subtiles.

    `copy` moves registers of shape `fragment_shape` to tSsC, (CPY, CPY_M, CPY_N, BUFFER). TMA moves
    a buffer of tCsC, (TMA, BUFFER), to a subtile of tCgC, (TMA, RestM, RestN).
    """

    copy: Any
    tSsC: Any
    fragment_shape: Any
    atom: Any
    tCsC: Any
    tCgC: Any
    dtype: Any


def subtile_shape(dtype):
    """Returns the rows and columns of a subtile."""
    return 64, 1024 // dtype.width


def make_operand(config, c) -> StoreOperand:
    """Host: prepares the arguments from which the kernel stores C."""
    shape = subtile_shape(c.element_type)
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, c.element_type)
    buffers = cute.tile_to_shape(
        atom, (64 * config.consumers, shape[1], config.epilogue_stages), (0, 1, 2)
    )
    one = cute.tile_to_shape(atom, shape, (0, 1))
    store, tensor = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), c, one, shape)
    return StoreOperand(store, tensor, buffers)


def alloc_smem(smem, operand, dtype) -> EpilogueSmem:
    """Allocates the buffers of all consumers in shared memory."""
    atom, mC, layout = operand
    sC = smem.allocate_tensor(dtype, layout.outer, 1024, swizzle=layout.inner)
    return EpilogueSmem(atom, sC, cute.local_tile(mC, subtile_shape(dtype), (None, None)), dtype)


def make_writer(config, epilogue: EpilogueSmem, consumer) -> HalfTileWriter:
    """Returns the writer of one consumer thread: it uses stmatrix for 16-bit outputs, 64-bit stores
    of pairs for 32-bit ones.
    """
    dtype, sC = epilogue.dtype, epilogue.sC
    if dtype.width == 16:
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
    else:
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=64)
    mma = consumer.fragments.mma.accumulating
    copy = cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(atom, mma))
    thread = copy.get_slice(consumer.thread_in_tile)
    tSsC = thread.partition_D(sC)  # (CPY, CPY_M, CPY_N, BUFFER)
    fragment_shape = cute.shape(thread.partition_S(sC))[:3]
    own = cute.local_tile(
        sC, (*subtile_shape(dtype), config.epilogue_stages), (consumer.index, 0, 0)
    )
    tCsC, tCgC = cpasync.tma_partition(
        epilogue.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(own, 0, 2),
        cute.group_modes(epilogue.gC, 0, 2),
    )
    return HalfTileWriter(copy, tSsC, fragment_shape, epilogue.atom, tCsC, tCgC, dtype)


@cute.jit
def store(consumer, config: cutlass.Constexpr, m, n, timers: PhaseTimers | None):
    """One consumer: stores its rows of tile (m, n) in rounds. A round fills every buffer with a
    subtile and stores them as one bulk group.
    """
    writer = consumer.writer
    rows = config.tile_m // (64 * config.consumers)
    columns = config.tile_n // subtile_shape(writer.dtype)[1]
    subtiles = [(i, j) for i in range(rows) for j in range(columns)]
    issuer = consumer.context.warp % 4 == 0
    for first in cutlass.range_constexpr(0, len(subtiles), config.epilogue_stages):
        batch = subtiles[first : first + config.epilogue_stages]
        if issuer:
            wait_stores_read()
        roles.sync_consumer(consumer.index)

        for buffer in cutlass.range_constexpr(len(batch)):
            rounded = round_subtile(consumer, config, *batch[buffer])
            cute.copy(writer.copy, rounded, writer.tSsC[None, None, None, buffer])
        cute.arch.fence_proxy("async.shared", space="cta")
        roles.sync_consumer(consumer.index)

        if issuer:
            for buffer in cutlass.range_constexpr(len(batch)):
                i, j = batch[buffer]
                row = (m * rows + i) * config.consumers + consumer.index
                target = writer.tCgC[None, row, n * columns + j]
                cute.copy(writer.atom, writer.tCsC[None, buffer], target)
            cute.arch.cp_async_bulk_commit_group()
    lap(timers, STORE)


@cute.jit
def round_subtile(consumer, config: cutlass.Constexpr, i: cutlass.Constexpr, j: cutlass.Constexpr):
    """Rounds subtile (i, j) of the accumulator to C's dtype. Accumulators have the layout ((2, 2,
    V), MMA_M, MMA_N), and a thread holds half an accumulator per column of 64 rows.
    """
    writer, acc, mma_n = consumer.writer, consumer.fragments.acc, config.instruction_n
    column = j * subtile_shape(writer.dtype)[1]
    rows = config.tile_m // (64 * config.consumers)
    first = column % mma_n // 2 + mma_n // 2 * (i + rows * (column // mma_n))
    exact = cute.make_rmem_tensor(writer.fragment_shape, Float32)
    for v in cutlass.range_constexpr(cute.size(exact)):
        exact[v] = acc[first + v]
    rounded = cute.make_rmem_tensor(writer.fragment_shape, writer.dtype)
    rounded.store(exact.load().to(writer.dtype))
    return rounded


@cute.jit
def wait_stores_read():
    """Waits until every TMA store that this thread issued has read its buffer."""
    cute.arch.cp_async_bulk_wait_group(0, read=True)
