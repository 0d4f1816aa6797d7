"""Gradients of `outblas.grouped_mm` with epilogue, gather and scatter, of the first and the second
order, beside those of torch functions in float64.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.grouped_calls import (
    ENDS,
    EXTENT,
    FLOATING,
    FORMS,
    Call,
    draw,
    subsets,
)

from outblas.core.grouped import Form
from outblas.torch_ops import ops

Tensor = torch.Tensor

pytestmark = pytest.mark.filterwarnings("ignore:torch takes this call")

ROWS = "a_index", "scatter_index", "scatter_weights"
ALL = "bias", "residual", *ROWS


@pytest.fixture(autouse=True)
def _memory_is_full_of_nan() -> Iterator[None]:
    """Whatever a call leaves undefined is NaN, and must not reach a gradient."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def leaves(call: Call, *names: str) -> tuple[Call, list[Tensor]]:
    """Returns the call with leaves of autograd as its floating tensors, and those of `names`."""
    found = {
        name: t.detach().clone().requires_grad_(name in names)
        for name, t in call.tensors.items()
        if name in FLOATING
    }
    return call.with_tensors(**found), [found[name] for name in names]


def gradients(result: Tensor, defined: Tensor, given: list[Tensor], order: int) -> list[Tensor]:
    """Returns the gradients of a weighted sum of what is defined; of the second order, those of the
    sum of the sines of the first ones.
    """
    torch.manual_seed(1)
    loss = (result[defined] * torch.randn(int(defined.sum())).to(result.dtype)).sum()
    found = torch.autograd.grad(loss, given, create_graph=order > 1)
    sines = torch.stack([g.sin().sum() for g in found]).sum()
    if order == 1 or not sines.requires_grad:
        return list(found)
    again = torch.autograd.grad(sines, given, materialize_grads=True, allow_unused=True)
    return [*found, *again]


def check(call: Call, *names: str, order: int = 1, **options: Any) -> None:
    own, given = leaves(call, *names)
    wide, wanted = leaves(call.wide(), *names)
    _, want = wide.expected()
    defined = ~want.isnan()

    got = gradients(own.run(**options), defined, given, order)
    expected = gradients(want, defined, wanted, order)

    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-3)


def real(form: Form, *names: str, activation: str = "") -> Call:
    return draw(form, *names, activation=activation, dtype=torch.float32, real=True, M=9, N=8, K=5)


FUNCTIONS = "", "relu", "gelu", "gelu_tanh", "silu"
CASES = [(form, name) for form in FORMS for name in FUNCTIONS]
CASES += [("batch", "silu"), *((form, "swiglu") for form in ("ragged_m", "ragged_k", "batch"))]


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize(("form", "activation"), CASES)
def test_gradients_of_an_epilogue(form: Form, activation: str, order: int) -> None:
    names = ("residual",) if form == "ragged_n" else ("bias", "residual")
    call = real(form, *names, activation=activation)

    check(call, "mat_a", "mat_b", *names, order=order)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("activation", ["", "silu", "swiglu"])
@pytest.mark.parametrize("rows", [pytest.param(r, id="+".join(r)) for r in subsets(ROWS) if r])
def test_gradients_of_gathered_and_scattered_rows(
    rows: tuple[str, ...], activation: str, order: int
) -> None:
    floating = [name for name in rows if name == "scatter_weights"]
    call = real("ragged_m", "bias", "residual", *rows, activation=activation)

    check(call, "mat_a", "mat_b", "bias", "residual", *floating, order=order)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("activation", ["", "swiglu"])
@pytest.mark.parametrize("name", FLOATING)
def test_a_single_tensor_may_need_a_gradient(name: str, activation: str, order: int) -> None:
    for rows in subsets(ROWS):
        call = real("ragged_m", "bias", "residual", *rows, activation=activation)
        if name in call.tensors:
            check(call, name, order=order)


@pytest.mark.interpreter
@pytest.mark.parametrize("names", [("mat_a",), ("mat_a", "mat_b", "bias", "scatter_weights")])
@pytest.mark.parametrize("activation", ["", "swiglu"])
def test_gradients_of_the_portable_kernel(activation: str, names: tuple[str, ...]) -> None:
    check(real("ragged_m", *ALL, activation=activation), *names, kernel="portable")


@pytest.mark.interpreter
@pytest.mark.parametrize("kernel", [None, "portable"])
@pytest.mark.parametrize("names", [("mat_a",), ("mat_a", "mat_b", "scatter_weights")])
def test_what_is_of_no_group_or_not_stored_gets_zeros(
    names: tuple[str, ...], kernel: str | None
) -> None:
    """Behind the last group x is NaN here, and so is the gradient of a row that nothing names."""
    call = real("ragged_m", "scatter_index", "scatter_weights", activation="swiglu")
    call.tensors["scatter_index"][:] = torch.randperm(EXTENT)
    call.tensors["scatter_index"][3] = EXTENT
    place = call.tensors["scatter_index"]
    own, given = leaves(call, *names)

    result = own.run(kernel=kernel)
    grad = torch.full_like(result, torch.nan)
    grad[place[: ENDS[-1]][place[: ENDS[-1]] < EXTENT]] = 1
    found = dict(zip(names, torch.autograd.grad(result, given, grad), strict=True))

    for name in set(names) - {"mat_b"}:
        assert (found[name][ENDS[-1] :] == 0).all(), name
        assert (found[name][3] == 0).all(), name
        assert (found[name][0] != 0).any(), name
    assert not any(each.isnan().any() for each in found.values())


