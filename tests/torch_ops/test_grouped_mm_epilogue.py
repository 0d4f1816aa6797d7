"""`outblas.grouped_mm` with bias, activation, residual, aux, gather and scatter: torch group by
group, and the portable kernel in Triton's interpreter, both beside products of single groups.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.grouped_calls import (
    ENDS,
    EXTENT,
    FORMS,
    ROWS_OF_A,
    Call,
    check_close,
    check_equal,
    draw,
    empty_aux,
    subsets,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import outblas
from outblas.core import grouped
from outblas.core.epilogue import ACTIVATIONS, GATED
from outblas.core.errors import OperandError
from outblas.core.grouped import Form, GroupedTensors
from outblas.kernels import grouped as kernels

Tensor = torch.Tensor

pytestmark = pytest.mark.filterwarnings("ignore:torch takes this call")

BOTH = [None, pytest.param("portable", marks=pytest.mark.interpreter)]
EXACT = "", "relu", "reglu"  # of integers
ROWS = "a_index", "scatter_index", "scatter_weights"
ALL = "bias", "residual", *ROWS
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def forms_and_activations(*forms: Form) -> list[Any]:
    """All but gated activations of divided columns. CI takes a function and a gated pair."""
    in_ci = "", "gelu", "swiglu"
    return [
        pytest.param(form, activation, marks=() if activation in in_ci else pytest.mark.slow)
        for form in forms
        for activation in ("", *ACTIVATIONS)
        if form != "ragged_n" or activation not in GATED
    ]


def check(call: Call, kernel: str | None, *, aux: bool) -> None:
    """Compares a call, exactly where its activation allows it."""
    dtype = call.options.get("out_dtype", call.tensors["mat_a"].dtype)
    x, want = call.wide().expected()
    written = empty_aux(call, dtype) if aux else None

    result = call.run(aux=written, kernel=kernel)

    assert result.dtype == dtype
    assert result.is_contiguous()
    if call.form == "batch" and kernel is None:
        check_close(result, want, 1 / 32)  # torch rounds after each step
    elif call.activation in EXACT:
        check_equal(result, want)
    else:
        check_close(result, want, {F32: 1e-5, F16: 1e-3, BF16: 1 / 128}[dtype])
    if written is not None:
        check_equal(written, x)
        assert written[x.isnan()].isnan().all(), "of no group, so not written"


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize(("form", "activation"), forms_and_activations(*FORMS, "batch"))
def test_epilogues(form: Form, activation: str, kernel: str | None) -> None:
    names = ("residual",) if form == "ragged_n" else ("bias", "residual")
    for given in subsets(names):
        check(draw(form, *given, activation=activation), kernel, aux="residual" in given)
    check(draw(form, activation=activation), kernel, aux=True)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("activation", ["", "relu", "silu", "reglu", "swiglu"])
def test_rows_are_gathered_and_scattered(activation: str, kernel: str | None) -> None:
    for given in subsets(("residual", *ROWS)):
        call = draw("ragged_m", *given, activation=activation)
        check(call, kernel, aux="scatter_index" in given)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("out_dtype", [None, F32])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_dtypes(
    dtype: torch.dtype, out_dtype: torch.dtype | None, index: torch.dtype, kernel: str | None
) -> None:
    call = draw("ragged_m", *ALL, activation="reglu", dtype=dtype, out_dtype=out_dtype, index=index)

    check(call, kernel, aux=True)


@pytest.mark.parametrize("kernel", BOTH)
def test_weights_in_the_dtype_of_the_result(kernel: str | None) -> None:
    call = draw("ragged_m", *ALL, activation="relu")
    weights = call.tensors["scatter_weights"].bfloat16()

    check(call.with_tensors(scatter_weights=weights), kernel, aux=False)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("form", FORMS)
def test_tensors_of_any_strides(form: Form, kernel: str | None) -> None:
    call = draw(form, "residual", activation="relu")
    residual = call.tensors["residual"].mT.contiguous().mT
    if form == "ragged_m":
        wide = draw(form, *ALL, activation="relu")
        spread = {name: wide.tensors[name].repeat_interleave(2)[::2] for name in ROWS}
        call = wide.with_tensors(**spread)
    call = call.with_tensors(residual=residual)
    x, want = call.wide().expected()
    aux = torch.full((*x.shape, 2), torch.nan, dtype=BF16).transpose(-2, -3)[..., 0]
    aux = aux.mT if aux.shape != x.shape else aux

    result = call.run(aux=aux, kernel=kernel)

    check_equal(result, want)
    check_equal(aux, x)


@pytest.mark.parametrize("kernel", BOTH)
def test_a_result_is_rounded_once(kernel: str | None) -> None:
    """257 has no bfloat16, the sum with the bias has one."""
    a, b = torch.ones(1, 257, dtype=BF16), torch.ones(1, 257, 1, dtype=BF16)
    bias, residual = torch.tensor([[-256]], dtype=BF16), torch.tensor([[0.5]], dtype=BF16)
    offs = torch.ones(1, dtype=torch.int32)

    result = outblas.grouped_mm(
        a, b, offs=offs, bias=bias, activation="relu", residual=residual, kernel=kernel
    )

    assert result.item() == 1.5


@pytest.mark.parametrize("kernel", BOTH)
def test_a_gathered_index_beyond_32_bits_does_not_wrap(kernel: str | None) -> None:
    call = draw("ragged_m", "a_index")
    call.tensors["a_index"][:2] = torch.tensor([2**32 + 3, -(2**32) + 3])

    check(call, kernel, aux=False)


@pytest.mark.parametrize("kernel", BOTH)
def test_a_scattered_index_beyond_32_bits_does_not_wrap(kernel: str | None) -> None:
    """It would name the row that has been stored before."""
    call = draw("ragged_m", "scatter_index")
    place = call.tensors["scatter_index"]
    place[ENDS[-1] - 2] = place[0] + 2**32
    place[ENDS[-1] - 1] = place[1] - 2**32

    check(call, kernel, aux=False)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_an_index_beyond_mat_a_stands_for_its_first_or_last_row(
    index: torch.dtype, kernel: str | None
) -> None:
    call = draw("ragged_m", "a_index", index=index)
    call.tensors["a_index"][0], call.tensors["a_index"][20] = -1, ROWS_OF_A
    rows = call.tensors["mat_a"]
    guarded = torch.full((3, *rows.shape), torch.nan, dtype=BF16)
    guarded[1] = rows

    check(call.with_tensors(mat_a=guarded[1]), kernel, aux=False)


@pytest.mark.interpreter
@pytest.mark.parametrize("activation", ["", "reglu"])
def test_an_index_outside_of_the_result_stores_nothing(activation: str) -> None:
    call = draw("ragged_m", "scatter_index", activation=activation, index=torch.int32)
    a, b, place = (call.tensors[name] for name in ("mat_a", "mat_b", "scatter_index"))
    _, want = call.expected()
    guarded = torch.full((3, *want.shape), torch.nan, dtype=BF16)
    out, tensors = guarded[1], GroupedTensors(scatter_index=place)
    place[2], place[4] = -1, EXTENT
    _, want = call.wide().expected()
    offs = torch.tensor(ENDS, dtype=torch.int32)
    problem = grouped.describe("ragged_m", a, b, out, len(ENDS), tensors, activation=activation)

    kernels.run(problem, a, b, out, offs, tensors)

    check_equal(out, want)
    assert out[want.isnan()].isnan().all(), "no row of the groups is stored there"
    assert guarded[0].isnan().all()
    assert guarded[2].isnan().all()


@pytest.mark.interpreter
@pytest.mark.parametrize("scatters", [False, True])
def test_rows_behind_the_last_group_are_zeros_with_any_epilogue(scatters: bool) -> None:
    names = ALL if scatters else ("bias", "residual")
    call = draw("ragged_m", *names, activation="reglu", index=torch.int32)
    call.tensors["residual"][:] += 1
    given = {**call.tensors, "aux": empty_aux(call)}
    a, b = given.pop("mat_a"), given.pop("mat_b")
    out = torch.full(given["residual"].shape, torch.nan, dtype=BF16)
    tensors = GroupedTensors(**given)
    problem = grouped.describe(
        "ragged_m", a, b, out, len(ENDS), tensors, activation="reglu", zero_tail=True
    )

    kernels.run(problem, a, b, out, torch.tensor(ENDS, dtype=torch.int32), tensors)

    tail = call.tensors["scatter_index"][ENDS[-1] :] if scatters else slice(ENDS[-1], None)
    assert (out[tail] == 0).all()
    assert given["aux"][ENDS[-1] :].isnan().all()


@pytest.mark.compile
@pytest.mark.oldest_triton
@pytest.mark.parametrize(
    ("form", "activation", "arch", "dtype", "instruction"),
    [
        ("ragged_m", "swiglu", 75, F16, "fma.rn.f32"),
        ("ragged_m", "swiglu", 80, BF16, "mma.sync"),
        ("ragged_m", "gelu", 90, BF16, "wgmma.mma_async"),
        ("ragged_m", "swiglu", 90, BF16, "wgmma.mma_async"),
        ("ragged_k", "swiglu", 90, BF16, "wgmma.mma_async"),
    ],
)
def test_an_epilogue_compiles_for_every_architecture(
    form: Form, activation: str, arch: int, dtype: torch.dtype, instruction: str
) -> None:
    names = ALL if form == "ragged_m" else ("bias", "residual")
    call = draw(form, *names, activation=activation, dtype=dtype, N=128, K=64, index=torch.int32)
    given = {**call.tensors, "aux": empty_aux(call, dtype)}
    a, b = given.pop("mat_a"), given.pop("mat_b")
    out = torch.empty_like(given["residual"])
    problem = grouped.describe(
        form, a, b, out, len(ENDS), GroupedTensors(**given), activation=activation
    )

    compiled = kernels.compile_for(problem, kernels.Block(64, 128, 32, 4, 2), arch)

    assert instruction in compiled.asm["ptx"]


def test_what_an_epilogue_needs_compiles_another_kernel() -> None:
    """A graph must not be captured before the kernel of the very call is loaded."""
    keys = set()
    calls = [draw("ragged_m", *names, N=32) for names in subsets(ALL)]
    for call in calls:
        given = grouped.in_kernel_form(
            GroupedTensors(**{n: t for n, t in call.tensors.items() if not n.startswith("mat")}), 10
        )
        a, b = call.tensors["mat_a"], call.tensors["mat_b"]
        out = torch.empty(EXTENT, 32, dtype=BF16)
        problem = grouped.describe("ragged_m", a, b, out, len(ENDS), given)
        tile = kernels.Block(16, 32, 32, 4, 1)
        known = kernels.traits(problem, tile, "ieee")
        pointers = kernels.GroupedPointers(a, b, out, torch.empty(5), *given[:6])
        records = pointers, kernels.sizes(problem), kernels.strides(problem), None
        keys.add(kernels._specialization(problem, tile, known, records))

    assert len(keys) == len(calls)


# ---- torch's machinery
def test_a_call_with_everything_is_one_graph_under_compile() -> None:
    call = draw("ragged_m", *ALL, activation="swiglu", real=True, dtype=F32)
    aux, wanted_aux = empty_aux(call, F32), empty_aux(call, F32)

    def run(tensors: dict[str, Tensor], aux: Tensor) -> Tensor:
        return call.with_tensors(**tensors).run(aux=aux) + 1

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")

    assert torch.equal(compiled(call.tensors, aux), run(call.tensors, wanted_aux))
    assert torch.equal(aux.nan_to_num(), wanted_aux.nan_to_num())


@pytest.mark.parametrize("name", ["grouped_gemm", "grouped_gemm_aux", "grouped_gemm_to_aux"])
def test_the_operators_pass_torchs_own_checks(name: str) -> None:
    call = draw("ragged_m", *ALL, activation="swiglu", dtype=F32, real=True)
    order = "bias", "residual", *ROWS
    offs = torch.tensor((*ENDS[:-1], EXTENT), dtype=torch.int32)
    call.tensors["scatter_index"][:] = torch.randperm(EXTENT)
    given: list[Any] = [call.tensors["mat_a"], call.tensors["mat_b"], offs]
    given += [call.tensors[name] for name in order]
    if name == "grouped_gemm_to_aux":
        given.insert(0, torch.zeros(EXTENT, 34))
    else:
        given = [t.requires_grad_() if t.is_floating_point() else t for t in given]

    torch.library.opcheck(getattr(torch.ops.outblas, name).default, (*given, "swiglu"))


def test_fake_tensors_have_the_shapes_of_results() -> None:
    with FakeTensorMode():
        call = draw("ragged_m", *ROWS, activation="swiglu")
        offs = torch.empty(len(ENDS), dtype=torch.int32)
        given = call.tensors["mat_a"], call.tensors["mat_b"], offs, None, None
        rows = [call.tensors[name] for name in ROWS]
        y, x = torch.ops.outblas.grouped_gemm_aux(*given, *rows, "swiglu", F32)

    assert (y.shape, x.shape) == ((EXTENT, 17), (EXTENT, 34))
    assert (y.dtype, x.dtype) == (F32, F32)


def test_vmap_takes_calls_one_by_one_and_refuses_an_aux() -> None:
    call = draw("ragged_m", *ALL, activation="swiglu", dtype=F32)
    several = torch.stack([call.tensors["mat_a"], call.tensors["mat_a"] + 1])

    mapped = torch.vmap(lambda a: call.with_tensors(mat_a=a).run())(several)

    _, defined = call.expected()
    is_defined = ~defined.isnan()
    for one, a in zip(mapped, several, strict=True):
        single = call.with_tensors(mat_a=a).run()
        assert torch.equal(one[is_defined], single[is_defined])
    aux = empty_aux(call, F32)
    with pytest.raises(RuntimeError, match="grouped_gemm_to_aux"):
        torch.vmap(lambda a: call.with_tensors(mat_a=a).run(aux=aux))(several)


def test_a_lazily_negated_aux_is_written() -> None:
    call = draw("ragged_m", "bias", activation="relu", dtype=F32)
    x, _ = call.expected()
    aux = torch._neg_view(torch.full(x.shape, torch.nan))

    call.run(aux=aux)

    check_equal(aux, x)


def test_flops_are_those_of_gathered_rows() -> None:
    call = draw("ragged_m", *ALL, activation="swiglu", dtype=F32)
    aux = empty_aux(call, F32)

    with FlopCounterMode(display=False) as counter:
        call.run()
        call.run(aux=aux)

    assert counter.get_total_flops() == 2 * 2 * EXTENT * 34 * 20


class Overriding(torch.Tensor):
    """A tensor type that overrides functions."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function, sorted(n for n, value in (kwargs or {}).items() if value is not None)


