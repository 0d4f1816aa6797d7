"""What torch makes of the operators: autocast, vmap, torch.func, inference mode, compiled and
exported programs.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import vmap
from torch._dynamo.testing import CompileCounter
from torch.func import grad, hessian, jacrev

from outblas import OperandError, addmm, linear, matmul
from outblas.core.epilogue import apply
from outblas.torch_ops import ops

pytestmark = pytest.mark.filterwarnings(
    "ignore::outblas.FallbackWarning", "ignore::DeprecationWarning"
)
close = torch.testing.assert_close


def layer(x: Any, w: Any, bias: Any, residual: Any = None) -> torch.Tensor:
    return linear(x, w, bias, activation="gelu", residual=residual)


def torchs_layer(x: Any, w: Any, bias: Any, residual: Any = None) -> torch.Tensor:
    return apply(torch.nn.functional.linear(x, w, bias), "gelu", residual)


Function = Callable[..., torch.Tensor]
A, W, BIAS = torch.randn(6, 5), torch.randn(4, 5).requires_grad_(), torch.randn(4).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_torch_does(dtype: torch.dtype) -> None:
    x, leaves = torch.randn(3, 6, 5), (W, BIAS)
    pairs: list[tuple[Function, Function, tuple[torch.Tensor, ...]]] = [
        (matmul, torch.matmul, (x, W.t())),
        (matmul, torch.matmul, (x.to(dtype), W.t())),
        (matmul, torch.matmul, (x.double(), W.t().double())),
        (addmm, torch.addmm, (BIAS, x[0], W.t())),
        (linear, torch.nn.functional.linear, (x, W, BIAS)),
        (linear, torch.nn.functional.linear, (x.to(dtype), W, BIAS)),
        (linear, torch.nn.functional.linear, (x, W)),
    ]
    for ours, torchs, given in pairs:
        with torch.autocast("cpu", dtype=dtype):
            results = ours(*given), torchs(*given)
        close(*results)
        gradients = [
            torch.autograd.grad(y.sum(), leaves, allow_unused=True, materialize_grads=True)
            for y in results
        ]
        close(*gradients, atol=0.05, rtol=0.02)
    with torch.autocast("cpu", dtype=dtype):
        assert layer(x, W, BIAS, torch.randn(6, 4)).dtype == dtype
        assert matmul(A, W.t(), out_dtype=torch.float32, bias=BIAS.to(dtype)).dtype == torch.float32
        with torch.no_grad():  # as torch, which casts nothing for an out
            assert matmul(A, W.t(), out=torch.empty(6, 4)).dtype == torch.float32
        with torch.autocast("cpu", enabled=False):
            assert matmul(A, W.t()).dtype == torch.float32
        with pytest.raises(ValueError, match=r"other.dtype is .*float16 but input.dtype is"):
            matmul(A.double(), W.t())


@pytest.mark.parametrize("shape_b", [(5,), (5, 4), (3, 5, 4)])
@pytest.mark.parametrize("shape_a", [(5,), (6, 5), (2, 1, 6, 5)])
def test_vmap_over_any_dimension(shape_a: tuple[int, ...], shape_b: tuple[int, ...]) -> None:
    for dim_a in (None, *range(len(shape_a) + 1)):
        for dim_b in (None, *range(len(shape_b) + 1)):
            if dim_a is None and dim_b is None:
                continue
            given = [
                torch.randn(shape) if dim is None else torch.randn(*shape[:dim], 7, *shape[dim:])
                for shape, dim in ((shape_a, dim_a), (shape_b, dim_b))
            ]
            close(vmap(matmul, (dim_a, dim_b))(*given), vmap(torch.matmul, (dim_a, dim_b))(*given))


PAIRS: list[tuple[Function, Function, list[tuple[int, ...]]]] = [
    (
        lambda c, a, b: addmm(c, a, b, alpha=0.5, beta=-2),
        lambda c, a, b: a @ b / 2 - 2 * c,
        [(6, 4), (6, 5), (5, 4)],
    ),
    (addmm, lambda c, a, b: c + a @ b, [(4,), (6, 5), (5, 4)]),
    (lambda c, a, b: addmm(c, a, b, beta=0), lambda c, a, b: c * 0 + a @ b, [(), (6, 5), (5, 4)]),
    *(
        (layer, torchs_layer, [x, (4, 5), (4,), r])
        for x, r in [((6, 5), (6, 4)), ((5,), ()), ((3, 6, 5), (6, 1))]
    ),
    (
        lambda c, a, b: addmm(c, a, b, alpha=0.5, activation="swiglu"),
        lambda c, a, b: apply(c + (a @ b) / 2, "swiglu", None),
        [(6, 1), (6, 5), (5, 4)],
    ),
    (lambda x, w: linear(x, w, activation="relu"), lambda x, w: torch.relu(x @ w), [(6, 5), (5,)]),
    (vmap(matmul, (None, 0)), vmap(torch.matmul, (None, 0)), [(6, 5), (2, 5, 4)]),
]


@pytest.mark.parametrize("i", range(len(PAIRS)))
def test_vmap_over_any_arguments(i: int) -> None:
    ours, torchs, shapes = PAIRS[i]
    for mask in range(1, 2 ** len(shapes)):
        in_dims = tuple(0 if mask >> k & 1 else None for k in range(len(shapes)))
        given = [
            torch.randn(7, *s) if dim == 0 else torch.randn(s)
            for s, dim in zip(shapes, in_dims, strict=True)
        ]
        close(vmap(ours, in_dims)(*given), vmap(torchs, in_dims)(*given))


R = torch.randn
# calls that must raise as they do without vmap: the operands, and which of them are mapped
WRONG: dict[str, tuple[Function, list[torch.Tensor], tuple[int | None, ...]]] = {
    "dtype of c": (addmm, [R(2, 5).bfloat16(), R(2, 3, 4), R(2, 4, 5)], (0, 0, 0)),
    "shape of c": (lambda *t: addmm(*t, beta=0), [R(2, 7), R(2, 3, 4), R(2, 4, 5)], (0, 0, 0)),
    "c of too many dimensions": (addmm, [R(2, 1, 3, 5), R(2, 3, 4), R(4, 5)], (0, 0, None)),
    "a of one dimension": (addmm, [R(5), R(2, 4), R(4, 5)], (None, 0, None)),
    "a of three dimensions": (addmm, [R(5), R(2, 3, 4), R(2, 4, 5)], (None, None, 0)),
    "inner sizes of addmm": (addmm, [R(2, 5), R(3, 4), R(3, 5)], (0, None, None)),
    "no dimensions": (matmul, [R(2, 3, 4, 1), R(2)], (0, 0)),
    "inner sizes": (matmul, [R(2, 3, 4), R(2, 5, 4)], (0, 0)),
    "dtypes": (matmul, [R(2, 3, 4), R(4, 5).double()], (0, None)),
    "batches": (matmul, [R(2, 3, 3, 4), R(2, 2, 4, 5)], (0, 0)),
    "odd columns": (
        lambda a, b: matmul(a, b, activation="swiglu"),
        [R(2, 3, 4), R(4, 5)],
        (0, None),
    ),
    "bias": (lambda a, b, t: matmul(a, b, bias=t), [R(3, 4), R(4, 5), R(2, 7)], (None, None, 0)),
    "residual": (
        lambda a, b, t: matmul(a, b, residual=t),
        [R(3, 4), R(4, 5), R(2, 2, 3, 5)],
        (None, None, 0),
    ),
    "derivative": (lambda g, x: ops.activation_backward(g, x, "gelu"), [R(2), R(2, 2)], (0, None)),
    "derivative of a pair": (
        lambda g, x: ops.activation_backward(g, x, "swiglu"),
        [R(1), R(2)],
        (None, 0),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_vmap_checks_each_call(name) -> None:
    call, tensors, dims = WRONG[name]
    of_one = [t if dim is None else t[0] for t, dim in zip(tensors, dims, strict=True)]
    with pytest.raises(OperandError) as plain:
        call(*of_one)
    with pytest.raises(OperandError) as mapped:
        vmap(call, dims)(*tensors)
    assert str(mapped.value) == str(plain.value)


@pytest.mark.parametrize("activation", ["reglu", "swiglu"])
@pytest.mark.parametrize("dims", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0)])
@pytest.mark.parametrize(
    "shapes", [((4, 5), (5,), (2,)), ((5,), (5, 4), (2,)), ((3, 4, 5), (5,), (3, 1))]
)
def test_vmap_of_a_gated_pair_without_columns(shapes, dims, activation: str) -> None:
    given = [R(s) if dim is None else R(7, *s) for s, dim in zip(shapes, dims, strict=True)]
    ours = lambda a, b, r: matmul(a, b, activation=activation, residual=r)  # noqa: E731
    close(vmap(ours, dims)(*given), vmap(lambda a, b, r: apply(a @ b, activation, r), dims)(*given))


def test_vmap_of_integers_is_that_of_one_call() -> None:
    a, b, c = (
        torch.randint(-9, 9, shape, dtype=torch.int8) for shape in ((3, 6, 5), (5, 4), (6, 4))
    )
    for alpha, beta in ((1, 1), (1.5, 2.9), (2, 0.5)):
        call = lambda a, s=alpha, t=beta: addmm(c, a, b, alpha=s, beta=t)  # noqa: E731
        assert torch.equal(vmap(call)(a), torch.stack([call(t) for t in a]))
    with pytest.raises(
        RuntimeError, match=r"alpha is nan, expected a number that torch.int8 can hold"
    ):
        vmap(lambda a: addmm(c, a, b, alpha=torch.nan))(a)


@pytest.mark.parametrize(
    "call",
    [
        lambda c, a, b: matmul(a, b),
        lambda c, a, b: addmm(c, a, b),
        lambda c, a, b: matmul(a, b, bias=c, activation="gelu"),
        lambda c, a, b: linear(a, b.mT, c[0]),
    ],
)
def test_vmap_under_autocast(call) -> None:
    given = R(7, 6, 4), R(7, 6, 5), R(5, 4).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = vmap(call, (0, 0, None))(*given)
        want = torch.stack([call(c, a, given[2]) for c, a in zip(*given[:2], strict=True)])
    assert found.dtype == torch.bfloat16
    close(found, want, atol=0.05, rtol=0.02)  # torch rounds a bias on one of the ways only


def test_transforms_of_gradients() -> None:
    x, w, bias = torch.randn(7, 3, 5).double(), torch.randn(4, 5).double(), torch.randn(4).double()
    dims = None, None, 0

    def losses(layer: Any) -> Any:
        return lambda w, bias, x: layer(x, w, bias).square().sum()

    for transform in (
        lambda f: grad(f, (0, 1, 2)),
        lambda f: vmap(grad(f, (0, 1)), dims),
        lambda f: grad(lambda *t: vmap(f, dims)(*t).sum()),
        lambda f: grad(lambda *t: grad(f)(*t).square().sum()),
        lambda f: jacrev(vmap(f, dims)),
        lambda f: hessian(f, 1),
    ):
        close(transform(losses(layer))(w, bias, x), transform(losses(torchs_layer))(w, bias, x))
    w.requires_grad_()  # transforms inside what autograd records
    close(
        *(
            torch.autograd.grad(grad(losses(f), 1)(w, bias, x).sum(), w)
            for f in (layer, torchs_layer)
        )
    )
    with pytest.raises(RuntimeError, match=r"vmap|out"):
        vmap(lambda a: matmul(a, torch.randn(5, 4), out=torch.empty(6, 4)))(torch.randn(7, 6, 5))


def test_inference_mode_and_deterministic_algorithms() -> None:
    for _ in range(3):
        with torch.inference_mode():
            y = layer(A, W, BIAS)
        torch.use_deterministic_algorithms(True)
        try:
            z = layer(A, W, BIAS)
        finally:
            torch.use_deterministic_algorithms(False)
        assert (y.is_inference(), z.requires_grad, torch.equal(y, z)) == (True, True, True)


# ---- compiled
class Perceptron(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = linear(x, self.up.weight, self.up.bias, activation="swiglu")
        x = linear(hidden, self.down.weight, self.down.bias, residual=x)
        return addmm(
            self.down.bias, x, matmul(self.down.weight[:, :8], self.up.weight[:8]), alpha=0.5
        )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_training_is_one_graph(backend: str, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    model = Perceptron()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    for rows in (6, 6, 9):
        x = torch.randn(rows, 8)
        results = compiled(x), model(x)
        close(*results)
        close(*(torch.autograd.grad(y.square().mean(), list(model.parameters())) for y in results))


def test_functional_calls_give_what_the_model_gives() -> None:
    model, x = Perceptron(), torch.randn(6, 8)
    got = torch.func.functional_call(model, dict(model.named_parameters()), x)
    close(got, model(x))


CALLS = [
    lambda x, w, b: matmul(x, w.t(), bias=b, activation="gelu"),
    lambda x, w, b: addmm(b, x, w.t(), alpha=0.5),
    lambda x, w, b: linear(x[None].expand(2, -1, -1), w, activation="swiglu"),
    lambda x, w, b: matmul(x, w.detach().t(), out=x.new_empty(x.shape[0], 4)),
]


@pytest.mark.parametrize("i", range(len(CALLS)))
def test_a_dynamic_size_is_compiled_once(i: int) -> None:
    torch._dynamo.reset()
    counter, w, bias = CompileCounter(), torch.randn(4, 8).requires_grad_(), torch.randn(4)
    compiled = torch.compile(CALLS[i], backend=counter, fullgraph=True)
    for rows in (5, 7, 64):
        x = torch.randn(rows, 8)
        torch._dynamo.mark_dynamic(x, 0)
        close(compiled(x, w, bias), CALLS[i](x, w, bias))
    assert counter.frame_count == 1


def test_compiled_under_autocast_and_transforms() -> None:
    torch._dynamo.reset()

    def cast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x, W, BIAS)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return layer(x, W, BIAS)

    for f in (cast, vmap(plain), grad(lambda x: plain(x).sum())):
        close(torch.compile(lambda x, f=f: f(x), backend="aot_eager", fullgraph=True)(A), f(A))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = torch.compile(plain, backend="aot_eager", fullgraph=True)(A), plain(A)
    close(*(torch.autograd.grad(y.float().sum(), (W, BIAS)) for y in results))


def test_a_gradient_of_an_unbacked_size() -> None:
    """A size that no graph knows asks for no guard, where its operand lies by rows or by
    columns.
    """
    torch._dynamo.reset()

    def product(x, w):
        rows = torch.nonzero(x[:, 0]).squeeze(1)
        return matmul(x[rows], w.t()).sum() + matmul(x[rows].t().contiguous().t(), w.t()).sum()

    x, results = torch.randn(6, 5).requires_grad_(), []
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for f in (torch.compile(product, backend="aot_eager", fullgraph=True), product):
            results.append(torch.autograd.grad(f(x, W), (x, W)))
    close(*results)


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict: bool) -> None:
    model, rows = Perceptron(), torch.export.Dim("rows", min=2, max=4096)
    exported = torch.export.export(
        model, (torch.randn(6, 8),), dynamic_shapes={"x": {0: rows}}, strict=strict
    )
    targets = [str(node.target) for node in exported.graph.nodes]
    assert [targets.count(f"outblas.{name}.default") for name in ("gemm", "addmm", "matmul")] == [
        2,
        1,
        1,
    ]
    for program in (exported, exported.run_decompositions()):
        x = torch.randn(31, 8)
        close(program.module()(x), model(x))


def test_alpha_of_zero_under_vmap_is_no_product() -> None:
    """Whatever A and B hold: NaN does not come through, as without vmap."""
    a, b, c = torch.full((3, 4), torch.nan), torch.ones(4, 5), torch.ones(2, 5)
    got = vmap(lambda c: addmm(c, a, b, alpha=0, beta=2))(c)
    assert torch.equal(got, torch.full((2, 3, 5), 2.0))
