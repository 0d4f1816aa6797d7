"""`outblas.scaled_grouped_mm` without a GPU: torch group by group, and the portable kernel in
Triton's interpreter, both beside products of single groups in float64.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.fp8 import E4M3, E5M2
from support.grouped_calls import check_close, check_equal
from support.scaled_groups import (
    COUNTS,
    ENDS,
    EXTENT,
    FORMS,
    TERM_ENDS,
    TERMS,
    ScaledGroups,
    blocks,
    draw,
    scales,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import outblas
from outblas.core import grouped
from outblas.core.errors import OperandError
from outblas.core.grouped import Form, GroupedProblem, GroupedTensors
from outblas.kernels import grouped as kernels
from outblas.runtime import dispatch

Tensor = torch.Tensor

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.filterwarnings("ignore:torch takes this call"),
]

BOTH = [None, "portable"]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    dispatch.clear_cache()


def check(call: ScaledGroups, kernel: str | None) -> None:
    want = call.expected()

    result = call.run(kernel=kernel)

    assert result.dtype == call.options["out_dtype"]
    assert result.shape == want.shape
    assert result.is_contiguous()
    check_equal(result, want)


# ---- values
OTHER_ENDS: dict[Form, tuple[tuple[int, ...], ...]] = {
    "ragged_m": ((43,), (0, 0, 0), (1, 2, 16, 33)),
    "masked": ((17,), (0, 0, 0)),
    "ragged_k": ((512,), (0, 0, 0), (128, 256, 512)),
}


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("form", FORMS)
def test_each_group_has_its_product(form: Form, kernel: str | None) -> None:
    for ends in (None, *OTHER_ENDS[form]):
        check(draw(form, out_dtype=F32, ends=ends), kernel)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("out_dtype", [F32, BF16, F16])
@pytest.mark.parametrize("form", FORMS)
def test_results_are_rounded_once(form: Form, out_dtype: torch.dtype, kernel: str | None) -> None:
    call = draw(form, "bias", "residual", out_dtype=out_dtype, activation="relu", M=5, N=40, K=130)
    # The largest result fits float16.
    call = call.replaced(scale_a=call.tensors["scale_a"] / 16)

    check(call, kernel)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize(("a", "b"), [(E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)])
@pytest.mark.parametrize("form", FORMS)
def test_formats(form: Form, a: torch.dtype, b: torch.dtype, kernel: str | None) -> None:
    check(draw(form, a=a, b=b, out_dtype=F32, M=5, N=40, K=136), kernel)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_fp8_value_is_multiplied(dtype: torch.dtype, kernel: str | None) -> None:
    """Subnormal ones and those that are not finite too: one in each row of A, times one."""
    every = torch.arange(256).to(torch.uint8).view(dtype)
    a = torch.zeros(256, 16).to(dtype)
    a.view(torch.uint8)[:, 3] = every.view(torch.uint8)
    b = torch.zeros(1, 16, 16)
    b[0, 3] = 1
    offs = torch.tensor([256], dtype=torch.int32)

    result = outblas.scaled_grouped_mm(
        a,
        b.to(dtype),
        torch.full((256, 1), 4.0),
        torch.ones(1, 1, 1),
        offs=offs,
        out_dtype=F32,
        kernel=kernel,
    )

    want = (every.float() * 4).unsqueeze(1).expand(256, 16)
    finite = want.isfinite()
    assert torch.equal(result[finite], want[finite])
    assert torch.equal(result.isnan()[:, 0], want.isnan()[:, 0])


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("form", FORMS)
def test_tensors_of_any_strides(form: Form, kernel: str | None) -> None:
    call = draw(form, out_dtype=F32)

    padded = {
        name: torch.cat([t.mT, t.mT[..., :1]], -1).contiguous()[..., :-1].mT
        for name, t in call.tensors.items()
        if name.startswith("scale")
    }
    lying = {name: t.mT.contiguous().mT for name, t in call.tensors.items() if "mat" in name}

    check(call.replaced(**padded, **lying), kernel)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize(
    ("N", "K"), [(1, 1), (7, 127), (128, 128), (129, 129), (256, 257), (130, 0)]
)
@pytest.mark.parametrize("form", ["ragged_m", "masked"])
def test_blocks_at_the_edge(form: Form, N: int, K: int, kernel: str | None) -> None:
    check(draw(form, "bias", N=N, K=K, out_dtype=F32), kernel)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("activation", ["", "silu", "swiglu"])
@pytest.mark.parametrize("form", FORMS)
def test_real_numbers_with_an_epilogue(form: Form, activation: str, kernel: str | None) -> None:
    call = draw(form, "bias", "residual", real=True, activation=activation, out_dtype=F32)

    result = call.run(kernel=kernel)

    check_close(result, call.expected(), 1e-4)


@pytest.mark.parametrize("kernel", BOTH)
def test_rows_are_gathered_with_their_scales_and_scattered(kernel: str | None) -> None:
    names = "a_index", "scatter_index", "scatter_weights", "residual", "bias"

    check(draw("ragged_m", *names, out_dtype=F32), kernel)


@pytest.mark.parametrize("kernel", BOTH)
def test_what_belongs_to_no_group_does_not_matter(kernel: str | None) -> None:
    """Neither values nor scales that are not finite."""
    for form in FORMS:
        call = draw(form, out_dtype=F32)
        want = call.expected()
        a, scale_a = call.tensors["mat_a"], call.tensors["scale_a"]
        if form == "masked":
            for group, count in enumerate(COUNTS):
                scale_a[group, max(count, 0) :] = torch.nan
                a.view(torch.uint8)[group, max(count, 0) :] = 127
        elif form == "ragged_m":
            scale_a[ENDS[-1] :] = torch.nan
            a.view(torch.uint8)[ENDS[-1] :] = 127
        else:
            scale_a[:, TERM_ENDS[-1] // 128 :] = torch.nan
            a.view(torch.uint8)[:, TERM_ENDS[-1] :] = 127

        check_equal(call.run(kernel=kernel), want)


@pytest.mark.parametrize("kernel", BOTH)
def test_a_group_without_terms_has_zeros(kernel: str | None) -> None:
    call = draw("ragged_k", ends=(128, 128, 512))

    result = call.run(kernel=kernel)

    assert (result[1] == 0).all()


@pytest.mark.parametrize("kernel", BOTH)
def test_no_row_and_no_column(kernel: str | None) -> None:
    offs = torch.tensor([0, 0], dtype=torch.int32)
    b = torch.ones(2, 16, 200).to(E4M3)

    result = outblas.scaled_grouped_mm(
        b[0, :0, :16], b, scales(0, 1), scales(2, 1, 2), offs=offs, kernel=kernel
    )

    assert result.shape == (0, 200)


# ---- torch's machinery
@pytest.mark.parametrize("form", FORMS)
def test_a_call_is_described_once(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    described = Mock(wraps=grouped.describe)
    monkeypatch.setattr(grouped, "describe", described)
    call = draw(form, out_dtype=F32, M=5, N=40, K=40)

    results = [call.run(kernel="portable").nan_to_num() for _ in range(3)]

    assert described.call_count == 1
    check_equal(results[-1], call.expected())


@pytest.mark.parametrize("name", ["scale_a", "scale_b"])
def test_scales_of_other_strides_take_another_plan(name: str) -> None:
    call = draw("ragged_m", out_dtype=F32, N=40)
    call.run(kernel="portable")

    turned = call.replaced(**{name: call.tensors[name].mT.contiguous().mT})

    check(turned, "portable")


def test_a_call_is_one_graph_under_compile() -> None:
    call = draw("ragged_m", "bias", "residual", activation="swiglu")
    compiled = torch.compile(call.run, fullgraph=True, backend="aot_eager")

    for ends in (ENDS, (3, 7, 7, 20, 40)):
        offs = torch.tensor(ends, dtype=torch.int32)
        got, want = compiled(offs=offs), call.run(offs=offs)
        assert torch.equal(got[:40], want[:40])


@pytest.mark.parametrize("form", FORMS)
def test_fake_tensors_have_the_shapes_of_results(form: Form) -> None:
    real = draw(form, activation="swiglu", out_dtype=F16)
    with FakeTensorMode() as mode:
        result = real.run(**{name: mode.from_tensor(t) for name, t in real.tensors.items()})

    assert result.shape == real.expected().shape
    assert result.dtype == F16


def test_the_operator_passes_torchs_own_checks() -> None:
    t = draw("ragged_m", "bias", "residual", activation="swiglu", ends=(5, 43)).tensors
    given = t["mat_a"], t["mat_b"], t["scale_a"], t["scale_b"], t["offs"], t["bias"], t["residual"]

    torch.library.opcheck(
        torch.ops.outblas.scaled_grouped_mm.default,
        (*given, None, None, None, None, "swiglu", BF16, ""),
        test_utils=("test_autograd_registration", "test_faketensor"),  # others multiply fp8 tensors
    )


def test_flops_are_those_of_all_rows() -> None:
    call = draw("ragged_m")

    with FlopCounterMode(display=False) as counter:
        call.run()

    assert counter.get_total_flops() == 2 * EXTENT * 136 * 200


def test_a_backward_pass_names_what_has_no_gradient() -> None:
    call = draw("ragged_m", "bias")
    call.tensors["bias"].requires_grad_()

    result = call.run()

    with pytest.raises(NotImplementedError, match="bias requires grad, but scaled_grouped_mm has"):
        result.sum().backward()


def test_a_forward_gradient_is_refused() -> None:
    call = draw("ragged_m", "bias")

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(call.tensors["bias"], torch.ones_like(call.tensors["bias"]))
        with pytest.raises(OperandError, match="bias carries a forward-mode gradient"):
            call.run(bias=dual)


def test_a_promise_of_batch_invariance_is_refused() -> None:
    """Also where the call has a plan from before."""
    call = draw("ragged_m")
    for _ in range(2):
        call.run()

    with (
        outblas.batch_invariant(),
        pytest.raises(ValueError, match="batch_invariant is True, and scaled_grouped_mm does not"),
    ):
        call.run()


class Overriding(torch.Tensor):
    """A tensor type that overrides functions."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function, sorted(n for n, value in (kwargs or {}).items() if value is not None)


