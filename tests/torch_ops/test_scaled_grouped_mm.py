"""`outblas.scaled_grouped_mm` without a GPU: torch group by group, and the portable kernel in
Triton's interpreter, both compared with GEMMs of single groups in float64.
"""

from typing import Any

import pytest
import torch
from support.fp8 import E4M3, E5M2
from support.grouped_calls import GroupedCall, check_close, check_equal, guarded
from support.scaled_groups import FORMS, blocks, draw, scales

import outblas
from outblas.core.errors import OperandError
from outblas.core.grouped import Form
from outblas.kernels import grouped as portable
from outblas.runtime import dispatch

Tensor = torch.Tensor

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.filterwarnings("ignore:torch takes this call"),
]

kernels = pytest.mark.parametrize("kernel", [None, "portable"])
forms = pytest.mark.parametrize("form", FORMS)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    dispatch.clear_cache()


def check(call: GroupedCall, kernel: str | None) -> None:
    want = call.expected()

    result = call.run(kernel=kernel)

    assert (result.dtype, result.shape) == (call.options["out_dtype"], want.shape)
    assert result.is_contiguous()
    check_equal(result, want)


# ---- values
GROUPS: dict[Form, tuple[tuple[int, ...] | None, ...]] = {
    "ragged_m": (None, (43,), (0, 0, 0), (1, 2, 16, 33)),
    "masked": (None, (17,), (0, 0, 0)),
    "ragged_k": (None, (512,), (0, 0, 0), (128, 128, 512)),
}


@kernels
@forms
def test_each_group_has_its_product(form: Form, kernel: str | None) -> None:
    """Values and scales that no group reads are NaN."""
    for ends in GROUPS[form]:
        check(draw(form, out_dtype=F32, ends=ends).poisoned(), kernel)


@pytest.mark.parametrize("ends", [(100, 300), (1, 511), (200, 200)])
def test_the_portable_kernel_takes_any_end_of_terms(ends: tuple[int, ...]) -> None:
    check(draw("ragged_k", out_dtype=F32, ends=ends), "portable")


@kernels
@pytest.mark.parametrize("out_dtype", [F32, BF16, F16])
@forms
def test_results_are_rounded_once(form: Form, out_dtype: torch.dtype, kernel: str | None) -> None:
    call = draw(form, "bias", "residual", out_dtype=out_dtype, activation="relu", M=5, N=40, K=130)
    # The largest result fits float16.
    call = call.replaced(scale_a=call.tensors["scale_a"] / 16)

    check(call, kernel)


@kernels
@pytest.mark.parametrize(("a", "b"), [(E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)])
@forms
def test_formats(form: Form, a: torch.dtype, b: torch.dtype, kernel: str | None) -> None:
    check(draw(form, a=a, b=b, out_dtype=F32, M=5, N=40, K=136), kernel)


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


@kernels
@forms
def test_tensors_of_any_strides(form: Form, kernel: str | None) -> None:
    call = draw(form, out_dtype=F32)
    padded = {
        name: torch.cat([t.mT, t.mT[..., :1]], -1).contiguous()[..., :-1].mT
        for name, t in call.tensors.items()
        if name.startswith("scale")
    }
    turned = {name: t.mT.contiguous().mT for name, t in call.tensors.items() if "mat" in name}

    check(call.replaced(**padded, **turned), kernel)


@kernels
@pytest.mark.parametrize(
    ("N", "K"), [(1, 1), (7, 127), (128, 128), (129, 129), (256, 257), (130, 0)]
)
@pytest.mark.parametrize("form", ["ragged_m", "masked"])
def test_blocks_at_the_edge(form: Form, N: int, K: int, kernel: str | None) -> None:
    check(draw(form, "bias", N=N, K=K, out_dtype=F32), kernel)


@kernels
@pytest.mark.parametrize("activation", ["", "silu", "swiglu"])
@forms
def test_real_numbers_with_an_epilogue(form: Form, activation: str, kernel: str | None) -> None:
    call = draw(form, "bias", "residual", real=True, activation=activation, out_dtype=F32)

    check_close(call.run(kernel=kernel), call.expected(), 1e-4)


@kernels
def test_rows_are_gathered_with_their_scales_and_scattered(kernel: str | None) -> None:
    names = "a_index", "scatter_index", "scatter_weights", "residual", "bias"

    check(draw("ragged_m", *names, out_dtype=F32), kernel)


