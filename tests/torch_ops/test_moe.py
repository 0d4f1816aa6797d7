"""`outblas.moe_mlp` without a GPU, beside experts that are computed one by one."""

from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch

import outblas
from outblas.base.compiling import CompileForbidden
from outblas.call.epilogue import ACTIVATIONS, GATED, Activation, apply
from outblas.call.errors import OperandError
from outblas.kernels import moe as kernels
from outblas.torch_ops import moe

Tensor = torch.Tensor

pytestmark = pytest.mark.filterwarnings("ignore:torch takes this call")

T, K, E, H, F = 13, 3, 5, 8, 6


class Case(NamedTuple):
    """The arguments of a call, in the order of the operator without the activation."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    routes: Tensor
    weights: Tensor
    gate_up_bias: Tensor
    down_bias: Tensor

    def leaves(self) -> "Case":
        """The same values, of which all but the indices need gradients."""
        return Case(*(t.clone().requires_grad_(t.is_floating_point()) for t in self))

    @property
    def differentiable(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self if t.is_floating_point())


def case(activation: str = "swiglu", dtype: torch.dtype = torch.float32) -> Case:
    """Experts -1 and E, which some tokens have, do not exist."""
    W = F * (1 + (activation in GATED))
    shapes = (T, H), (E, H, W), (E, F, H), (T, K), (E, W), (E, H)
    x, gate_up, down, weights, first, second = (torch.randn(*each).to(dtype) for each in shapes)
    index = torch.stack([torch.randperm(E + 2)[:K] - 1 for _ in range(T)])
    return Case(x, gate_up, down, index, weights, first, second)


def call(c: Case, activation: Activation = "swiglu", bias: bool = True) -> Tensor:
    biases = {"gate_up_bias": c.gate_up_bias, "down_bias": c.down_bias} if bias else {}
    return outblas.moe_mlp(*c[:5], activation=activation, **biases)


def one_by_one(c: Case, activation: Activation = "swiglu", bias: bool = True) -> Tensor:
    """Computes the experts one after the other in float64."""
    x, gate_up, down, index, weights, *biases = (
        t.double() if t.is_floating_point() else t for t in c
    )
    out = torch.zeros_like(x)
    for e in range(gate_up.shape[0]):
        token, j = torch.where(index == e)
        inner = x[token] @ gate_up[e] + (biases[0][e] if bias else 0)
        result = apply(inner, activation, None) @ down[e] + (biases[1][e] if bias else 0)
        out = out.index_add(0, token, result * weights[token, j].unsqueeze(1))
    return out


@pytest.fixture(params=["torch", pytest.param("kernels", marks=pytest.mark.interpreter)])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes by torch's functions, or by the kernels in Triton's interpreter."""
    if request.param == "kernels":
        monkeypatch.setattr(moe, "moe_passes", kernels)


