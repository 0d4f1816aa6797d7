"""`scaled_mm` with scales of blocks: exactly, because the scales are powers of two and the operands
small integers; which recipe a shape means; what is refused.
"""

import itertools
from typing import Any

import pytest
import torch
from support.fp8 import (
    BY_ROW,
    E4M3,
    E5M2,
    ORDERS,
    SQUARE,
    block_scale,
    fp8_operands,
    scaled,
)
from torch._subclasses.fake_tensor import FakeTensorMode

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
@pytest.mark.parametrize("formats", [(E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)], ids=str)
def test_formats_may_be_mixed_with_scales_of_blocks(
    formats: tuple[torch.dtype, torch.dtype], device: str
) -> None:
    case = Case((130, 264, 272), (BY_ROW, SQUARE), device, formats=formats)

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
def test_a_gated_epilogue_pairs_columns_after_the_scales(device: str) -> None:
    case = Case((130, 264, 272), (BY_ROW, SQUARE), device)

    got = scaled_mm(*case.given, out_dtype=torch.float32, activation="reglu")

    gate, up = case.exact.chunk(2, dim=1)
    assert torch.equal(got.double(), gate.relu() * up)


@devices
@pytest.mark.parametrize("shape", [(0, 16, 256), (8, 0, 256), (8, 16, 0)], ids=str)
def test_an_empty_product_with_scales_of_blocks_is_zero(
    shape: tuple[int, int, int], device: str
) -> None:
    case = Case(shape, (BY_ROW, SQUARE), device)

    got = scaled_mm(*case.given)

    assert torch.equal(got, torch.zeros(shape[0], shape[1], device=device).bfloat16())


def test_the_gradient_of_a_bias_before_an_activation_has_the_scales() -> None:
    case = Case((7, 300, 272), (BY_ROW, SQUARE))
    bias = torch.zeros(300, requires_grad=True)
    y = scaled_mm(*case.given, bias=bias, out_dtype=torch.float32, activation="relu")

    y.sum().backward()

    assert bias.grad is not None
    assert torch.equal(bias.grad, (case.exact > 0).sum(0).float())


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


def shapes_of_scales(
    shape: tuple[int, int, int], pair: tuple[str, str]
) -> tuple[torch.Size, torch.Size]:
    M, N, K = shape
    return block_scale(M, K, pair[0]).shape, block_scale(N, K, pair[1]).shape


# Where scales of the same shapes fit two pairs of recipes.
CLASHES = [
    (shape, one, other)
    for shape in [(1, 300, 400), (200, 1, 400), (1, 1, 400), (1, 300, 100), (1, 1, 100)]
    for one, other in itertools.combinations(PAIRS, 2)
    if shapes_of_scales(shape, one) == shapes_of_scales(shape, other)
]


@pytest.mark.parametrize(("shape", "one", "other"), CLASHES, ids=str)
def test_scales_that_fit_two_pairs_of_recipes_mean_one_product(
    shape: tuple[int, int, int], one: tuple[str, str], other: tuple[str, str]
) -> None:
    case, same = Case(shape, one), Case(shape, other)

    got = scaled_mm(*case.given, out_dtype=torch.float32)

    assert torch.equal(got.double(), case.exact)
    assert torch.equal(case.exact, same.exact)


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


def test_fast_sums_stay_with_a_scale_for_each_row_of_one_block() -> None:
    a, b = fp8_operands(8, 16, 128, most=2)
    rows, columns = torch.full((8, 1), 2.0), torch.full((1, 16), 0.5)

    got = scaled_mm(a, b, rows, columns, use_fast_accum=True, out_dtype=torch.float32)

    assert torch.equal(got.double(), a.double() @ b.double())


# ---- the operator
@pairs
def test_opcheck_of_scales_of_blocks(pair: tuple[str, str]) -> None:
    case = Case((7, 300, 272), pair)
    bias = torch.ones(300).bfloat16().requires_grad_()
    arguments = (*case.given, bias, None, False, "gelu", bias)
    # The check of the schema knows no fp8.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")

    torch.library.opcheck(torch.ops.outblas.scaled_mm.default, arguments, test_utils=checks)


def test_scales_of_fakes_are_checked() -> None:
    mode = FakeTensorMode()
    a, b, scale_a, scale_b = map(mode.from_tensor, Case((7, 300, 272), (BY_ROW, SQUARE)).given)

    with pytest.raises(OperandError, match=r"scale_a.shape is \(6, 3\), expected"):
        scaled_mm(a, b, scale_a[:6], scale_b)


def test_a_compiled_product_has_any_number_of_rows() -> None:
    compiled = torch.compile(scaled_mm, fullgraph=True, dynamic=True, backend="aot_eager")
    cases = [Case((M, 300, 272), (BY_ROW, SQUARE)) for M in (7, 130, 1)]

    got = [compiled(*case.given, out_dtype=torch.float32) for case in cases]

    assert all(
        torch.equal(each.double(), case.exact) for each, case in zip(got, cases, strict=True)
    )


def test_a_compiled_product_may_know_no_number_of_rows() -> None:
    case = Case((7, 300, 272), (BY_ROW, SQUARE))
    torch._dynamo.decorators.mark_unbacked(case.a, 0)
    torch._dynamo.decorators.mark_unbacked(case.scale_a, 0)

    def product(a: Tensor, scale_a: Tensor) -> Tensor:
        torch._check(a.shape[0] == scale_a.shape[0])
        return scaled_mm(a, case.b, scale_a, case.scale_b, out_dtype=torch.float32)

    got = torch.compile(product, fullgraph=True, backend="aot_eager")(case.a, case.scale_a)

    assert torch.equal(got.double(), case.exact)
