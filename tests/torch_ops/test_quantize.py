"""`quantize`: what values and scales are, what becomes of special values, what it says of its
arguments, and how it is compiled.
"""

import re
from typing import Any

import pytest
import torch
from support.fp8 import E4M3, E5M2
from torch.nn.functional import ScalingType

from outblas import OperandError, quantize
from outblas.base.compiling import CompileForbidden
from outblas.call import hooks
from outblas.call.quantization import RECIPES, spread
from outblas.torch_ops import quantize as module

Tensor = torch.Tensor

MOST = {E4M3: 448.0, E5M2: 57344.0}
recipes = pytest.mark.parametrize("recipe", RECIPES)
formats = pytest.mark.parametrize("dtype", MOST, ids=str)


def parts(x: Tensor, recipe: str) -> dict[tuple[int, ...], Tensor]:
    """The parts of a matrix that share a scale, by the index of the scale."""
    rows, columns = {
        "tensorwise": x.shape,
        "rowwise": (1, x.shape[1]),
        "1x128": (1, 128),
        "128x128": (128, 128),
    }[recipe]
    found: dict[tuple[int, ...], Tensor] = {}
    for i, group in enumerate(x.split(rows)):
        for j, part in enumerate(group.split(columns, 1)):
            found[() if recipe == "tensorwise" else (i, j)] = part
    return found


# ---- values and scales
@recipes
@formats
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_and_scales_are_the_tensor_again(
    recipe: str, dtype: torch.dtype, x_dtype: torch.dtype
) -> None:
    """A scale is the largest magnitude over the largest value."""
    x = torch.randn(200, 300).to(x_dtype)

    values, scale = quantize(x, recipe, dtype=dtype)

    expected = parts(x, recipe)
    assert (values.dtype, scale.dtype, scale.numel()) == (dtype, torch.float32, len(expected))
    for index, part in expected.items():
        assert scale[index] == part.float().abs().max() / MOST[dtype]
    wide, x = spread(scale, recipe, x.shape).double(), x.double()
    unit = 2.0**-4 if dtype == E4M3 else 2.0**-3  # half a unit of the last place, relative
    least = 2.0**-10 if dtype == E4M3 else 2.0**-17  # half the least value
    assert ((values.double() * wide - x).abs() <= x.abs() * unit * (1 + 1e-6) + least * wide).all()


@recipes
@formats
def test_what_is_not_finite_takes_no_part_in_a_scale(recipe: str, dtype: torch.dtype) -> None:
    x = torch.randn(130, 200)
    x[3, 5:8] = 0
    expected, scale = quantize(x, recipe, dtype=dtype)
    x[3, 5], x[3, 6], x[3, 7] = torch.nan, torch.inf, -torch.inf

    values, found = quantize(x, recipe, dtype=dtype)

    assert torch.equal(found, scale)
    special = values[3, 5:8].float()
    if dtype == E5M2:
        torch.testing.assert_close(
            special, torch.tensor([torch.nan, torch.inf, -torch.inf]), equal_nan=True
        )
    else:
        assert special.isnan().all()
    others = ~x.isnan() & ~x.isinf()
    assert torch.equal(values.float()[others], expected.float()[others])


@recipes
@formats
def test_scales_have_a_least_value_and_a_largest(recipe: str, dtype: torch.dtype) -> None:
    """That of zeros is 1."""
    shape = 130, 200
    zeros, of_zeros = quantize(torch.zeros(shape), recipe, dtype=dtype)
    largest = torch.full(shape, torch.finfo(torch.float32).max)
    saturated, of_largest = quantize(largest, recipe, dtype=dtype)
    least, of_least = quantize(torch.full(shape, 2.0**-149), recipe, dtype=dtype)

    assert (zeros.float() == 0).all()
    assert (of_zeros == 1).all()
    assert (saturated.float() == MOST[dtype]).all()
    assert of_largest.isfinite().all()
    assert (least.float() == 0).all()
    assert (of_least == 2.0**-126).all()


@recipes
def test_scales_that_are_powers_of_two_round_up(recipe: str) -> None:
    x = torch.randn(200, 300)
    x[:, :128] = 448.0 / 8
    _, scale = quantize(x, recipe)

    values, rounded = quantize(x, recipe, power_of_two=True)

    assert (rounded.log2() == rounded.log2().round()).all()
    assert ((rounded >= scale) & (rounded < 2 * scale)).all()
    assert torch.equal(values.float(), (x / spread(rounded, recipe, x.shape)).to(E4M3).float())
    if recipe == "1x128":
        assert (rounded[:, 0] == 1 / 8).all(), "a power of two stays the scale"