@pytest.mark.parametrize("kernel", [None, pytest.param("portable", marks=pytest.mark.interpreter)])
def test_rows_that_are_gathered_often_are_added_in_float32(
    kernel: str | None,
) -> None:
    """A sum of ones in bfloat16 would stop at 256."""
    offs, index = torch.tensor([600], dtype=torch.int32), torch.zeros(600, dtype=torch.int64)
    index[-1] = 1
    a = torch.ones(3, 1, dtype=torch.bfloat16, requires_grad=True)
    b = torch.ones(1, 1, 1, dtype=torch.bfloat16)

    result = torch.ops.outblas.grouped_gemm(a, b, offs, None, None, index, kernel_name=kernel or "")
    (grad,) = torch.autograd.grad(result.float().sum(), a)

    assert grad.flatten().tolist() == [600, 1, 0]  # 599 rounded


def test_weights_in_the_dtype_of_the_result_have_gradients_in_it() -> None:
    call = draw("ragged_m", *ALL, activation="relu")
    weights = call.tensors["scatter_weights"].bfloat16()
    own, (leaf,) = leaves(call.with_tensors(scatter_weights=weights), "scatter_weights")
    wide, (wanted,) = leaves(own.wide(), "scatter_weights")
    _, want = wide.expected()
    defined = ~want.isnan()

    own.run()[defined].float().sum().backward()
    want[defined].sum().backward()

    assert leaf.grad is not None
    assert wanted.grad is not None
    assert torch.equal(leaf.grad, wanted.grad.bfloat16()), "integers, so exact in fp32"


def test_x_has_gradients_of_its_own() -> None:
    """`grouped_gemm_aux` returns x too."""
    call = real("ragged_m", "bias", "a_index", activation="silu")
    own, given = leaves(call, "mat_a", "mat_b", "bias")
    wide, wanted = leaves(call.wide(), "mat_a", "mat_b", "bias")
    offs = torch.tensor(ENDS, dtype=torch.int32)
    t = own.tensors
    first = t["mat_a"], t["mat_b"], offs, t["bias"], None, t["a_index"], None, None

    y, x = torch.ops.outblas.grouped_gemm_aux(*first, "silu")
    loss = (y * x)[: ENDS[-1]].sum()
    want_x, want_y = wide.expected()
    want = (want_y * want_x)[: ENDS[-1]].sum()

    for one, other in zip(
        torch.autograd.grad(loss, given), torch.autograd.grad(want, wanted), strict=True
    ):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_gradients_by_torch_func() -> None:
    call = real("ragged_m", *ALL, activation="swiglu")
    _, want = call.expected()
    defined = ~want.isnan()

    def loss(a: Tensor, w: Tensor) -> Tensor:
        return call.with_tensors(mat_a=a, scatter_weights=w).run()[defined].square().sum()

    given = call.tensors["mat_a"], call.tensors["scatter_weights"]
    got = torch.func.grad(loss, argnums=(0, 1))(*given)

    copies = [t.clone().requires_grad_() for t in given]
    for one, other in zip(got, torch.autograd.grad(loss(*copies), copies), strict=True):
        assert torch.equal(one, other)


def test_a_backward_pass_under_compile() -> None:
    call = real("ragged_m", *ALL, activation="swiglu")
    _, want = call.expected()
    defined = ~want.isnan()
    own, given = leaves(call, "mat_a", "mat_b", "bias", "residual", "scatter_weights")

    def loss(tensors: dict[str, Tensor]) -> Tensor:
        result = call.with_tensors(**tensors).run()
        return torch.where(defined, result, 0).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(own.tensors), given)

    for one, other in zip(got, torch.autograd.grad(loss(own.tensors), given), strict=True):
        torch.testing.assert_close(one, other)


def test_a_forward_pass_that_needs_no_x_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen product under a residual, for example, or one without an activation."""
    made: list[str] = []
    compute = torch.ops.outblas.grouped_gemm_aux.default

    def counted(*given: Any) -> Any:
        made.append("x")
        return compute(*given)

    monkeypatch.setattr(ops, "grouped_gemm_aux", counted)
    call = real("ragged_m", "bias", "residual", "a_index", activation="silu")

    leaves(call, "residual")[0].run()
    leaves(dataclasses.replace(call, activation=""), "mat_a", "bias")[0].run()
    assert made == []
    leaves(call, "bias")[0].run()
    assert made == ["x"]
