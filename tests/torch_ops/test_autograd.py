"""Gradients of first and second order, against finite differences and against torch's autograd."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from support.gradients import COLD_THEN_WARM, leaves, second_order
from torch.autograd import gradcheck, gradgradcheck

from outblas import addmm, batch_invariant, linear, matmul
from outblas.core import invariance
from outblas.core.epilogue import ACTIVATIONS, GATED, Activation, apply
from outblas.torch_ops import autograd, autograd_levels, ops

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")


def linear_with(activation: Activation | None) -> Callable[..., torch.Tensor]:
    return lambda x, w, bias, residual: linear(x, w, bias, activation=activation, residual=residual)


# ---- against finite differences
@dataclass(frozen=True)
class Differentiable:
    """A function of tensors of these shapes."""

    call: Callable[..., Any]
    shapes: list[tuple[int, ...]] = field(default_factory=list)


MATMUL_SHAPES = [
    ((3, 4), (4, 2)),
    ((4,), (4,)),
    ((4,), (4, 2)),
    ((3, 4), (4,)),
    ((2, 3, 4), (4, 2)),
    ((2, 2, 3, 4), (1, 4, 2)),
    ((3, 4), (2, 4, 2)),
    ((2, 1, 3, 4), (3, 4, 2)),
    ((2, 3, 4), (4,)),
    ((4,), (2, 4, 2)),
]


def products() -> dict[str, Differentiable]:
    """Products without an activation, which complex tensors have too."""
    found = {f"matmul {a} {b}": Differentiable(matmul, [a, b]) for a, b in MATMUL_SHAPES}
    for alpha, beta in ((1, 1), (0.5, -2.0), (3, 0)):
        for c in ((3, 2), (2,), (3, 1), ()):
            found[f"addmm {c} alpha={alpha} beta={beta}"] = Differentiable(
                lambda c, a, b, alpha=alpha, beta=beta: addmm(c, a, b, alpha=alpha, beta=beta),
                [c, (3, 4), (4, 2)],
            )
    found["linear"] = Differentiable(linear_with(None), [(2, 3, 4), (2, 4), (2,), (3, 2)])
    return found


def activated() -> dict[str, Differentiable]:
    """Calls with an activation."""
    found = {}
    for activation in cast(tuple[Activation, ...], ACTIVATIONS):
        columns = 4 if activation in GATED else 2
        shapes = [(2, 3, 4), (columns, 4), (columns,), (3, 2)]
        found[f"linear {activation}"] = Differentiable(linear_with(activation), shapes)
    found["addmm swiglu"] = Differentiable(
        lambda c, a, b, bias: addmm(c, a, b, alpha=0.5, beta=-2.0, bias=bias, activation="swiglu"),
        [(1, 4), (3, 4), (4, 4), (3, 1)],
    )
    found["dot product gelu"] = Differentiable(
        lambda a, b, bias: matmul(a, b, bias=bias, activation="gelu"), [(4,), (4,), ()]
    )
    found["gemm_aux gelu"] = Differentiable(
        lambda a, b, bias: ops.gemm_aux(a, b, None, bias, None, 1, 1, "gelu"),
        [(3, 4), (4, 2), (2,)],
    )
    return found


PRODUCTS, ACTIVATED = products(), activated()


@pytest.mark.parametrize("case", [pytest.param(PRODUCTS[name], id=name) for name in PRODUCTS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_products_have_first_and_second_derivatives(
    case: Differentiable, dtype: torch.dtype
) -> None:
    tensors = leaves(*case.shapes, dtype=dtype)

    assert gradcheck(case.call, tensors)
    assert gradgradcheck(case.call, tensors)


@pytest.mark.parametrize("case", [pytest.param(ACTIVATED[name], id=name) for name in ACTIVATED])
def test_activated_products_have_first_and_second_derivatives(case: Differentiable) -> None:
    tensors = leaves(*case.shapes)

    assert gradcheck(case.call, tensors)
    assert gradgradcheck(case.call, tensors)


@pytest.mark.parametrize("case", [pytest.param(ACTIVATED[name], id=name) for name in ACTIVATED])
def test_activations_of_complex_tensors_that_need_gradients_raise_torchs_error(
    case: Differentiable,
) -> None:
    tensors = leaves(*case.shapes, dtype=torch.complex128)

    with pytest.raises(
        RuntimeError,  # NotImplementedError is one
        match=r"not supported for complex|not implemented for 'Complex|outputs with complex",
    ):
        case.call(*tensors)


# ---- against torch's autograd
@pytest.mark.parametrize(
    "shapes",
    [((0, 4), (4, 2)), ((3, 0), (0, 2)), ((0, 3, 4), (4, 2))],
    ids=["no rows", "no terms", "no batch"],
)
def test_empty_products_have_torchs_gradients(shapes: tuple[tuple[int, ...], ...]) -> None:
    tensors = leaves(*shapes)
    got, want = matmul(*tensors), torch.matmul(*tensors)
    grad = torch.ones_like(want)

    got_gradients = torch.autograd.grad(got, tensors, grad)

    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_gradients, torch.autograd.grad(want, tensors, grad))


@pytest.mark.parametrize("operand", ["a", "b", "bias"])
def test_a_wide_product_has_gradients_of_its_operands_dtype(operand: str) -> None:
    a, b = leaves((9, 16), (16, 8), dtype=torch.bfloat16)
    tensors = {"a": a, "b": b, "bias": leaves((8,), dtype=torch.float32)[0]}
    wide = {name: t.detach().float().requires_grad_() for name, t in tensors.items()}
    y = matmul(a, b, out_dtype=torch.float32, bias=tensors["bias"], activation="silu")
    want_y = torch.nn.functional.silu(wide["a"] @ wide["b"] + wide["bias"])

    (got,) = torch.autograd.grad(y.square().sum(), tensors[operand])

    (want,) = torch.autograd.grad(want_y.square().sum(), wide[operand])
    assert got.dtype == tensors[operand].dtype
    error = torch.linalg.vector_norm(got - want) / torch.linalg.vector_norm(want)
    assert error < 2**-7


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=["y", "x", "y and x"])
def test_of_two_outputs_one_may_have_no_gradient(used: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors = leaves((3, 4), (4, 2), (2,), (3, 2), dtype=dtype)
    a, b, bias, residual = tensors
    activation = "" if dtype.is_complex else "gelu"
    x = a @ b + bias
    torchs = apply(x, activation, residual), x

    def gradients(outputs: tuple[torch.Tensor, ...]) -> Any:
        loss = torch.stack([outputs[i].abs().sum() for i in used]).sum()
        return torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True)

    got = gradients(ops.gemm_aux(a, b, None, bias, residual, 1, 1, activation))

    torch.testing.assert_close(got, gradients(torchs))


def test_a_checkpointed_call_has_torchs_gradients() -> None:
    tensors = leaves((6, 5), (4, 5), (4,), (4,))
    want = apply(torch.nn.functional.linear(*tensors[:3]), "gelu", tensors[3])

    y = torch.utils.checkpoint.checkpoint(linear_with("gelu"), *tensors, use_reentrant=False)

    torch.testing.assert_close(
        torch.autograd.grad(y.square().sum(), tensors),
        torch.autograd.grad(want.square().sum(), tensors),
    )


def test_integers_have_no_gradients() -> None:
    a, b = torch.randint(-9, 9, (3, 4)), torch.randint(-9, 9, (4, 2))

    results = {
        "matmul": matmul(a, b),
        "ops.matmul": ops.matmul(a, b),
        "addmm": addmm(b[0], a, b) - b[0],
    }

    for name, y in results.items():
        assert torch.equal(y, a @ b), name
        assert not y.requires_grad, name


# ---- calls that are repeated
@pytest.mark.parametrize("create_graph", [True, False], ids=["create_graph", "no graph"])
def test_warm_calls_go_on_having_gradients(create_graph: bool) -> None:
    a, b = leaves((6, 5), (5, 4), dtype=torch.float32)

    for call in COLD_THEN_WARM:
        loss = matmul(a, b).square().sum()
        (gradient,) = torch.autograd.grad(loss, a, create_graph=create_graph)

        torch.testing.assert_close(gradient, 2 * a @ b @ b.t(), msg=f"call {call}")
        assert gradient.requires_grad == create_graph, f"call {call}"


def test_calls_without_gradients_between_those_with_them_record_nothing() -> None:
    a, b = leaves((6, 5), (5, 4), dtype=torch.float32)

    for call in COLD_THEN_WARM:
        assert matmul(a, b).requires_grad, f"call {call}"
        with torch.no_grad():
            assert not matmul(a, b).requires_grad, f"call {call}"
        assert not matmul(a.detach(), b.detach()).requires_grad, f"call {call}"


def test_a_named_kernel_has_gradients() -> None:
    a, b = leaves((6, 5), (5, 4), dtype=torch.float32)

    matmul(a, b, kernel="portable").sum().backward()

    torch.testing.assert_close(a.grad, b.detach().sum(1).expand(6, 5))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda a, b: matmul(a, b, out=torch.empty(6, 4)), id="out"),
        pytest.param(lambda a, b: matmul(a, b, bias=b[0], aux=torch.empty(6, 4)), id="aux"),
        pytest.param(lambda a, b: ops.matmul_out(a, b, torch.empty(6, 4)), id="ops.matmul_out"),
    ],
)
def test_what_a_call_would_write_is_refused_where_inputs_need_gradients(
    call: Callable[..., Any],
) -> None:
    a, b = leaves((6, 5), (5, 4), dtype=torch.float32)
    matmul(a, b)

    with pytest.raises(ValueError, match=r"(out|aux) is given with inputs that need gradients"):
        call(a, b)


# ---- what the backward pass of a call that was allowed does
INVARIANT_CALLS = [
    pytest.param(lambda a, b, **how: matmul(a, b, **how), id="matmul"),
    pytest.param(lambda a, b, **how: addmm(a[:, :1], a, b, alpha=2, **how), id="addmm"),
    pytest.param(lambda a, b, **how: linear(a, b.t(), activation="gelu", **how), id="linear gelu"),
]
ASKED_FOR_BY = [
    pytest.param({}, batch_invariant, id="context"),
    pytest.param({"batch_invariant": True}, contextlib.nullcontext, id="argument"),
]


@pytest.fixture
def never_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the process forget that batch invariance was ever asked for, as before the test:
    programs that are compiled later are then compiled as ever.
    """
    monkeypatch.setattr(invariance.flag, "ever", False)


