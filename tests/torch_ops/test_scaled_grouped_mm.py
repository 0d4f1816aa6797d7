"""`outblas.scaled_grouped_mm` without a GPU: torch group by group, and the portable kernel in
Triton's interpreter, both compared with GEMMs of single groups in float64.
"""

from typing import Any

import pytest
import torch
from support import portable_groups
from support.fp8 import E4M3, E5M2, RECIPES
from support.grouped_calls import GroupedCall, check_close, check_equal, guarded
from support.scaled_groups import FORMS, blocks, draw, scales

import outblas
from outblas.call.errors import OperandError
from outblas.call.grouped import Form
from outblas.kernels import grouped as portable

Tensor = torch.Tensor

pytestmark = pytest.mark.filterwarnings("ignore:torch takes this call")

forms = pytest.mark.parametrize("form", FORMS)
kernels = pytest.mark.parametrize(
    "kernel", [None, pytest.param("portable", marks=pytest.mark.interpreter)]
)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ROWS = "a_index", "scatter_index", "scatter_weights"


def check(call: GroupedCall, kernel: str | None) -> None:
    want = call.expected()

    result = call.run(kernel=kernel)

    assert (result.dtype, result.shape) == (call.options["out_dtype"], want.shape)
    assert result.is_contiguous()
    if call.activation in ("", "relu"):
        check_equal(result, want)
    else:
        check_close(result, want, 1e-4)


def with_strides(call: GroupedCall) -> GroupedCall:
    """The call with gaps between its scales, and operands that lie the other way."""
    tensors = {
        name: torch.cat([t.mT, t.mT[..., :1]], -1).contiguous()[..., :-1].mT
        for name, t in call.tensors.items()
        if name.startswith("scale")
    }
    tensors |= {name: t.mT.contiguous().mT for name, t in call.tensors.items() if "mat" in name}
    return call.replaced(**tensors)


# ---- values: a form, tensors beside the operands, and how it is drawn
F8 = {"a": E5M2, "b": E4M3}
CASES: list[tuple[Form, tuple[str, ...], dict[str, Any]]] = [
    ("ragged_m", (), {"ends": (3, 3, 18), "extent": 20, "N": 130, "K": 130}),
    ("ragged_m", ("bias",), {"ends": (20,), "extent": 20, "N": 7, "K": 127, **F8}),
    ("ragged_m", ROWS, {"ends": (1, 2, 17), "extent": 19, "N": 40, "K": 129}),
    ("ragged_m", ("residual", "bias", *ROWS), {"ends": (0, 9), "extent": 9, "N": 40, "K": 20}),
    ("ragged_m", ("bias", "residual"), {"ends": (5, 9), "extent": 9, "activation": "relu"}),
    ("ragged_m", (), {"ends": (0, 0), "extent": 3, "N": 1, "K": 1, "out_dtype": BF16}),
    ("ragged_m", ("bias",), {"ends": (4,), "extent": 4, "N": 130, "K": 0, "out_dtype": F16}),
    ("masked", (), {"ends": (3, 0, 17), "N": 130, "K": 130, "a": E4M3, "b": E5M2}),
    ("masked", ("bias",), {"ends": (-4, 9), "extent": 9, "N": 128, "K": 128, "out_dtype": BF16}),
    ("masked", ("bias", "residual"), {"ends": (2, 1), "extent": 2, "activation": "swiglu"}),
    ("masked", ("residual",), {"ends": (1,), "extent": 1, "activation": "relu", "out_dtype": F16}),
    ("ragged_k", (), {"ends": (128, 128, 200), "extent": 200, "M": 5, "N": 20}),
    ("ragged_k", ("bias",), {"ends": (0, 128), "extent": 256, "M": 17, "N": 7, **F8}),
    ("ragged_k", ("residual",), {"ends": (256,), "extent": 256, "M": 1, "activation": "relu"}),
    ("ragged_k", ("bias", "residual"), {"ends": (128,), "extent": 128, "activation": "silu"}),
    ("ragged_k", (), {"ends": (0, 0), "extent": 130, "a": E5M2, "b": E5M2, "out_dtype": BF16}),
]


