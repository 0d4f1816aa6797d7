"""C of `hopper.gemm` on its way through shared memory: as `staging`, for tiles of any width, C by rows or by columns.

A slab has 64 rows, and as many columns as a row of 128 bytes holds or the narrowest tile has. Where slabs do not divide
a tile's width the last overlaps its neighbour: both write the same values there, and one TMA box serves every width.
The contract of a slab's memory is `staging`'s.

An addend or a residual that lies as C does is fetched the same way, by TMA into the slab in which C will leave: those
of a tile's first round while its products run. Each round has a barrier of its own, whose phase is the tile's number.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.utils import hopper_helpers

from . import staging, transform
from .config import WARPGROUP

ALL = 8  # the named barrier of all consumers

_ROWS = warpgroup.SmemLayoutAtomKind
_BY_BYTES = {128: _ROWS.K_SW128, 64: _ROWS.K_SW64, 32: _ROWS.K_SW32, 16: _ROWS.K_INTER}


def slab_columns(config, dtype) -> int:
    """Columns of a slab: a power of two of 16-byte pieces."""
    columns: int = 1024 // dtype.width
    while columns > min(config.widths):
        columns //= 2
    return columns


def starts(width: int, columns: int) -> list[int]:
    """The first column of each slab of a tile so many columns wide."""
    found = list(range(0, width - columns + 1, columns))
    return found if width % columns == 0 else [*found, width - columns]


def places(config, dtype, width: int) -> list[tuple[int, int]]:
    """Row group and first column of each slab that a consumer stores of a tile so many columns wide."""
    tall = config.tile_m // (64 * config.sharing)
    return [(i, start) for i in range(tall) for start in starts(width, slab_columns(config, dtype))]


def most_slabs(config, dtype) -> int:
    """Slabs of one consumer's part of the widest tile."""
    return max(len(places(config, dtype, width)) for width in config.widths)


