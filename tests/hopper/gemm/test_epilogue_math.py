"""What the production kernel makes of sums: its epilogue's own source on Python's numbers, for
every thread of a tile.

The DSL's part is played by stand-ins: registers are lists, tensors arrays, and what the DSL would
trace is computed. Values are small integers, so that every order of the sums gives the same.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.own_source import run_source

from outblas.hopper.gemm import epilogue_math as source
from outblas.hopper.gemm.tile_scheduler import KPartition, WorkTile

WARPGROUP = 128
M, N = 200, 56  # C ends inside of the tile that begins at (128, 32)
TILE_M, TILE_N = 128, 32
PART_N = 16  # columns that are computed at a time
ROW_TILE, COLUMN, MATRIX = 1, 32, 1
MATRICES = 2
ALPHA, BETA = 2.0, 3.0


class Number(float):
    """A value in memory."""

    def to(self, dtype):
        return float(self)


class Registers(list):
    """The registers of a thread, or a vector of them."""

    element_type = "fp32"


class Memory:
    """A tensor: it is read by coordinates, or from a pointer on."""

    def __init__(self, values):
        self.values = values

    def __getitem__(self, at):
        return Number(self.values[at])

    @property
    def iterator(self):
        return Pointer(self.values, 0)


class Pointer(NamedTuple):
    values: Any
    at: int

    def __add__(self, steps):
        return Pointer(self.values, self.at + steps)


@pytest.fixture(scope="module")
def epilogue_math():
    """The module's own functions over the stand-ins."""
    functions = SimpleNamespace(
        fma=lambda x, y, z: x * y + z,
        add=lambda x, y, rounding: x + y,
        RoundingMode=SimpleNamespace(NEAREST_EVEN=None),
    )
    cute = {
        "make_rmem_tensor": lambda shape, dtype: Registers([0.0] * shape[0]),
        "size": len,
        "math": functions,
    }
    types = ("BFloat16", "Float16", "Uint32", "Consumer", "Cta", "CtaEpilogue", "WorkTile")
    made = run_source(
        source,
        cute=cute,
        cutlass={"Float32": float},
        Float32=float,
        WARPGROUP=WARPGROUP,
        **dict.fromkeys(types, object),
    )
    made["load_vector"] = lambda pointer, count: Registers(
        map(Number, pointer.values[pointer.at : pointer.at + count])
    )
    return SimpleNamespace(**made)


