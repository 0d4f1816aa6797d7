"""Operands of types that override torch's functions, or ours: each reaches the function that it
knows as it came.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.tensor_types import (
    BIAS,
    C,
    Duck,
    Overriding,
    Packed,
    Quantized,
    Refusing,
    Unwrapping,
    W,
    X,
    sevens,
)
from torch.nn import functional as F

import outblas
from outblas import FallbackWarning, OperandError, addmm, linear, matmul

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
strict_warning = pytest.mark.filterwarnings("error::outblas.FallbackWarning")

knows_only_linear = pytest.mark.parametrize("kind", [Quantized, Refusing])


# ---- weights that know F.linear and nothing else
@knows_only_linear
def test_a_quantized_weight_reaches_the_linear_of_torch(kind: type[Quantized]) -> None:
    with pytest.warns(FallbackWarning, match=f"tensor subclass {kind.__name__}"):
        got = linear(X, kind(W))

    assert torch.equal(got, F.linear(X, W / 2))


@knows_only_linear
def test_the_bias_goes_along(kind: type[Quantized]) -> None:
    assert torch.equal(linear(X, kind(W), BIAS), F.linear(X, W / 2, BIAS))


@knows_only_linear
def test_an_epilogue_follows_the_linear_of_a_quantized_weight(kind: type[Quantized]) -> None:
    got = linear(X, kind(W), BIAS, activation="gelu", residual=C)

    assert torch.equal(got, F.gelu(F.linear(X, W / 2, BIAS)) + C)


def test_a_bias_that_broadcasts_is_added_to_the_linear_of_a_quantized_weight() -> None:
    assert torch.equal(linear(X, Quantized(W), C[:, :1]), F.linear(X, W / 2) + C[:, :1])


def test_the_linear_of_a_quantized_weight_goes_to_out() -> None:
    out = sevens()

    assert linear(X, Quantized(W), out=out) is out
    assert torch.equal(out, F.linear(X, W / 2))


def test_out_of_a_wrong_shape_is_not_written() -> None:
    out = sevens(1, 4)

    with pytest.raises(OperandError, match=r"out\.shape is \(1, 4\), expected \(6, 4\)"):
        linear(X[:1].expand(6, 5), Quantized(W), out=out)

    assert torch.equal(out, sevens(1, 4))


def test_a_patched_layer_takes_a_quantized_weight() -> None:
    layer = torch.nn.Linear(5, 4)
    del layer.weight
    layer.weight = Quantized(W)
    want = layer(X)

    layer.__class__ = outblas.Linear

    assert torch.equal(layer(X), want)


def test_a_type_may_call_our_function_for_torchs() -> None:
    assert torch.equal(linear(X, Unwrapping(W)), F.linear(X, W))


def test_functions_that_the_caller_disabled_stay_disabled() -> None:
    with (
        torch._C.DisableTorchFunctionSubclass(),
        pytest.raises(NotImplementedError, match=r"Quantized has no aten"),
    ):
        linear(X, Quantized(W))


def test_a_named_kernel_refuses_a_quantized_weight() -> None:
    message = "kernel 'portable' needs plain tensors, but was given tensor subclass Quant"
    with pytest.raises(ValueError, match=message):
        linear(X, Quantized(W), kernel="portable")


def test_strict_mode_refuses_a_quantized_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_STRICT", "1")

    with pytest.raises(RuntimeError, match=r"OUTBLAS_STRICT=1 forbids.*tensor subclass Quantized"):
        linear(X, Quantized(W))


def test_batch_invariance_is_not_promised_for_a_quantized_weight() -> None:
    with pytest.raises(ValueError, match="batch_invariant is True, and torch would take this call"):
        linear(X, Quantized(W), batch_invariant=True)


def test_a_wrong_activation_is_refused_before_torch_is_called() -> None:
    with pytest.raises(ValueError, match="activation is 'tanh', expected"):
        linear(X, Quantized(W), activation="tanh")  # type: ignore[arg-type]


# ---- weights that say nothing of their product
def test_a_packed_weight_reaches_the_linear_of_torch() -> None:
    assert torch.equal(linear(X, Packed(W), BIAS), F.linear(X, W / 2, BIAS))


def test_a_packed_weight_of_an_odd_number_of_columns_is_refused_after_its_product() -> None:
    out = sevens(6, 3)

    with pytest.raises(OperandError, match=r"an even number of them, got shape \(6, 3\)"):
        linear(X, Packed(W[:3]), activation="geglu", out=out)

    assert torch.equal(out, sevens(6, 3))


def test_out_of_a_packed_weights_product_is_checked_after_it() -> None:
    out = sevens(6, 3)

    with pytest.raises(OperandError, match=r"out.shape is \(6, 3\), expected \(6, 4\)"):
        linear(X, Packed(W), out=out)

    assert torch.equal(out, sevens(6, 3))


# ---- types that override our functions
@strict_warning
def test_a_type_may_override_our_function() -> None:
    w = Overriding(W)

    function, args, kwargs = linear(X, w, BIAS, activation="gelu", residual=C)

    assert function == "ours"
    assert args == (X, w)
    assert list(kwargs) == ["bias", "residual", "activation"]


@strict_warning
def test_a_residual_may_override_our_function() -> None:
    assert linear(X, W, residual=Overriding(C))[0] == "ours"


LEADING_OPERANDS: dict[Callable[..., Any], tuple[torch.Tensor, ...]] = {
    matmul: (X,),
    addmm: (C, X),
    linear: (X,),
}
TORCHS: dict[Callable[..., Any], Callable[..., Any]] = {
    matmul: torch.matmul,
    addmm: torch.addmm,
    linear: F.linear,
}
functions = pytest.mark.parametrize("function", LEADING_OPERANDS, ids=lambda f: f.__name__)


@strict_warning
@functions
def test_what_is_no_tensor_may_override_our_functions(function: Callable[..., Any]) -> None:
    duck = Duck(known=[function])
    operands = (*LEADING_OPERANDS[function], duck)

    assert function(*operands) == (function, operands, {})


@functions
def test_what_is_no_tensor_reaches_torch_where_it_knows_torch(function: Callable[..., Any]) -> None:
    duck = Duck(known=[TORCHS[function]])
    operands = (*LEADING_OPERANDS[function], duck)

    with pytest.warns(FallbackWarning, match="operands of type Duck"):
        called, args, _ = function(*operands)

    assert called is TORCHS[function]
    assert args[: len(operands)] == operands


def test_what_knows_neither_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"torch\.matmul.* returned NotImplemented"):
        matmul(X, Duck())  # type: ignore[arg-type]
