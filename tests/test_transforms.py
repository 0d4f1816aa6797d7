"""What torch makes of the operators: autocast, vmap, torch.func, inference mode, compiled and exported programs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import vmap
from torch._dynamo.testing import CompileCounter, EagerAndRecordGraphs
from torch.func import functional_call, grad, hessian, jacrev, jvp

from outblas import addmm, linear, matmul, ops
from outblas.epilogue import apply

OPERATORS = torch.ops.outblas
pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning", "ignore::DeprecationWarning")


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def gelu_layer(x: Any, w: Any, bias: Any, residual: Any = None) -> torch.Tensor:
    return linear(x, w, bias, activation="gelu", residual=residual)


def torchs_layer(x: Any, w: Any, bias: Any, residual: Any = None) -> torch.Tensor:
    return apply(torch.nn.functional.linear(x, w, bias), "gelu", residual)


# ---- opcheck ----
def grown(*shape: int) -> torch.Tensor:
    return normal(*shape).requires_grad_()


A, B, C = normal(6, 5), normal(5, 4), normal(6, 4)
CHECKED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "matmul": (ops.matmul, (grown(6, 5), grown(5, 4))),
    "matmul one": (ops.matmul, (A, grown(5, 4))),
    "matmul batched": (ops.matmul, (grown(3, 6, 5), grown(5, 4))),
    "matmul 1-D": (ops.matmul, (grown(5), grown(3, 5, 4))),
    "matmul wide": (ops.matmul, (A.half().requires_grad_(), B.half().requires_grad_(), torch.float32)),
    "addmm": (ops.addmm, (grown(4), grown(6, 5), grown(5, 4), 0.5, 2.0)),
    "gemm": (ops.gemm, (grown(6, 5), grown(5, 4), None, grown(4), grown(6, 4), 1, 1, "gelu")),
    "gemm gated": (ops.gemm, (grown(6, 5), grown(5, 4), grown(4), None, None, 0.5, 2, "swiglu")),
    "gemm without gradients": (ops.gemm, (A, B, None, B[0])),
    "gemm_aux": (ops.gemm_aux, (grown(6, 5), grown(5, 4), None, grown(4), None, 1, 1, "silu")),
    "gemm_out": (ops.gemm_out, (torch.empty(6, 4), torch.empty(6, 4), A, B, None, B[0], None, 1, 1, "gelu")),
    "activation_backward": (ops.activation_backward, (grown(6, 2), grown(6, 4), "geglu")),
}


@pytest.mark.parametrize("name", CHECKED)
def test_opcheck(name: str) -> None:
    operator, arguments = CHECKED[name]
    torch.library.opcheck(operator, arguments)


# ---- autocast ----
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_torch_does(dtype: torch.dtype) -> None:
    x, w, bias, r = grown(3, 6, 5), grown(4, 5), grown(4), normal(6, 4)
    pairs: list[tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = [
        (matmul, torch.matmul, (x, w.t())),
        (matmul, torch.matmul, (x.to(dtype), w.t())),
        (matmul, torch.matmul, (x.double(), w.t().double())),
        (addmm, torch.addmm, (bias, x[0], w.t())),
        (linear, torch.nn.functional.linear, (x.to(dtype), w, bias)),
        (linear, torch.nn.functional.linear, (x, w)),
    ]
    for ours, torchs, given in pairs:
        with torch.autocast("cpu", dtype=dtype):
            got, want = ours(*given), torchs(*given)
        torch.testing.assert_close(got, want)
        leaves = [t for t in (x, w, bias) if t.requires_grad]
        for mine, theirs in zip(
            torch.autograd.grad(got.sum(), leaves, allow_unused=True),
            torch.autograd.grad(want.sum(), leaves, allow_unused=True),
            strict=True,
        ):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert mine.dtype == torch.float32
                torch.testing.assert_close(mine, theirs, atol=0.05, rtol=0.02)
    with torch.autocast("cpu", dtype=dtype):
        assert gelu_layer(x, w, bias, r).dtype == dtype
        assert matmul(A, B, out_dtype=torch.float32, bias=B[0].to(dtype)).dtype == torch.float32
        assert matmul(A, B, out=torch.empty(6, 4)).dtype == torch.float32  # as torch, which casts nothing for an out
        with torch.autocast("cpu", enabled=False):
            assert matmul(A, B).dtype == torch.float32
        with pytest.raises(ValueError, match=r"b.dtype is .*float16 but a.dtype is torch.float64"):
            matmul(A.double(), B)


# ---- vmap ----
def dims(t: torch.Tensor) -> list[int | None]:
    return [None, *range(t.dim() + 1)]


@pytest.mark.parametrize("shape_b", [(5,), (5, 4), (3, 5, 4)])
@pytest.mark.parametrize("shape_a", [(5,), (6, 5), (3, 6, 5), (2, 1, 6, 5)])
def test_vmap_over_any_dimension(shape_a: tuple[int, ...], shape_b: tuple[int, ...]) -> None:
    a, b = normal(*shape_a), normal(*shape_b)
    for dim_a in dims(a):
        for dim_b in dims(b):
            if dim_a is None and dim_b is None:
                continue
            mapped = [
                t if dim is None else torch.stack([t, -t, t + 1, t - 1, 2 * t, t, t], dim)
                for t, dim in ((a, dim_a), (b, dim_b))
            ]
            got = vmap(matmul, (dim_a, dim_b))(*mapped)
            torch.testing.assert_close(got, vmap(torch.matmul, (dim_a, dim_b))(*mapped))


@pytest.mark.parametrize("scales", [(1, 1), (0.5, -2), (2, 0)])
@pytest.mark.parametrize("shape", [(6, 4), (4,), (6, 1), (1, 4), ()])
def test_vmap_of_addmm(shape: tuple[int, ...], scales: tuple[float, float]) -> None:
    alpha, beta = scales
    given = [normal(7, *shape), normal(7, 6, 5), normal(7, 5, 4)]
    for mask in range(1, 8):
        in_dims = tuple(0 if mask >> i & 1 else None for i in range(3))
        mapped = [t if dim == 0 else t[0] for t, dim in zip(given, in_dims, strict=True)]
        got = vmap(lambda c, a, b: addmm(c, a, b, alpha=alpha, beta=beta), in_dims)(*mapped)
        want = vmap(lambda c, a, b: beta * c + alpha * (a @ b), in_dims)(*mapped)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("shapes", [((6, 5), (6, 4)), ((5,), (4,)), ((5,), ()), ((3, 6, 5), (6, 1)), ((3, 6, 5), (4,))])
def test_vmap_of_an_epilogue(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    given = [normal(7, *shapes[0]), normal(7, 4, 5), normal(7, 4), normal(7, *shapes[1])]
    for mask in range(1, 16):
        in_dims = tuple(0 if mask >> i & 1 else None for i in range(4))
        mapped = [t if dim == 0 else t[0] for t, dim in zip(given, in_dims, strict=True)]
        torch.testing.assert_close(vmap(gelu_layer, in_dims)(*mapped), vmap(torchs_layer, in_dims)(*mapped))
    got = vmap(lambda x: linear(x, given[1][0, 0], activation="relu"))(given[0])
    torch.testing.assert_close(got, torch.relu(given[0] @ given[1][0, 0]))


def test_vmap_of_what_else_there_is() -> None:
    many = normal(3, 6, 5)
    nested = vmap(vmap(matmul, (None, 0)), (0, None))(many, normal(2, 5, 4))
    torch.testing.assert_close(nested, many[:, None] @ normal(2, 5, 4))
    c, a, b = normal(7, 6, 4), normal(7, 6, 5), normal(7, 5, 4)
    how = {"alpha": 0.5, "beta": 2, "bias": B[0], "activation": "swiglu"}
    got = vmap(lambda *t: addmm(*t, **how))(c, a, b)
    torch.testing.assert_close(got, torch.stack([addmm(*t, **how) for t in zip(c, a, b, strict=True)]))
    with pytest.raises(Exception, match=r"out|in-place|vmap"):
        vmap(lambda a: matmul(a, B, out=torch.empty(6, 4)))(normal(7, 6, 5))


# ---- torch.func ----
def test_transforms_of_gradients() -> None:
    x, w, bias = normal(7, 3, 5).double(), normal(4, 5).double(), normal(4).double()

    def loss(layer: Any) -> Any:
        return lambda w, bias, x: layer(x, w, bias).square().sum()

    for transform in (
        grad,
        lambda f: grad(f, (0, 1, 2)),
        lambda f: vmap(grad(f, (0, 1)), (None, None, 0)),
        lambda f: grad(lambda w, bias, x: vmap(f, (None, None, 0))(w, bias, x).sum()),
        lambda f: grad(lambda *t: grad(f)(*t).square().sum()),
        lambda f: jacrev(lambda w, bias, x: vmap(f, (None, None, 0))(w, bias, x)),
        lambda f: hessian(f, 1),
    ):
        torch.testing.assert_close(transform(loss(gelu_layer))(w, bias, x), transform(loss(torchs_layer))(w, bias, x))
    got, want = (jvp(lambda w, f=f: loss(f)(w, bias, x), (w,), (w,)) for f in (gelu_layer, torchs_layer))
    torch.testing.assert_close(got, want)
    grown = w.clone().requires_grad_()  # transforms inside what autograd records
    got, want = (torch.autograd.grad(grad(loss(f), 1)(grown, bias, x).sum(), grown) for f in (gelu_layer, torchs_layer))
    torch.testing.assert_close(got, want)


def test_inference_mode_and_deterministic_algorithms() -> None:
    w = grown(4, 5)
    for _ in range(3):
        with torch.inference_mode():
            y = gelu_layer(A, w, B[0])
            assert y.is_inference()
        torch.use_deterministic_algorithms(True)
        try:
            z = gelu_layer(A, w, B[0])
        finally:
            torch.use_deterministic_algorithms(False)
        assert z.requires_grad
        assert torch.equal(y, z)


# ---- compiled ----
class Perceptron(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = linear(x, self.up.weight, self.up.bias, activation="swiglu")
        x = linear(hidden, self.down.weight, self.down.bias, residual=x)
        return addmm(self.down.bias, x, matmul(self.down.weight[:, :8], self.up.weight[:8]), alpha=0.5)


def trained(model: Callable[..., Any], x: torch.Tensor, parameters: Any) -> list[torch.Tensor]:
    y = model(x)
    return [y, *torch.autograd.grad(y.square().mean(), list(parameters))]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_training_is_one_graph(backend: str, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    model = Perceptron()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    for rows in (6, 6, 9):
        x = normal(rows, 8)
        got, want = trained(compiled, x, model.parameters()), trained(model, x, model.parameters())
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("call", [
    lambda x, w, b: matmul(x, w.t()),
    lambda x, w, b: matmul(x, w.t(), out_dtype=None, bias=b, activation="gelu"),
    lambda x, w, b: addmm(b, x, w.t(), alpha=0.5),
    lambda x, w, b: linear(x, w, b, activation="swiglu"),
    lambda x, w, b: matmul(x, w.t(), out=x.new_empty(x.shape[0], 4)),
    lambda x, w, b: linear(x[None].expand(2, -1, -1), w, b),
])  # fmt: skip
@pytest.mark.parametrize("grows", [False, True])
def test_a_dynamic_size_is_compiled_once(call: Callable[..., torch.Tensor], grows: bool) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    w, bias = normal(4, 8).requires_grad_(grows), normal(4)
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for rows in (5, 7, 64, 3):
        x = normal(rows, 8)
        torch._dynamo.mark_dynamic(x, 0)
        try:
            want = call(x, w, bias)
        except ValueError:  # out, of gradients
            return
        torch.testing.assert_close(compiled(x, w, bias), want)
    assert counter.frame_count == 1


def test_compiled_under_autocast_and_vmap() -> None:
    torch._dynamo.reset()
    w, bias = grown(4, 5), grown(4)

    def cast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return gelu_layer(x, w, bias)

    for f in (cast, lambda x: vmap(lambda x: gelu_layer(x, w, bias))(x), grad(lambda x: gelu_layer(x, w, bias).sum())):
        torch.testing.assert_close(torch.compile(f, backend="aot_eager", fullgraph=True)(A), f(A))
    compiled = torch.compile(lambda x: gelu_layer(x, w, bias), backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = compiled(A), gelu_layer(A, w, bias)
    torch.testing.assert_close(got, want)
    got, want = (torch.autograd.grad(y.float().sum(), (w, bias)) for y in (got, want))
    torch.testing.assert_close(got, want)


def test_graphs_hold_the_operators() -> None:
    torch._dynamo.reset()
    backend, model = EagerAndRecordGraphs(), Perceptron()
    torch.compile(model, backend=backend, fullgraph=True)(normal(6, 8))
    (graph,) = backend.graphs
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert [targets.count(op) for op in (ops.gemm, ops.addmm, ops.matmul)] == [2, 1, 1]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_exported(strict: bool, dynamic: bool) -> None:
    model = Perceptron()
    shapes = {"x": {0: torch.export.Dim("rows", min=2, max=4096)}} if dynamic else None
    exported = torch.export.export(model, (normal(6, 8),), dynamic_shapes=shapes, strict=strict)
    targets = [str(node.target) for node in exported.graph.nodes]
    assert targets.count("outblas.gemm.default") == 2
    for program in (exported, exported.run_decompositions()):
        for rows in (6, 31) if dynamic else (6,):
            x = normal(rows, 8)
            torch.testing.assert_close(program.module()(x), model(x))


def test_functional_calls_and_subclasses_that_stand_for_plain_tensors() -> None:
    model = Perceptron()
    parameters = dict(model.named_parameters())
    torch.testing.assert_close(functional_call(model, parameters, normal(6, 8)), model(normal(6, 8)))
    with torch._subclasses.FakeTensorMode() as mode, warnings.catch_warnings():
        warnings.simplefilter("error")
        a, b = mode.from_tensor(A), mode.from_tensor(B)
        assert matmul(a, b).shape == (6, 4)
        assert linear(a, b.t(), activation="silu").shape == (6, 4)
