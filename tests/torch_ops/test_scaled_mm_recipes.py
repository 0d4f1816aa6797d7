"""`outblas.scaled_mm` takes the arguments of `torch._scaled_mm` and of
`torch.nn.functional.scaled_mm`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import fp8
from torch.nn import functional

import outblas

Tensor = torch.Tensor
ScalingType: Any = getattr(functional, "ScalingType", None)
if ScalingType is None:
    pytest.skip("this torch has no recipes of scales", allow_module_level=True)
SwizzleType: Any = functional.SwizzleType  # type: ignore[attr-defined]
ONE, ROWS = ScalingType.TensorWise, ScalingType.RowWise
BY_ROW, SQUARE = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

M, N, K = 6, 16, 32
A = torch.randint(-4, 5, (M, K)).to(torch.float8_e4m3fn)
B = torch.randint(-4, 5, (N, K)).to(torch.float8_e4m3fn).t()
BIAS = torch.randint(-4, 5, (N,)).to(torch.bfloat16)
SCALE = torch.tensor(0.5)
SCALE_A, SCALE_B = torch.full((M, 1), 2.0), torch.full((1, N), 0.25)


def expected(scale_a: Tensor = SCALE, scale_b: Tensor = SCALE, **more: Any) -> Tensor:
    return outblas.scaled_mm(A, B, scale_a, scale_b, **more)


FORMS: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
    "torch._scaled_mm by place": (
        lambda: outblas.scaled_mm(A, B, SCALE, SCALE, BIAS, None, torch.bfloat16, True),
        lambda: expected(bias=BIAS, use_fast_accum=True),
    ),
    "by place": (
        lambda: outblas.scaled_mm(A, B, SCALE, ONE, SCALE, ONE),
        lambda: expected(),
    ),
    "by place, all of them": (
        lambda: outblas.scaled_mm(
            A, B, SCALE, ONE, SCALE, ONE, None, None, BIAS.half(), torch.float16, (), True
        ),
        lambda: expected(bias=BIAS.half(), out_dtype=torch.float16, use_fast_accum=True),
    ),
    "by keyword": (
        lambda: outblas.scaled_mm(
            mat_a=A,
            mat_b=B,
            scale_a=SCALE_A,
            scale_recipe_a=ROWS,
            scale_b=SCALE_B,
            scale_recipe_b=ROWS,
        ),
        lambda: expected(SCALE_A, SCALE_B),
    ),
    "scales of two kinds": (
        lambda: outblas.scaled_mm(A, B, SCALE_A, ROWS, SCALE, ONE),
        lambda: expected(SCALE_A),
    ),
    "lists of one": (
        lambda: outblas.scaled_mm(A, B, [SCALE], [ONE], [SCALE], [ONE], [], []),
        lambda: expected(),
    ),
    "no swizzle": (
        lambda: outblas.scaled_mm(
            A, B, SCALE, ONE, SCALE, ONE, SwizzleType.NO_SWIZZLE, contraction_dim=(-1, 0)
        ),
        lambda: expected(),
    ),
    "with an epilogue": (
        lambda: outblas.scaled_mm(A, B, SCALE, ONE, SCALE, ONE, bias=BIAS, activation="relu"),
        lambda: expected(bias=BIAS, activation="relu"),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_computes_the_same_product(name: str) -> None:
    written, as_ever = FORMS[name]

    assert torch.equal(written(), as_ever())


def test_the_product_is_that_of_torch() -> None:
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"):
        pytest.skip(f"torch {torch.__version__} has a public scaled_mm for GPUs only")
    by_torch: Any = functional.scaled_mm  # type: ignore[attr-defined]

    got = outblas.scaled_mm(A, B, SCALE, ONE, SCALE, ONE)

    assert torch.equal(got, by_torch(A, B, SCALE, ONE, SCALE, ONE))


def as_torch_wants(stored: Tensor, recipe: Any, padded: bool = True) -> Tensor:
    """The scales of an operand that is stored with one row for each row of A or column of B, in the
    order that torch requires: scales of square blocks lie along K, in fours.
    """
    if recipe == BY_ROW:
        return stored.t().contiguous().t()
    blocks = stored.shape[1]
    wide = torch.full((stored.shape[0], -(-blocks // 4) * 4), float("nan"))
    wide[:, :blocks] = stored
    return (wide if padded else stored).t()


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "bare"])
@pytest.mark.parametrize("K", [100, 400, 640])
@pytest.mark.parametrize(
    ("recipe_a", "recipe_b"),
    [(BY_ROW, SQUARE), (BY_ROW, BY_ROW), (SQUARE, BY_ROW), (SQUARE, SQUARE)],
    ids=str,
)
def test_scales_of_blocks_come_as_torch_wants_them(
    recipe_a: Any, recipe_b: Any, K: int, padded: bool
) -> None:
    kinds = [fp8.BY_ROW if recipe == BY_ROW else fp8.SQUARE for recipe in (recipe_a, recipe_b)]
    a, b = fp8.fp8_operands(200, 300, K, most=2)
    stored_a, stored_b = fp8.block_scale(200, K, kinds[0]), fp8.block_scale(300, K, kinds[1])
    scale_a = as_torch_wants(stored_a, recipe_a, padded)
    scale_b = as_torch_wants(stored_b, recipe_b, padded)

    got = outblas.scaled_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, output_dtype=torch.float32)

    want = fp8.scaled(a, stored_a, kinds[0]) @ fp8.scaled(b.t(), stored_b, kinds[1]).t()
    assert torch.equal(got.double(), want)


BLOCKS = {"scale_recipe_a": BY_ROW, "scale_recipe_b": SQUARE}
REFUSED: dict[str, dict[str, Any]] = {
    "scale_recipe_a is BlockWise1x32, expected one of TensorWise, RowWise, BlockWise1x128, "
    "BlockWise128x128": {"scale_recipe_a": ScalingType.BlockWise1x32},
    "scale_recipe_b is BlockWise1x16, expected one of TensorWise, RowWise": {
        "scale_recipe_b": ScalingType.BlockWise1x16
    },
    "scale_recipe_b is TensorWise, expected BlockWise1x128 or BlockWise128x128 with "
    "BlockWise1x128 as scale_recipe_a": {"scale_recipe_a": BY_ROW},
    "scale_recipe_b is BlockWise128x128, expected TensorWise or RowWise with TensorWise as "
    "scale_recipe_a": {"scale_recipe_b": SQUARE},
    "use_fast_accum is True, expected False with scales of blocks": BLOCKS
    | {"use_fast_accum": True},
    r"scale_a.shape is \(\), expected \(6, 1\) with BlockWise1x128": BLOCKS,
    r"scale_b.shape is \(\), expected \(4, 1\) or \(1, 1\) with BlockWise128x128": BLOCKS
    | {"scale_a": SCALE_A},
    r"scale_b.shape is \(1, 16\), expected \(16, 1\) with BlockWise1x128": {
        "scale_recipe_a": BY_ROW,
        "scale_a": SCALE_A,
        "scale_recipe_b": BY_ROW,
        "scale_b": SCALE_B,
    },
    "scale_recipe_a has 2 entries, expected one": {"scale_recipe_a": [ONE, ROWS]},
    "swizzle_b is SWIZZLE_32_4_4, expected NO_SWIZZLE or None": {
        "swizzle_b": SwizzleType.SWIZZLE_32_4_4
    },
    r"scale_a.shape is \(6, 1\), expected one element with TensorWise": {"scale_a": SCALE_A},
    r"scale_b.shape is \(\), expected \(1, 16\) with RowWise": {"scale_recipe_b": ROWS},
    r"contraction_dim is \(0, 1\), expected \(\) or \(1, 0\)": {"contraction_dim": (0, 1)},
    "scale_recipe_b is str, expected a member of torch's": {"scale_recipe_b": "RowWise"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_covered_is_refused_by_name(message: str) -> None:
    scales = {"scale_a": SCALE, "scale_recipe_a": ONE, "scale_b": SCALE, "scale_recipe_b": ONE}

    with pytest.raises((outblas.OperandError, TypeError), match=message):
        outblas.scaled_mm(**{"mat_a": A, "mat_b": B} | scales | REFUSED[message])


def test_a_scale_for_results_is_refused() -> None:
    with pytest.raises(outblas.OperandError, match="scale_result is given, expected None"):
        outblas.scaled_mm(A, B, SCALE, SCALE, None, SCALE)