@kernels
@pytest.mark.parametrize(("form", "names", "how"), CASES, ids=str)
def test_each_group_has_its_product(
    form: Form, names: tuple[str, ...], how: dict[str, Any], kernel: str | None
) -> None:
    """Values and scales that no group reads are NaN, or tensors have other strides."""
    call = draw(form, *names, **{"M": 5, "N": 40, "K": 136, "out_dtype": F32, **how})
    if how.get("out_dtype") == F16:  # which the largest result fits
        call = call.replaced(scale_a=call.tensors["scale_a"] / 16)

    check(call if "a_index" in names else call.poisoned(), kernel)
    if how["ends"][-1] == how.get("extent") and "K" not in how:
        check(with_strides(call), kernel)


@pytest.mark.interpreter
@pytest.mark.parametrize("ends", [(100, 200), (1, 199)])
def test_the_portable_kernel_takes_any_end_of_terms(ends: tuple[int, ...]) -> None:
    check(draw("ragged_k", out_dtype=F32, ends=ends, extent=200, M=5, N=20), "portable")


@kernels
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_fp8_value_is_multiplied(dtype: torch.dtype, kernel: str | None) -> None:
    """Subnormal ones and those that are not finite too: one in each row of A, times one."""
    every = torch.arange(256).to(torch.uint8)
    a = torch.zeros(256, 16).to(dtype)
    a.view(torch.uint8)[:, 3] = every
    b = torch.zeros(1, 16, 16)
    b[0, 3] = 1
    tensors = {
        "mat_a": a,
        "mat_b": b.to(dtype),
        "scale_a": torch.full((256, 1), 4.0),
        "scale_b": torch.ones(1, 1, 1),
        "offs": torch.tensor([256], dtype=torch.int32),
    }

    result = GroupedCall("ragged_m", tensors, {"out_dtype": F32}).run(kernel=kernel)

    want = (every.view(dtype).float() * 4).unsqueeze(1).expand(256, 16)
    finite = want.isfinite()
    assert torch.equal(result[finite], want[finite])
    assert torch.equal(result.isnan()[:, 0], want.isnan()[:, 0])


def test_no_row_and_no_column() -> None:
    offs = torch.tensor([0, 0], dtype=torch.int32)
    b = torch.ones(2, 16, 200).to(E4M3)

    result = outblas.scaled_grouped_mm(
        *(b[0, :0, :16], b),
        *(scales(0, 1), RECIPES["1x128"], scales(2, 1, 2), RECIPES["128x128"]),
        offs=offs,
    )

    assert result.shape == (0, 200)


def test_a_group_of_terms_has_the_scales_of_its_own_terms() -> None:
    """Scales are numbered from the beginning of K, not of the group."""
    call = draw("ragged_k", out_dtype=F32, ends=(256, 512))
    scale = torch.tensor([1.0, 2, 4, 8]).expand(21, blocks(512))
    ones, columns = torch.ones(21, 512).to(E4M3), torch.ones(512, 136).to(E4M3)

    result = call.replaced(
        mat_a=ones, mat_b=columns, scale_a=scale, scale_b=torch.ones(4, 136)
    ).run()

    assert (result[0] == 128 * 3).all()
    assert (result[1] == 128 * 12).all()


# ---- the portable kernel
@pytest.mark.interpreter
@forms
def test_wrong_ends_never_leave_the_operands(form: Form) -> None:
    """The result is undefined then, but memory around it is not."""
    for ends in ((90, 5, 20), (-(2**31), 60, 2**31 - 1)):
        written = guarded(draw(form, ends=ends, out_dtype=F32, extent=130, M=5, N=20, K=40))

        written.launch(portable)

        written.check_guards()


INSTRUCTIONS: list[tuple[Form, int, tuple[torch.dtype, torch.dtype], str]] = [
    ("ragged_m", 75, (E4M3, E4M3), "fma.rn.f32"),
    ("masked", 80, (E4M3, E5M2), "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"),
    ("ragged_k", 89, (E4M3, E4M3), "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"),
    ("ragged_m", 90, (E5M2, E4M3), "wgmma.mma_async.sync.aligned.m64n64k32.f32.e5m2.e4m3"),
]