# ---- values
@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_result_and_gradients_are_those_of_single_experts(activation: Activation) -> None:
    """With biases for gated activations, and without."""
    given, bias = case(activation), activation in GATED
    ours, theirs = given.leaves(), given.leaves()
    grad = torch.randn(T, H)

    result, wanted = call(ours, activation, bias), one_by_one(theirs, activation, bias)
    result.backward(grad)
    wanted.backward(grad.double())

    torch.testing.assert_close(result.double(), wanted, atol=1e-4, rtol=1e-5)
    for one, other in zip(ours.differentiable, theirs.differentiable, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)],
)
def test_16_bits_are_rounded_after_each_product(
    dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    given = case(dtype=dtype)
    given = given._replace(weights=given.weights.to(weight_dtype))
    ours, theirs = given.leaves(), given.leaves()
    grad = torch.randn(T, H).to(dtype)

    result, wanted = call(ours), one_by_one(theirs)
    result.backward(grad)
    wanted.backward(grad.double())

    assert result.dtype == dtype
    unit = torch.finfo(dtype).eps
    pairs = [(result, wanted)]
    pairs += [(a.grad, b.grad) for a, b in zip(ours.differentiable, theirs.differentiable)]  # noqa: B905
    for one, other in pairs:
        distance = (one.double() - other.double()).norm() / other.double().norm()
        assert distance < 4 * unit


@pytest.mark.usefixtures("either")
def test_tokens_without_any_expert_get_zeros() -> None:
    given = case().leaves()._replace(routes=torch.full((T, K), E))

    result = call(given)
    result.sum().backward()

    assert (result == 0).all()
    assert all((t.grad == 0).all() for t in given.differentiable)


@pytest.mark.parametrize("memory", ["(E, W, H) and (E, H, F)", "with gaps"])
def test_matrices_of_any_memory_layout(memory: str) -> None:
    given = case()
    c = given.leaves()
    if memory == "with gaps":
        gate_up, down = (torch.stack((t, t), -1)[..., 0] for t in (c.gate_up, c.down))
    else:
        gate_up, down = (t.mT.contiguous().mT for t in (c.gate_up, c.down))

    result = outblas.moe_mlp(c.x, gate_up, down, c.routes, c.weights)
    result.sum().backward()

    wanted = given.leaves()
    one_by_one(wanted, bias=False).sum().backward()
    torch.testing.assert_close(c.gate_up.grad, wanted.gate_up.grad)
    torch.testing.assert_close(c.down.grad, wanted.down.grad)


def test_gradients_of_transposed_matrices_are_stored_as_these_are() -> None:
    """So that autograd keeps them, and copies nothing."""
    c = case()
    stored = c.gate_up.mT.contiguous().requires_grad_()

    result = outblas.moe_mlp(c.x, stored.mT, c.down, c.routes, c.weights)
    (gradient,) = torch.autograd.grad(result.sum(), stored)

    assert gradient.is_contiguous()


def test_gradients_that_nobody_needs_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    products, product = [], moe._product

    def counted(*given: Any) -> Tensor:
        products.append(given)
        result: Tensor = product(*given)
        return result

    c = case()
    c.x.requires_grad_()
    result = outblas.moe_mlp(*c[:5])
    monkeypatch.setattr(moe, "_product", counted)

    result.sum().backward()

    assert len(products) == 2, "those of the inner rows and of x"


@pytest.mark.parametrize(
    ("tokens", "k", "columns", "inner"), [(0, 2, 8, 6), (4, 0, 8, 6), (4, 2, 0, 6), (4, 2, 8, 0)]
)
def test_empty_layers(tokens: int, k: int, columns: int, inner: int) -> None:
    x = torch.ones(tokens, columns, requires_grad=True)
    gate_up = torch.ones(3, columns, 2 * inner, requires_grad=True)
    down = torch.ones(3, inner, columns, requires_grad=True)
    index, weights = torch.zeros(tokens, k, dtype=torch.int32), torch.ones(tokens, k)

    result = outblas.moe_mlp(x, gate_up, down, index, weights)
    result.sum().backward()

    assert result.shape == x.shape
    assert (result == 0).all()
    assert (down.grad == 0).all()


@pytest.mark.parametrize("leaf", ["x", "gate_up", "down", "weights", "gate_up_bias", "down_bias"])
def test_second_gradients_are_refused(leaf: str) -> None:
    """Those of a linear loss too, where the gradient of the result is a constant."""
    for loss in (torch.Tensor.sum, lambda y: y.square().sum()):
        c = case()
        t = getattr(c, leaf).requires_grad_()
        (first,) = torch.autograd.grad(loss(call(c)), t, create_graph=True)

        message = "the backward pass of moe_mlp has no gradients"
        with pytest.raises(NotImplementedError, match=message):
            first.sum().backward()


# ---- what is refused
C = case()
BAD: Any = [1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (C._replace(x=C.x[0]), "x has 1 dimensions, expected 2"),
        (C._replace(gate_up=C.gate_up[0]), "gate_up has 2 dimensions, expected 3"),
        (C._replace(x=C.x.int()), "x.dtype is torch.int32, expected one of"),
        (C._replace(down=C.down.half()), "down.dtype is torch.float16 but x.dtype is"),
        (C._replace(x=C.x[:, :7]), r"gate_up.shape\[1\] is 8 but x.shape\[1\] is 7"),
        (C._replace(down=C.down[:, :5]), r"down.shape is \(5, 5, 8\), expected \(5, 6, 8\)"),
        (C._replace(gate_up=C.gate_up[..., :11]), r"gate_up.shape\[2\] is 11, expected an even"),
        (C._replace(gate_up=C.gate_up[:0], down=C.down[:0]), r"expected 1 to 1024 experts"),
        (C._replace(routes=C.routes[:4]), r"expert_index.shape is \(4, 3\), expected \(13, k\)"),
        (C._replace(routes=C.routes.float()), "expert_index.dtype is torch.float32, expected"),
        (C._replace(weights=C.weights[:, :2]), r"expert_weights.shape is \(13, 2\) but"),
        (C._replace(weights=C.weights.int()), "expert_weights.dtype is torch.int32, expected"),
        (C._replace(gate_up_bias=C.down_bias), r"gate_up_bias is .* expected .*\(5, 12\)"),
        (C._replace(down_bias=C.down_bias.double()), "down_bias is torch.float64 of shape"),
        (C._replace(x=C.x.to("meta")), "gate_up is on cpu but x is on meta"),
    ],
)
def test_operands_that_do_not_fit_are_named(given: Case, message: str) -> None:
    with pytest.raises(OperandError, match=message):
        call(given)


def test_arguments_of_another_type_are_named() -> None:
    for name in ("x", "gate_up", "down", "routes", "weights", "down_bias"):
        shown = {"routes": "expert_index", "weights": "expert_weights"}.get(name, name)
        with pytest.raises(TypeError, match=f"{shown} is list, expected a torch.Tensor"):
            call(C._replace(**{name: BAD}))


@pytest.mark.parametrize(("activation", "error"), [("tanh", ValueError), (None, TypeError)])
def test_an_activation_that_does_not_exist_is_named(
    activation: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=f"activation is {activation!r}, expected"):
        call(C, activation)


# ---- which passes run
ON_GPU = torch.device("cuda")
LAYER = moe.Layer(T, K, E, H, 2 * F, F)


def test_passes_run_on_kernels_where_there_is_something_to_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By torch where Triton is missing, or may not compile."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def module(layer: moe.Layer = LAYER, compiles: bool = True) -> Any:
        def passes(module: Any) -> Any:
            if module is kernels and not compiles:
                raise CompileForbidden("a kernel")
            return module

        return moe._run(layer, ON_GPU, passes)

    assert module() is kernels
    assert module(LAYER._replace(tokens=0)) is moe.moe_passes
    with pytest.warns(outblas.FallbackWarning, match="neither a pack nor the cache has a kernel"):
        assert module(compiles=False) is moe.moe_passes
    monkeypatch.setattr(moe.hooks.moe_kernels, "get", Mock(side_effect=ImportError("no triton")))
    with pytest.warns(RuntimeWarning, match="no triton"):
        assert module() is moe.moe_passes