@dataclass(frozen=True)
class Call:
    """A call with these tensors in its epilogue. `kinds`: how each is read, as `KernelTraits`
    says. Values differ from element to element, and from tensor to tensor.
    """

    function: str = ""
    gated: bool = False
    scaled: bool = False
    formats: str = ""
    kinds: tuple[tuple[str, str], ...] = ()
    scatters: bool = False
    weighted: bool = False

    @property
    def scatter_index(self) -> np.ndarray:
        """Where rows are stored; some of them nowhere."""
        index = np.random.default_rng(1).permutation(M)
        index[[3, 150]] = -5, M + 7
        return index

    @property
    def scatter_weights(self) -> np.ndarray:
        return np.random.default_rng(2).integers(-3, 4, M).astype(float)

    @property
    def columns(self) -> int:
        """The columns of B."""
        return 2 * N if self.gated else N

    def array(self, name: str) -> np.ndarray:
        """The values of a tensor, as it lies in memory."""
        kind = dict(self.kinds)[name]
        columns = N if name == "residual" else self.columns
        shapes = {
            "one": (1,),
            "rows": (M,),
            "columns": (columns,),
            "pairs": (columns,),
            "matrix": (M, columns),
            "scattered": (M, columns),
            "batch": (M, columns, MATRICES),
            "staged": (M, columns),
        }
        draw = np.random.default_rng(len(name))
        return draw.integers(-4, 5, shapes[kind]).astype(float)

    def broadcast(self, name: str) -> np.ndarray:
        """The values of a tensor for every element of a matrix."""
        kind, values = dict(self.kinds)[name], self.array(name)
        if kind == "batch":
            return values[..., MATRIX]
        if kind == "scattered":
            return values[np.clip(self.scatter_index, 0, M - 1)]
        shape = (M, N if name == "residual" else self.columns)
        return np.broadcast_to(values[:, None] if kind == "rows" else values, shape)

    @property
    def products(self) -> np.ndarray:
        """A B, of all columns of B."""
        return np.random.default_rng(0).integers(-9, 10, (M, self.columns)).astype(float)

    @property
    def outputs(self) -> np.ndarray:
        """What the call has to give: f(alpha · A B + beta · C + bias) + residual."""
        names = dict(self.kinds)
        x = self.products
        for scale in ("scale_a", "scale_b"):
            x = x * self.broadcast(scale) if scale in names else x
        x = x * ALPHA if self.scaled else x
        x = x + BETA * self.broadcast("addend") if "addend" in names else x
        x = x + self.broadcast("bias") if "bias" in names else x
        gate = x[:, :N] if self.gated else x
        y = np.maximum(gate, 0) if self.function == "relu" else gate
        y = y * x[:, N:] if self.gated else y
        y = y * self.scatter_weights[:, None] if self.weighted else y
        return y + self.broadcast("residual") if "residual" in names else y

    def epilogue(self) -> SimpleNamespace:
        """What the kernel reads of the call."""
        kinds = dict(self.kinds)
        names = ("addend", "bias", "residual", "aux", "scale_a", "scale_b")
        tensors = {name: Memory(self.array(name)) if name in kinds else None for name in names}
        traits = {name: kinds.get(name, "") for name in names}
        return SimpleNamespace(
            config=SimpleNamespace(
                tile_m=TILE_M, tile_n=TILE_N, mma_n=0, warpgroups_per_tile=1, cluster_k=1
            ),
            traits=SimpleNamespace(
                function=self.function,
                gated=self.gated,
                scaled=self.scaled,
                formats=self.formats,
                batched=False,
                **traits,
            ),
            tensors=SimpleNamespace(
                alpha=ALPHA,
                beta=BETA,
                scatter_index=self.scatter_index if self.scatters else None,
                scatter_weights=Memory(self.scatter_weights) if self.weighted else None,
                **tensors,
            ),
            extents=(M, N),
            dtype="fp32",
        )


