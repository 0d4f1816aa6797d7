"""Which bytes the gathering warps of hopper.grouped copy, and where to: the source of
`gather` on Python's integers, beside the layout that TMA writes.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from support.own_source import run_source
from support.tile_arithmetic import Word

from outblas.hopper.gemm import gather

A, STAGES = 2**40, 2**14  # addresses


class Copied(NamedTuple):
    target: int
    source: int
    size: int


def on_integers(copied: list[Copied]) -> dict[str, Any]:
    """The functions of the module's own source. What they copy is appended to `copied`."""

    def inline_ptx(text: str, read_only_args: list[int]) -> None:
        assert text == "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};"
        copied.append(Copied(*map(int, read_only_args)))

    cute = {
        "arch": SimpleNamespace(inline_ptx=inline_ptx),
        "make_rmem_tensor": lambda shape, dtype: [Word(-1)] * shape[0],
    }
    sizes = {name: getattr(gather, name) for name in ("THREADS", "ACROSS", "VECTOR", "TILE_K")}
    functions = "rows_per_thread", "row_offsets", "copy_k_tile"
    return run_source(gather, *functions, cute=cute, Int32=Word, Int64=int, Cta=Any, **sizes)


def pointer(address: int) -> SimpleNamespace:
    return SimpleNamespace(toint=lambda: address)


class Index(list[Word]):
    @property
    def shape(self) -> tuple[int]:
        return (len(self),)

    def __getitem__(self, at: Any) -> Any:
        assert 0 <= at < len(self), f"index[{at}] is read"
        return super().__getitem__(at)


def copies(
    index: list[int], rows: int, K: int, stride: int, row: int, k_tile: int, stage: int, tile_m: int
) -> list[Copied]:
    """What all threads copy for one k tile of a tile that begins at `row`."""
    copied: list[Copied] = []
    functions = on_integers(copied)
    a = SimpleNamespace(shape=(Word(rows), Word(K)), stride=(stride, 1), iterator=pointer(A))
    params = SimpleNamespace(a=a, a_index=Index(map(Word, index)))
    for thread in range(64, 64 + gather.THREADS):
        cta: Any = SimpleNamespace(
            config=SimpleNamespace(tile_m=tile_m),
            context=SimpleNamespace(thread=thread),
            scheduler=SimpleNamespace(params=params),
            loads=SimpleNamespace(stages=pointer(STAGES)),
        )
        offsets = functions["row_offsets"](cta, SimpleNamespace(row=Word(row)))
        functions["copy_k_tile"](cta, offsets, Word(k_tile), Word(stage))
    return copied


@pytest.mark.parametrize("tile_m", [64, 128])
@pytest.mark.parametrize(
    ("K", "k_tile", "stage"), [(192, 1, 0), (200, 3, 2), (72, 2, 1), (67, 1, 3), (5, 0, 0)]
)
def test_a_k_tile_lies_as_tma_would_write_it(K: int, k_tile: int, stage: int, tile_m: int) -> None:
    """Rows of 128 bytes, whose pieces of 16 bytes are exchanged by an XOR with the row modulo 8.
    Behind the end of K there are zeros: so many bytes fewer are read.
    """
    rows, row, stride = 500, 37, -(-K // 8) * 8 + 8
    index = [(m * 7919) % rows for m in range(180)]

    copied = copies(index, rows, K, stride, row, k_tile, stage, tile_m)

    found = {each.target: each for each in copied}
    assert len(found) == len(copied) == tile_m * 8
    for r in range(tile_m):
        chosen = index[min(row + r, len(index) - 1)]
        for piece in range(8):
            target = STAGES + stage * tile_m * 128 + r * 128 + (piece ^ r % 8) * 16
            k = k_tile * 64 + piece * 8
            each = found[target]
            assert each.size == min(max(K - k, 0) * 2, 16)
            if each.size:
                assert each.source == A + (chosen * stride + k) * 2
            begin = A + chosen * stride * 2
            assert each.source % 16 == 0
            assert begin <= each.source < begin + K * 2


def test_an_index_outside_of_a_is_its_first_or_last_row() -> None:
    copied = copies([-5, 10**9, -(2**31), 2**31 - 1] * 16, 90, 64, 64, 0, 0, 0, 64)

    rows = {(each.source - A) // 128 for each in copied}
    assert rows == {0, 89}


def test_the_longest_row_fits_32_bits() -> None:
    K = 2**31 - 8

    first = copies([0] * 64, 1, K, K, 0, 0, 0, 64)
    last = copies([0] * 64, 1, K, K, 0, K // 64, 0, 64)

    assert {each.size for each in first} == {16}
    assert {each.size for each in last} == {0, 16}


def test_rows_that_span_as_much_as_is_allowed_fit_32_bits() -> None:
    rows, stride = 2**20, 2**14 - 8  # the last row begins just before 2**34 elements

    copied = copies([rows - 1] * 64, rows, 64, stride, 0, 0, 0, 64)

    assert max(each.source for each in copied) == A + ((rows - 1) * stride + 56) * 2
