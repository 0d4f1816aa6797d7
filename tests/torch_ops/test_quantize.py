"""`quantize`: what values and scales are, what becomes of special values, what it says of its
arguments, and how it is compiled.
"""

from typing import Any

import pytest
import torch
from support.fp8 import E4M3, E5M2
from support.recording_modes import RecordingDispatch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType

import outblas
from outblas import OperandError, quantize
from outblas.core.compiling import CompileForbidden
from outblas.core.quantization import RECIPES, spread
from outblas.runtime import hooks
from outblas.torch_ops import quantize as module

Tensor = torch.Tensor

MOST = {E4M3: 448.0, E5M2: 57344.0}
recipes = pytest.mark.parametrize("recipe", RECIPES)
formats = pytest.mark.parametrize("dtype", MOST, ids=str)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


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
def test_a_scale_is_the_largest_magnitude_over_the_largest_value(
    recipe: str, dtype: torch.dtype, x_dtype: torch.dtype
) -> None:
    x = torch.randn(200, 300).to(x_dtype)

    values, scale = quantize(x, recipe, dtype=dtype)

    expected = parts(x, recipe)
    assert values.dtype == dtype
    assert scale.dtype == torch.float32
    assert scale.numel() == len(expected)
    for index, part in expected.items():
        assert scale[index] == part.float().abs().max() / MOST[dtype]


@recipes
@formats
def test_values_times_scales_are_the_tensor_again(recipe: str, dtype: torch.dtype) -> None:
    x = torch.randn(200, 300)

    values, scale = quantize(x, recipe, dtype=dtype)

    wide = spread(scale, recipe, x.shape).double()
    unit = 2.0**-4 if dtype == E4M3 else 2.0**-3  # half a unit of the last place, relative
    least = 2.0**-10 if dtype == E4M3 else 2.0**-17  # half the least value
    error = (values.double() * wide - x.double()).abs()
    assert (error <= x.double().abs() * unit * (1 + 1e-6) + least * wide).all()


@recipes
def test_scales_that_are_powers_of_two_round_up(recipe: str) -> None:
    x = torch.randn(200, 300)
    _, scale = quantize(x, recipe)

    values, rounded = quantize(x, recipe, power_of_two=True)

    assert (rounded.log2() == rounded.log2().round()).all()
    assert ((rounded >= scale) & (rounded < 2 * scale)).all()
    assert torch.equal(values.float(), (x / spread(rounded, recipe, x.shape)).to(E4M3).float())


def test_a_power_of_two_stays_the_scale() -> None:
    _, scale = quantize(torch.full((1, 128), 448.0 / 8), "1x128", power_of_two=True)

    assert scale.item() == 1 / 8


@recipes
@formats
def test_nothing_but_zeros_has_the_scale_one(recipe: str, dtype: torch.dtype) -> None:
    values, scale = quantize(torch.zeros(130, 200), recipe, dtype=dtype)

    assert (scale == 1).all()
    assert (values.float() == 0).all()


@recipes
@formats
def test_the_largest_numbers_saturate(recipe: str, dtype: torch.dtype) -> None:
    x = torch.full((130, 200), torch.finfo(torch.float32).max)

    values, scale = quantize(x, recipe, dtype=dtype)

    assert (values.float() == MOST[dtype]).all()
    assert scale.isfinite().all()


@recipes
def test_the_least_numbers_have_the_least_scale(recipe: str) -> None:
    x = torch.full((130, 200), 2.0**-149)

    values, scale = quantize(x, recipe)

    assert (scale == 2.0**-126).all()
    assert (values.float() == 0).all()


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


# ---- layouts
@pytest.mark.parametrize(("M", "stride"), [(1, 4), (4, 4), (37, 40)])
def test_columns_of_scales_of_1x128_begin_at_multiples_of_16_bytes(M: int, stride: int) -> None:
    _, scale = quantize(torch.randn(M, 300), "1x128")

    assert scale.shape == (M, 3)
    assert scale.stride() == (1, stride)


