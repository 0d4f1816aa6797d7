"""Which elements of a tile the threads of a consumer copy to which rows of the result: the source
of `row_stores` on Python's integers, every thread of a warpgroup one after the other.
"""

import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from support.own_source import run_source

from outblas.hopper.gemm import row_stores

M, N = 300, 200
WARPGROUP, COLUMNS, VECTOR = 128, 64, 8
TILE_M = 128


class Part(NamedTuple):
    """The part of a thread of 64 rows: `at` gives the coordinates of a vector, or the vector."""

    thread: int

    def __getitem__(self, index: Any) -> Any:
        _, m, n = index
        across = COLUMNS // VECTOR
        row = m * (WARPGROUP // across) + self.thread // across
        return row, n * COLUMNS + self.thread % across * VECTOR


class TiledCopy:
    """The copy of 16 bytes a thread that the source asks for."""

    def __init__(self, threads: tuple[tuple[int, int], tuple[int, int]], values: Any):
        across = COLUMNS // VECTOR
        assert threads == ((WARPGROUP // across, across), (across, 1))
        assert values == ((1, VECTOR), None)

    def get_slice(self, thread: int) -> SimpleNamespace:
        return SimpleNamespace(partition_S=lambda _: Part(thread))


class Target:
    """A matrix, or one of two halves of a matrix, that is stored."""

    layout = iterator = None

    def __init__(self, name: str, halves: int = 1):
        self.name, self.halves = name, halves

    def __getitem__(self, at: tuple[None, None, int]) -> "Target":
        return Target(f"{self.name}, half {at[2]}")


class Stores(NamedTuple):
    aux: bool = False
    half: int = 0
    subtiles: tuple[tuple[int, int], ...] = ((0, 0), (0, 64), (1, 0), (1, 64))


def copies(
    stores: Stores, number: int, *, end_row: int, index: Any = None, aux: Target | None = None
) -> dict[tuple[str, int, int], tuple[int, int]]:
    """Returns, for each vector that consumer 1 of 2 stores, the matrix, the row and the column, and
    from where in its subtile it comes. The tile begins at row 100 and column 64.
    """
    stored: dict[tuple[str, int, int], tuple[int, int]] = {}

    def copy(atom: Any, source: Any, target: Any) -> None:
        if isinstance(target, Register):
            target.origin = source
        else:
            key = (into[-1], *target)
            assert key not in stored, f"{key} is stored twice"
            stored[key] = source.origin

    class Register:
        layout, origin = "layout", (0, 0)

    into: list[str] = []

    def crd2idx(at: tuple[int, int], layout: Any) -> tuple[int, int]:
        return at

    class Iterator:
        memspace = "global"

        def __init__(self, name: str, at: Any = None):
            self.name, self.at = name, at

        def __add__(self, at: Any) -> "Iterator":
            into.append(self.name)
            return Iterator(self.name, at)

        def toint(self) -> "Iterator":
            return self

    Target.iterator = property(lambda self: Iterator(self.name))  # type: ignore[assignment]
    cute = {
        "make_layout": lambda shape, stride=None: (shape, stride),
        "make_copy_atom": lambda *_, **__: None,
        "nvgpu": SimpleNamespace(CopyUniversalOp=lambda: None),
        "make_tiled_copy_tv": lambda atom, threads, values: TiledCopy(threads, values),
        "make_identity_tensor": lambda shape: None,
        "size": lambda part, mode: {1: 64 * COLUMNS // VECTOR // WARPGROUP, 2: 1}[mode[0]],
        "make_rmem_tensor_like": lambda _: Register(),
        "copy": copy,
        "crd2idx": crd2idx,
        "make_ptr": lambda dtype, at, space, assumed_align: at,
        "make_tensor": lambda at, layout: at.at,
        "rank": lambda target: 1 + target.halves,
    }
    functions = run_source(
        row_stores, cute=cute, Int32=int, EpilogueTile=object, WARPGROUP=WARPGROUP
    )

    for thread in range(WARPGROUP):
        tile = SimpleNamespace(
            epilogue=SimpleNamespace(
                config=SimpleNamespace(tile_m=TILE_M, warpgroups_per_tile=2),
                dtype=SimpleNamespace(width=16),
                extents=(M, N),
                mC=Target("C"),
                tensors=SimpleNamespace(aux=aux, scatter_index=index),
            ),
            consumer=SimpleNamespace(
                warpgroup_in_tile=1,
                writer=SimpleNamespace(columns=COLUMNS, buffers={(None, None, 0): None}),
                context=SimpleNamespace(thread=WARPGROUP + thread),
            ),
            work=SimpleNamespace(first_row=lambda tile_m: 100, column=64, end_row=end_row),
        )
        functions["store_rows"](tile, stores, number, 0)
    return stored


def vectors(name: str, rows: range, columns: range, first: tuple[int, int]) -> dict[Any, Any]:
    """What stores all vectors of a subtile's part that begins at `first`, in its own rows."""
    return {
        (name, row, column): (row - first[0], column - first[1])
        for row, column in itertools.product(rows, columns[::VECTOR])
    }


def test_rows_before_the_end_of_the_group_are_stored() -> None:
    """Consumer 1 has rows 64 to 127 of the tile."""
    assert copies(Stores(), 0, end_row=203) == vectors(
        "C", range(164, 203), range(64, 128), (164, 64)
    )


@pytest.mark.parametrize("end_row", [101, 164])
def test_nothing_is_stored_of_rows_that_are_all_the_next_groups(end_row: int) -> None:
    assert copies(Stores(), 0, end_row=end_row) == {}


def test_columns_end_with_the_result() -> None:
    assert copies(Stores(), 1, end_row=300) == vectors(
        "C", range(164, 228), range(128, 192), (164, 128)
    )
    beyond = Stores(subtiles=((0, 96),))
    assert copies(beyond, 0, end_row=300) == vectors(
        "C", range(164, 228), range(160, 200), (164, 160)
    )


def test_rows_are_stored_where_their_index_says() -> None:
    index = [(7 * row + 3) % M for row in range(M)]

    found = copies(Stores(), 0, end_row=203, index=index)

    own = vectors("C", range(164, 203), range(64, 128), (164, 64))
    assert found == {("C", index[row], column): at for (_, row, column), at in own.items()}


def test_an_index_outside_of_the_result_stores_nothing() -> None:
    index = list(range(M))
    index[170], index[180], index[190] = -1, M, -(1 << 31)

    found = copies(Stores(), 0, end_row=203, index=index)

    assert {row for _, row, _ in found} == set(range(164, 203)) - {170, 180, 190}


@pytest.mark.parametrize("index", [None, list(range(M))[::-1]], ids=["in order", "scattered"])
@pytest.mark.parametrize("half", [0, 1])
def test_x_stays_in_the_order_of_groups(half: int, index: Any) -> None:
    stores = Stores(aux=True, half=half)

    found = copies(stores, 0, end_row=203, index=index, aux=Target("aux", 2))

    name = f"aux, half {half}"
    assert found == vectors(name, range(164, 203), range(64, 128), (164, 64))
