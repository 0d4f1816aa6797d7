"""Quantization to fp8: Triton's kernels in the interpreter beside torch's functions, and what they
are compiled to.
"""

import itertools
from typing import Any

import pytest
import torch
from support.covering import covering
from support.fp8 import E4M3, E5M2

from outblas.base.compat import triton_private
from outblas.call.quantization import RECIPES
from outblas.kernels import quantize as kernels
from outblas.kernels.passes import compile_for
from outblas.torch_ops import quantize as module

Tensor = torch.Tensor

NAMES = tuple(RECIPES)
formats = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def assert_same(x: Tensor, recipe: str, dtype: torch.dtype, power_of_two: bool = False) -> None:
    """The kernels return the bits and the strides of torch's functions."""
    found = kernels.quantize(x, recipe, dtype, power_of_two)
    expected = module.by_torch(x, recipe, dtype, power_of_two)

    for one, other, name in zip(found, expected, ("values", "scales"), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        assert one.stride() == other.stride(), name
        kind = torch.uint8 if name == "values" else torch.int32
        different = one.view(kind) != other.view(kind)
        assert not different.any(), f"{int(different.sum())} {name} differ"


# ---- bits
SHAPES = {
    "one element": (1,),
    "a row": (200,),
    "one row": (1, 129),
    "a tile and a bit": (33, 130),
    "a block and a bit": (129, 33),
    "matrices of whole blocks": (2, 128, 20),
    "matrices of other rows": (2, 5, 100),
}


@pytest.mark.interpreter
@pytest.mark.oldest_triton
@pytest.mark.parametrize(
    ("shape", "recipe"),
    [
        pytest.param(shape, NAMES[(i + turn) % len(NAMES)], id=f"{name}-{turn}")
        for turn in (0, 1)
        for i, (name, shape) in enumerate(SHAPES.items())
        if len(shape) > 1 or NAMES[(i + turn) % len(NAMES)] != "128x128"
    ],
)
def test_kernels_round_as_torch_does(shape: tuple[int, ...], recipe: str) -> None:
    x = (torch.randn(shape) * 10).bfloat16()

    assert_same(x, recipe, E4M3)


@pytest.mark.interpreter
@formats
def test_every_16_bit_number_is_rounded_as_torch_does(dtype: torch.dtype) -> None:
    x = torch.arange(2**16).int().to(torch.int16).view(torch.float16).view(512, 128)

    assert_same(x, "1x128", dtype)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("recipe", "special"),
    list(zip(NAMES, itertools.cycle([torch.inf, -torch.inf, torch.nan]), strict=False)),
)
def test_what_is_not_finite_takes_no_part_in_a_scale(recipe: str, special: float) -> None:
    x = torch.randn(9, 130)
    x[2, 3] = special

    assert_same(x, recipe, E4M3)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("dtype", "recipe", "power_of_two"),
    covering(
        {"e4m3": E4M3, "e5m2": E5M2},
        {recipe: recipe for recipe in NAMES},
        {"any": False, "power of two": True},
        of=2,
    ),
)
def test_magnitudes_of_all_of_float32(dtype: torch.dtype, recipe: str, power_of_two: bool) -> None:
    x = torch.randn(9, 130) * torch.logspace(-45, 38, 130)

    assert_same(x, recipe, dtype, power_of_two)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("recipe", "order"),
    list(
        zip(NAMES, ["transposed", "every second", "inner dimension", "expanded"] * 2, strict=False)
    ),
)
def test_strides_are_free(recipe: str, order: str) -> None:
    wide = torch.randn(40, 2, 136)
    x = {
        "transposed": wide[:, 0].t(),
        "every second": wide[::2, 1, ::2],
        "inner dimension": wide[:12].transpose(0, 1),
        "expanded": wide[:1, 1].expand(9, -1),
    }[order]

    assert_same(x, recipe, E4M3)


@pytest.mark.interpreter
def test_a_row_that_no_program_holds_takes_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "ONE_PASS", 256)
    monkeypatch.setattr(kernels, "AT_A_TIME", 128)

    assert_same(torch.randn(5, 300), "rowwise", E4M3)


# ---- machine code
I32 = "i32"
OUTPUTS = {"x": "*bf16", "out": "*u8", "scale": "*fp32", "columns": I32, "x_row": I32}
ROWS = {"x_column": 1, "scale_row": 1, "largest": None, "ROWS": kernels.TILE_ROWS, "SCALES": "row"}
# name -> kernel, types of arguments, constants, warps
COMPILED: dict[str, tuple[Any, dict[str, str], dict[str, Any], int]] = {
    "1x128": (kernels.tile_kernel, OUTPUTS | {"rows": I32, "scale_column": I32}, ROWS, 4),
    "1x128 of few rows": (
        kernels.tile_kernel,
        OUTPUTS | {"rows": I32, "scale_column": I32},
        ROWS | {"ROWS": kernels.FEW_ROWS},
        4,
    ),
    "128x128": (
        kernels.tile_kernel,
        OUTPUTS | {"rows": I32, "scale_row": I32},
        {"x_column": 1, "scale_column": 1, "largest": None, "ROWS": 128, "SCALES": "tile"},
        8,
    ),
    "tensorwise": (
        kernels.tile_kernel,
        OUTPUTS | {"rows": I32, "largest": "*i32"},
        {"x_column": 1, "scale_row": 1, "scale_column": 1, "ROWS": 32, "SCALES": "all"},
        4,
    ),
    "rowwise": (
        kernels.row_kernel,
        OUTPUTS,
        {"x_column": 1, "WIDTH": kernels.ONE_PASS, "IS_ONE_PASS": True},
        16,
    ),
    "rowwise of long rows": (
        kernels.row_kernel,
        OUTPUTS,
        {"x_column": 1, "WIDTH": kernels.AT_A_TIME, "IS_ONE_PASS": False},
        8,
    ),
}


@pytest.mark.compile
@pytest.mark.oldest_triton
@pytest.mark.parametrize(
    ("name", "arch"), [("1x128", 75), ("rowwise", 75), *((name, 90) for name in COMPILED)]
)
def test_every_kernel_compiles_without_spills(name: str, arch: int) -> None:
    """And round by an instruction where GPUs have one."""
    kernel, types, constants, warps = COMPILED[name]
    if arch < 80:
        types = types | {"x": "*fp16"}
    how = {"MANTISSA": 3, "POWER_OF_TWO": False, "NATIVE": arch >= kernels._NATIVE_ARCH}

    compiled = compile_for(kernel, types, constants | how, arch, warps)

    ptx = compiled.asm["ptx"]
    _, log = triton_private.assemble(ptx, compiled.metadata._asdict(), arch)
    assert "0 bytes spill stores, 0 bytes spill loads" in log
    assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == (arch == 90)
