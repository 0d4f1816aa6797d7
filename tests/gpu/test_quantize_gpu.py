"""`outblas.quantize` on a GPU: the bits that torch's functions give on the CPU, graphs, and layers
of fp8 checkpoints.
"""

import pytest
import torch
from support.fp8 import E4M3, E5M2, scaled

import outblas
from outblas.core.quantization import RECIPES
from outblas.torch_ops import quantize as module

Tensor = torch.Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

recipes = pytest.mark.parametrize("recipe", RECIPES)
formats = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
SHAPES = (1, 128), (7, 1000), (64, 7168), (300, 20000), (4096, 4096), (3, 200, 520), (8, 128, 256)


def bits(t: Tensor) -> Tensor:
    return t.cpu().view(torch.uint8 if t.element_size() == 1 else torch.int32)


def assert_same(x: Tensor, recipe: str, dtype: torch.dtype, power_of_two: bool = False) -> None:
    """Values and scales have the bits and the strides of those on the CPU."""
    found = outblas.quantize(x, recipe, dtype=dtype, power_of_two=power_of_two)

    expected = module.by_torch(x.cpu(), recipe, dtype, power_of_two)
    for one, other, name in zip(found, expected, ("values", "scales"), strict=True):
        assert one.stride() == other.stride(), name
        different = int((bits(one) != bits(other)).sum())
        assert not different, f"{different} {name} differ of {tuple(x.shape)}"


@recipes
@formats
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_bits_are_those_of_the_cpu(
    recipe: str, dtype: torch.dtype, shape: tuple[int, ...], x_dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape, device="cuda") * 3).to(x_dtype)

    assert_same(x, recipe, dtype)


@recipes
@formats
@pytest.mark.parametrize("power_of_two", [False, True])
def test_every_16_bit_number_and_every_magnitude(
    recipe: str, dtype: torch.dtype, power_of_two: bool
) -> None:
    torch.manual_seed(0)
    codes = torch.arange(2**16, device="cuda").int().to(torch.int16).view(512, 128)
    magnitudes = torch.randn(300, 520) * torch.logspace(-45, 38, 520)

    for x in (codes.view(torch.bfloat16), codes.view(torch.float16), magnitudes.cuda()):
        assert_same(x, recipe, dtype, power_of_two)


@recipes
@formats
def test_torchs_functions_give_the_same_bits(recipe: str, dtype: torch.dtype) -> None:
    """They compute where no kernel can."""
    torch.manual_seed(0)
    x = (torch.randn(300, 520) * torch.logspace(-20, 20, 520)).cuda()

    found = module.by_torch(x, recipe, dtype, False)

    expected = module.by_torch(x.cpu(), recipe, dtype, False)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(bits(one), bits(other))


@recipes
def test_strides_are_free(recipe: str) -> None:
    torch.manual_seed(0)
    wide = torch.randn(300, 3, 520, device="cuda").bfloat16()

    for x in (wide[:, 0].t(), wide[::2, 1, ::2], wide.transpose(0, 1), wide[:1, 1].expand(9, -1)):
        assert_same(x, recipe, E4M3)


@recipes
def test_a_graph_quantizes_what_is_there_when_it_is_replayed(recipe: str) -> None:
    x = torch.randn(200, 1024, device="cuda").bfloat16()
    outblas.warmup(outblas.quantize, x, recipe)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, scale = outblas.quantize(x, recipe)
    x.copy_(torch.randn_like(x) * 5)

    graph.replay()

    expected, same_scale = outblas.quantize(x, recipe)
    assert torch.equal(bits(values), bits(expected))
    assert torch.equal(scale, same_scale)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["1x128", "rowwise", "tensorwise"])
def test_more_elements_than_32_bits_count(recipe: str) -> None:
    x = torch.zeros(2**18 + 3, 2**13, dtype=torch.bfloat16, device="cuda")
    x[-1] = 7

    values, scale = outblas.quantize(x, recipe)

    assert (values[-1].float() == 448).all()
    assert (scale.flatten()[-1] if recipe != "1x128" else scale[-1]).max() == 7 / 448


@pytest.mark.parametrize("rows", [1, 16, 500])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16])
def test_a_layer_multiplies_the_dequantized_operands(rows: int, x_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(1536, 1000, device="cuda", dtype=x_dtype)
    layer = outblas.FP8Linear.from_linear(linear)
    x = torch.randn(rows, 1536, device="cuda").to(x_dtype)

    y = layer(x)

    values, scale = outblas.quantize(x, "1x128")
    weight = scaled(layer.weight, layer.weight_scale_inv, "128x128")
    wanted = scaled(values, scale, "1x128") @ weight.t() + linear.bias.double()
    assert (y.double() - wanted).norm() < 0.005 * wanted.norm()
