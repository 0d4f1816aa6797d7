"""Gradients of first and second order, compared with those of torch's autograd: of random GEMMs
(shapes, views, activations, subsets of operands that need gradients, and gradients that arrive with
strides), of `linear` in one node of autograd, of wider results, of two outputs, where rows must not
depend on others; and of complex tensors and in forward mode, which torch computes.
"""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from fuzz import runner, spec
from support.gradients import (
    GRADIENT_KINDS,
    assert_gradients_of_a_kind_are_torchs,
    leaves,
    second_order,
)
from torch.autograd import forward_ad

from outblas import FallbackWarning, addmm, batch_invariant, linear, matmul
from outblas.call import invariance
from outblas.call.epilogue import Activation, apply
from outblas.torch_ops import autograd, autograd_levels, ops

pytest_plugins = ("support.eager_fixtures",)
pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

Tensor = torch.Tensor


# ---- random GEMMs
@pytest.mark.usefixtures("as_in_the_fuzz")
@pytest.mark.filterwarnings("ignore")
def test_random_calls_have_torchs_gradients_of_gradients() -> None:
    """Those of 9000 descriptions that are differentiated twice: of operands of any shapes that lie
    in memory in any way, some of which need gradients.
    """
    calls = [spec.make(1, index) for index in range(9000)]
    twice = [call for call in calls if call.get("gradients", {}).get("double")]

    judged = [runner.judged(call) for call in twice if not spec.is_heavy(call)]

    assert sum(outcome == "same" for outcome, _ in judged) > 180
    assert [row for _, rows in judged for row in rows if row["known"] is None] == []


# ---- linear
class Layer(NamedTuple):
    """The tensors of a call."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None

    def needing(self, *names: str) -> "Layer":
        """The tensors anew, of which these need gradients."""
        tensors = {n: t.detach().requires_grad_(n in names) for n, t in present(self)}
        return self._replace(**tensors)

    def by_us(self, activation: Activation | None) -> Tensor:
        return linear(*self[:3], activation=activation, residual=self.residual)

    def by_torch(self, activation: Activation | None) -> Tensor:
        y = F.linear(self.x, self.weight)
        return apply(y if self.bias is None else y + self.bias, activation or "", self.residual)


def present(layer: Layer) -> list[tuple[str, Tensor]]:
    return [(name, t) for name, t in layer._asdict().items() if t is not None]


def integers(*shape: int) -> Tensor:
    """Small integers, whose products have one right result in float32."""
    return torch.randint(-4, 5, shape).float()


def by_columns(t: Tensor) -> Tensor:
    return t.t().contiguous().t()


LAYERS = {
    "rows": Layer(integers(6, 5), integers(4, 5)),
    "bias": Layer(integers(6, 5), integers(4, 5), integers(4)),
    "two batches": Layer(integers(2, 1, 3, 5), integers(4, 5), integers(4)),
    "bias, residual, batch": Layer(
        integers(2, 3, 5), integers(4, 5), integers(4), integers(2, 3, 4)
    ),
    "one column": Layer(integers(6, 5), integers(1, 5), integers(1)),
    "one bias": Layer(integers(6, 5), integers(4, 5), integers(1)),
    "one residual": Layer(integers(6, 5), integers(4, 5), None, integers(1)),
    "a residual for all rows": Layer(integers(6, 5), integers(4, 5), None, integers(4)),
    # those of `MatmulFunction`
    "x by columns": Layer(by_columns(integers(6, 5)), integers(4, 5), integers(4)),
    "weight by columns": Layer(integers(6, 5), by_columns(integers(4, 5)), integers(4)),
    "a row": Layer(integers(5), integers(4, 5), integers(4)),
    "bias of two dimensions": Layer(integers(6, 5), integers(4, 5), integers(1, 4)),
    "weight of one dimension": Layer(integers(6, 5), integers(5)),
}


def layer_gradients(y: Tensor, layer: Layer) -> list[Tensor | None]:
    y.backward(torch.arange(1.0, y.numel() + 1).reshape(y.shape) % 7 - 3)
    return [t.grad for _, t in present(layer)]


@pytest.mark.usefixtures("cpu_plans_run")
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_a_layer_are_torchs(name: str) -> None:
    layer = LAYERS[name]
    for activation in (None, "gelu") if layer.weight.dim() > 1 else (None,):
        ours, theirs = layer.needing(*Layer._fields), layer.needing(*Layer._fields)

        got = layer_gradients(ours.by_us(activation), ours)

        torch.testing.assert_close(got, layer_gradients(theirs.by_torch(activation), theirs))


# A kernel reads memory: a view that negates has the other sign there.
@pytest.mark.usefixtures("cpu_plans_run")
@pytest.mark.parametrize("cpu_plans_run", ["portable"], indirect=True)
@pytest.mark.parametrize("kind", GRADIENT_KINDS)
@pytest.mark.parametrize("name", ["bias, residual, batch", "x by columns"])
def test_a_gradient_may_be_of_any_kind(name: str, kind: str) -> None:
    """That of `LinearFunction`, and that of `MatmulFunction`."""
    tensors = [t.clone().requires_grad_() for _, t in present(LAYERS[name])]
    kinds: list[tuple[Activation | None, bool]] = [(None, False), ("gelu", True)]
    for activation, create_graph in kinds:
        assert_gradients_of_a_kind_are_torchs(
            kind,
            lambda *given, f=activation: Layer(*given).by_us(f),
            lambda *given, f=activation: Layer(*given).by_torch(f),
            tensors,
            create_graph,
        )


@pytest.mark.usefixtures("cpu_plans_run")
@pytest.mark.parametrize("frozen", ["weight", "x"])
def test_what_only_a_frozen_tensor_needs_is_freed(frozen: str) -> None:
    """The input of a frozen weight is needed for nothing: adapters are trained so."""
    for _ in range(2):
        x, weight = integers(6, 5), integers(4, 5)
        if frozen == "weight":
            x = x.requires_grad_() * 1
        else:
            weight = weight.requires_grad_() * 1
        y = linear(x, weight)
        other = weakref.ref(x if frozen == "weight" else weight)

        del x, weight

        assert other() is None
        y.sum().backward()


# ---- results that random GEMMs do not have


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_of_two_outputs_one_may_have_no_gradient(dtype: torch.dtype) -> None:
    tensors = leaves((3, 4), (4, 2), (2,), (3, 2), dtype=dtype)
    a, b, bias, residual = tensors
    activation = "" if dtype.is_complex else "gelu"
    x = a @ b + bias
    torchs = apply(x, activation, residual), x

    def of(outputs: tuple[Tensor, ...], used: tuple[int, ...]) -> Any:
        loss = torch.stack([outputs[i].abs().sum() for i in used]).sum()
        return torch.autograd.grad(
            loss, tensors, retain_graph=True, allow_unused=True, materialize_grads=True
        )

    ours = ops.gemm_aux(a, b, None, bias, residual, 1, 1, activation)

    for used in ((0,), (1,), (0, 1)):
        torch.testing.assert_close(of(ours, used), of(torchs, used))


# ---- what the backward pass of a call that was allowed does
INVARIANT_CALLS: dict[str, tuple[Callable[..., Tensor], dict[str, bool]]] = {
    "matmul": (lambda a, b, **how: matmul(a, b, **how), {}),
    "addmm": (
        lambda a, b, **how: addmm(a[:, :1], a, b, alpha=2, **how),
        {"batch_invariant": True},
    ),
    "linear gelu": (lambda a, b, **how: linear(a, b.t(), activation="gelu", **how), {}),
}


@pytest.mark.parametrize("name", INVARIANT_CALLS)
def test_the_kernel_of_a_batch_invariant_forward_pass_computes_its_gradients(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The promise is asked for by a context, or by an argument."""
    # As before the test, so that programs which are compiled later are compiled as ever.
    monkeypatch.setattr(invariance.flag, "ever", False)
    call, how = INVARIANT_CALLS[name]
    a, b = leaves((6, 5), (5, 4), dtype=torch.float32)
    want = second_order(call(a, b), (a, b))

    with contextlib.nullcontext() if how else batch_invariant():
        y = call(a, b, kernel="portable", **how)
    got = second_order(y, (a, b))

    # Terms of hundreds cancel in small elements: 4e-6 of the largest one in 120 random problems.
    for ours, torchs in zip(got, want, strict=True):
        largest = torchs.abs().max().item()
        torch.testing.assert_close(ours, torchs, atol=1e-4 * largest, rtol=0)


