"""Gradients of complex tensors and forward-mode gradients, which torch computes."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from support.gradients import COLD_THEN_WARM, gradients, leaves
from torch.autograd import forward_ad

from outblas import FallbackWarning, addmm, linear, matmul
from outblas.torch_ops import ops

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

Tensor = torch.Tensor


@dataclass(frozen=True)
class Pair:
    """A function of ours, and the same one written with torch's operators."""

    ours: Callable[..., Tensor]
    torchs: Callable[..., Tensor]


# ---- complex tensors
COMPLEX_PAIRS = {
    "matmul": Pair(lambda a, b, c: matmul(a, b), lambda a, b, c: a @ b),
    "addmm": Pair(
        lambda a, b, c: addmm(c, a, b, alpha=2 - 1j),
        lambda a, b, c: torch.addmm(c, a, b, alpha=2 - 1j),
    ),
    "linear": Pair(lambda a, b, c: linear(a, b.mH, c), lambda a, b, c: a @ b.mH.mT + c),
    "ops.matmul": Pair(lambda a, b, c: ops.matmul(a, b), lambda a, b, c: a @ b),
    "ops.addmm": Pair(lambda a, b, c: ops.addmm(c, a, b), lambda a, b, c: c + a @ b),
    "ops.gemm": Pair(lambda a, b, c: ops.gemm(a, b, None, c, c), lambda a, b, c: a @ b + 2 * c),
}
complex_pairs = pytest.mark.parametrize(
    "pair", [pytest.param(pair, id=name) for name, pair in COMPLEX_PAIRS.items()]
)


@pytest.fixture
def operands() -> list[Tensor]:
    """A, B and C of complex64, which need gradients."""
    return leaves((3, 4), (4, 2), (2,), dtype=torch.complex64)


@pytest.fixture
def grad() -> Tensor:
    """A gradient that reaches the product of these operands."""
    return torch.randn(3, 2, dtype=torch.complex64)


@complex_pairs
def test_complex_gradients_are_conjugated(pair: Pair, operands: list[Tensor], grad: Tensor) -> None:
    want = gradients(pair.torchs, operands, grad)

    for call in COLD_THEN_WARM:
        got = gradients(pair.ours, operands, grad)
        torch.testing.assert_close(got, want, msg=f"{{}}, in call {call}".format)


@complex_pairs
def test_compiled_complex_gradients_are_conjugated(
    pair: Pair, operands: list[Tensor], grad: Tensor
) -> None:
    compiled = torch.compile(pair.ours, backend="aot_eager", fullgraph=True)

    got = gradients(compiled, operands, grad)

    torch.testing.assert_close(got, gradients(pair.torchs, operands, grad))


def test_a_warning_says_that_torch_computes_complex_gradients(operands: list[Tensor]) -> None:
    with pytest.warns(FallbackWarning, match="gradients of complex64 tensors"):
        matmul(*operands[:2])


@pytest.mark.parametrize("kernel", ["portable", "hopper.gemm"])
def test_a_named_kernel_refuses_complex_gradients(kernel: str, operands: list[Tensor]) -> None:
    message = f"kernel '{kernel}' does not support gradients of complex64 tensors"
    with pytest.raises(ValueError, match=message):
        matmul(*operands[:2], kernel=kernel)


def test_batch_invariance_is_not_promised_for_complex_gradients(operands: list[Tensor]) -> None:
    with pytest.raises(ValueError, match="batch_invariant is True"):
        matmul(*operands[:2], batch_invariant=True)


# ---- forward mode
A, B, BIAS = (t.detach() for t in leaves((3, 4), (4, 2), (2,)))
GELU_GEMM = Pair(
    lambda a: ops.gemm(a, B, None, BIAS, None, 1, 1, "gelu"),
    lambda a: torch.nn.functional.gelu(a @ B + BIAS),
)
FORWARD_PAIRS = {
    "ops.matmul": Pair(lambda a: ops.matmul(a, B), lambda a: a @ B),
    "ops.addmm": Pair(lambda a: ops.addmm(BIAS, a, B, 0.5), lambda a: BIAS + a @ B / 2),
    "ops.gemm gelu": GELU_GEMM,
    "aux of ops.gemm_aux": Pair(
        lambda a: ops.gemm_aux(a, B, None, BIAS, None, 1, 1, "silu")[1], lambda a: a @ B + BIAS
    ),
}
forward_pairs = pytest.mark.parametrize(
    "pair", [pytest.param(pair, id=name) for name, pair in FORWARD_PAIRS.items()]
)


@forward_pairs
def test_jvp_of_an_operator_is_torchs(pair: Pair) -> None:
    got = torch.func.jvp(pair.ours, (A,), (A.cos(),))

    torch.testing.assert_close(got, torch.func.jvp(pair.torchs, (A,), (A.cos(),)))


def test_an_operator_with_a_named_kernel_refuses_dual_tensors() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(A, A.cos())
        with pytest.raises(
            ValueError, match="kernel 'portable' does not support forward-mode gradients"
        ):
            ops.matmul(dual, B, None, "portable")


def test_an_operator_that_writes_out_refuses_dual_tensors() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(A, A.cos())
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

    got = tangent(GELU_GEMM.ours)

    torch.testing.assert_close(got, tangent(GELU_GEMM.torchs))
