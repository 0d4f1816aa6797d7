"""The operators as torch sees them: schema, fake tensors, mutation, errors, lazy views."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from support.every_function import (
    A8,
    B8,
    E4M3,
    EXPERTS,
    GROUP_SCALES,
    OFFS,
    ONE,
    ROUTES,
    ROWS,
    WEIGHTS,
)

from outblas import OperandError
from outblas.base.compat.torch_private import below_autograd
from outblas.call import dispatch

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

Tensor = torch.Tensor
ops = torch.ops.outblas
A, B, C = (torch.randint(-8, 9, shape).float() for shape in ((6, 5), (5, 4), (6, 4)))


def sevens() -> Tensor:
    """An output that is full of sevens, so that a test sees whether it was written."""
    return torch.full((6, 4), 7.0)


# ---- schemas
BIASES, INDEX = torch.randn(2, 16), torch.arange(6)
BESIDE = BIASES, torch.randn(6, 8), INDEX, INDEX.flip(0), torch.rand(6), "swiglu"
CALLS: dict[str, tuple[Any, ...]] = {
    "matmul": (A.expand(3, 6, 5), B),
    "matmul_out": (A, B, torch.empty(6, 4)),
    "addmm": (C[0], A, B, 0.5, 2.0),
    "addmm_out": (C, A, B, torch.empty(6, 4), 0.5, 2.0),
    "gemm": (A, B, C[0], None, None, 0.5, 2.0, "swiglu"),
    "gemm_aux": (A, B, None, C[0], None, 1, 1, "silu"),
    "gemm_out": (torch.empty(6, 4), torch.empty(6, 4), A, B, None, C[0], None, 1, 1, "gelu"),
    "activation_backward": (C[:, :2], C, "geglu"),
    "grouped_mm": (ROWS, EXPERTS, OFFS),
    "grouped_gemm": (ROWS, EXPERTS, OFFS, *BESIDE),
    "grouped_gemm_aux": (ROWS, EXPERTS, OFFS, *BESIDE),
    "grouped_gemm_to_aux": (torch.zeros(6, 16), ROWS, EXPERTS, OFFS, *BESIDE),
    "moe_mlp": (ROWS, EXPERTS, torch.randn(2, 8, 8), ROUTES, WEIGHTS, "swiglu", BIASES, None),
    "quantize": (torch.randn(130, 200), "1x128"),
}
WITHOUT_GRADIENTS = "matmul_out", "addmm_out", "gemm_out", "grouped_gemm_to_aux", "quantize"
OF_FP8: dict[str, tuple[str, tuple[Any, ...]]] = {
    "scales of blocks": (
        "scaled_mm",
        (
            *(torch.zeros(6, 300).to(E4M3), torch.zeros(200, 300).to(E4M3).t()),
            *(torch.ones(6, 3), torch.ones(3, 2)),
        ),
    ),
    "gradients": (
        "scaled_mm",
        (A8, B8, ONE, ONE, torch.ones(8).bfloat16().requires_grad_(), None, False, "gelu"),
    ),
    "an fp8 result": (
        "scaled_mm_quantized",
        (A8, B8, ONE, ONE, "1x128", torch.randn(8), True, False, "gelu"),
    ),
    "groups": (
        "scaled_grouped_mm",
        (ROWS.to(E4M3), EXPERTS.to(E4M3), *GROUP_SCALES, OFFS),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    """With gradients where the operator has them."""
    arguments = tuple(
        t.clone().requires_grad_(t.is_floating_point() and name not in WITHOUT_GRADIENTS)
        if isinstance(t, Tensor)
        else t
        for t in CALLS[name]
    )

    torch.library.opcheck(getattr(ops, name).default, arguments)


@pytest.mark.parametrize("name", OF_FP8)
def test_opcheck_of_fp8(name: str) -> None:
    """The check of the schema knows no fp8."""
    operator, arguments = OF_FP8[name]
    checks = ["test_autograd_registration", "test_faketensor"]
    checks += ["test_aot_dispatch_dynamic"] * ("grouped" not in operator)

    torch.library.opcheck(getattr(ops, operator).default, arguments, test_utils=checks)


# ---- errors
LEAF = A.clone().requires_grad_()
REFUSED: dict[str, Callable[[Tensor], object]] = {
    "matmul_out with gradients": lambda out: ops.matmul_out(LEAF, B, out),
    "addmm_out with gradients": lambda out: ops.addmm_out(C, LEAF, B, out),
    "gemm_out with gradients": lambda out: ops.gemm_out(out, None, LEAF, B),
    "alpha without c": lambda out: ops.gemm(A, B, None, None, None, 2),
    "wide product beside a narrow c": lambda out: ops.gemm(
        A.half(), B.half(), C.half(), None, None, 1, 1, "", torch.float32
    ),
    "gradient of too few columns": lambda out: ops.activation_backward(C[:, :3], C, "gelu"),
    "gradient of no half": lambda out: ops.activation_backward(C[:, :3], C, "swiglu"),
    "odd number of columns": lambda out: ops.activation_backward(C[:, :1], C[:, :3], "swiglu"),
    "no columns": lambda out: ops.activation_backward(C[0, 0], C[0, 0], "swiglu"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_is_caught_as_torchs_and_as_ours(name: str) -> None:
    out = sevens()

    with pytest.raises(OperandError) as caught:
        REFUSED[name](out)

    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, ValueError)
    assert out.eq(7).all()


# ---- warm calls of operators, as compiled programs make them
WARM: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "matmul": (lambda a: ops.matmul(a, B), lambda a: a @ B),
    "addmm": (lambda a: ops.addmm(C, a, B, 2, 3), lambda a: torch.addmm(C, a, B, alpha=2, beta=3)),
    "gemm": (lambda a: ops.gemm(a, B, None, C[0]), lambda a: a @ B + C[0]),
    "gemm with an addend": (
        lambda a: ops.gemm(a, B, C, None, None, 2, 3, "relu"),
        lambda a: torch.addmm(C, a, B, alpha=2, beta=3).relu(),
    ),
}
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "eager": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("mode", [*MODES, "gradients"])
@pytest.mark.parametrize("call", WARM)
def test_a_warm_call_of_an_operator_runs_its_plan_alone(
    call: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is neither described nor looked up a second time."""
    ours, theirs = WARM[call]
    with MODES.get(mode, nullcontext)():
        a, b = (A.clone().requires_grad_(mode == "gradients") for _ in range(2))
        ours(a), ours(a)
        described: list[object] = []
        monkeypatch.setattr(dispatch, "_cache_key", lambda *call: described.append(call))

        result, expected = ours(a), theirs(b)

    assert described == []
    assert torch.equal(result, expected)
    if mode == "gradients":
        result.sum().backward()
        expected.sum().backward()
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("call", WARM)
def test_below_autograd_an_operator_records_nothing(call: str) -> None:
    ours, theirs = WARM[call]
    a = A.clone().requires_grad_()

    with below_autograd():
        results = [ours(a) for _ in range(2)]

    assert not any(result.requires_grad for result in results)
    assert all(torch.equal(result, theirs(A)) for result in results)