def rounds(config, dtype) -> int:
    """Rounds in which one consumer stores the widest tile."""
    return -(-most_slabs(config, dtype) // config.store_buffers)


def buffers(config, dtype, form) -> int:
    """Slabs of one consumer in shared memory. A CTA that has one tile lays all of them over the ring, whose slots it
    has read by then; they fit unless K's slices are few and C's elements wide. Not where they are written twice.
    """
    slabs = most_slabs(config, dtype)
    room = slabs * config.consumers * 64 * slab_columns(config, dtype) * dtype.width // 8
    fits = room <= config.slots * config.slot_bytes and not form.fetched and form.aux != "staged"
    return slabs if form.once and fits else config.store_buffers


def over_ring(config, dtype, form):
    return buffers(config, dtype, form) > config.store_buffers


def maps(config, c, aux, fetched, form):
    """Host: atoms and tensors of the TMA store of C, of x if it leaves so, and of the loads of what is fetched (or
    None), and the slabs' layout (64, columns, BUFFER of all consumers).
    """
    dtype = c.element_type
    columns = slab_columns(config, dtype)
    kind = _ROWS.MN_SW128 if form.by_columns else _BY_BYTES[columns * dtype.width // 8]
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    held = buffers(config, dtype, form) * config.consumers
    slabs = cute.tile_to_shape(atom, (64, columns, held), (0, 1, 2))
    one = cute.tile_to_shape(atom, (64, columns), (0, 1))

    def made(operation, tensor):
        return cpasync.make_tiled_tma_atom(operation, tensor, one, (64, columns))

    store = cpasync.CopyBulkTensorTileS2GOp()
    stored = made(store, c)
    written = made(store, aux) if form.aux == "staged" else (None, None)
    read = made(cpasync.CopyBulkTensorTileG2SOp(), fetched) if form.fetched else (None, None)
    return *stored, *written, *read, slabs


def place(k, config, smem, made, ring):
    """Adds the slabs of all consumers to `k`, in shared memory of their own or in that of the ring's slots, `ring`."""
    k.tma_c, k.gmem_c, k.tma_aux, k.gmem_aux, k.tma_fetched, k.gmem_fetched, slabs = made
    dtype = k.mC.element_type
    if over_ring(config, dtype, k.form):
        k.sC = cute.make_tensor(cute.recast_ptr(ring, slabs.inner, dtype), slabs.outer)
    else:
        k.sC = smem.allocate_tensor(dtype, slabs.outer, 1024, swizzle=slabs.inner)


def become_writer(k, config, consumer, by_columns: bool):
    """Adds to `k` how one consumer's threads write its slabs, stmatrix for 16 bits, pairs for 32, and how they read
    what lies there: two neighbours of a row, or one element, at a time.
    """
    dtype = k.mC.element_type
    columns = slab_columns(config, dtype)
    universal = cute.nvgpu.CopyUniversalOp()
    pairs = cute.make_copy_atom(universal, dtype, num_bits_per_copy=2 * dtype.width)
    written = pairs
    if dtype.width == 16:
        written = cute.make_copy_atom(warp.StMatrix8x8x16bOp(by_columns, 4 if columns % 16 == 0 else 2), dtype)
    read = cute.make_copy_atom(universal, dtype, num_bits_per_copy=dtype.width) if by_columns else pairs
    major = cute.nvgpu.OperandMajorMode.K
    kind = k.operand_type
    mma = hopper_helpers.make_trivial_tiled_mma(kind, kind, major, major, Float32, (1, 1, 1), (64, columns))
    k.to_shared = cute.make_tiled_copy_S(written, cute.make_tiled_copy_C_atom(written, mma))
    k.from_shared = cute.make_tiled_copy_S(read, cute.make_tiled_copy_C_atom(pairs, mma))
    thread, reader = (copy.get_slice(k.tidx % WARPGROUP) for copy in (k.to_shared, k.from_shared))
    k.slabs = cute.local_tile(k.sC, (64, columns, buffers(config, dtype, k.form)), (0, 0, consumer))
    k.tSsC = thread.partition_D(k.slabs)  # (CPY, CPY_M, CPY_N, BUFFER)
    k.tSsR = reader.partition_D(k.slabs)
    k.slab_registers, k.read_registers = (cute.shape(each.partition_S(k.slabs))[:3] for each in (thread, reader))


@cute.jit
def init(k, config: cutlass.Constexpr):
    """One thread, before anyone waits."""
    for i in cutlass.range_constexpr(config.consumers * rounds(config, k.mC.element_type)):
        cute.arch.mbarrier_init(k.fetched_bars + i, 1)


@cute.jit
def fetch(k, config: cutlass.Constexpr, work, width: cutlass.Constexpr, number: cutlass.Constexpr):
    """A consumer's first warp: slabs of round `number` that are fetched, into buffers that nothing reads any more."""
    dtype, together = k.mC.element_type, config.store_buffers
    columns = slab_columns(config, dtype)
    batch = places(config, dtype, width)[number * together :][:together]
    landed = k.fetched_bars + (k.consumer * rounds(config, dtype) + number)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(landed, len(batch) * 64 * columns * dtype.width // 8)
    for i in cutlass.range_constexpr(len(batch)):
        sC, gC = slab_of(k, config, k.gmem_fetched, work, batch[i], columns, 0)
        tRsR, tRgR = cpasync.tma_partition(k.tma_fetched, 0, cute.make_layout(1), sC, gC)
        cute.copy(k.tma_fetched, tRgR, tRsR[None, i], tma_bar_ptr=landed)


@cute.jit
def begin(k, config: cutlass.Constexpr, work, width: cutlass.Constexpr):
    """Every consumer, before a tile's products: asks for the first slabs that are fetched, once C has left them."""
    if cutlass.const_expr(k.form.fetched != "" and k.form.aux != "staged"):
        issuer = k.warp % 4 == 0
        if issuer:
            staging.finish()
            fetch(k, config, work, width, 0)


@cute.jit
def settle(k, config: cutlass.Constexpr):
    """Every consumer, its products done: where C will lie over the ring, waits until all of them have read it. Not in
    `store`, for consumers that share a tile may not all come there: whoever adds the pieces of K last does.
    """
    if cutlass.const_expr(config.sharing > 1 and over_ring(config, k.mC.element_type, k.form)):
        cute.arch.barrier(barrier_id=ALL, number_of_threads=config.sharing * WARPGROUP)


@cute.jit
def store(k, config: cutlass.Constexpr, work, width: cutlass.Constexpr, turn):
    """One consumer: its rows of the tile, x first where a call asks for it. `turn`: the number of the tile."""
    form = k.form
    if cutlass.const_expr(form.aux == "staged"):
        for half in cutlass.range_constexpr(2 if form.gated else 1):
            store_pass(k, config, work, width, turn, "aux", half)
        if cutlass.const_expr(form.fetched != ""):
            issuer = k.warp % 4 == 0
            if issuer:
                staging.finish()
                fetch(k, config, work, width, 0)
    store_pass(k, config, work, width, turn, "out", 0)


@cute.jit
def store_pass(k, config: cutlass.Constexpr, work, width: cutlass.Constexpr, turn, what: cutlass.Constexpr,
               half: cutlass.Constexpr):  # fmt: skip
    """A tile in rounds of as many slabs as there are buffers; a round leaves as one group of stores. Slabs over the
    ring are written once, after `settle`.
    """
    dtype, together = k.mC.element_type, config.store_buffers
    columns, slabs = slab_columns(config, dtype), places(config, dtype, width)
    fresh = over_ring(config, dtype, k.form)
    added = what == "out" and k.form.fetched != ""
    tma, gmem = (k.tma_c, k.gmem_c) if what == "out" else (k.tma_aux, k.gmem_aux)
    issuer = k.warp % 4 == 0
    for first in cutlass.range_constexpr(0, len(slabs), together):
        batch, buffer = slabs[first : first + together], first if fresh else 0
        if cutlass.const_expr(added):
            landed = k.fetched_bars + (k.consumer * rounds(config, dtype) + first // together)
            cute.arch.mbarrier_wait(landed, turn & 1)
        elif cutlass.const_expr(not fresh):
            if issuer:
                staging.finish()
            cute.arch.barrier(barrier_id=k.consumer + 1, number_of_threads=WARPGROUP)
        for i in cutlass.range_constexpr(len(batch)):
            slab = rounded(k, config, work, batch[i], what, half, i if added else None)
            cute.copy(k.to_shared, slab, k.tSsC[None, None, None, buffer + i])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=k.consumer + 1, number_of_threads=WARPGROUP)
        if issuer:
            for i in cutlass.range_constexpr(len(batch)):
                sC, gC = slab_of(k, config, gmem, work, batch[i], columns, half)
                tCsC, tCgC = cpasync.tma_partition(tma, 0, cute.make_layout(1), sC, gC)
                cute.copy(tma, tCsC[None, buffer + i], tCgC)
            cute.arch.cp_async_bulk_commit_group()
            if cutlass.const_expr(added and first + together < len(slabs)):
                staging.finish()
                fetch(k, config, work, width, first // together + 1)
    if cutlass.const_expr(added):
        skip(k, config, len(slabs))


@cute.jit
def skip(k, config: cutlass.Constexpr, slabs: cutlass.Constexpr):
    """Rounds that a narrow tile has not: their barriers count tiles too."""
    every = rounds(config, k.mC.element_type)
    for number in cutlass.range_constexpr(-(-slabs // config.store_buffers), every):
        if k.tidx % WARPGROUP == 0:
            cute.arch.mbarrier_arrive(k.fetched_bars + (k.consumer * every + number))


def slab_of(k, config, tensor, work, slab, columns: int, half: int):
    """The consumer's buffers, and a slab's place in C, in what is fetched, or in (a half of) x."""
    row = work.m * config.tile_m + (slab[0] * config.sharing + k.share) * 64
    gC = tile_of(k, tensor, row, work.column + slab[1], work.matrix, (64, columns), half)
    return cute.group_modes(k.slabs, 0, 2), cute.group_modes(gC, 0, 2)


def tile_of(k, tensor, row, column, matrix, shape, half: int = 0):
    """The part of C, or of a tensor of its shape, from (row, column) of one matrix on; of x's, in a half of columns."""
    rest = (half,) * (cute.rank(tensor) - 2 - k.batched) + (matrix,) * k.batched
    return cute.local_tile(cute.domain_offset((row, column, *(0 for _ in rest)), tensor), shape, (0, 0, *rest))


@cute.jit
def rounded(k, config: cutlass.Constexpr, work, slab: cutlass.Constexpr, what: cutlass.Constexpr,
            half: cutlass.Constexpr, buffer: cutlass.Constexpr):  # fmt: skip
    """A slab in C's dtype: of the output, with what was fetched into a buffer, or of x."""
    i, start = slab
    fetched = None
    if cutlass.const_expr(buffer is not None):
        fetched = cute.make_rmem_tensor(k.read_registers, k.mC.element_type)
        cute.copy(k.from_shared, k.tSsR[None, None, None, buffer], fetched)
    if cutlass.const_expr(what == "aux"):
        exact = transform.sums(k, config, work, i, start, k.slab_registers, half)
    else:
        exact = transform.outputs(k, config, work, i, start, k.slab_registers, fetched)
    made = cute.make_rmem_tensor(k.slab_registers, k.mC.element_type)
    made.store(exact.load().to(k.mC.element_type))
    return made