@pytest.mark.compile
@pytest.mark.oldest_triton
@pytest.mark.parametrize(("form", "arch", "formats", "instruction"), INSTRUCTIONS)
def test_every_architecture_gets_its_instructions(
    form: Form, arch: int, formats: tuple[torch.dtype, torch.dtype], instruction: str
) -> None:
    call = draw(form, a=formats[0], b=formats[1], N=128, K=256, out_dtype=F32)
    tile = portable.Block(16, 32, 32, 4, 1) if arch < 80 else portable.Block(64, 64, 64, 4, 2)

    compiled = portable_groups.compile_for(guarded(call).problem, tile, arch)

    assert instruction in compiled.asm["ptx"]


# ---- what is refused
BESIDE, MASKED, OF_TERMS = (draw(form, "bias") for form in FORMS)
WRONG: dict[str, tuple[GroupedCall, dict[str, Any]]] = {
    "offs is None, expected the ends of groups": (BESIDE, {"offs": None}),
    r"offs and counts are None, expected mat_a \(M, K\)": (MASKED, {"counts": None}),
    "mat_a.dtype is torch.float32, expected one of": (BESIDE, {"mat_a": torch.ones(43, 200)}),
    "mat_b.dtype is torch.float32, expected one": (BESIDE, {"mat_b": torch.ones(5, 200, 136)}),
    "output_dtype is torch.int8, expected one of": (BESIDE, {"out_dtype": torch.int8}),
    r"scale_a is torch.float32 of shape \(43, 3\) on cpu, expected torch.float32 of shape "
    r"\(43, 2\) on cpu": (BESIDE, {"scale_a": scales(43, 3)}),
    "scale_a is torch.float16 of shape": (BESIDE, {"scale_a": scales(43, 2).half()}),
    r"scale_b is .*136.* expected .* \(5, 2, 2\)": (BESIDE, {"scale_b": scales(5, 2, 136)}),
    r"scale_a is .* expected .* \(5, 17, 2\)": (MASKED, {"scale_a": scales(85, 2)}),
    r"scale_b.shape is \(2, 4\), expected \(136, 4\) with BlockWise1x128": (
        OF_TERMS,
        {"scale_b": scales(4, 2)},
    ),
    r"bias is torch.float32 .* expected torch.bfloat16": (BESIDE, {"bias": torch.ones(5, 136)}),
    r"residual is .* \(43, 136\)": (BESIDE, {"residual": torch.ones(4, 136).bfloat16()}),
    "a_index is given, expected None beside counts": (MASKED, {"a_index": torch.arange(4)}),
    "mat_a has 3 dimensions and mat_b has 2, expected": (
        MASKED,
        {
            "mat_b": OF_TERMS.tensors["mat_b"][:200],
            "counts": None,
            "offs": BESIDE.tensors["offs"],
            "bias": None,
        },
    ),
    **{
        f"{name} is list, expected a torch.Tensor": (BESIDE, {name: [1]})
        for name in ("mat_a", "mat_b", "offs", "bias")
    },
    **{
        f"{name} is float, expected a torch.Tensor": (BESIDE, {name: [1.0]})
        for name in ("scale_a", "scale_b")
    },
    "scale_recipe_a and scale_recipe_b are TensorWise and TensorWise, expected BlockWise1x128": (
        BESIDE,
        dict.fromkeys(("scale_recipe_a", "scale_recipe_b"), RECIPES["tensorwise"]),
    ),
    "expected BlockWise1x128 and BlockWise1x128 where mat_b has 2": (
        OF_TERMS,
        {"scale_recipe_b": RECIPES["128x128"]},
    ),
    r"contraction_dim is \(1, 0\), expected \(\) or \(1, 1\): the columns": (
        BESIDE,
        {"contraction_dim": (1, 0)},
    ),
    "use_fast_accum is True, expected False with scales of blocks": (
        BESIDE,
        {"use_fast_accum": True},
    ),
    "use_fast_accum is int, expected a bool": (BESIDE, {"use_fast_accum": 0}),
    "output_dtype is NoneType, expected a torch.dtype": (BESIDE, {"out_dtype": None}),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_named(message: str) -> None:
    call, wrong = WRONG[message]

    with pytest.raises((OperandError, TypeError), match=message):
        call.run(**wrong)


def test_kernels_that_do_not_take_it_say_so() -> None:
    with pytest.raises(ValueError, match="kernel is 'fast', expected"):
        BESIDE.run(kernel="fast")
    with pytest.raises(ValueError, match=r"kernel 'hopper\.grouped': needs an NVIDIA GPU"):
        BESIDE.run(kernel="hopper.grouped")
