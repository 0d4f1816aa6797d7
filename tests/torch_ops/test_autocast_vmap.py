"""Autocast, vmap and torch.func of our operators give what they give of torch's."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import vmap
from torch.func import grad, hessian, jacrev

from outblas import OperandError, addmm, linear, matmul
from outblas.core.epilogue import apply
from outblas.torch_ops import ops

pytestmark = pytest.mark.filterwarnings(
    "ignore::outblas.FallbackWarning", "ignore::DeprecationWarning"
)

Tensor = torch.Tensor
Function = Callable[..., Tensor]
Shape = tuple[int, ...]
A, W, BIAS = torch.randn(6, 5), torch.randn(4, 5).requires_grad_(), torch.randn(4).requires_grad_()


def our_layer(x: Any, w: Any, bias: Any, residual: Any = None) -> Tensor:
    return linear(x, w, bias, activation="gelu", residual=residual)


def torchs_layer(x: Any, w: Any, bias: Any, residual: Any = None) -> Tensor:
    return apply(torch.nn.functional.linear(x, w, bias), "gelu", residual)


# ---- autocast
NARROW = [torch.bfloat16, torch.float16]
X = torch.randn(3, 6, 5)
# Functions of ours and of torch, and their operands, of which `narrow` makes some narrow already.
AUTOCAST_CALLS: dict[str, tuple[Function, Function, Callable[[torch.dtype], tuple[Any, ...]]]] = {
    "matmul": (matmul, torch.matmul, lambda narrow: (X, W.t())),
    "matmul of a narrow operand": (matmul, torch.matmul, lambda narrow: (X.to(narrow), W.t())),
    "matmul of float64": (matmul, torch.matmul, lambda narrow: (X.double(), W.t().double())),
    "addmm": (addmm, torch.addmm, lambda narrow: (BIAS, X[0], W.t())),
    "linear": (linear, torch.nn.functional.linear, lambda narrow: (X, W, BIAS)),
    "linear of a narrow operand": (
        linear,
        torch.nn.functional.linear,
        lambda narrow: (X.to(narrow), W, BIAS),
    ),
    "linear without bias": (linear, torch.nn.functional.linear, lambda narrow: (X, W)),
}


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", AUTOCAST_CALLS)
def test_autocast_casts_and_has_gradients_as_torch_does(name: str, dtype: torch.dtype) -> None:
    ours, torchs, operands = AUTOCAST_CALLS[name]
    with torch.autocast("cpu", dtype=dtype):
        got, want = ours(*operands(dtype)), torchs(*operands(dtype))

    def gradients(y: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y.sum(), (W, BIAS), allow_unused=True, materialize_grads=True)

    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradients(got), gradients(want), atol=0.05, rtol=0.02)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_autocast_keeps_the_dtype_that_a_call_asks_for(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype=dtype):
        wide = matmul(A, W.t(), out_dtype=torch.float32, bias=BIAS.to(dtype))

    assert wide.dtype == torch.float32


# ---- vmap
MAPPED = 7  # calls at once


def operand(shape: Shape, dim: int | None) -> Tensor:
    """A tensor of this shape, or with a mapped dimension at `dim`."""
    return torch.randn(shape if dim is None else (*shape[:dim], MAPPED, *shape[dim:]))


def assert_maps_as_torch(
    ours: Function, torchs: Function, shapes: list[Shape], dims: tuple[int | None, ...]
) -> None:
    """A function of ours under vmap gives what torch's gives."""
    operands = [operand(shape, dim) for shape, dim in zip(shapes, dims, strict=True)]
    got = vmap(ours, dims)(*operands)
    want = vmap(torchs, dims)(*operands)
    torch.testing.assert_close(got, want, msg=lambda text: f"in_dims {dims}: {text}")


@pytest.mark.parametrize("shape_b", [(5,), (5, 4), (3, 5, 4)], ids=str)
@pytest.mark.parametrize("shape_a", [(5,), (6, 5), (2, 1, 6, 5)], ids=str)
def test_vmap_over_any_dimension(shape_a: Shape, shape_b: Shape) -> None:
    dims_a, dims_b = (None, *range(len(shape_a) + 1)), (None, *range(len(shape_b) + 1))

    for dims in itertools.product(dims_a, dims_b):
        if dims != (None, None):
            assert_maps_as_torch(matmul, torch.matmul, [shape_a, shape_b], dims)


def random(*shape: int) -> Tensor:
    return torch.randn(shape)


@dataclass(frozen=True)
class WrongCall:
    """A call that must raise under vmap as it does without: its operands, and which are mapped."""

    call: Function
    operands: list[Tensor]
    dims: tuple[int | None, ...]


