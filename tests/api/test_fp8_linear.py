"""`FP8Linear`: what it computes, its gradients, and what it is made of."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.fp8 import E4M3, E5M2, scaled
from torch import nn, vmap
from torch.func import functional_call, grad, jacrev

from outblas import FP8Linear, OperandError, quantize

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

Tensor = torch.Tensor
Function = Callable[..., Any]


def new_layer(bias: bool = True) -> FP8Linear:
    return FP8Linear.from_linear(nn.Linear(300, 200, bias))


def dequantized(layer: Any) -> Tensor:
    return scaled(layer.weight, layer.weight_scale_inv, "128x128")


def expected(layer: Any, x: Tensor) -> Tensor:
    """The product of the dequantized operands in float64."""
    values, scale = quantize(x.reshape(-1, x.shape[-1]), "1x128")
    out = scaled(values, scale, "1x128") @ dequantized(layer).t()
    out = out if layer.bias is None else out + layer.bias.double()
    return out.view(*x.shape[:-1], layer.weight.shape[0])


# ---- what it computes
@pytest.mark.parametrize(
    ("shape", "dtype", "of_weight", "bias"),
    [
        ((300,), torch.bfloat16, E4M3, True),
        ((7, 300), torch.float32, E4M3, False),
        ((7, 300), torch.float32, E5M2, True),
        ((2, 3, 5, 300), torch.float16, E4M3, True),
        ((0, 300), torch.bfloat16, E4M3, False),
    ],
)
def test_it_multiplies_by_the_dequantized_weight(
    shape: tuple[int, ...], dtype: torch.dtype, of_weight: torch.dtype, bias: bool
) -> None:
    linear = nn.Linear(300, 200, bias)
    layer, x = FP8Linear.from_linear(linear, dtype=of_weight), torch.randn(shape).to(dtype)

    y = layer(x)

    assert (y.dtype, layer.weight.dtype) == (dtype, of_weight)
    unit = torch.finfo(dtype).eps if dtype != torch.float32 else 2**-20
    torch.testing.assert_close(y.double(), expected(layer, x), atol=4 * unit, rtol=unit)
    theirs = linear(x.float())
    assert (y - theirs).norm() <= (0.05 if of_weight == E4M3 else 0.1) * theirs.norm()


def test_autocast_decides_the_dtype() -> None:
    layer, x = new_layer(), torch.randn(7, 300)

    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)

    assert y.dtype == torch.bfloat16
    assert torch.equal(y, layer(x.bfloat16()))


# ---- gradients
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_the_dequantized_weight(bias: bool) -> None:
    layer = new_layer(bias)
    x = torch.randn(2, 3, 300, requires_grad=True)
    grad = torch.randn(2, 3, 200)

    layer(x).backward(grad)

    assert x.grad is not None
    expected_grad = grad.double() @ dequantized(layer)
    torch.testing.assert_close(x.grad.double(), expected_grad, atol=1e-5, rtol=1e-5)
    assert layer.weight.grad is layer.weight_scale_inv.grad is None
    if layer.bias is not None:
        torch.testing.assert_close(layer.bias.grad, grad.sum((0, 1)))


def loss(y: Tensor) -> Tensor:
    return y.sin().sum()


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "grad": lambda layer: grad(lambda *given: loss(layer(*given)), (0, 1)),
    "jacrev": lambda layer: jacrev(lambda *given: layer(*given)[0, 0, :4], (0, 1)),
    "grad of grad": lambda layer: grad(
        lambda *given: loss(grad(lambda *inner: loss(layer(*inner)))(*given))
    ),
    "vmap of grad": lambda layer: vmap(grad(lambda *given: loss(layer(*given)), (0, 1)), (0, None)),
    "grad of vmap": lambda layer: grad(lambda *given: loss(vmap(layer, (0, None))(*given)), (0, 1)),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_those_of_the_formula(name: str) -> None:
    layer = new_layer()
    x, bias = torch.randn(2, 3, 300), torch.randn(200)
    weight = dequantized(layer).float()

    def by_layer(x: Tensor, bias: Tensor) -> Tensor:
        return functional_call(layer, {"bias": bias}, (x,))

    def by_formula(x: Tensor, bias: Tensor) -> Tensor:
        rounding = by_layer(x.detach(), bias.detach()) - nn.functional.linear(x, weight, bias)
        return nn.functional.linear(x, weight, bias) + rounding.detach()

    got, want = (TRANSFORMS[name](function)(x, bias) for function in (by_layer, by_formula))

    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


# ---- what it is made of


def test_a_new_layer_loads_a_state_dict() -> None:
    layer = new_layer()
    x = torch.randn(3, 300)

    for device in ("cpu", "meta"):
        new = FP8Linear(300, 200, device=device)
        new.load_state_dict(layer.state_dict(), assign=device == "meta")

        assert torch.equal(new(x), layer(x)), device


def test_a_layer_of_tensors_shares_their_memory() -> None:
    weight, scale = quantize(torch.randn(200, 300), "128x128")
    bias = torch.zeros(200)

    layer = FP8Linear.from_fp8(weight, scale, bias)

    given = {"weight": weight, "weight_scale_inv": scale, "bias": bias}
    for name, parameter in layer.named_parameters():
        assert parameter.data_ptr() == given[name].data_ptr(), name
        assert not parameter.requires_grad, name
    assert (layer.in_features, layer.out_features) == (300, 200)


def test_a_compiled_layer_is_one_graph() -> None:
    layer = new_layer()
    x = torch.randn(3, 300, requires_grad=True)

    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)

    torch.testing.assert_close(y, layer(x))
    y.sum().backward()
    assert x.grad is not None


# ---- errors
WEIGHT, SCALE = quantize(torch.ones(200, 300), "128x128")
WRONG: dict[str, Callable[[], object]] = {
    "weight_scale_inv is float, expected a torch.Tensor": (
        lambda: FP8Linear.from_fp8(WEIGHT, 1.0)  # type: ignore[arg-type]
    ),
    "linear is Conv1d, expected a torch.nn.Linear": (
        lambda: FP8Linear.from_linear(nn.Conv1d(2, 2, 1))  # type: ignore[arg-type]
    ),
    "weight has 1 dimensions, expected 2": lambda: FP8Linear.from_fp8(WEIGHT[0], SCALE),
    "weight.dtype is torch.float32, expected one of torch.float8_e4m3fn, torch.float8_e5m2": (
        lambda: FP8Linear.from_fp8(WEIGHT.float(), SCALE)
    ),
    "weight_scale_inv.dtype is torch.bfloat16, expected one of torch.float32": (
        lambda: FP8Linear.from_fp8(WEIGHT, SCALE.bfloat16())
    ),
    "weight_scale_inv.shape is (3, 2), expected (2, 3)": (
        lambda: FP8Linear.from_fp8(WEIGHT, SCALE.t())
    ),
    "bias.shape is (300,), expected (200,)": (
        lambda: FP8Linear.from_fp8(WEIGHT, SCALE, torch.ones(300))
    ),
    "bias is on meta but weight is on cpu": (
        lambda: FP8Linear.from_fp8(WEIGHT, SCALE, torch.ones(200, device="meta"))
    ),
    "input.shape is (2, 200), expected (..., 300)": lambda: new_layer()(torch.ones(2, 200)),
    "input.shape is (), expected (..., 300)": lambda: new_layer()(torch.ones(())),
    "input.dtype is torch.float64, expected one of torch.bfloat16, torch.float16, torch.float32": (
        lambda: new_layer()(torch.ones(2, 300).double())
    ),
    "input is on meta, expected cpu, as the weight": (
        lambda: new_layer()(torch.ones(2, 300, device="meta"))
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_refused(message: str) -> None:
    is_of_a_type = "is float" in message or "is Conv1d" in message

    with pytest.raises(TypeError if is_of_a_type else OperandError) as caught:
        WRONG[message]()

    assert str(caught.value) == message
