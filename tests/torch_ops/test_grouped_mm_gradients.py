"""Gradients of `outblas.grouped_mm` with epilogue, gather and scatter, of the first and the second
order, compared with those of torch functions in float64.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.grouped_calls import ENDS, EXTENT, FLOATING, FORMS, GroupedCall, draw, subsets

import outblas
from outblas.call.grouped import Form
from outblas.torch_ops import ops

Tensor = torch.Tensor

pytestmark = pytest.mark.filterwarnings("ignore:torch takes this call")

kernels = pytest.mark.parametrize(
    "kernel", [None, pytest.param("portable", marks=pytest.mark.interpreter)]
)
ROWS = "a_index", "scatter_index", "scatter_weights"
ALL = "bias", "residual", *ROWS


@pytest.fixture(autouse=True)
def _memory_is_full_of_nan() -> Iterator[None]:
    """Whatever a call leaves undefined is NaN, and must not reach a gradient."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def with_leaves(call: GroupedCall, *names: str) -> tuple[GroupedCall, list[Tensor]]:
    """Returns the call with leaves of autograd as its floating tensors, and those of `names`."""
    leaves = {
        name: t.detach().clone().requires_grad_(name in names)
        for name, t in call.tensors.items()
        if name in FLOATING
    }
    return call.replaced(**leaves), [leaves[name] for name in names]


def gradients(result: Tensor, defined: Tensor, leaves: list[Tensor], order: int) -> list[Tensor]:
    """Returns the gradients of a weighted sum of what is defined; of the second order, those of the
    sum of the sines of the first ones.
    """
    torch.manual_seed(1)
    loss = (result[defined] * torch.randn(int(defined.sum())).to(result.dtype)).sum()
    first = torch.autograd.grad(loss, leaves, create_graph=order > 1)
    sines = torch.stack([g.sin().sum() for g in first]).sum()
    if order == 1 or not sines.requires_grad:
        return list(first)
    second = torch.autograd.grad(sines, leaves, materialize_grads=True, allow_unused=True)
    return [*first, *second]


def check(call: GroupedCall, *names: str, order: int = 1, **options: Any) -> None:
    ours, leaves = with_leaves(call, *names)
    theirs, their_leaves = with_leaves(call, *names)
    want = theirs.expected()
    defined = ~want.isnan()

    got = gradients(ours.run(**options), defined, leaves, order)

    expected = gradients(want, defined, their_leaves, order)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def real(form: Form, *names: str, activation: str = "") -> GroupedCall:
    return draw(form, *names, activation=activation, dtype=torch.float32, real=True, M=9, N=8, K=5)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("form", [*FORMS, "batch"])
def test_gradients_of_an_epilogue(form: Form, order: int) -> None:
    names = ("residual",) if form == "ragged_n" else ("bias", "residual")
    for activation in ("", "relu", "gelu", "gelu_tanh", "silu", "swiglu"):
        if form != "ragged_n" or activation != "swiglu":
            call = real(form, *names, activation=activation)
            check(call, "mat_a", "mat_b", *names, order=order)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("activation", ["", "swiglu"])
def test_gradients_of_gathered_and_scattered_rows(activation: str, order: int) -> None:
    """Of all tensors that have one, and of each alone."""
    for rows in subsets(ROWS):
        call = real("ragged_m", "bias", "residual", *rows, activation=activation)
        floating = [name for name in FLOATING if name in call.tensors]
        check(call, *floating, order=order)
        for name in floating if activation else ():
            check(call, name, order=order)


@pytest.mark.interpreter
@pytest.mark.parametrize("form", [*FORMS, "batch"])
def test_gradients_of_the_portable_kernel(form: Form) -> None:
    names: dict[Form, tuple[str, ...]] = {"ragged_m": ALL, "ragged_n": ("residual",)}
    call = real(form, *names.get(form, ("bias",)), activation="silu")

    check(call, *(name for name in FLOATING if name in call.tensors), kernel="portable")


@kernels
def test_what_is_of_no_group_or_not_stored_gets_zeros(kernel: str | None) -> None:
    """Behind the last group x is NaN here, and so is the gradient of a row that nothing names."""
    names = "mat_a", "mat_b", "scatter_weights"
    call = real("ragged_m", "scatter_index", "scatter_weights", activation="swiglu")
    call.tensors["scatter_index"][:] = torch.randperm(EXTENT)
    call.tensors["scatter_index"][3] = EXTENT
    place = call.tensors["scatter_index"]
    ours, leaves = with_leaves(call, *names)

    result = ours.run(kernel=kernel)
    grad = torch.full_like(result, torch.nan)
    grad[place[: ENDS[-1]][place[: ENDS[-1]] < EXTENT]] = 1
    of = dict(zip(names, torch.autograd.grad(result, leaves, grad), strict=True))

    for name in set(names) - {"mat_b"}:
        assert (of[name][ENDS[-1] :] == 0).all(), name
        assert (of[name][3] == 0).all(), name
        assert (of[name][0] != 0).any(), name
    assert not any(g.isnan().any() for g in of.values())