def test_scales_of_blocks_lie_in_rows() -> None:
    _, scale = quantize(torch.randn(200, 300), "128x128")

    assert scale.shape == (2, 3)
    assert scale.is_contiguous()


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


@recipes
def test_any_strides_give_contiguous_values(recipe: str) -> None:
    x = torch.randn(300, 200).t()

    values, scale = quantize(x, recipe)

    expected, same_scale = quantize(x.contiguous(), recipe)
    assert values.is_contiguous()
    assert torch.equal(values.float(), expected.float())
    assert torch.equal(scale, same_scale)


@recipes
@pytest.mark.parametrize("shape", [(0, 256), (256, 0), (0, 0)])
def test_empty_tensors_have_empty_values(recipe: str, shape: tuple[int, int]) -> None:
    values, scale = quantize(torch.empty(shape), recipe)

    assert values.shape == shape
    assert (scale == 1).all()


# ---- recipes
@pytest.mark.parametrize("recipe", RECIPES)
def test_members_of_torchs_enumeration_are_recipes(recipe: str) -> None:
    x = torch.randn(130, 200)

    values, scale = quantize(x, getattr(ScalingType, RECIPES[recipe]))

    expected, same_scale = quantize(x, recipe)
    assert torch.equal(values.float(), expected.float())
    assert torch.equal(scale, same_scale)


@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
@pytest.mark.parametrize(
    ("of_x", "of_w"), [("1x128", "128x128"), ("rowwise", "rowwise"), ("tensorwise", "tensorwise")]
)
def test_scaled_mm_takes_what_quantize_returns(of_x: str, of_w: str) -> None:
    x, w = torch.randn(40, 300), torch.randn(200, 300)
    (x8, scale_x), (w8, scale_w) = quantize(x, of_x), quantize(w, of_w)

    y = outblas.scaled_mm(x8, w8.t(), scale_x, scale_w.t(), out_dtype=torch.float32)

    assert (y - x @ w.t()).norm() < 0.05 * (x @ w.t()).norm()


