"""What public functions promise alike: who is told that torch computes a call, what autocast,
forward mode, gradients and the promise of batch invariance mean where a function has none of them.
"""

from typing import Any

import pytest
import torch
from support.every_function import CALLS
from torch.autograd import forward_ad

import outblas
from outblas import FallbackWarning, OperandError

Tensor = torch.Tensor
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch takes this call", "ignore::outblas.FallbackWarning"
)

BY_TORCH = [name for name in CALLS if "kernel" not in name and "quantize" not in name]
OF_GROUPS_OR_FP8 = [n for n in BY_TORCH if n.split()[0] not in ("matmul", "addmm", "linear")]


@pytest.mark.parametrize("name", BY_TORCH)
def test_a_fallback_warns_and_strict_mode_refuses_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(FallbackWarning, match="CPU tensors"):
        CALLS[name]()
    monkeypatch.setenv("OUTBLAS_STRICT", "1")

    with pytest.raises(RuntimeError, match="OUTBLAS_STRICT=1 forbids the fallback to torch"):
        CALLS[name]()


@pytest.mark.parametrize("name", OF_GROUPS_OR_FP8)
def test_a_promise_of_batch_invariance_is_refused(name: str) -> None:
    """Also where the call has a plan from before."""
    for _ in range(2):
        CALLS[name]()

    with (
        outblas.batch_invariant(),
        pytest.raises(ValueError, match=r"batch_invariant is True, and .* does not"),
    ):
        CALLS[name]()
    with outblas.batch_invariant(), outblas.batch_invariant(False):
        CALLS[name]()


@pytest.mark.parametrize("name", [*OF_GROUPS_OR_FP8, "quantize"])
def test_autocast_casts_nothing(name: str) -> None:
    """As of torch's functions, which compute in the dtype of their operands."""
    plain = CALLS[name]()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = CALLS[name]()

    pairs = zip(cast, plain, strict=True) if isinstance(plain, tuple) else [(cast, plain)]
    for got, want in pairs:
        assert got.dtype == want.dtype
        torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=0, equal_nan=True)


# Functions, and those of their tensors that have no forward-mode gradient.
TANGENTS: dict[str, tuple[str, ...]] = {
    "grouped_mm": ("mat_a", "mat_b"),
    "grouped_mm with an epilogue": ("mat_a", "bias", "residual", "scatter_weights"),
    "grouped_mm with counts": ("mat_a", "mat_b"),
    "scaled_grouped_mm": ("bias", "scale_a"),
    "scaled_mm with an epilogue": ("bias", "residual"),
    "moe_mlp": ("x", "gate_up", "down", "expert_weights"),
}
OPERANDS: dict[str, tuple[str, ...]] = {
    "grouped_mm": ("mat_a", "mat_b"),
    "scaled_grouped_mm": ("mat_a", "mat_b"),
    "scaled_mm": ("mat_a", "mat_b"),
    "moe_mlp": ("x", "gate_up", "down", "expert_index", "expert_weights"),
    "quantize": ("x",),
}


def with_tensor(name: str, argument: str, change: Any) -> Any:
    """The result of a call, of which a tensor is changed."""
    call = CALLS[name]
    names = (*OPERANDS[name.split()[0]], *call.tensors)
    place = names.index(argument)
    tensors = [change(t) if i == place else t for i, t in enumerate(call.all_tensors)]
    return call.of(*tensors)


@pytest.mark.parametrize(
    ("name", "argument"), [(name, each) for name, names in TANGENTS.items() for each in names]
)
def test_a_tangent_is_refused(name: str, argument: str) -> None:
    CALLS[name]()
    message = f"{argument} carries a forward-mode gradient"

    with forward_ad.dual_level(), pytest.raises(OperandError, match=message):
        with_tensor(name, argument, lambda t: forward_ad.make_dual(t, t))
    call = CALLS[name]
    if argument == OPERANDS[name.split()[0]][0]:
        with pytest.raises(OperandError, match=message):
            torch.func.jvp(
                lambda t: call.of(t, *call.all_tensors[1:]), call.operands[:1], call.operands[:1]
            )


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("scaled_grouped_mm", "bias"),
        ("quantize", "x"),
        *(("scaled_mm to fp8", each) for each in ("mat_a", "mat_b", "scale_a", "scale_b")),
        *(("scaled_mm", each) for each in ("mat_a", "mat_b", "scale_a", "scale_b")),
    ],
)
def test_a_backward_pass_names_what_has_no_gradient(name: str, argument: str) -> None:
    """As of torch._scaled_mm, the forward pass runs."""
    result = with_tensor(name, argument, lambda t: t.detach().clone().requires_grad_())
    loss = sum(t.float().sum() for t in result) if isinstance(result, tuple) else result.sum()

    with pytest.raises(NotImplementedError, match=f"{argument}.* requires grad, but"):
        loss.backward()
