"""`scaled_mm` with scales of blocks: exactly, because the scales are powers of two and the operands
small integers; which recipe a shape means; what is refused.
"""

from typing import Any

import pytest
import torch
from support.fp8 import (
    BY_ROW,
    E4M3,
    ORDERS,
    SQUARE,
    block_scale,
    fp8_operands,
    scaled,
)

from outblas import OperandError, scaled_mm
from outblas.torch_ops import block_scales

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
on_hopper = [pytest.mark.gpu, pytest.mark.sm90]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_hopper)])

Tensor = torch.Tensor
PAIRS = [(BY_ROW, SQUARE), (BY_ROW, BY_ROW), (SQUARE, BY_ROW), (SQUARE, SQUARE)]
pairs = pytest.mark.parametrize("pair", PAIRS, ids=" by ".join)
# Whole blocks; tails of M, N and K; fewer than a block of each; one row; one column.
SHAPES = [
    (128, 256, 384),
    (130, 264, 272),
    (257, 129, 1000),
    (7, 300, 145),
    (1, 384, 256),
    (1, 7, 33),
    (200, 1, 300),
    (200, 260, 33),
]


class Case:
    """Operands of a product, their scales and the product in float64."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        pair: tuple[str, str],
        device: str = "cpu",
        order: str = "by rows",
        formats: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    ) -> None:
        M, N, K = shape
        self.a, self.b = fp8_operands(M, N, K, *formats, device=device, most=2)
        self.scale_a = block_scale(M, K, pair[0], order, device)
        stored_b = block_scale(N, K, pair[1], order, device)
        self.scale_b = stored_b.t()
        self.exact = (
            scaled(self.a, self.scale_a, pair[0]) @ scaled(self.b.t(), stored_b, pair[1]).t()
        )

    @property
    def given(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.a, self.b, self.scale_a, self.scale_b


@pytest.fixture(autouse=True)
def _kernels_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, a product that torch would compute is an error."""
    if "cuda" in request.node.name:
        monkeypatch.setenv("OUTBLAS_STRICT", "1")


# ---- values
@devices
@pairs
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_with_scales_of_blocks_is_exact(
    shape: tuple[int, int, int], pair: tuple[str, str], device: str
) -> None:
    case = Case(shape, pair, device)

    got = scaled_mm(*case.given, out_dtype=torch.float32)

    assert torch.equal(got.double(), case.exact)


@devices
@pairs
@pytest.mark.parametrize("order", ORDERS)
def test_scales_of_blocks_may_lie_in_any_order(
    order: str, pair: tuple[str, str], device: str
) -> None:
    case = Case((130, 264, 400), pair, device, order)

    got = scaled_mm(*case.given, out_dtype=torch.float32)

    assert torch.equal(got.double(), case.exact)


@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pairs
def test_an_epilogue_follows_the_scales_of_blocks(
    pair: tuple[str, str], dtype: torch.dtype, device: str
) -> None:
    case = Case((130, 264, 272), pair, device)
    bias = torch.arange(-100, 164, device=device).to(dtype)
    residual = torch.arange(130, device=device).to(dtype).unsqueeze(1)

    got = scaled_mm(*case.given, bias=bias, out_dtype=dtype, activation="relu", residual=residual)

    want = (case.exact + bias.double()).relu() + residual.double()
    assert torch.equal(got, want.to(dtype))


@devices
@pytest.mark.parametrize("shape", [(0, 16, 256), (8, 0, 256), (8, 16, 0)], ids=str)
def test_an_empty_product_with_scales_of_blocks_is_zero(
    shape: tuple[int, int, int], device: str
) -> None:
    case = Case(shape, (BY_ROW, SQUARE), device)

    got = scaled_mm(*case.given)

    assert torch.equal(got, torch.zeros(shape[0], shape[1], device=device).bfloat16())


