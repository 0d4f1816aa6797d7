"""`outblas.quantize` on a GPU: the bits that torch's functions give on the CPU."""

import itertools

import pytest
import torch
from support.fp8 import E4M3, E5M2
from support.scaled_tiles import bits

import outblas
from outblas.call.quantization import RECIPES
from outblas.torch_ops import quantize as module

Tensor = torch.Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

recipes = pytest.mark.parametrize("recipe", RECIPES)
formats = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
SHAPES = (1, 128), (7, 1000), (64, 7168), (300, 20000), (4096, 4096), (3, 200, 520), (8, 128, 256)


def check(x: Tensor, recipe: str, dtype: torch.dtype, power_of_two: bool = False) -> None:
    """Values and scales have the bits and the strides of those on the CPU."""
    outputs = outblas.quantize(x, recipe, dtype=dtype, power_of_two=power_of_two)
    expected = module.by_torch(x.cpu(), recipe, dtype, power_of_two)
    for output, want in zip(outputs, expected, strict=True):
        assert output.stride() == want.stride()  # before `cpu`, which may take others
        assert torch.equal(bits(output).cpu(), bits(want))


@recipes
@formats
def test_bits_are_those_of_the_cpu(recipe: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x_dtypes = itertools.cycle((torch.bfloat16, torch.float16, torch.float32))
    for shape, x_dtype in zip(2 * SHAPES, x_dtypes, strict=False):
        check((torch.randn(shape, device="cuda") * 3).to(x_dtype), recipe, dtype)


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
        check(x, recipe, dtype, power_of_two)


@recipes
def test_strides_are_free(recipe: str) -> None:
    torch.manual_seed(0)
    wide = torch.randn(300, 3, 520, device="cuda").bfloat16()

    for x in (wide[:, 0].t(), wide[::2, 1, ::2], wide.transpose(0, 1), wide[:1, 1].expand(9, -1)):
        check(x, recipe, E4M3)
