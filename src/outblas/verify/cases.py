"""The calls that verification makes. A `Case` describes one call completely; generators yield sets
of them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from outblas.base.shapes import LAYOUTS

ADDENDS = ("", "matrix", "row", "column", "out")
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Case:
    """out[*batch, M, N] = alpha · A[*batch_a, M, K] B[*batch_b, K, N] + beta · C.

    `layout` has two letters, A then B: n is stored row-major, t transposed; `out_layout` has one
    such letter. `offset`: elements added to every base address. `pad`: extra elements in the
    leading stride of every matrix. `expand`: "a" or "b" stores one row of that operand and repeats
    it with stride 0. `addend`: C is an M×N "matrix", an (N,) "row", an (M, 1) "column", or "out"
    itself; with beta = 0 its values are NaN and must be ignored. `tf32`: the caller allows fp32
    operands to be rounded to tf32.
    """

    M: int
    N: int
    K: int
    dtype: torch.dtype
    out_dtype: torch.dtype | None = None
    layout: str = "nn"
    batch_a: tuple[int, ...] = ()
    batch_b: tuple[int, ...] = ()
    offset: int = 0
    pad: int = 0
    expand: str = ""
    out_layout: str = "n"
    addend: str = ""
    alpha: float = 1.0
    beta: float = 0.0
    tf32: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        choices: dict[str, tuple[Any, ...]] = {
            "dtype": tuple(_SHORT),
            "out_dtype": (None, self.dtype, torch.float32),
            "layout": LAYOUTS,
            "expand": ("", "a", "b"),
            "out_layout": ("n", "t"),
            "addend": ADDENDS,
        }
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                expected = ", ".join(map(repr, allowed))
                raise ValueError(f"{name} is {value!r}, expected one of {expected}")
        for name in ("M", "N", "K", "offset", "pad"):
            if (size := getattr(self, name)) < 0:
                raise ValueError(f"{name} is {size}, expected at least 0")
        if self.addend and self.batch:
            raise ValueError(
                f"addend is {self.addend!r} with batch {self.batch}, expected no batch"
            )
        if not self.addend and (self.alpha, self.beta) != (1.0, 0.0):
            raise ValueError(
                f"alpha is {self.alpha} and beta {self.beta} without an addend, expected 1 and 0"
            )
        if self.tf32 and self.dtype != torch.float32:
            raise ValueError(f"tf32 with dtype {self.dtype}, expected torch.float32")
        if self.addend == "out" and (self.beta == 0 or self.result_dtype != self.dtype):
            raise ValueError(
                "addend is 'out', expected beta other than 0 and an out of the operands' dtype"
            )

    @property
    def batch(self) -> tuple[int, ...]:
        """The batch dimensions of the product."""
        if self.batch_a == self.batch_b:  # the first call of the other function takes seconds
            return self.batch_a
        return tuple(torch.broadcast_shapes(self.batch_a, self.batch_b))

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of the product."""
        return self.out_dtype or self.dtype

    def __str__(self) -> str:
        """A name fit for a pytest id: 65x127x40-bf16-nt-offset1."""
        parts = [f"{self.M}x{self.N}x{self.K}", _SHORT[self.dtype], self.layout]
        if self.batch_a or self.batch_b:
            parts.append(f"batch_{_sizes(self.batch_a)}_{_sizes(self.batch_b)}")
        if self.result_dtype != self.dtype:
            parts.append(f"to_{_SHORT[self.result_dtype]}")
        if self.addend:
            parts.append(f"{self.addend}_{self.alpha:g}_{self.beta:g}")
        for name in ("offset", "pad", "expand", "seed"):
            if value := getattr(self, name):
                parts.append(f"{name}{value}")
        parts += ["out_t"] * (self.out_layout == "t") + ["tf32"] * self.tf32
        return "-".join(parts)


def _sizes(batch: tuple[int, ...]) -> str:
    return "x".join(map(str, batch)) or "none"