# ---- which recipe a shape means
# (M, N, K), the shapes of both scales, and the recipes that the kernel is asked for.
MEANT: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], Any]] = {
    "blocks of A's rows": ((200, 300, 400), (200, 4), (4, 3), (BY_ROW, SQUARE)),
    "blocks of rows and columns": ((200, 300, 400), (200, 4), (4, 300), (BY_ROW, BY_ROW)),
    "square blocks of A": ((200, 300, 400), (2, 4), (4, 300), (SQUARE, BY_ROW)),
    "square blocks of both": ((200, 300, 400), (2, 4), (4, 3), (SQUARE, SQUARE)),
    "rows and columns": ((200, 300, 400), (200, 1), (1, 300), None),
    "one element": ((200, 300, 400), (1, 1), (1,), None),
    "one block of terms is a whole row": ((200, 300, 100), (200, 1), (1, 300), None),
    "one block of terms, square for B": ((200, 300, 100), (200, 1), (1, 3), (BY_ROW, SQUARE)),
    "one block of terms, square for A": ((200, 300, 100), (2, 1), (1, 300), (SQUARE, BY_ROW)),
    "one block of A": ((100, 300, 100), (1, 1), (1, 3), (SQUARE, SQUARE)),
    "one block of B": ((200, 100, 100), (2, 1), (1, 1), (SQUARE, SQUARE)),
    "one block of each": ((100, 90, 80), (1, 1), (1, 1), None),
    "one row": ((1, 300, 400), (1, 4), (4, 3), (BY_ROW, SQUARE)),
    "one row and one block of terms": ((1, 300, 100), (1, 1), (1, 3), (BY_ROW, SQUARE)),
    "one row with a scale for each column": ((1, 300, 100), (1, 1), (1, 300), None),
    "one column": ((200, 1, 400), (200, 4), (4, 1), (BY_ROW, SQUARE)),
    "one column and one block of terms": ((200, 1, 100), (2, 1), (1, 1), (SQUARE, SQUARE)),
    "as many rows as blocks of terms": ((4, 4, 400), (4, 4), (4, 4), (BY_ROW, BY_ROW)),
}


@pytest.mark.parametrize("name", MEANT)
def test_the_shapes_of_scales_mean_recipes(name: str) -> None:
    (M, N, K), shape_a, shape_b, meant = MEANT[name]

    found = block_scales.recipes(M, N, K, torch.ones(shape_a), torch.ones(shape_b))

    assert found == meant


# ---- what is refused
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another shape of scale_a": (
        {"scale_a": torch.ones(200, 3)},
        r"scale_a.shape is \(200, 3\), expected one element or \(200, 1\), or \(200, 4\) or "
        r"\(2, 4\) with blocks of 128",
    ),
    "another shape of scale_b": (
        {"scale_b": torch.ones(3, 4)},
        r"scale_b.shape is \(3, 4\), expected one element or \(1, 300\), or \(4, 300\) or "
        r"\(4, 3\) with blocks of 128",
    ),
    "blocks of A only": (
        {"scale_b": torch.ones(())},
        r"scale_b.shape is \(\), expected \(4, 300\) or \(4, 3\), because scale_a has blocks",
    ),
    "blocks of B only": (
        {"scale_a": torch.ones(200, 1)},
        r"scale_a.shape is \(200, 1\), expected \(200, 4\) or \(2, 4\), because scale_b has blocks",
    ),
    "another dtype": (
        {"scale_a": torch.ones(200, 4).double()},
        "scale_a is torch.float64 on cpu, expected torch.float32 on cpu",
    ),
    "fast sums": (
        {"use_fast_accum": True},
        "use_fast_accum is True, expected False with scales of blocks",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_scales_of_blocks_that_do_not_fit_are_refused_by_name(name: str) -> None:
    changed, message = REFUSED[name]
    a, b = fp8_operands(200, 300, 400)
    given = {"input": a, "mat2": b, "scale_a": torch.ones(200, 4), "scale_b": torch.ones(4, 3)}

    with pytest.raises(OperandError, match=message):
        scaled_mm(**given | changed)
