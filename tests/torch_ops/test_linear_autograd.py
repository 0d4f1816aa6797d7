"""Gradients of eager calls of `linear`: one node of autograd, products of the tensors as stored."""

import weakref
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.gradients import GRADIENT_KINDS, assert_gradients_of_a_kind_are_torchs

from outblas import linear
from outblas.core.epilogue import Activation

pytest_plugins = ("support.eager_fixtures",)
pytestmark = [
    pytest.mark.usefixtures("cpu_plans_run"),
    pytest.mark.filterwarnings("ignore::outblas.FallbackWarning"),
]

Tensor = torch.Tensor


class Layer(NamedTuple):
    """The tensors of a call."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None


def integers(*shape: int) -> Tensor:
    """Small integers, whose products have one right result in float32."""
    return torch.randint(-4, 5, shape).float()


def by_columns(t: Tensor) -> Tensor:
    return t.t().contiguous().t()


LAYERS = {
    "rows": Layer(integers(6, 5), integers(4, 5)),
    "bias": Layer(integers(6, 5), integers(4, 5), integers(4)),
    "batch": Layer(integers(2, 3, 5), integers(4, 5), integers(4)),
    "two batches": Layer(integers(2, 1, 3, 5), integers(4, 5), integers(4)),
    "residual": Layer(integers(6, 5), integers(4, 5), None, integers(6, 4)),
    "bias, residual, batch": Layer(
        integers(2, 3, 5), integers(4, 5), integers(4), integers(2, 3, 4)
    ),
    "one column": Layer(integers(6, 5), integers(1, 5), integers(1)),
    "one bias": Layer(integers(6, 5), integers(4, 5), integers(1)),
    "one residual": Layer(integers(6, 5), integers(4, 5), None, integers(1)),
    "a residual for all rows": Layer(integers(6, 5), integers(4, 5), None, integers(4)),
}
COMMON = tuple(LAYERS)
LAYERS |= {  # those of `autograd.MatmulFunction`
    "x by columns": Layer(by_columns(integers(6, 5)), integers(4, 5), integers(4)),
    "weight by columns": Layer(integers(6, 5), by_columns(integers(4, 5)), integers(4)),
    "a row": Layer(integers(5), integers(4, 5), integers(4)),
    "bias of two dimensions": Layer(integers(6, 5), integers(4, 5), integers(1, 4)),
    "weight of one dimension": Layer(integers(6, 5), integers(5)),
}
ACTIVATIONS = (None, "relu", "gelu", "silu")


def by_torch(given: Layer, activation: Activation | None) -> Tensor:
    y = F.linear(given.x, given.weight)
    if given.bias is not None:
        y = y + given.bias
    if activation is not None:
        y = getattr(F, activation)(y)
    return y if given.residual is None else y + given.residual


def by_us(given: Layer, activation: Activation | None) -> Tensor:
    return linear(*given[:3], activation=activation, residual=given.residual)


def needing(given: Layer, names: tuple[str, ...]) -> Layer:
    """The tensors anew, of which these need gradients."""
    fields = given._asdict().items()
    return Layer(
        **{
            name: None if t is None else t.detach().requires_grad_(name in names)
            for name, t in fields
        }
    )


def gradients(y: Tensor, given: Layer) -> list[Tensor | None]:
    y.backward(torch.arange(1.0, y.numel() + 1).reshape(y.shape) % 7 - 3)
    return [None if t is None else t.grad for t in given]


NAMES = Layer._fields


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_torchs(name: str, activation: Activation | None) -> None:
    ours, theirs = needing(LAYERS[name], NAMES), needing(LAYERS[name], NAMES)

    got = gradients(by_us(ours, activation), ours)

    expected = gradients(by_torch(theirs, activation), theirs)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("names", [(name,) for name in NAMES] + [("x", "bias"), ("weight", "bias")])
def test_only_what_needs_a_gradient_gets_one(names: tuple[str, ...]) -> None:
    layer = LAYERS["bias, residual, batch"]
    ours, theirs = needing(layer, names), needing(layer, names)

    got = gradients(by_us(ours, "gelu"), ours)

    torch.testing.assert_close(got, gradients(by_torch(theirs, "gelu"), theirs))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("kind", GRADIENT_KINDS)
@pytest.mark.parametrize("name", ["bias, residual, batch", "x by columns"])
def test_a_gradient_may_be_of_any_kind(
    name: str, kind: str, activation: Activation | None, create_graph: bool
) -> None:
    """That of `Linear`, and that of `Product`."""
    given = [t.clone().requires_grad_() for t in LAYERS[name] if t is not None]

    assert_gradients_of_a_kind_are_torchs(
        kind,
        lambda *tensors: by_us(Layer(*tensors), activation),
        lambda *tensors: by_torch(Layer(*tensors), activation),
        given,
        create_graph,
    )


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


@pytest.mark.parametrize("cpu_plans_run", ["torch's product"], indirect=True)
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("name", COMMON)
def test_second_derivatives_are_numerical_ones(name: str, activation: Activation | None) -> None:
    given = [t if t is None else t.double().requires_grad_() for t in LAYERS[name]]

    def function(*tensors: Tensor | None) -> Tensor:
        return by_us(Layer(*tensors), activation)  # type: ignore[arg-type]

    assert torch.autograd.gradcheck(function, given)
    assert torch.autograd.gradgradcheck(function, given)