@pytest.mark.parametrize("name", ["mat_a", "bias", *ROWS])
def test_every_tensor_may_override_the_call(name: str) -> None:
    call = draw("ragged_m", *ALL, activation="relu")
    given = call.with_tensors(**{name: call.tensors[name].as_subclass(Overriding)})

    function, names = given.run()  # type: ignore[misc]

    assert function is outblas.grouped_mm
    assert names == sorted((*ALL, "offs", "activation"))


# ---- wrong arguments
A, B, OFFS = torch.ones(6, 8), torch.ones(2, 8, 4), torch.tensor([2, 6], dtype=torch.int32)
INDEX = torch.arange(6)
Run = Callable[[], object]


def run(a: Tensor = A, b: Tensor = B, offs: Tensor | None = OFFS, **given: Any) -> Tensor:
    return outblas.grouped_mm(a, b, offs=offs, **given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: run(residual=torch.ones(6, 3)),
            r"residual is torch.float32 of shape \(6, 3\) .* of shape \(6, 4\)",
        ),
        (
            lambda: run(residual=torch.ones(6, 4), activation="swiglu"),
            r"residual is .* expected torch.float32 of shape \(6, 2\)",
        ),
        (lambda: run(residual=torch.ones(6, 4).half()), "residual is torch.float16"),
        (lambda: run(aux=torch.ones(6, 2), activation="swiglu"), r"aux is .*shape \(6, 4\)"),
        (lambda: run(aux=torch.ones(6, 4).half()), "aux is torch.float16"),
        (lambda: run(aux=torch.ones(1, 4).expand(6, 4)), "aux has strides .* share memory"),
        (lambda: run(b=B[..., :3], activation="geglu"), "activation 'geglu' pairs the columns"),
        (
            lambda: run(B.mT, A.t(), activation="reglu"),
            "activation 'reglu' pairs columns, expected another where groups are columns",
        ),
        (lambda: run(a_index=INDEX.float()), "a_index is torch.float32 of shape"),
        (lambda: run(a_index=INDEX.reshape(2, 3)), r"a_index is .*\(2, 3\).* of 1 dimension"),
        (lambda: run(A[:0], a_index=INDEX), r"mat_a.shape\[0\] is 0 but a_index has 6 elements"),
        (lambda: run(B.mT, A.t(), a_index=INDEX), "a_index is given, expected None where groups"),
        (lambda: run(A.t(), A, a_index=INDEX), "a_index is given, expected None where groups"),
        (lambda: run(B, B.mT, offs=None, a_index=INDEX), "a_index is given, expected None"),
        (lambda: run(B, B.mT, offs=None, scatter_index=INDEX), "scatter_index is given, expected"),
        (lambda: run(scatter_index=INDEX[:5]), r"scatter_index is .*\(5,\).* of shape \(6,\)"),
        (
            lambda: run(a_index=INDEX[:5], scatter_index=INDEX),
            r"scatter_index is .*\(6,\).* of shape \(5,\)",
        ),
        (lambda: run(scatter_weights=torch.ones(6)), "scatter_weights is given without"),
        (
            lambda: run(scatter_index=INDEX, scatter_weights=torch.ones(5)),
            r"scatter_weights has shape \(5,\) .* expected \(6,\)",
        ),
        (
            lambda: run(scatter_index=INDEX, scatter_weights=torch.ones(6).half()),
            "scatter_weights.dtype is torch.float16, expected torch.float32",
        ),
        (
            lambda: run(residual=torch.ones(6, 4, device="meta")),
            "residual is .* on meta, expected .* on cpu",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(call: Run, message: str) -> None:
    with pytest.raises(OperandError, match=message):
        call()


@pytest.mark.parametrize("name", ["mat_a", "bias", "residual", "scatter_weights"])
def test_an_aux_shares_no_memory(name: str) -> None:
    call = draw("ragged_m", *ALL, dtype=F32, N=20)
    memory = torch.zeros(EXTENT * 20 + 200)
    shared = call.tensors[name]
    part = memory[: shared.numel()].view(shared.shape).copy_(shared)
    aux = memory[1 : 1 + EXTENT * 20].view(EXTENT, 20)
    before = memory.clone()

    with pytest.raises(OperandError, match=f"aux overlaps {name} in memory"):
        call.with_tensors(**{name: part}).run(aux=aux)

    assert torch.equal(memory, before), "nothing is written"


@pytest.mark.parametrize("name", ["mat_b", "bias", "residual", "scatter_weights"])
def test_an_aux_has_no_gradients(name: str) -> None:
    call = draw("ragged_m", *ALL, dtype=F32)
    call.tensors[name].requires_grad_()
    aux = empty_aux(call, F32)

    with pytest.raises(OperandError, match="aux is given with inputs that need gradients"):
        call.run(aux=aux)
    with torch.no_grad():
        call.run(aux=aux)

    assert not aux[: ENDS[-1]].isnan().any()


def test_an_aux_that_autograd_saved_has_changed() -> None:
    call = draw("ragged_m", dtype=F32)
    aux, leaf = torch.zeros(EXTENT, 34), torch.ones(EXTENT, 34, requires_grad=True)
    product = aux * leaf

    call.run(aux=aux)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


WRONG: Any = [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["bias", "residual", "aux", *ROWS])
def test_arguments_of_another_type_are_named(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is list, expected a torch.Tensor"):
        run(**{name: WRONG})


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(ValueError, match="activation is 'tanh', expected None or one of relu"):
        run(activation="tanh")
    with pytest.raises(TypeError, match="activation is int, expected a str or None"):
        run(activation=3)
    with pytest.raises(ValueError, match="activation is 'tanh', expected '' or one of relu"):
        torch.ops.outblas.grouped_gemm(A, B, OFFS, activation="tanh")
