"""The portable kernel on the CPU, through Triton's interpreter, against float64 products of small
integers.
"""

import mmap

import pytest
import torch
from support.covering import covering

import outblas
from outblas.call.problem import problem
from outblas.device import grid
from outblas.device.grid import chunks_of
from outblas.kernels.portable import Config, plan

pytestmark = pytest.mark.interpreter

SMALL = Config(16, 16, 16, 2, 1, 1)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}


# ---- operands, and what a product of them has to be
def integers(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def pair(M: int, N: int, K: int, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor]:
    return integers(M, K, dtype=dtype), integers(K, N, dtype=dtype, seed=1)


def stored(t: torch.Tensor, letter: str) -> torch.Tensor:
    """The same matrix, stored as rows ("n"), columns ("t"), or with gaps both ways ("s")."""
    if letter == "n":
        return t.contiguous()
    if letter == "t":
        return t.mT.contiguous().mT
    gaps = torch.full(
        (*t.shape[:-2], 3 * t.shape[-2], 2 * t.shape[-1]), float("nan"), dtype=t.dtype
    )
    gaps[..., 1::3, 1::2] = t
    return gaps[..., 1::3, 1::2]


def check(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    alpha: float = 1,
    beta: float = 0,
    config: Config | None = SMALL,
    launches: int = 1,
) -> torch.Tensor:
    """Plans once, launches into NaN, compares each time with the float64 result rounded once."""
    exact = alpha * (a.double() @ b.double())
    if c is not None and beta != 0:
        exact = exact + beta * c.double()
    out = torch.empty(exact.shape, dtype=a.dtype) if out is None else out
    addend = c if beta != 0 else None
    launch = plan(problem(a, b, out, addend, scaled=addend is not None or alpha != 1), config)
    for _ in range(launches):
        out.fill_(float("nan"))
        launch(a, b, c, out, alpha, beta)
        assert torch.equal(out, exact.to(out.dtype))
    return out


# ---- shapes, configs, layouts
@pytest.mark.parametrize(
    ("shape", "dtype", "out_dtype"),
    covering(
        {
            "one element": (1, 1, 1),
            "one tile": (16, 16, 16),
            "edges": (17, 15, 33),
            "a row": (1, 40, 7),
            "a column": (40, 1, 16),
            "whole tiles": (48, 32, 80),
        },
        DTYPES,
        {"into its dtype": None, "into fp32": FP32},
        of=2,
        possible=lambda shape, dtype, out_dtype: dtype != out_dtype,
    ),
)
def test_a_product_of_any_shape_is_right_in_either_dtype_of_output(
    shape: tuple[int, int, int], dtype: torch.dtype, out_dtype: torch.dtype | None
) -> None:
    check(*pair(*shape, dtype), out=torch.empty(shape[:2], dtype=out_dtype or dtype))


@pytest.mark.parametrize(
    ("config", "launches"),
    [(Config(32, 16, 32, 1, 4, 2), 1), (Config(16, 64, 16, 8, 2, 3), 1), (None, 2)],
    ids=str,
)
def test_a_config_of_any_tile_is_right_in_every_launch(
    config: Config | None, launches: int
) -> None:
    check(*pair(70, 90, 40), config=config, launches=launches)


@pytest.mark.parametrize(
    ("layout", "out_letter"), [("nn", "s"), ("nt", "n"), ("tn", "t"), ("tt", "n"), ("ss", "s")]
)
def test_operands_and_outputs_lie_by_rows_by_columns_or_with_gaps(
    layout: str, out_letter: str
) -> None:
    """Gaps between the elements of an output are not written."""
    a, b = map(stored, pair(20, 18, 35, FP16), layout)
    out = stored(torch.empty(20, 18, dtype=FP16), out_letter)

    check(a, b, out=out)

    if out_letter == "s":
        assert int(out._base.isnan().sum()) == out._base.numel() - out.numel()


VIEWS = {
    "one row, expanded": (integers(1, 24).expand(19, 24), integers(24, 21, seed=1)),
    "one term, expanded": (integers(19, 1).expand(19, 24), integers(1, 21, seed=1).expand(24, 21)),
    "vector, matrix": (integers(24), integers(24, 21, seed=1)),
    # A vector B lies along a column of a matrix, with a stride.
    "matrix, vector": (integers(19, 24), integers(24, 4, seed=1)[:, 1]),
    "vector, vector": (integers(24), integers(24, 4, seed=1)[:, 1]),
    "batch, vector": (integers(3, 19, 24), integers(24, 4, seed=1)[:, 1]),
    "vector, batch": (integers(24), integers(3, 24, 21, seed=1)),
}


@pytest.mark.parametrize(("a", "b"), VIEWS.values(), ids=VIEWS)
def test_operands_may_be_expanded_or_vectors(a: torch.Tensor, b: torch.Tensor) -> None:
    check(a, b)


# ---- batches
@pytest.mark.parametrize(
    ("batch_a", "batch_b", "dims", "launches"),
    [
        pytest.param((5,), (), 0, 1, id="of A, which is one matrix of more rows"),
        pytest.param((), (5,), 1, 1, id="of B"),
        pytest.param((2, 1), (2, 3), 2, 1, id="two dimensions, A broadcast"),
        pytest.param((2, 3, 1), (1, 3, 2), 3, 2, id="three dimensions"),
        pytest.param((2, 1, 2, 1), (1, 3, 1, 2), 4, 4, id="four dimensions"),
    ],
)
def test_a_batch_takes_a_launch_for_each_index_of_its_outer_dimensions(
    batch_a: tuple[int, ...], batch_b: tuple[int, ...], dims: int, launches: int
) -> None:
    a, b = integers(*batch_a, 17, 20), integers(*batch_b, 20, 9, seed=1)

    given = problem(a, b, check(a, b))

    assert len(given.batch) == dims
    assert len(chunks_of(given, SMALL)) == launches


LIMITS = {"20 programs": (20, 2), "4": (4, 8)}


@pytest.mark.parametrize(("limit", "launches"), LIMITS.values(), ids=LIMITS)
def test_a_batch_is_cut_where_a_grid_would_be_too_large(
    monkeypatch: pytest.MonkeyPatch, limit: int, launches: int
) -> None:
    """The parts of 4 x 3 products of two tiles each make the whole."""
    monkeypatch.setattr(grid, "MAX_PROGRAMS", limit)
    a, b = integers(4, 1, 17, 20), integers(4, 3, 20, 9, seed=1)

    chunks = chunks_of(problem(a, b, check(a, b)), SMALL)

    assert max(chunk.programs for chunk in chunks) <= limit
    assert sum(chunk.programs for chunk in chunks) == 4 * 3 * 2
    assert len(chunks) == launches


# ---- alpha, beta and C
@pytest.mark.parametrize(
    ("scales", "letter", "dtype"),
    covering(
        {"1, 1": (1, 1), "0.5, -2": (0.5, -2), "2, 0": (2, 0)},
        {"a matrix": "n", "a matrix by columns": "t", "a row": ""},
        DTYPES,
        of=2,
    ),
)
def test_alpha_and_beta_scale_the_product_and_c(
    scales: tuple[float, float], letter: str, dtype: torch.dtype
) -> None:
    alpha, beta = scales
    c = integers(18, 33, dtype=dtype, seed=2)

    check(*pair(18, 33, 20, dtype), c=stored(c, letter) if letter else c[0], alpha=alpha, beta=beta)


def test_c_may_be_the_output() -> None:
    a, b = pair(18, 33, 20, FP32)
    c = integers(18, 33, dtype=FP32, seed=2)
    expected = (a.double() @ b.double() + 2 * c.double()).float()

    plan(problem(a, b, c, c, scaled=True), SMALL)(a, b, c, c, 1, 2)

    assert torch.equal(c, expected)


# ---- numbers
@pytest.mark.parametrize(
    ("terms", "rounded"), [(129, 1160), (133, 1200), (-129, -1160), (-133, -1200)]
)
def test_sums_beyond_the_output_precision_round_to_nearest(terms: int, rounded: int) -> None:
    """bf16 holds every eighth number between 1024 and 2048; the sum is of so many nines. fp32 holds
    it.
    """
    b = torch.full((abs(terms), 4), 3.0, dtype=BF16)
    a = b.t() if terms > 0 else -b.t()

    assert check(a, b)[0, 0] == rounded
    assert check(a, b, out=torch.empty(4, 4))[0, 0] == 9 * terms


def test_a_k_block_wider_than_its_strides() -> None:
    """64 columns of A lie 2³² elements apart, each 2²⁶ + 1: in 32 bits the second k-block would
    start at element 64.
    """
    stride, K = 2**26 + 1, 65
    storage = reserved(stride * (K - 1) + 8)
    a = storage.as_strided((4, K), (1, stride))
    a.fill_(1)
    storage[64:68] = 5
    b = torch.ones(K, 4, dtype=FP16)

    out = outblas.matmul(a, b, kernel="portable")

    assert out.eq(K).all()


def reserved(elements: int) -> torch.Tensor:
    """fp16 elements whose memory is taken where it is written, and nowhere else."""
    no_reserve = 0x4000  # MAP_NORESERVE, which the oldest Python does not name
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, 2 * elements, flags=flags), dtype=FP16)
