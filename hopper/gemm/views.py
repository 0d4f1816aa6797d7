"""The views that `hopper.gemm` takes of its tensors."""

import cutlass.cute as cute


def tile_of(tensor, batched: bool, row, column, matrix, shape, half: int = 0):
    """Returns the part of C, or of a tensor of its shape, that begins at (row, column) of one
    matrix. A tensor of gated pairs has one more mode, which selects the `half` of the columns.
    """
    rest = (half,) * (cute.rank(tensor) - 2 - batched) + (matrix,) * batched
    return cute.local_tile(
        cute.domain_offset((row, column, *(0 for _ in rest)), tensor), shape, (0, 0, *rest)
    )


def split_gated(tensor, mode: int, columns):
    """Views a tensor (M, N, L), whose `mode` has 2 · `columns` elements, as a tensor whose third
    mode selects one half of them.
    """
    shape, stride = list(tensor.layout.shape), list(tensor.layout.stride)
    shape[mode : mode + 1], shape[2:2] = [columns], [2]
    stride[2:2] = [stride[mode] * columns]
    return cute.make_tensor(tensor.iterator, cute.make_layout(tuple(shape), stride=tuple(stride)))


def batch_last(tensor, transposed: bool):
    """Views a tensor of the host, (L, M, N) or (M, N), as (M, N, L) or (M, N); exchanges its rows
    and columns if they are `transposed`.
    """
    batch = list(range(cute.rank(tensor) - 2))
    pair = [len(batch), len(batch) + 1]
    order = (pair[::-1] if transposed else pair) + batch
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=order))
