"""Autocast, vmap and torch.func of our operators give what they give of torch's."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.gradients import COLD_THEN_WARM
from torch import vmap
from torch.func import grad, hessian, jacrev

from outblas import OperandError, addmm, linear, matmul
from outblas.core.epilogue import Activation, apply
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
def test_autocast_casts_as_torch_does(name: str, dtype: torch.dtype) -> None:
    ours, torchs, operands = AUTOCAST_CALLS[name]

    with torch.autocast("cpu", dtype=dtype):
        got, want = ours(*operands(dtype)), torchs(*operands(dtype))

    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", AUTOCAST_CALLS)
def test_gradients_go_through_autocast_as_torchs_do(name: str, dtype: torch.dtype) -> None:
    ours, torchs, operands = AUTOCAST_CALLS[name]
    with torch.autocast("cpu", dtype=dtype):
        got, want = ours(*operands(dtype)), torchs(*operands(dtype))

    def gradients(y: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y.sum(), (W, BIAS), allow_unused=True, materialize_grads=True)

    torch.testing.assert_close(gradients(got), gradients(want), atol=0.05, rtol=0.02)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_autocast_narrows_calls_with_an_epilogue(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype=dtype):
        assert our_layer(X, W, BIAS, torch.randn(6, 4)).dtype == dtype


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_autocast_keeps_the_dtype_that_a_call_asks_for(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype=dtype):
        wide = matmul(A, W.t(), out_dtype=torch.float32, bias=BIAS.to(dtype))

    assert wide.dtype == torch.float32


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_autocast_casts_nothing_for_an_out(dtype: torch.dtype) -> None:
    """As torch does."""
    with torch.autocast("cpu", dtype=dtype), torch.no_grad():
        assert matmul(A, W.t(), out=torch.empty(6, 4)).dtype == torch.float32


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_autocast_that_is_off_casts_nothing(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype=dtype), torch.autocast("cpu", enabled=False):
        assert matmul(A, W.t()).dtype == torch.float32


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_autocast_does_not_narrow_float64(dtype: torch.dtype) -> None:
    with (
        torch.autocast("cpu", dtype=dtype),
        pytest.raises(ValueError, match=r"other.dtype is .*float16 but input.dtype is"),
    ):
        matmul(A.double(), W.t())


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


@dataclass(frozen=True)
class Pair:
    """A function of ours, the same one of torch, and the shapes of their operands."""

    ours: Function
    torchs: Function
    shapes: list[Shape]


PAIRS = {
    "addmm of a matrix": Pair(
        lambda c, a, b: addmm(c, a, b, alpha=0.5, beta=-2),
        lambda c, a, b: a @ b / 2 - 2 * c,
        [(6, 4), (6, 5), (5, 4)],
    ),
    "addmm of a row": Pair(addmm, lambda c, a, b: c + a @ b, [(4,), (6, 5), (5, 4)]),
    "addmm with beta=0": Pair(
        lambda c, a, b: addmm(c, a, b, beta=0),
        lambda c, a, b: c * 0 + a @ b,
        [(), (6, 5), (5, 4)],
    ),
    "addmm swiglu": Pair(
        lambda c, a, b: addmm(c, a, b, alpha=0.5, activation="swiglu"),
        lambda c, a, b: apply(c + (a @ b) / 2, "swiglu", None),
        [(6, 1), (6, 5), (5, 4)],
    ),
    "layer of a matrix": Pair(our_layer, torchs_layer, [(6, 5), (4, 5), (4,), (6, 4)]),
    "layer of a vector": Pair(our_layer, torchs_layer, [(5,), (4, 5), (4,), ()]),
    "layer of a batch": Pair(our_layer, torchs_layer, [(3, 6, 5), (4, 5), (4,), (6, 1)]),
    "layer of one output": Pair(
        lambda x, w: linear(x, w, activation="relu"),
        lambda x, w: torch.relu(x @ w),
        [(6, 5), (5,)],
    ),
    "vmap of vmap": Pair(
        vmap(matmul, (None, 0)), vmap(torch.matmul, (None, 0)), [(6, 5), (2, 5, 4)]
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_vmap_over_any_arguments(name: str) -> None:
    pair = PAIRS[name]
    nothing_mapped = (None,) * len(pair.shapes)

    for dims in itertools.product((None, 0), repeat=len(pair.shapes)):
        if dims != nothing_mapped:
            assert_maps_as_torch(pair.ours, pair.torchs, pair.shapes, dims)


@pytest.mark.parametrize("activation", ["reglu", "swiglu"])
@pytest.mark.parametrize(
    "dims", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0)], ids=str
)
@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param([(4, 5), (5,), (2,)], id="matrix by vector"),
        pytest.param([(5,), (5, 4), (2,)], id="vector by matrix"),
        pytest.param([(3, 4, 5), (5,), (3, 1)], id="batch by vector"),
    ],
)
def test_vmap_of_a_gated_pair_without_columns(
    shapes: list[Shape], dims: tuple[int | None, ...], activation: Activation
) -> None:
    assert_maps_as_torch(
        lambda a, b, residual: matmul(a, b, activation=activation, residual=residual),
        lambda a, b, residual: apply(a @ b, activation, residual),
        shapes,
        dims,
    )


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


def test_vmap_of_integers_checks_scalars() -> None:
    message = "alpha is nan, expected a number that torch.int8 can hold"
    with pytest.raises(RuntimeError, match=message):
        vmap(lambda a: addmm(INTEGER_C, a, INTEGER_B, alpha=torch.nan))(INTEGERS)


def test_alpha_of_zero_under_vmap_is_no_product() -> None:
    """Whatever A and B hold: NaN does not come through, as without vmap."""
    a, b, c = torch.full((3, 4), torch.nan), torch.ones(4, 5), torch.ones(2, 5)

    got = vmap(lambda c: addmm(c, a, b, alpha=0, beta=2))(c)

    assert torch.equal(got, torch.full((2, 3, 5), 2.0))


def test_vmap_takes_no_out() -> None:
    with pytest.raises(RuntimeError, match=r"vmap|out"):
        vmap(lambda a: matmul(a, torch.randn(5, 4), out=torch.empty(6, 4)))(torch.randn(7, 6, 5))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda c, a, b: matmul(a, b), id="matmul"),
        pytest.param(lambda c, a, b: addmm(c, a, b), id="addmm"),
        pytest.param(lambda c, a, b: matmul(a, b, bias=c, activation="gelu"), id="epilogue"),
        pytest.param(lambda c, a, b: linear(a, b.mT, c[0]), id="linear"),
    ],
)
def test_vmap_under_autocast(call: Function) -> None:
    c, a, b = torch.randn(7, 6, 4), torch.randn(7, 6, 5), torch.randn(5, 4).bfloat16()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = vmap(call, (0, 0, None))(c, a, b)
        want = torch.stack([call(*one, b) for one in zip(c, a, strict=True)])

    assert got.dtype == torch.bfloat16
    # Torch rounds a bias on one of the ways only.
    torch.testing.assert_close(got, want, atol=0.05, rtol=0.02)


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


def test_autograd_records_transforms(given: list[Tensor]) -> None:
    w, bias, x = given
    w.requires_grad_()

    def gradient(layer: Function) -> tuple[Tensor, ...]:
        return torch.autograd.grad(grad(loss_of(layer), 1)(w, bias, x).sum(), w)

    torch.testing.assert_close(gradient(our_layer), gradient(torchs_layer))


# ---- modes
def test_results_in_inference_mode_are_inference_tensors() -> None:
    for call in COLD_THEN_WARM:
        with torch.inference_mode():
            assert our_layer(A, W, BIAS).is_inference(), f"call {call}"
        assert our_layer(A, W, BIAS).requires_grad, f"call {call}"


def test_deterministic_algorithms_change_no_result() -> None:
    want = our_layer(A, W, BIAS)
    torch.use_deterministic_algorithms(True)
    try:
        results = [our_layer(A, W, BIAS) for _ in COLD_THEN_WARM]
    finally:
        torch.use_deterministic_algorithms(False)

    for result in results:
        assert torch.equal(result, want)
        assert result.requires_grad