# ---- what is taken from torch
def test_gradients_need_no_class_for_one_level_but_transforms_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients are recorded as with a torch that lacks the class for one level of autograd."""
    monkeypatch.setattr(autograd_levels, "OneLevelFunction", torch.autograd.Function)
    recorder = autograd_levels.recorder(autograd.MatmulFunction)
    monkeypatch.setattr(autograd, "_record", recorder)
    a, b = leaves((3, 4), (4, 2))

    (gradient,) = torch.autograd.grad(ops.matmul(a, b).sum(), a)

    torch.testing.assert_close(gradient, b.detach().sum(1).expand(3, 4))
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda a: ops.matmul(a, b).sum())(a.detach())


# ---- complex tensors: functions of ours, and the same ones written with torch's operators
Pair = tuple[Callable[..., Tensor], Callable[..., Tensor]]


def test_complex_gradients_have_a_warning_and_neither_kernel_nor_promise() -> None:
    a, b = leaves((3, 4), (4, 2), dtype=torch.complex64)

    with pytest.warns(FallbackWarning, match="gradients of complex64 tensors"):
        matmul(a, b)
    for kernel in ("portable", "hopper.gemm"):
        message = f"kernel '{kernel}' does not support gradients of complex64 tensors"
        with pytest.raises(ValueError, match=message):
            matmul(a, b, kernel=kernel)
    with pytest.raises(ValueError, match="batch_invariant is True"):
        matmul(a, b, batch_invariant=True)


# ---- forward mode
A, B, BIAS = (t.detach() for t in leaves((3, 4), (4, 2), (2,)))
GELU_GEMM: Pair = (
    lambda a: ops.gemm(a, B, None, BIAS, None, 1, 1, "gelu"),
    lambda a: F.gelu(a @ B + BIAS),
)


def test_an_operator_with_a_named_kernel_or_an_out_refuses_dual_tensors() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(A, A.cos())
        message = "kernel 'portable' does not support forward-mode gradients"
        with pytest.raises(ValueError, match=message):
            ops.matmul(dual, B, None, "portable")
        with pytest.raises(ValueError, match="carry forward-mode gradients, expected no out"):
            ops.matmul_out(dual, B, torch.empty(3, 2).double())


def test_a_tangent_of_the_gradient_goes_through_a_backward_pass() -> None:
    leaf = A.clone().requires_grad_()

    def tangent(function: Callable[..., Tensor]) -> Tensor | None:
        y = function(leaf)
        with forward_ad.dual_level():
            grad = forward_ad.make_dual(torch.ones_like(y), y.detach().cos())
            (gradient,) = torch.autograd.grad(y, leaf, grad)
            return forward_ad.unpack_dual(gradient).tangent

    ours, torchs = GELU_GEMM

    torch.testing.assert_close(tangent(ours), tangent(torchs))
