"""The gradient of an activation's argument: its kernel, its formula, and what reaches them."""

import numpy as np
import pytest
import torch
from support.gradients import COLD_THEN_WARM

from outblas import matmul
from outblas.call.epilogue import ACTIVATIONS, GATED, Activation
from outblas.kernels import activation as kernels
from outblas.kernels import passes
from outblas.torch_ops import activation_backward, ops
from outblas.torch_ops.activation_backward import formula

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

Tensor = torch.Tensor


# ---- the kernel
@pytest.mark.interpreter
@pytest.mark.oldest_triton
@pytest.mark.parametrize(
    ("activation", "wide"), [(name, i % 2 == 0) for i, name in enumerate(ACTIVATIONS)]
)
def test_the_kernel_computes_the_formula(activation: Activation, wide: bool) -> None:
    gated = activation in GATED
    columns = 70
    grad, x = torch.randn(37, columns), 3 * torch.randn(37, columns * (1 + gated))
    x[0, :3] = torch.tensor([0.0, torch.nan, -30.0])
    out = torch.full_like(x, -7)
    function = GATED.get(activation, activation)
    kernel = kernels._PASSES.interpreted[kernels.backward_kernel]

    with np.errstate(all="ignore"):
        kernel[(3,)](grad, x, out, grad.numel(), columns, function, gated, wide, kernels.BLOCK)

    want = formula(grad.double(), x.double(), activation).float()
    torch.testing.assert_close(out, want, equal_nan=True, atol=3e-6, rtol=3e-6)


@pytest.mark.compile
@pytest.mark.oldest_triton
@pytest.mark.parametrize(("arch", "pointer", "wide"), [(75, "*fp16", True), (90, "*bf16", False)])
def test_the_kernel_moves_16_bytes_at_a_time(pointer: str, wide: bool, arch: int) -> None:
    types = dict.fromkeys(("grad", "x", "out"), pointer) | {"elements": "i32", "columns": "i32"}
    constants = {"FUNCTION": "gelu", "GATE": wide, "WIDE": wide, "BLOCK": kernels.BLOCK}

    compiled = passes.compile_for(kernels.backward_kernel, types, constants, arch)

    assert "ld.global.v4" in compiled.asm["ptx"]


# ---- what reaches the operator
def test_a_gradient_that_negates_when_read_is_resolved_for_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels read memory, where such a view has the other sign."""
    negates = []

    def kernel(grad: Tensor, x: Tensor, activation: Activation) -> Tensor:
        negates.append(grad.is_neg())
        return formula(grad, x, activation)

    monkeypatch.setattr(activation_backward, "_compute", kernel)
    a, b, g = torch.randn(3, 4).requires_grad_(), torch.randn(4, 2), torch.randn(3, 2)

    for _ in COLD_THEN_WARM:
        y = matmul(a, b, activation="relu")
        (gradient,) = torch.autograd.grad(y, a, torch._neg_view(g))

        torch.testing.assert_close(gradient, torch.where(y > 0, -g, 0) @ b.t())
    assert not any(negates)


@pytest.mark.parametrize("needs_grad", [False, True], ids=["plain", "needs gradients"])
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_a_derivative_of_a_sparse_tensor_is_refused(layout: str, needs_grad: bool) -> None:
    """As torch's dispatcher does for operators, also where gradients are asked for."""
    x = getattr(torch.randn(3, 4), layout)().requires_grad_(needs_grad)

    with pytest.raises(NotImplementedError):
        torch.ops.outblas.activation_backward(torch.randn(3, 4), x, "relu")


# ---- aux beside a residual
activations = pytest.mark.parametrize("activation", ["", "gelu", "swiglu"])


@activations
def test_aux_needs_no_gradient_where_only_the_residual_does(activation: Activation) -> None:
    a, b, residual = torch.randn(3, 4), torch.randn(4, 2), torch.randn(3, 1).requires_grad_()

    y, x = ops.gemm_aux(a, b, None, None, residual, 1, 1, activation)

    assert y.requires_grad
    assert not x.requires_grad
    assert x.is_leaf
    assert x.grad_fn is None