@pytest.mark.usefixtures("never_invariant")
@pytest.mark.parametrize(("how", "context"), ASKED_FOR_BY)
@pytest.mark.parametrize("call", INVARIANT_CALLS)
def test_the_kernel_of_a_batch_invariant_forward_pass_computes_its_gradients(
    call: Callable[..., torch.Tensor], how: dict[str, bool], context: Callable[[], Any]
) -> None:
    a, b = leaves((6, 5), (5, 4), dtype=torch.float32)
    want = second_order(call(a, b), (a, b))

    with context():
        y = call(a, b, kernel="portable", **how)
    got = second_order(y, (a, b))

    # Terms of hundreds cancel in small elements: 4e-6 of the largest one in 120 random problems.
    for ours, torchs in zip(got, want, strict=True):
        largest = torchs.abs().max().item()
        torch.testing.assert_close(ours, torchs, atol=1e-4 * largest, rtol=0)


@pytest.mark.usefixtures("never_invariant")
@pytest.mark.parametrize(("how", "context"), ASKED_FOR_BY)
@pytest.mark.parametrize("call", INVARIANT_CALLS)
def test_no_row_of_the_gradient_of_a_batch_invariant_call_depends_on_another(
    call: Callable[..., torch.Tensor], how: dict[str, bool], context: Callable[[], Any]
) -> None:
    a, b = leaves((6, 5), (5, 4), dtype=torch.float32)

    with context():
        of_all_rows = call(a, b, kernel="portable", **how)
        of_two_rows = call(a[:2], b, kernel="portable", **how)
    (all_rows,) = torch.autograd.grad(of_all_rows.sin().sum(), a)
    (two_rows,) = torch.autograd.grad(of_two_rows.sin().sum(), a)

    assert torch.equal(two_rows[:2], all_rows[:2])


# ---- what is taken from torch
@pytest.fixture
def without_one_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has gradients recorded as with a torch that lacks the class for one level of autograd."""
    monkeypatch.setattr(autograd_levels, "OneLevelFunction", torch.autograd.Function)
    monkeypatch.setattr(autograd, "_record", autograd_levels.recorder(autograd.Product))


@pytest.mark.usefixtures("without_one_level")
def test_gradients_need_no_class_for_one_level() -> None:
    a, b = leaves((3, 4), (4, 2))

    (found,) = torch.autograd.grad(ops.matmul(a, b).sum(), a)

    torch.testing.assert_close(found, b.detach().sum(1).expand(3, 4))


@pytest.mark.usefixtures("without_one_level")
def test_transforms_fail_without_the_class_for_one_level() -> None:
    a, b = leaves((3, 4), (4, 2))

    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda a: ops.matmul(a, b).sum())(a.detach())
