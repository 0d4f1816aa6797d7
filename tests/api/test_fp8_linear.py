"""`FP8Linear`: what it computes, its gradients, and what it is made of."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.fp8 import E5M2, scaled
from torch import nn, vmap
from torch.func import functional_call, grad, jacrev, vjp

from outblas import FP8Linear, OperandError, quantize

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

Tensor = torch.Tensor
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def layer_and_linear(bias: bool = True, N: int = 200, K: int = 300) -> tuple[FP8Linear, nn.Linear]:
    linear = nn.Linear(K, N, bias)
    return FP8Linear.from_linear(linear), linear


def dequantized(layer: Any) -> Tensor:
    return scaled(layer.weight, layer.weight_scale_inv, "128x128")


def expected(layer: Any, x: Tensor) -> Tensor:
    """The product of the dequantized operands in float64."""
    values, scale = quantize(x.reshape(-1, x.shape[-1]), "1x128")
    out = scaled(values, scale, "1x128") @ dequantized(layer).t()
    out = out if layer.bias is None else out + layer.bias.double()
    return out.view(*x.shape[:-1], layer.weight.shape[0])


# ---- what it computes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(300,), (7, 300), (2, 3, 5, 300), (0, 300)])
@pytest.mark.parametrize("bias", [True, False])
def test_it_multiplies_by_the_dequantized_weight(
    bias: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    layer, _ = layer_and_linear(bias)
    x = torch.randn(shape).to(dtype)

    y = layer(x)

    assert y.dtype == dtype
    unit = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}[dtype]
    torch.testing.assert_close(y.double(), expected(layer, x), atol=4 * unit, rtol=unit)


def test_a_layer_of_a_linear_one_is_near_to_it() -> None:
    layer, linear = layer_and_linear()
    x = torch.randn(16, 300)

    y = layer(x)

    wanted = linear(x)
    assert (y - wanted).norm() < 0.05 * wanted.norm()


def test_a_weight_may_be_e5m2() -> None:
    layer = FP8Linear.from_linear(nn.Linear(300, 200), dtype=E5M2)
    x = torch.randn(7, 300)

    y = layer(x)

    assert layer.weight.dtype == E5M2
    torch.testing.assert_close(y.double(), expected(layer, x), atol=1e-5, rtol=1e-5)


def test_autocast_decides_the_dtype() -> None:
    layer, _ = layer_and_linear()
    x = torch.randn(7, 300)

    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)

    assert y.dtype == torch.bfloat16
    assert torch.equal(y, layer(x.bfloat16()))


# ---- gradients
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_the_dequantized_weight(bias: bool) -> None:
    layer, _ = layer_and_linear(bias)
    x = torch.randn(2, 3, 300, requires_grad=True)
    grad = torch.randn(2, 3, 200)

    layer(x).backward(grad)

    assert x.grad is not None
    wanted = grad.double() @ dequantized(layer)
    torch.testing.assert_close(x.grad.double(), wanted, atol=1e-5, rtol=1e-5)
    assert layer.weight.grad is layer.weight_scale_inv.grad is None
    if layer.bias is not None:
        torch.testing.assert_close(layer.bias.grad, grad.sum((0, 1)))


def loss(y: Tensor) -> Tensor:
    return y.sin().sum()


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "grad": lambda layer: grad(lambda *given: loss(layer(*given)), (0, 1)),
    "vjp": lambda layer: lambda *given: vjp(layer, *given)[1](torch.ones(2, 3, 200)),
    "jacrev": lambda layer: jacrev(lambda *given: layer(*given)[0, 0, :4], (0, 1)),
    "grad of grad": lambda layer: grad(
        lambda *given: loss(grad(lambda *inner: loss(layer(*inner)))(*given))
    ),
    "vmap": lambda layer: vmap(layer, (0, None)),
    "vmap of grad": lambda layer: vmap(grad(lambda *given: loss(layer(*given)), (0, 1)), (0, None)),
    "grad of vmap": lambda layer: grad(lambda *given: loss(vmap(layer, (0, None))(*given)), (0, 1)),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_those_of_the_formula(name: str) -> None:
    layer, _ = layer_and_linear()
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
    layer, _ = layer_and_linear()
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
    layer, _ = layer_and_linear()
    x = torch.randn(3, 300, requires_grad=True)

    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)

    torch.testing.assert_close(y, layer(x))
    y.sum().backward()
    assert x.grad is not None


# ---- errors
WEIGHT, SCALE = quantize(torch.ones(200, 300), "128x128")
WRONG: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "no tensor": ((WEIGHT, 1.0), TypeError, "weight_scale_inv is float, expected a torch.Tensor"),
    "a vector": ((WEIGHT[0], SCALE), OperandError, "weight has 1 dimensions, expected 2"),
    "a weight that is not fp8": (
        (WEIGHT.float(), SCALE),
        OperandError,
        "weight.dtype is torch.float32, expected one of torch.float8_e4m3fn, torch.float8_e5m2",
    ),
    "scales of another dtype": (
        (WEIGHT, SCALE.bfloat16()),
        OperandError,
        "weight_scale_inv.dtype is torch.bfloat16, expected one of torch.float32",
    ),
    "scales of the transposed weight": (
        (WEIGHT, SCALE.t()),
        OperandError,
        "weight_scale_inv.shape is (3, 2), expected (2, 3)",
    ),
    "another bias": (
        (WEIGHT, SCALE, torch.ones(300)),
        OperandError,
        "bias.shape is (300,), expected (200,)",
    ),
    "a bias elsewhere": (
        (WEIGHT, SCALE, torch.ones(200, device="meta")),
        OperandError,
        "bias is on meta but weight is on cpu",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_tensors_that_are_no_layer_are_refused(name: str) -> None:
    given, kind, message = WRONG[name]

    with pytest.raises(kind) as caught:
        FP8Linear.from_fp8(*given)

    assert str(caught.value) == message


def test_only_linear_layers_are_quantized() -> None:
    with pytest.raises(TypeError, match=r"linear is Conv1d, expected a torch\.nn\.Linear"):
        FP8Linear.from_linear(nn.Conv1d(2, 2, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(2, 200), "input.shape is (2, 200), expected (..., 300)"),
        (torch.ones(()), "input.shape is (), expected (..., 300)"),
        (
            torch.ones(2, 300).double(),
            "input.dtype is torch.float64, expected one of torch.bfloat16, torch.float16, "
            "torch.float32",
        ),
        (
            torch.ones(2, 300, device="meta"),
            "input is on meta, expected cpu, as the weight",
        ),
    ],
)
def test_an_input_that_does_not_fit_is_refused(x: Tensor, message: str) -> None:
    layer, _ = layer_and_linear()

    with pytest.raises(OperandError) as caught:
        layer(x)

    assert str(caught.value) == message