def coordinates(thread: int) -> list[tuple[int, int]]:
    """Row and column of C of each value that a thread has of a tile, as wgmma leaves them:
    ((2, 2, V), MMA_M), four of every eight columns.
    """
    warp, lane = thread // 32, thread % 32
    return [
        (
            ROW_TILE * TILE_M + 64 * group + 16 * warp + lane // 4 + 8 * row,
            COLUMN + 8 * eight + lane % 4 * 2 + neighbour,
        )
        for group in range(TILE_M // 64)
        for eight in range(TILE_N // 8)
        for row in range(2)
        for neighbour in range(2)
    ]


def sums(call: Call, thread: int) -> Registers:
    """The accumulators of a thread: products of its elements, zeros past the edge of C. The halves
    of gated pairs lie one after the other in each group of 64 rows.
    """
    products, held = call.products, Registers()
    own = coordinates(thread)
    per_group = len(own) // (TILE_M // 64)
    for first in range(0, len(own), per_group):
        for half in range(2 if call.gated else 1):
            for row, column in own[first : first + per_group]:
                inside = row < M and column < N
                held.append(products[row, column + half * N] if inside else 0.0)
    return held


def tile_of(epilogue_math, call: Call, thread: int, acc: Registers):
    """The tile of a thread, as the kernel hands it to its epilogue."""
    consumer = SimpleNamespace(
        index=0,
        warpgroup_in_tile=0,
        writer=SimpleNamespace(columns=PART_N),
        context=SimpleNamespace(thread=thread),
    )
    work = WorkTile(ROW_TILE, COLUMN, 0, MATRIX, KPartition(0, 1, 0, 1, 0, 0))
    width = TILE_N * (2 if call.gated else 1)
    return epilogue_math.EpilogueTile(call.epilogue(), consumer, work, acc, width)


CALLS = {
    "alpha and beta": Call(scaled=True, kinds=(("addend", "matrix"),)),
    "an addend of a batch": Call(scaled=True, kinds=(("addend", "batch"),)),
    "bias of columns": Call(kinds=(("bias", "columns"),)),
    "bias of columns in pairs": Call(kinds=(("bias", "pairs"),)),
    "bias of rows": Call(kinds=(("bias", "rows"),)),
    "activation": Call("relu"),
    "activation before the residual": Call("relu", kinds=(("residual", "matrix"),)),
    "addend, bias, activation, residual": Call(
        "relu",
        scaled=True,
        kinds=(("addend", "matrix"), ("bias", "pairs"), ("residual", "matrix")),
    ),
    "gated pairs": Call("relu", gated=True, kinds=(("bias", "pairs"),)),
    "gated pairs and a residual": Call(
        "relu", gated=True, kinds=(("bias", "columns"), ("residual", "matrix"))
    ),
    "a weight of each row": Call("relu", scatters=True, weighted=True),
    "a weight before the residual of the row where it is stored": Call(
        "relu",
        gated=True,
        kinds=(("bias", "pairs"), ("residual", "scattered")),
        scatters=True,
        weighted=True,
    ),
    "scales of rows and columns": Call(
        formats="e4m3 e4m3", kinds=(("scale_a", "rows"), ("scale_b", "columns"))
    ),
    "scales of all elements": Call(
        formats="e4m3 e4m3", kinds=(("scale_a", "one"), ("scale_b", "one"), ("bias", "pairs"))
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_thread_turns_its_sums_into_outputs(epilogue_math, name: str) -> None:
    call = CALLS[name]
    expected = call.outputs

    for thread in range(WARPGROUP):
        operations = epilogue_math.EpilogueOps(
            tile_of(epilogue_math, call, thread, sums(call, thread))
        )
        outputs = epilogue_math.output_registers(operations, TILE_N)

        for at, found in zip(coordinates(thread), outputs, strict=True):
            if at[0] < M and at[1] < N:
                assert found == expected[at], f"thread {thread}, C{list(at)}"


@pytest.mark.parametrize(
    "call",
    [
        Call("relu", scaled=True, kinds=(("addend", "staged"),)),
        Call("relu", kinds=(("residual", "staged"),)),
    ],
    ids=["addend", "residual"],
)
def test_what_comes_through_shared_memory_is_added_in_its_turn(epilogue_math, call: Call) -> None:
    ((source, _),) = call.kinds
    thread = 37
    inside = [at for at in coordinates(thread) if at[0] < M and at[1] < N]
    held = Registers(call.products[at] * (ALPHA if call.scaled else 1.0) for at in inside)
    if source == "residual":  # the activation came before
        held = Registers(max(value, 0.0) for value in held)
    landed = Registers(Number(call.array(source)[at]) for at in inside)

    epilogue_math.add_source(call.epilogue(), held, lambda: landed)

    assert held == [call.outputs[at] for at in inside]


class Written(dict[Any, float]):
    """A tensor to which elements are written, each once."""

    def __setitem__(self, at: Any, value: float) -> None:
        assert at not in self, f"{at} is written twice"
        super().__setitem__(at, value)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("end_row", [None, 150])
def test_x_is_written_up_to_the_end_of_the_result_or_of_the_group(
    epilogue_math, gated: bool, end_row: int | None
) -> None:
    call = Call(gated=gated, kinds=(("aux", "matrix"),))
    written = Written()

    for thread in range(WARPGROUP):
        held = Registers(map(Number, sums(call, thread)))
        tile = tile_of(epilogue_math, call, thread, held)
        tile.epilogue.tensors.aux = written
        if end_row is not None:  # a work tile of a grouped product
            work = SimpleNamespace(
                first_row=tile.work.first_row, column=COLUMN, matrix=0, end_row=end_row
            )
            tile = replace(tile, work=work)
        epilogue_math.store_aux(epilogue_math.EpilogueOps(tile))

    rows, halves = range(TILE_M, end_row or M), range(2 if gated else 1)
    places = [(r, c + half * N) for r in rows for half in halves for c in range(COLUMN, N)]
    assert written == {at: call.products[at] for at in places}
