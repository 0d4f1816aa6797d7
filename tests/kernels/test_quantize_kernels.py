"""Quantization to fp8: Triton's kernels in the interpreter beside torch's functions, and what they
are compiled to.
"""

import re
from typing import Any

import pytest
import torch
from support.fp8 import E4M3, E5M2

from outblas.base.compat import triton_private
from outblas.base.compiling import CompileForbidden
from outblas.core.quantization import RECIPES
from outblas.kernels import quantize as kernels
from outblas.kernels.passes import compile_for
from outblas.torch_ops import quantize as module

Tensor = torch.Tensor

recipes = pytest.mark.parametrize("recipe", RECIPES)
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
@recipes
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_kernels_round_as_torch_does(shape: tuple[int, ...], recipe: str) -> None:
    if recipe == "128x128" and len(shape) < 2:
        pytest.skip("there are no blocks of rows")
    x = (torch.randn(shape) * 10).bfloat16()

    assert_same(x, recipe, E4M3)


@pytest.mark.interpreter
@formats
def test_every_16_bit_number_is_rounded_as_torch_does(dtype: torch.dtype) -> None:
    x = torch.arange(2**16).int().to(torch.int16).view(torch.float16).view(512, 128)

    assert_same(x, "1x128", dtype)


@pytest.mark.interpreter
@recipes
@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_takes_no_part_in_a_scale(recipe: str, special: float) -> None:
    x = torch.randn(9, 130)
    x[2, 3] = special

    assert_same(x, recipe, E4M3)


@pytest.mark.interpreter
@recipes
@formats
@pytest.mark.parametrize("power_of_two", [False, True])
def test_magnitudes_of_all_of_float32(dtype: torch.dtype, recipe: str, power_of_two: bool) -> None:
    x = torch.randn(9, 130) * torch.logspace(-45, 38, 130)

    assert_same(x, recipe, dtype, power_of_two)


@pytest.mark.interpreter
@recipes
@pytest.mark.parametrize("order", ["transposed", "every second", "inner dimension", "expanded"])
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


# ---- launches on a GPU
class OnGpu(int):
    """An argument of a kernel, as if it lay on a GPU."""

    device = torch.device("cuda", 0)


def test_no_kernel_is_loaded_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    with pytest.raises(RuntimeError, match=r"outblas\.warmup\(function, \*args\) puts it there"):
        kernels._launch(kernels.tile_kernel, (1,), (OnGpu(3),), {})


def test_no_kernel_is_compiled_where_nothing_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_COMPILE", "never")

    with pytest.raises(CompileForbidden, match="the kernels that quantize to fp8"):
        kernels._launch(kernels.tile_kernel, (1,), (OnGpu(3),), {})


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


def compiled(name: str, arch: int, mantissa: int = 3) -> Any:
    kernel, types, constants, warps = COMPILED[name]
    if arch < 80:
        types = types | {"x": "*fp16"}
    how = {"MANTISSA": mantissa, "POWER_OF_TWO": False, "NATIVE": arch >= kernels._NATIVE_ARCH}
    return compile_for(kernel, types, constants | how, arch, warps)


@pytest.mark.compile
@pytest.mark.oldest_triton
@pytest.mark.parametrize("arch", [75, 90])
@pytest.mark.parametrize("name", COMPILED)
def test_every_kernel_compiles_without_spills(name: str, arch: int) -> None:
    found = compiled(name, arch)

    _, log = triton_private.assemble(found.asm["ptx"], found.metadata._asdict(), arch)
    assert "0 bytes spill stores, 0 bytes spill loads" in log


@pytest.mark.compile
@pytest.mark.parametrize(("mantissa", "name"), [(3, "e4m3x2"), (2, "e5m2x2")])
def test_gpus_that_can_round_to_fp8_do(mantissa: int, name: str) -> None:
    """The fp8 instructions of sm_89 and later make two values at a time."""
    ptx = compiled("1x128", 90, mantissa).asm["ptx"]

    assert len(re.findall(rf"cvt\.rn\.satfinite\.{name}\.f32", ptx)) == 16