def test_scales_may_override_the_call() -> None:
    call = draw("ragged_m", "bias")

    function, names = call.run(scale_b=call.tensors["scale_b"].as_subclass(Overriding))

    assert function is outblas.scaled_grouped_mm
    assert names == ["bias", "offs", "out_dtype"]


# ---- what is refused
ROWS, MASKED, OF_TERMS = (draw(form) for form in FORMS)
Wrong = dict[str, Any]


@pytest.mark.parametrize(
    ("call", "wrong", "message"),
    [
        (ROWS, {"offs": None}, "offs is None, expected the ends of groups"),
        (MASKED, {"counts": None}, r"offs and counts are None, expected mat_a \(M, K\)"),
        (ROWS, {"mat_a": torch.ones(43, 200)}, "mat_a.dtype is torch.float32, expected one of"),
        (ROWS, {"mat_b": torch.ones(5, 200, 136)}, "mat_b.dtype is torch.float32, expected one"),
        (ROWS, {"out_dtype": torch.int8}, "out_dtype is torch.int8, expected one of"),
        (
            ROWS,
            {"scale_a": scales(43, 3)},
            r"scale_a is torch.float32 of shape \(43, 3\) on cpu, expected torch.float32 of shape "
            r"\(43, 2\) on cpu",
        ),
        (ROWS, {"scale_a": scales(43, 2).half()}, "scale_a is torch.float16 of shape"),
        (ROWS, {"scale_b": scales(5, 2, 136)}, r"scale_b is .* expected .* \(5, 2, 2\)"),
        (ROWS, {"scale_b": scales(5, 2, 1)}, r"scale_b is .* expected .* \(5, 2, 2\)"),
        (MASKED, {"scale_a": scales(85, 2)}, r"scale_a is .* expected .* \(5, 17, 2\)"),
        (OF_TERMS, {"scale_b": scales(4, 2)}, r"scale_b is .* expected .* \(4, 136\)"),
        (
            MASKED,
            {"mat_b": OF_TERMS.tensors["mat_b"][:200], "counts": None, "offs": ENDS},
            "offs is tuple",
        ),
        (ROWS, {"bias": torch.ones(5, 136)}, r"bias is torch.float32 .* expected torch.bfloat16"),
        (ROWS, {"residual": torch.ones(4, 136).bfloat16()}, r"residual is .* \(43, 136\)"),
        (MASKED, {"a_index": torch.arange(4)}, "a_index is given, expected None beside counts"),
    ],
)
def test_what_does_not_fit_is_named(call: ScaledGroups, wrong: Wrong, message: str) -> None:
    with pytest.raises((OperandError, TypeError), match=message):
        call.run(**wrong)