@kernels
def test_no_row_and_no_column(kernel: str | None) -> None:
    offs = torch.tensor([0, 0], dtype=torch.int32)
    b = torch.ones(2, 16, 200).to(E4M3)

    result = outblas.scaled_grouped_mm(
        b[0, :0, :16], b, scales(0, 1), scales(2, 1, 2), offs=offs, kernel=kernel
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
@pytest.mark.parametrize("ends", [(90, 5, 20), (-7, 30, 2**31 - 1), (-(2**31), 60, 3)])
@forms
def test_wrong_ends_never_leave_the_operands(form: Form, ends: tuple[int, ...]) -> None:
    """The result is undefined then, but memory around it is not."""
    written = guarded(draw(form, ends=ends, out_dtype=F32))

    written.launch(portable)

    written.check_guards()


@pytest.mark.compile
@pytest.mark.oldest_triton
@pytest.mark.parametrize(
    ("arch", "formats", "instruction"),
    [
        (75, (E4M3, E4M3), "fma.rn.f32"),
        (80, (E4M3, E5M2), "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"),
        (89, (E4M3, E4M3), "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"),
        (90, (E4M3, E4M3), "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3"),
        (90, (E5M2, E4M3), "wgmma.mma_async.sync.aligned.m64n64k32.f32.e5m2.e4m3"),
    ],
)
@forms
def test_every_architecture_gets_its_instructions(
    form: Form, arch: int, formats: tuple[torch.dtype, torch.dtype], instruction: str
) -> None:
    call = draw(form, a=formats[0], b=formats[1], N=128, K=256, out_dtype=F32)
    problem = guarded(call).problem

    compiled = portable.compile_for(problem, portable.Block(64, 64, 64, 4, 2), arch)

    assert instruction in compiled.asm["ptx"]


# ---- what is refused
ROWS, MASKED, OF_TERMS = (draw(form, "bias") for form in FORMS)
WRONG: dict[str, tuple[GroupedCall, dict[str, Any]]] = {
    "offs is None, expected the ends of groups": (ROWS, {"offs": None}),
    r"offs and counts are None, expected mat_a \(M, K\)": (MASKED, {"counts": None}),
    "mat_a.dtype is torch.float32, expected one of": (ROWS, {"mat_a": torch.ones(43, 200)}),
    "mat_b.dtype is torch.float32, expected one": (ROWS, {"mat_b": torch.ones(5, 200, 136)}),
    "out_dtype is torch.int8, expected one of": (ROWS, {"out_dtype": torch.int8}),
    r"scale_a is torch.float32 of shape \(43, 3\) on cpu, expected torch.float32 of shape "
    r"\(43, 2\) on cpu": (ROWS, {"scale_a": scales(43, 3)}),
    "scale_a is torch.float16 of shape": (ROWS, {"scale_a": scales(43, 2).half()}),
    r"scale_b is .*136.* expected .* \(5, 2, 2\)": (ROWS, {"scale_b": scales(5, 2, 136)}),
    r"scale_b is .*1\).* expected .* \(5, 2, 2\)": (ROWS, {"scale_b": scales(5, 2, 1)}),
    r"scale_a is .* expected .* \(5, 17, 2\)": (MASKED, {"scale_a": scales(85, 2)}),
    r"scale_b is .* expected .* \(4, 136\)": (OF_TERMS, {"scale_b": scales(4, 2)}),
    r"bias is torch.float32 .* expected torch.bfloat16": (ROWS, {"bias": torch.ones(5, 136)}),
    r"residual is .* \(43, 136\)": (ROWS, {"residual": torch.ones(4, 136).bfloat16()}),
    "a_index is given, expected None beside counts": (MASKED, {"a_index": torch.arange(4)}),
    "mat_a has 3 dimensions and mat_b has 2, expected": (
        MASKED,
        {"mat_b": OF_TERMS.tensors["mat_b"][:200], "counts": None, "offs": ROWS.tensors["offs"]},
    ),
    **{
        f"{name} is list, expected a torch.Tensor": (ROWS, {name: [1]})
        for name in ("mat_a", "mat_b", "scale_a", "scale_b", "offs", "bias")
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_named(message: str) -> None:
    call, wrong = WRONG[message]
    if "mat_a has" in message:
        call = GroupedCall(
            call.form, {n: t for n, t in call.tensors.items() if n != "bias"}, call.options
        )

    with pytest.raises((OperandError, TypeError), match=message):
        call.run(**wrong)


def test_kernels_that_do_not_take_it_say_so() -> None:
    with pytest.raises(ValueError, match="kernel is 'fast', expected"):
        ROWS.run(kernel="fast")
    with pytest.raises(ValueError, match=r"kernel 'hopper\.grouped': needs an NVIDIA GPU"):
        ROWS.run(kernel="hopper.grouped")