# ---- layouts and names
@recipes
@pytest.mark.parametrize("shape", [(0, 256), (256, 0), (130, 200)])
def test_any_strides_and_names_give_contiguous_values(recipe: str, shape: tuple[int, int]) -> None:
    x = torch.randn(shape[::-1]).t()
    member = getattr(ScalingType, RECIPES[recipe])

    values, scale = quantize(x, member)

    expected, same_scale = quantize(x.contiguous(), recipe)
    assert values.is_contiguous()
    assert torch.equal(values.float(), expected.float())
    assert torch.equal(scale, same_scale)
    assert recipe != "1x128" or scale.stride() == (1, -(-shape[0] // 4) * 4), "16 bytes"


@pytest.mark.parametrize(
    ("recipe", "shape"),
    [
        ("tensorwise", ()),
        ("rowwise", (2, 3, 140, 1)),
        ("1x128", (2, 3, 140, 3)),
        ("128x128", (2, 3, 2, 3)),
    ],
)
def test_further_dimensions_are_those_of_matrices(recipe: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(2, 3, 140, 300)

    values, scale = quantize(x, recipe)

    assert values.shape == x.shape
    assert scale.shape == shape
    if recipe != "tensorwise":
        one, of_one = quantize(x[1, 2], recipe)
        assert torch.equal(values[1, 2].float(), one.float())
        assert torch.equal(scale[1, 2], of_one)


# ---- errors
SQUARE = torch.ones(2, 2)
WRONG: dict[str, tuple[type[Exception], tuple[Any, ...], dict[str, Any]]] = {
    "x is int, expected a torch.Tensor": (TypeError, (3, "1x128"), {}),
    "recipe is '1x32', expected one of tensorwise, rowwise, 1x128, 128x128": (
        ValueError,
        (SQUARE, "1x32"),
        {},
    ),
    "recipe is BlockWise1x32, expected one of TensorWise, RowWise, BlockWise1x128, "
    "BlockWise128x128": (ValueError, (SQUARE, ScalingType.BlockWise1x32), {}),
    "recipe is int, expected a str or a member of torch's ScalingType": (
        TypeError,
        (SQUARE, 128),
        {},
    ),
    "x.dtype is torch.float64, expected one of torch.bfloat16, torch.float16, torch.float32": (
        OperandError,
        (SQUARE.double(), "rowwise"),
        {},
    ),
    "dtype is torch.float16, expected one of torch.float8_e4m3fn, torch.float8_e5m2": (
        OperandError,
        (SQUARE, "rowwise"),
        {"dtype": torch.float16},
    ),
    "dtype is str, expected a torch.dtype": (TypeError, (SQUARE, "rowwise"), {"dtype": "e4m3"}),
    "power_of_two is int, expected a bool": (TypeError, (SQUARE, "rowwise"), {"power_of_two": 1}),
    "x has 1 dimensions, expected at least 2 with 128x128": (
        OperandError,
        (SQUARE[0], "128x128"),
        {},
    ),
    "x has 0 dimensions, expected at least 1 with rowwise": (
        OperandError,
        (SQUARE[0, 0], "rowwise"),
        {},
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_an_error_names_the_argument(message: str) -> None:
    kind, arguments, named = WRONG[message]

    with pytest.raises(kind, match=re.escape(message)):
        quantize(*arguments, **named)


# ---- the operator
@pytest.mark.parametrize("change", [torch.Tensor.conj, torch._neg_view, torch.nn.Parameter])
def test_views_and_parameters_are_what_they_stand_for(change: Any) -> None:
    x = torch.randn(5, 130)
    expected, same_scale = quantize(change(x).detach().clone(), "1x128")

    with torch.no_grad():
        values, scale = quantize(change(x), "1x128")

    assert not values.requires_grad
    assert torch.equal(values.float(), expected.float())
    assert torch.equal(scale, same_scale)


# ---- which implementation computes
class OnGpu:
    """A tensor as if it lay on a GPU."""

    device = torch.device("cuda", 0)
    dtype, layout, is_nested = torch.float32, torch.strided, False

    def __init__(self, elements: int) -> None:
        self.numel = lambda: elements

    def dim(self) -> int:
        return 2


class Kernels:
    """What is registered to quantize on a GPU."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def quantize(self, *given: Any) -> Any:
        if self.error is not None:
            raise self.error
        return "kernels"


@pytest.mark.filterwarnings("ignore:outblas", "ignore::outblas.FallbackWarning")
def test_kernels_compute_what_is_on_a_gpu_and_not_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are to be had; else torch does."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(module, "by_torch", lambda *given: "torch")

    def computed(elements: int, error: Exception | None = None) -> Any:
        monkeypatch.setattr(hooks.quantize_kernels, "_loaded", Kernels(error))
        return module.compute(OnGpu(elements), "1x128")  # type: ignore[arg-type]

    assert computed(8) == "kernels"
    assert computed(0) == "torch"
    assert computed(8, ImportError("no triton")) == "torch"
    assert computed(8, CompileForbidden("a kernel")) == "torch"
