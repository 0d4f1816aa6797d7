"""Right kernels, in torch, and kernels each broken in one way that a GEMM under work breaks."""

import torch
from torch import Tensor

CHUNK = 16  # K of one tensor-core instruction


def right(a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float) -> None:
    _store(a.float() @ b.float(), c, out, alpha, beta)


def truncated_sum(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float
) -> None:
    """Right as far as tensor cores are: an exact step of K, then rounding towards zero."""
    total = torch.zeros(out.shape)
    for k in range(0, a.shape[-1], CHUNK):
        exact = total.double() + a[..., k : k + CHUNK].double() @ b[..., k : k + CHUNK, :].double()
        total = exact.float()
        total = torch.where(
            total.double().abs() > exact.abs(), torch.nextafter(total, total * 0), total
        )
    _store(total, c, out, alpha, beta)


def _store(product: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float) -> None:
    result = alpha * product
    if c is not None and beta:
        result = result + beta * c.float()
    out.copy_(result)


def bits_of(t: Tensor) -> Tensor:
    """The bits of a tensor's elements, as integers in the same memory."""
    return t.view(torch.int16 if t.itemsize == 2 else torch.int32)


def _matrix_at(t: Tensor, row: int, column: int, width: int) -> Tensor:
    """`width` elements of a row-major matrix's storage from a row and column that may lie outside
    it.
    """
    return t.as_strided((width,), (1,), t.storage_offset() + row * t.stride(-2) + column)


def one_unit_off(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float
) -> None:
    right(a, b, c, out, alpha, beta)
    bits_of(out)[..., -1, -1] += 1


def unwritten_tile(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float
) -> None:
    before = out[..., 16:32, :16].clone()
    right(a, b, c, out, alpha, beta)
    out[..., 16:32, :16] = before


def row_above(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float
) -> None:
    right(a, b, c, out, alpha, beta)
    _matrix_at(out, -1, 0, out.shape[-1]).fill_(1.0)


def row_below(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float
) -> None:
    right(a, b, c, out, alpha, beta)
    _matrix_at(out, out.shape[-2], 0, out.shape[-1]).fill_(1.0)


def nan_row_below(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float
) -> None:
    right(a, b, c, out, alpha, beta)
    _matrix_at(out, out.shape[-2], 0, out.shape[-1]).fill_(torch.nan)


def into_gap(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float
) -> None:
    right(a, b, c, out, alpha, beta)
    _matrix_at(out, 3, out.shape[-1], 2).fill_(1.0)


def lost_k_tail(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float
) -> None:
    whole = a.shape[-1] // CHUNK * CHUNK
    right(a[..., :whole], b[..., :whole, :], c, out, alpha, beta)


def wrong_batch_stride(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float
) -> None:
    packed = b.as_strided(b.shape, (b.shape[-1] * b.shape[-2], *b.stride()[1:]), b.storage_offset())
    right(a, packed, c, out, alpha, beta)


def no_batch_stride(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float
) -> None:
    right(a, b[:1], c, out, alpha, beta)


def bf16_accumulator(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float
) -> None:
    total = torch.zeros(out.shape)
    for k in range(0, a.shape[-1], CHUNK):
        total = (
            (total + a[..., k : k + CHUNK].float() @ b[..., k : k + CHUNK, :].float())
            .bfloat16()
            .float()
        )
    _store(total, c, out, alpha, beta)


def tf32(a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float) -> None:
    rounded = [((bits_of(t) + 0x1000) & ~0x1FFF).view(torch.float32) for t in (a, b)]
    right(rounded[0], rounded[1], c, out, alpha, beta)


def swapped_rows(b: Tensor) -> Tensor:
    """B as document 003's first ldmatrix brought it: lanes of .x4.trans step along N where they
    should along K, so that their windows of 8 elements overlap. Of each 16×16 fragment, (k, n) is
    the element (8 · (n // 8), k + n % 8).
    """
    rows, columns = (-(-size // CHUNK) * CHUNK for size in b.shape)
    padded = torch.zeros(rows, columns + 8, dtype=b.dtype)
    padded[: b.shape[0], : b.shape[1]] = b
    k, n = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    row, column = k // CHUNK * CHUNK + n % CHUNK // 8 * 8, n // CHUNK * CHUNK + k % CHUNK + n % 8
    return padded[row, column][: b.shape[0], : b.shape[1]]


def swapped_ldmatrix(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float
) -> None:
    right(a, swapped_rows(b), c, out, alpha, beta)


def swapped_ldmatrix_of_one_warp(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float
) -> None:
    """The warp that owns rows 16 to 31 and columns 32 to 47 has the fault."""
    right(a, b, c, out, alpha, beta)
    own = out[16:32, 32:48]
    right(
        a[16:32],
        swapped_rows(b)[:, 32:48],
        None if c is None else c[16:32, 32:48],
        own,
        alpha,
        beta,
    )


def transposed_operand(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float
) -> None:
    right(a, b.mT, c, out, alpha, beta)


def transposed_result(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float
) -> None:
    right(a, b, c, out.mT, alpha, beta)


def reads_past_k(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float
) -> None:
    """Overhangs K by one column of A and masks only B."""
    over = a.as_strided((*a.shape[:-1], a.shape[-1] + 1), a.stride(), a.storage_offset())
    masked = torch.cat([b, torch.zeros_like(b[..., :1, :])], dim=-2)
    right(over, masked, c, out, alpha, beta)


def overwrites_input(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float
) -> None:
    right(a, b, c, out, alpha, beta)
    b[..., 2, 3] += 1


def overwrites_input_first(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float
) -> None:
    b.copy_(b.mT.clone())
    right(a, b, c, out, alpha, beta)


def reads_c_at_beta_0(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float
) -> None:
    assert c is not None
    out.copy_(alpha * (a.float() @ b.float()) + beta * c.float())


def scales_addend_by_alpha(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float
) -> None:
    right(a, b, c, out, alpha, alpha * beta)


def skips_zeros(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float
) -> None:
    """Takes 0 · Inf for 0."""
    terms = a.float()[..., :, :, None] * b.float()[..., None, :, :]
    terms[(b == 0)[..., None, :, :].expand_as(terms)] = 0
    _store(terms.sum(-2), c, out, alpha, beta)


def clamps(a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float) -> None:
    right(a, b, c, out, alpha, beta)
    out.clamp_(-1e4, 1e4)


class Wavering:
    """Right, but for the last bit of one element in every other call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self, a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, alpha: float, beta: float
    ) -> None:
        right(a, b, c, out, alpha, beta)
        bits_of(out)[..., 1, 2] += self.calls % 2
        self.calls += 1