WRONG = {
    "dtype of c": WrongCall(
        addmm, [random(2, 5).bfloat16(), random(2, 3, 4), random(2, 4, 5)], (0, 0, 0)
    ),
    "shape of c": WrongCall(
        lambda c, a, b: addmm(c, a, b, beta=0),
        [random(2, 7), random(2, 3, 4), random(2, 4, 5)],
        (0, 0, 0),
    ),
    "c of too many dimensions": WrongCall(
        addmm, [random(2, 1, 3, 5), random(2, 3, 4), random(4, 5)], (0, 0, None)
    ),
    "a of one dimension": WrongCall(
        addmm, [random(5), random(2, 4), random(4, 5)], (None, 0, None)
    ),
    "a of three dimensions": WrongCall(
        addmm, [random(5), random(2, 3, 4), random(2, 4, 5)], (None, None, 0)
    ),
    "inner sizes of addmm": WrongCall(
        addmm, [random(2, 5), random(3, 4), random(3, 5)], (0, None, None)
    ),
    "no dimensions": WrongCall(matmul, [random(2, 3, 4, 1), random(2)], (0, 0)),
    "inner sizes": WrongCall(matmul, [random(2, 3, 4), random(2, 5, 4)], (0, 0)),
    "dtypes": WrongCall(matmul, [random(2, 3, 4), random(4, 5).double()], (0, None)),
    "batches": WrongCall(matmul, [random(2, 3, 3, 4), random(2, 2, 4, 5)], (0, 0)),
    "odd columns": WrongCall(
        lambda a, b: matmul(a, b, activation="swiglu"), [random(2, 3, 4), random(4, 5)], (0, None)
    ),
    "bias": WrongCall(
        lambda a, b, bias: matmul(a, b, bias=bias),
        [random(3, 4), random(4, 5), random(2, 7)],
        (None, None, 0),
    ),
    "residual": WrongCall(
        lambda a, b, residual: matmul(a, b, residual=residual),
        [random(3, 4), random(4, 5), random(2, 2, 3, 5)],
        (None, None, 0),
    ),
    "derivative": WrongCall(
        lambda g, x: ops.activation_backward(g, x, "gelu"), [random(2), random(2, 2)], (0, None)
    ),
    "derivative of a pair": WrongCall(
        lambda g, x: ops.activation_backward(g, x, "swiglu"), [random(1), random(2)], (None, 0)
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_vmap_checks_each_call(name: str) -> None:
    wrong = WRONG[name]
    operands_of_one = [
        t if dim is None else t[0] for t, dim in zip(wrong.operands, wrong.dims, strict=True)
    ]
    with pytest.raises(OperandError) as plain:
        wrong.call(*operands_of_one)

    with pytest.raises(OperandError) as mapped:
        vmap(wrong.call, wrong.dims)(*wrong.operands)

    assert str(mapped.value) == str(plain.value)


INTEGERS = torch.randint(-9, 9, (3, 6, 5), dtype=torch.int8)
INTEGER_B, INTEGER_C = (torch.randint(-9, 9, s, dtype=torch.int8) for s in ((5, 4), (6, 4)))


@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (1.5, 2.9), (2, 0.5)])
def test_vmap_of_integers_is_that_of_one_call(alpha: float, beta: float) -> None:
    def call(a: Tensor) -> Tensor:
        return addmm(INTEGER_C, a, INTEGER_B, alpha=alpha, beta=beta)

    got = vmap(call)(INTEGERS)

    assert torch.equal(got, torch.stack([call(a) for a in INTEGERS]))


# ---- torch.func
MAPPED_X = None, None, 0


def loss_of(layer: Function) -> Function:
    """A scalar, as a function of a weight, a bias and an input."""
    return lambda w, bias, x: layer(x, w, bias).square().sum()


@pytest.fixture
def given() -> list[Tensor]:
    """A weight, a bias and a batch of inputs, of float64."""
    return [torch.randn(shape).double() for shape in ((4, 5), (4,), (7, 3, 5))]


@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(lambda f: grad(f, (0, 1, 2)), id="grad"),
        pytest.param(lambda f: vmap(grad(f, (0, 1)), MAPPED_X), id="vmap of grad"),
        pytest.param(lambda f: grad(lambda *t: vmap(f, MAPPED_X)(*t).sum()), id="grad of vmap"),
        pytest.param(lambda f: grad(lambda *t: grad(f)(*t).square().sum()), id="grad of grad"),
        pytest.param(lambda f: jacrev(vmap(f, MAPPED_X)), id="jacrev of vmap"),
        pytest.param(lambda f: hessian(f, 1), id="hessian"),
    ],
)
def test_transforms_of_gradients(transform: Callable[[Function], Any], given: list[Tensor]) -> None:
    got = transform(loss_of(our_layer))(*given)

    torch.testing.assert_close(got, transform(loss_of(torchs_layer))(*given))