def test_rows_that_are_gathered_often_are_added_in_float32() -> None:
    """A sum of ones in bfloat16 would stop at 256."""
    offs, index = torch.tensor([600], dtype=torch.int32), torch.zeros(600, dtype=torch.int64)
    index[-1] = 1
    a = torch.ones(3, 1, dtype=torch.bfloat16, requires_grad=True)
    b = torch.ones(1, 1, 1, dtype=torch.bfloat16)

    result = outblas.grouped_mm(a, b, offs=offs, a_index=index)
    (grad,) = torch.autograd.grad(result.float().sum(), a)

    assert grad.flatten().tolist() == [600, 1, 0]  # 599 rounded


def test_no_gathered_rows_have_second_gradients() -> None:
    a, b = torch.randn(5, 8, requires_grad=True), torch.randn(2, 8, 6, requires_grad=True)
    none = torch.empty(0, dtype=torch.int32)

    y = outblas.grouped_mm(a, b, offs=torch.zeros(2, dtype=torch.int32), a_index=none)
    first = torch.autograd.grad(y.square().sum(), (a, b), create_graph=True)
    second = torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), (a, b))

    assert [g.shape for g in second] == [a.shape, b.shape]
    assert all((g == 0).all() for g in (*first, *second))


def test_weights_in_the_dtype_of_the_result_have_gradients_in_it() -> None:
    call = draw("ragged_m", *ALL, activation="relu")
    weights = call.tensors["scatter_weights"].bfloat16()
    ours, (leaf,) = with_leaves(call.replaced(scatter_weights=weights), "scatter_weights")
    theirs, (copy,) = with_leaves(ours, "scatter_weights")
    want = theirs.expected()
    defined = ~want.isnan()

    ours.run()[defined].float().sum().backward()
    want[defined].sum().backward()

    assert torch.equal(leaf.grad, copy.grad), "integers, so exact in fp32"


def test_a_bias_in_float32_has_a_gradient_in_float32() -> None:
    """Gradients that 16 bits cannot hold."""
    a, b = torch.ones(12, 8).half(), torch.ones(2, 8, 4).half()
    bias, offs = torch.zeros(2, 4, requires_grad=True), torch.tensor([5, 12], dtype=torch.int32)

    y = outblas.grouped_mm(a, b, offs=offs, bias=bias, out_dtype=torch.float32)
    (y * 1e5).sum().backward()

    assert torch.equal(bias.grad, torch.tensor([[5e5] * 4, [7e5] * 4]))


def test_x_has_gradients_of_its_own() -> None:
    """`grouped_gemm_aux` returns x too."""
    call = real("ragged_m", "bias", "a_index", activation="silu")
    ours, leaves = with_leaves(call, "mat_a", "mat_b", "bias")
    theirs, their_leaves = with_leaves(call, "mat_a", "mat_b", "bias")
    t = ours.tensors
    first = t["mat_a"], t["mat_b"], t["offs"], t["bias"], None, t["a_index"], None, None

    y, x = torch.ops.outblas.grouped_gemm_aux(*first, "silu")
    loss = (y * x)[: ENDS[-1]].sum()
    want = (theirs.expected() * theirs.x())[: ENDS[-1]].sum()

    torch.testing.assert_close(
        torch.autograd.grad(loss, leaves),
        torch.autograd.grad(want, their_leaves),
        rtol=1e-4,
        atol=1e-4,
    )


def test_gradients_by_torch_func() -> None:
    call = real("ragged_m", *ALL, activation="swiglu")
    defined = ~call.expected().isnan()

    def loss(a: Tensor, weights: Tensor) -> Tensor:
        return call.replaced(mat_a=a, scatter_weights=weights).run()[defined].square().sum()

    given = call.tensors["mat_a"], call.tensors["scatter_weights"]
    got = torch.func.grad(loss, argnums=(0, 1))(*given)

    leaves = [t.clone().requires_grad_() for t in given]
    for ours, expected in zip(got, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        assert torch.equal(ours, expected)


def test_a_forward_pass_that_needs_no_x_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen product under a residual, for example, or one without an activation."""
    kept: list[str] = []
    compute = torch.ops.outblas.grouped_gemm_aux.default

    def counted(*given: Any) -> Any:
        kept.append("x")
        return compute(*given)

    monkeypatch.setattr(ops, "grouped_gemm_aux", counted)
    call = real("ragged_m", "bias", "residual", "a_index", activation="silu")

    with_leaves(call, "residual")[0].run()
    with_leaves(dataclasses.replace(call, options={}), "mat_a", "bias")[0].run()
    assert kept == []
    with_leaves(call, "bias")[0].run()
    assert kept == ["x"]