# ---- errors
WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "no tensor": ((3, "1x128"), {}, TypeError, "x is int, expected a torch.Tensor"),
    "a recipe that is not there": (
        (torch.ones(2, 2), "1x32"),
        {},
        ValueError,
        "recipe is '1x32', expected one of tensorwise, rowwise, 1x128, 128x128",
    ),
    "a member that is not covered": (
        (torch.ones(2, 2), ScalingType.BlockWise1x32),
        {},
        ValueError,
        "recipe is BlockWise1x32, expected one of TensorWise, RowWise, BlockWise1x128, "
        "BlockWise128x128",
    ),
    "no recipe": (
        (torch.ones(2, 2), 128),
        {},
        TypeError,
        "recipe is int, expected a str or a member of torch's ScalingType",
    ),
    "another dtype of x": (
        (torch.ones(2, 2).double(), "rowwise"),
        {},
        OperandError,
        "x.dtype is torch.float64, expected one of torch.bfloat16, torch.float16, torch.float32",
    ),
    "another dtype": (
        (torch.ones(2, 2), "rowwise"),
        {"dtype": torch.float16},
        OperandError,
        "dtype is torch.float16, expected one of torch.float8_e4m3fn, torch.float8_e5m2",
    ),
    "no dtype": (
        (torch.ones(2, 2), "rowwise"),
        {"dtype": "e4m3"},
        TypeError,
        "dtype is str, expected a torch.dtype",
    ),
    "no bool": (
        (torch.ones(2, 2), "rowwise"),
        {"power_of_two": 1},
        TypeError,
        "power_of_two is int, expected a bool",
    ),
    "no rows": (
        (torch.ones(2), "128x128"),
        {},
        OperandError,
        "x has 1 dimensions, expected at least 2 with 128x128",
    ),
    "no columns": (
        (torch.ones(()), "rowwise"),
        {},
        OperandError,
        "x has 0 dimensions, expected at least 1 with rowwise",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_names_the_argument(name: str) -> None:
    given, named, kind, message = WRONG[name]

    with pytest.raises(kind) as caught:
        quantize(*given, **named)

    assert message in str(caught.value)


# ---- gradients
def test_a_gradient_that_does_not_exist_is_refused() -> None:
    values, scale = quantize(torch.randn(4, 128, requires_grad=True), "rowwise")

    with pytest.raises(NotImplementedError, match="x requires grad, but quantize has no gradients"):
        (values.float() * scale).sum().backward()


# ---- the operator
@recipes
@formats
@pytest.mark.parametrize("shape", [(130, 200), (3, 20, 200), (1, 128), (0, 128)])
def test_the_fake_has_the_shapes_and_strides_of_the_result(
    recipe: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    expected = quantize(torch.randn(shape), recipe, dtype=dtype)

    with FakeTensorMode():
        found = quantize(torch.randn(shape), recipe, dtype=dtype)

    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@recipes
def test_compiled_programs_have_it_as_one_operator(recipe: str) -> None:
    x = torch.randn(130, 200)

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize(x + 1, getattr(ScalingType, RECIPES[recipe]), power_of_two=True)

    found = torch.compile(program, fullgraph=True, backend="aot_eager", dynamic=True)(x)

    for one, other in zip(found, program(x), strict=True):
        assert torch.equal(one.float(), other.float())
        assert one.stride() == other.stride()


def test_modes_see_the_operator() -> None:
    mode = RecordingDispatch()

    with mode:
        quantize(torch.ones(4, 128), "rowwise")

    assert torch.ops.outblas.quantize.default in mode.seen


def test_a_transform_quantizes_each_matrix() -> None:
    x = torch.randn(3, 5, 130)

    values, scale = torch.func.vmap(lambda x: quantize(x, "1x128"))(x)

    expected, same_scale = quantize(x, "1x128")
    assert torch.equal(values.float(), expected.float())
    assert torch.equal(scale, same_scale)


@pytest.mark.parametrize("change", [torch.Tensor.conj, torch._neg_view, torch.nn.Parameter])
def test_views_and_parameters_are_what_they_stand_for(change: Any) -> None:
    x = torch.randn(5, 130)
    expected, same_scale = quantize(change(x).detach().clone(), "1x128")

    with torch.no_grad():
        values, scale = quantize(change(x), "1x128")

    assert not values.requires_grad
    assert torch.equal(values.float(), expected.float())
    assert torch.equal(scale, same_scale)


def test_the_operator_is_what_torch_expects_of_one() -> None:
    for recipe in RECIPES:
        torch.library.opcheck(torch.ops.outblas.quantize.default, (torch.randn(130, 200), recipe))


# ---- which implementation computes
class OnGpu:
    """A tensor as if it lay on a GPU."""

    device = torch.device("cuda", 0)
    dtype, layout, is_nested = torch.float32, torch.strided, False

    def __init__(self, elements: int) -> None:
        self.numel = lambda: elements

    def dim(self) -> int:
        return 2


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Lets torch say that it knows CUDA, and torch's functions return what they are."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(module, "by_torch", lambda *given: "torch")
    return monkeypatch


@pytest.mark.parametrize(("elements", "expected"), [(8, "kernels"), (0, "torch")])
def test_kernels_compute_what_is_on_a_gpu_and_not_empty(
    elements: int, expected: str, on_gpu: pytest.MonkeyPatch
) -> None:
    class Kernels:
        quantize = staticmethod(lambda *given: "kernels")

    on_gpu.setattr(hooks.quantize_kernels, "_loaded", Kernels)

    found: Any = module.compute(OnGpu(elements), "1x128")  # type: ignore[arg-type]

    assert found == expected


@pytest.mark.parametrize("error", [ImportError("no triton"), CompileForbidden("a kernel")])
@pytest.mark.filterwarnings("ignore:outblas")
@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
def test_torch_computes_where_kernels_are_not_to_be_had(
    error: Exception, on_gpu: pytest.MonkeyPatch
) -> None:
    class Kernels:
        @staticmethod
        def quantize(*given: Any) -> Any:
            raise error

    on_gpu.setattr(hooks.quantize_kernels, "_loaded", Kernels)

    found: Any = module.compute(OnGpu(8), "1x128")  # type: ignore[arg-type]

    assert found == "torch"