def test_columns_are_not_divided() -> None:
    a, b = MASKED.tensors["mat_a"], OF_TERMS.tensors["mat_b"][:200]

    with pytest.raises(OperandError, match="mat_a has 3 dimensions and mat_b has 2, expected"):
        outblas.scaled_grouped_mm(a, b, scales(1), scales(1), offs=ROWS.tensors["offs"])


@pytest.mark.parametrize("name", ["mat_a", "mat_b", "scale_a", "scale_b", "offs", "bias"])
def test_arguments_of_another_type_are_named(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is list, expected a torch.Tensor"):
        ROWS.run(**{name: [1]})


def test_kernels_that_do_not_take_it_say_so() -> None:
    with pytest.raises(ValueError, match="kernel is 'fast', expected"):
        ROWS.run(kernel="fast")
    with pytest.raises(ValueError, match=r"kernel 'hopper\.grouped': needs an NVIDIA GPU"):
        ROWS.run(kernel="hopper.grouped")


def test_a_fallback_warns_and_strict_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_STRICT", "1")

    with pytest.raises(RuntimeError, match="OUTBLAS_STRICT=1 forbids the fallback to torch"):
        ROWS.run()


def test_a_group_of_terms_has_the_scales_of_its_own_terms() -> None:
    """Scales are numbered from the beginning of K, not of the group."""
    call = draw("ragged_k", out_dtype=F32, ends=(256, TERMS))
    scale = torch.tensor([1.0, 2, 4, 8]).expand(21, blocks(TERMS))
    ones = torch.ones_like(call.tensors["mat_a"].float()).to(E4M3)
    columns = torch.ones(TERMS, 136).to(E4M3)

    result = call.replaced(
        mat_a=ones, mat_b=columns, scale_a=scale, scale_b=torch.ones(4, 136)
    ).run()

    assert (result[0] == 128 * 3).all()
    assert (result[1] == 128 * 12).all()


# ---- the portable kernel
def planned(call: ScaledGroups) -> tuple[GroupedProblem, Callable[[], None], Tensor]:
    """Returns the problem of a call, the launch of the portable kernel, and its result between two
    as large.
    """
    t = call.tensors
    beside = {n: x for n, x in t.items() if n not in ("mat_a", "mat_b", "offs")}
    tensors = GroupedTensors(**beside)
    shape, groups = call.expected().shape, len(call.parts())
    guarded = torch.full((3, *shape), torch.nan)
    out = guarded[1]
    given = call.form, t["mat_a"], t["mat_b"], out
    problem = grouped.describe(*given, groups, tensors)
    a, b, flat, moved = grouped.in_planned_form(*given, tensors)
    ends = grouped.ends(t.get("offs"), tensors)
    return problem, lambda: kernels.run(problem, a, b, flat, ends, moved), guarded


@pytest.mark.parametrize("ends", [(90, 5, 20), (-7, 30, 2**31 - 1), (-(2**31), 60, 3)])
@pytest.mark.parametrize("form", FORMS)
def test_wrong_ends_never_leave_the_operands(form: Form, ends: tuple[int, ...]) -> None:
    """The result is undefined then, but memory around it is not."""
    call = draw(form, ends=(0, 0, 0))
    call.tensors["counts" if form == "masked" else "offs"].copy_(torch.tensor(ends))
    _, launch, guarded = planned(call)

    launch()

    assert guarded[0].isnan().all()
    assert guarded[2].isnan().all()


@pytest.mark.parametrize("ends", [(100, 300), (1, 511), (200, 200)])
def test_the_portable_kernel_takes_any_end_of_terms(ends: tuple[int, ...]) -> None:
    check(draw("ragged_k", out_dtype=F32, ends=ends), "portable")


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
@pytest.mark.parametrize("form", FORMS)
def test_every_architecture_gets_its_instructions(
    form: Form, arch: int, formats: tuple[torch.dtype, torch.dtype], instruction: str
) -> None:
    call = draw(form, a=formats[0], b=formats[1], N=128, K=256)
    problem, _, _ = planned(call)

    compiled = kernels.compile_for(problem, kernels.Block(64, 64, 64, 4, 2), arch)

    assert instruction in compiled.asm["ptx"]