def shapes(tile_m: int = 128, tile_n: int = 128, tile_k: int = 64) -> tuple[Shape, ...]:
    """Returns (M, N, K) around a tile: empty, 1, tile ± 1, primes, K tails, skinny shapes, and more
    tiles than any GPU has SMs.
    """
    m, n, k = tile_m, tile_n, tile_k
    empty = [(0, n, k), (m, 0, k), (m, n, 0), (0, 0, 0), (1, 1, 0)]
    rows, columns = [(1, tile - 1, tile, tile + 1, prime_after(2 * tile)) for tile in (m, n)]
    edges = list(product(rows, columns, [k]))
    depths = (1, 2, 7, 8, 16, k - 1, k + 1, 3 * k - 8, prime_after(4 * k), 8 * k)
    tails = [shape for depth in depths for shape in ((m, n, depth), (m + 1, n - 1, depth))]
    skinny = [
        (1, 1, 4099),
        (3, 5, 8191),
        (1, 4099, k),
        (4099, 1, k + 1),
        (16, 2048, 512),
        (2048, 16, 512),
    ]
    many = [(17 * m, 13 * n, 2 * k), (9 * m + 1, 31 * n - 1, k + 8)]
    return tuple(dict.fromkeys((*empty, (1, 1, 1), *edges, *tails, *skinny, *many)))


def full(
    dtype: torch.dtype, tile_m: int = 128, tile_n: int = 128, tile_k: int = 64
) -> Iterator[Case]:
    """Yields about three hundred cases: every shape in every layout, and every option on a ragged
    and on an even shape.
    """
    for (M, N, K), layout in product(shapes(tile_m, tile_n, tile_k), LAYOUTS):
        yield Case(M, N, K, dtype, layout=layout)
    ragged, even = (tile_m + 1, tile_n - 1, tile_k + 9), (tile_m, 2 * tile_n, 2 * tile_k)
    for (M, N, K), layouts in ((ragged, LAYOUTS), (even, LAYOUTS[:2])):
        for layout, option in product(layouts, _options(dtype)):
            yield replace(Case(M, N, K, dtype, layout=layout), **option)


def quick(
    dtype: torch.dtype, tile_m: int = 32, tile_n: int = 32, tile_k: int = 32
) -> Iterator[Case]:
    """Yields about thirty small cases, for interpreters and first checks; the layouts alternate."""
    m, n, k = tile_m, tile_n, tile_k
    sizes: Iterable[Shape] = (
        (0, n, k),
        (m, 0, k),
        (m, n, 0),
        (1, 1, 1),
        (1, n + 1, k),
        (m + 1, 1, k + 1),
        (m, n, k),
        (m - 1, n + 1, k - 1),
        (m + 1, n - 1, prime_after(3 * k)),
        (2 * m, prime_after(2 * n), 2 * k),
        (prime_after(3 * m), n + 2, 7),
    )
    for i, (M, N, K) in enumerate(sizes):
        yield Case(M, N, K, dtype, layout=LAYOUTS[i % 4])
    for i, option in enumerate(_options(dtype)):
        yield replace(Case(m + 5, 2 * n - 3, k + 9, dtype, layout=LAYOUTS[i % 4]), **option)


def _options(dtype: torch.dtype) -> list[dict[str, Any]]:
    """Returns the options besides shapes and layouts: each alone first, then some together."""
    aligned = 16 // dtype.itemsize
    return [
        {"offset": 1},
        {"offset": aligned},
        {"pad": 1},
        {"pad": aligned},
        {"expand": "a"},
        {"expand": "b"},
        {"out_layout": "t"},
        {"out_layout": "t", "pad": 3, "offset": 1},
        {"batch_a": (3,), "batch_b": (3,), "pad": 1},
        {"batch_a": (3,)},
        {"batch_b": (3,)},
        {"batch_a": (2, 1), "batch_b": (3,), "offset": 1},
        {"addend": "matrix", "alpha": 2.0, "beta": -0.5},
        {"addend": "row", "beta": 1.0},
        {"addend": "column", "alpha": -0.5, "beta": 2.0, "out_layout": "t"},
        {"addend": "out", "beta": 3.0, "pad": 2},
        {"addend": "matrix", "alpha": 0.5},
        {"tf32": True} if dtype == torch.float32 else {"out_dtype": torch.float32},
    ]


def prime_after(n: int) -> int:
    """The smallest prime above n."""
    return next(
        p
        for p in range(n + 1, 2 * n + 3)
        if p > 1 and all(p % d for d in range(2, int(p**0.5) + 1))
    )
