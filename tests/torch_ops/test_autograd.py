"""Gradients of first and second order, compared with those of torch's autograd: of random GEMMs
(shapes, views, activations, subsets of operands that need gradients, and gradients that arrive with
strides), of wider results, of two outputs, and where rows must not depend on others.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.gradients import leaves, second_order
from support.random_products import Draw, Operand, RandomProduct

from outblas import addmm, batch_invariant, linear, matmul
from outblas.core import invariance
from outblas.core.epilogue import apply
from outblas.torch_ops import autograd, autograd_levels, ops

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")


Tensor = torch.Tensor

# ---- random GEMMs
SEEDS = range(8)
PRODUCTS_PER_SEED = 50


def derivatives(y: Tensor, needed: list[Tensor], grad: Operand) -> list[Tensor]:
    """The gradients of the leaves where `grad` arrives, and those of the sum of their squares, of
    the leaf of `grad` too.
    """
    arriving = grad.view(grad.leaf)
    first = torch.autograd.grad(y, needed, arriving, create_graph=True, materialize_grads=True)
    squares = [(t * t.conj()).sum().real for t in first if t.requires_grad]
    loss = torch.stack(squares).sum() if squares else torch.zeros(())
    if not loss.requires_grad:
        return list(first)
    second = torch.autograd.grad(loss, [grad.leaf, *needed], materialize_grads=True)
    return [*first, *second]


def assert_torchs(product: RandomProduct, draw: Draw) -> None:
    """The value of a product, whether it needs gradients, and its derivatives are torch's."""

    def message(difference: str) -> str:
        return f"{product}: {difference}"

    needed = [leaf for leaf in product.leaves if leaf.requires_grad]
    got, want = product.ours(), product.torchs()
    torch.testing.assert_close(got, want, msg=message)
    assert got.requires_grad == bool(needed), str(product)
    if needed:
        grad = draw.operand(got.shape)
        grad.leaf.requires_grad_()
        torch.testing.assert_close(
            derivatives(got, needed, grad), derivatives(want, needed, grad), msg=message
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_products_have_torchs_gradients(seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)

    for _ in range(PRODUCTS_PER_SEED):
        assert_torchs(draw.product(), draw)


# ---- results that random GEMMs do not have
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


# ---- what is taken from torch
@pytest.fixture
def without_one_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has gradients recorded as with a torch that lacks the class for one level of autograd."""
    monkeypatch.setattr(autograd_levels, "OneLevelFunction", torch.autograd.Function)
    monkeypatch.setattr(autograd, "_record", autograd_levels.recorder(autograd.MatmulFunction))


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
