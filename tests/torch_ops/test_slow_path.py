"""Operands of types that override torch's functions, or ours, and subclasses that override none:
each reaches the function that it knows as it came, or is checked as a plain tensor and multiplied
by torch. Tracers and compilers see a call of ours as one call.
"""

import contextlib
import os
import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import outblas
from outblas import FallbackWarning, addmm, linear, matmul
from outblas.call import fallback, invariance
from outblas.torch_ops import slow_path

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

Tensor = torch.Tensor


# ---- operands of integers, and types of tensors as other libraries have them
X, W, BIAS = (torch.randint(-8, 9, shape).float() for shape in ((6, 5), (4, 5), (4,)))
C = torch.randint(-8, 9, (6, 4)).float()
PRODUCT = F.linear(X, W, BIAS)
EPILOGUE = F.gelu(PRODUCT) + C


def sevens(*shape: int, **how: Any) -> Tensor:
    """An output that is full of sevens, so that a test sees whether it was written; of the shape
    of the product unless another is given.
    """
    return torch.full(shape or (6, 4), 7.0, **how)


class Plain(torch.Tensor):
    """A subclass with torch's own `__torch_function__`."""


class Sealed(Plain):
    """It knows products and copies. Who asks about its traits is told that there is no such
    function.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (F.linear, torch.Tensor.copy_):
            return super().__torch_function__(func, types, args, kwargs)
        return NotImplemented


class Wrapper(torch.Tensor):
    """A tensor that holds another, of which operators of torch see but the traits. It knows no
    operator.
    """

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "Wrapper":
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, device=held.device
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func, types, args=(), kwargs=None
    ) -> None:
        raise NotImplementedError(f"{cls.__name__} has no {func}")


class Quantized(Wrapper):
    """As torchao's weights: it knows `F.linear`, by which it counts half of what it holds, and has
    other functions run as if it overrode none.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, w, bias = (*args, None)[:3]
            return F.linear(x, w.held / 2, bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Refusing(Quantized):
    """It says of functions other than `F.linear` that it has none."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            return super().__torch_function__(func, types, args, kwargs)
        return NotImplemented


class Packed(Quantized):
    """As a packed weight, whose shape and dtype are not those of the matrix."""

    @staticmethod
    def __new__(cls, held: Tensor) -> "Packed":
        return torch.Tensor._make_wrapper_subclass(cls, (20,), dtype=torch.uint8)


class Unwrapping(Wrapper):
    """It answers `F.linear` by our own function, of the tensor that it holds."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            return linear(args[0], args[1].held)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Overriding(Wrapper):
    """It overrides our own `linear`, and shows what it was called with."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is linear:
            return "ours", args, kwargs
        return NotImplemented


class Dispatched(Wrapper):
    """It knows operators, by unwrapping, and no functions."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        def unwrapped(t: Any) -> Any:
            return t.held if isinstance(t, cls) else t

        args, kwargs = torch.utils._pytree.tree_map(unwrapped, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return cls(result) if func is torch.ops.aten.t.default else result


class Duck:
    """No tensor at all; it answers the functions that it knows by showing the call."""

    def __init__(self, known: Sequence[Callable[..., Any]] = ()) -> None:
        self.known = known

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        duck = next(t for t in args if isinstance(t, cls))
        return (func, args, kwargs) if func in duck.known else NotImplemented


B = W.t().contiguous()


def patched_layer() -> Tensor:
    layer = torch.nn.Linear(5, 4)
    del layer.weight, layer.bias
    layer.weight, layer.bias = Quantized(W), None
    layer.__class__ = outblas.Linear
    return layer(X)


# ---- which torch function multiplies
HALVED = F.linear(X, W / 2)
BY_TORCH: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
    "a quantized weight": (lambda: linear(X, Quantized(W)), HALVED),
    "one that refuses other functions": (lambda: linear(X, Refusing(W)), HALVED),
    "with a bias": (lambda: linear(X, Refusing(W), BIAS), F.linear(X, W / 2, BIAS)),
    "with a bias that broadcasts": (lambda: linear(X, Quantized(W), C[:, :1]), HALVED + C[:, :1]),
    "with an epilogue": (
        lambda: linear(X, Refusing(W), BIAS, activation="gelu", residual=C),
        F.gelu(F.linear(X, W / 2, BIAS)) + C,
    ),
    "in a patched layer": (patched_layer, HALVED),
    "a packed weight": (lambda: linear(X, Packed(W), BIAS), F.linear(X, W / 2, BIAS)),
    "a type that calls our function": (lambda: linear(X, Unwrapping(W)), F.linear(X, W)),
    "by dispatch": (lambda: linear(X, Dispatched(W), BIAS), PRODUCT),
    "by dispatch with an epilogue": (
        lambda: linear(X, Dispatched(W), BIAS, activation="gelu", residual=C),
        EPILOGUE,
    ),
    "matmul by dispatch": (lambda: matmul(X, Dispatched(B)), X @ B),
    "addmm by dispatch": (
        lambda: addmm(C, X, Dispatched(B), beta=2),
        torch.addmm(C, X, B, beta=2),
    ),
    "no type is asked about traits": (
        lambda: linear(X.as_subclass(Sealed), W).as_subclass(Tensor),
        X @ W.t(),
    ),
}


@pytest.mark.parametrize("name", BY_TORCH)
def test_an_operand_reaches_the_function_that_it_knows(name: str) -> None:
    """Under a default device, too."""
    call, want = BY_TORCH[name]

    assert torch.equal(call(), want)
    if "dispatch" not in name:
        with torch.device("meta"):
            assert torch.equal(call(), want)


def test_the_linear_of_a_quantized_weight_warns_and_goes_to_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = sevens()

    with pytest.warns(FallbackWarning, match="tensor subclass Quantized"):
        assert linear(X, Quantized(W), out=out) is out

    assert torch.equal(out, HALVED)
    monkeypatch.setenv("OUTBLAS_STRICT", "1")
    with pytest.raises(RuntimeError, match=r"OUTBLAS_STRICT=1 forbids.*tensor subclass Quantized"):
        linear(X, Quantized(W))


def test_functions_that_the_caller_disabled_stay_disabled() -> None:
    with (
        torch._C.DisableTorchFunctionSubclass(),
        pytest.raises(NotImplementedError, match=r"Quantized has no aten"),
    ):
        linear(X, Quantized(W))


# ---- types that override our functions
@pytest.mark.filterwarnings("error::outblas.FallbackWarning")
def test_a_type_may_override_our_function() -> None:
    w = Overriding(W)

    function, args, kwargs = linear(X, w, BIAS, activation="gelu", residual=C)

    assert function == "ours"
    assert args == (X, w)
    assert list(kwargs) == ["bias", "residual", "activation"]


LEADING: dict[Callable[..., Any], tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    matmul: (torch.matmul, (X,)),
    addmm: (torch.addmm, (C, X)),
    linear: (F.linear, (X,)),
}


@pytest.mark.parametrize("function", LEADING, ids=lambda f: f.__name__)
def test_what_is_no_tensor_may_override_our_functions_or_torchs(
    function: Callable[..., Any],
) -> None:
    of_torch, leading = LEADING[function]
    ours, torchs = Duck(known=[function]), Duck(known=[of_torch])

    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        assert function(*leading, ours) == (function, (*leading, ours), {})
    with pytest.warns(FallbackWarning, match="operands of type Duck"):
        called, args, _ = function(*leading, torchs)

    assert called is of_torch
    assert args[: len(leading) + 1] == (*leading, torchs)
    with pytest.raises(TypeError, match=r"torch\.\S+.* returned NotImplemented"):
        function(*leading, Duck())


# ---- subclasses that hold their values
class Weight(torch.nn.Parameter):
    """A parameter that knows how to load itself, as in servers of models. Its base class wraps no
    results.
    """

    def __init__(self, data: Tensor) -> None:
        self.load = data.copy_


class Passing(TorchFunctionMode):
    """A mode that changes nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Forwarding(Weight):
    """It overrides torch's functions, and leaves all of them to its base class."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Halving(Plain):
    """It knows `F.linear`, of half of what it holds, and leaves other functions to torch."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not F.linear:
            return super().__torch_function__(func, types, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return F.linear(args[0], args[1] / 2, *args[2:])


def of(kind: type[Tensor], t: Tensor, *, requires_grad: bool = False) -> Tensor:
    """Values of a type, as a leaf."""
    with torch._C.DisableTorchFunctionSubclass():
        leaf = kind(t.clone()) if issubclass(kind, Weight) else t.clone().as_subclass(kind)
        return leaf.requires_grad_(requires_grad)


def as_plain(t: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return t.as_subclass(Tensor)


def same(got: Tensor | None, want: Tensor | None) -> bool:
    """Whether two tensors are equal in values and type."""
    assert got is not None
    assert want is not None
    return type(got) is type(want) and torch.equal(as_plain(got), as_plain(want))


SAME_AS_TORCHS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "linear": (linear, F.linear),
    "linear with a bias": (
        lambda x, w, **kernel: linear(x, w, BIAS, **kernel),
        lambda x, w: F.linear(x, w, BIAS),
    ),
    "linear with an epilogue": (
        lambda x, w, **kernel: linear(x, w, activation="relu", residual=C, **kernel),
        lambda x, w: torch.relu(F.linear(x, w)) + C,
    ),
    "matmul": (
        lambda x, w, **kernel: matmul(w, x.t(), **kernel),
        lambda x, w: torch.matmul(w, x.t()),
    ),
    "addmm": (
        lambda x, w, **kernel: addmm(C.t(), w, x.t(), beta=2, **kernel),
        lambda x, w: torch.addmm(C.t(), w, x.t(), beta=2),
    ),
}


@pytest.mark.interpreter
@pytest.mark.parametrize("name", SAME_AS_TORCHS)
@pytest.mark.parametrize("kind", [Plain, Weight, Forwarding, Sealed])
def test_values_of_a_subclass_are_multiplied_by_a_kernel_into_torchs_type(
    kind: type[Tensor], name: str
) -> None:
    ours, of_torch = SAME_AS_TORCHS[name]
    if kind is Sealed and name != "linear":
        pytest.skip("it knows F.linear only")
    w = of(kind, W)

    for mode in (contextlib.nullcontext(), torch.device("meta")):
        with mode, warnings.catch_warnings(action="error"):
            assert same(ours(X, w, kernel="portable"), of_torch(X, w))


@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
@pytest.mark.parametrize("kind", [Plain, Weight, Forwarding])
def test_a_function_mode_and_types_that_leave_the_call_to_torch_end_in_a_result(kind: Any) -> None:
    a, b = torch.ones(2, 3), kind(torch.ones(3, 4))
    with Passing():
        result = outblas.matmul(a, b)

    assert type(result) is type(torch.matmul(a, b))
    assert result.eq(3).all()


@pytest.mark.parametrize("kernel", [{}, {"kernel": "portable"}], ids=["default", "portable"])
@pytest.mark.parametrize("name", SAME_AS_TORCHS)
@pytest.mark.parametrize("kind", [Plain, Weight, Forwarding, Sealed])
@pytest.mark.interpreter
def test_gradients_of_a_subclass_are_torchs(
    kind: type[Tensor], name: str, kernel: dict[str, str]
) -> None:
    """The backward pass asks no type. Twice, for a warm call."""
    ours, of_torch = SAME_AS_TORCHS[name]
    if kind is Sealed and name != "linear":
        pytest.skip("it knows F.linear only")
    x, w = (of(*leaf, requires_grad=True) for leaf in ((Tensor, X), (kind, W)))
    x_of_torch, w_of_torch = (of(*leaf, requires_grad=True) for leaf in ((Tensor, X), (kind, W)))

    for _ in range(2):
        as_plain(ours(x, w, **kernel)).square().sum().backward()
        as_plain(of_torch(x_of_torch, w_of_torch)).square().sum().backward()

    with torch._C.DisableTorchFunctionSubclass():
        assert same(x.grad, x_of_torch.grad)
        assert same(w.grad, w_of_torch.grad)


def test_a_type_that_overrides_nothing_takes_the_warm_path(monkeypatch: pytest.MonkeyPatch) -> None:
    w, b = of(Weight, W), of(Weight, B)
    for _ in range(2):
        assert torch.equal(linear(X, w), X @ B)
        assert torch.equal(matmul(X, b), X @ B)
        monkeypatch.setattr(slow_path, "run", None)


def test_a_type_that_computes_by_itself_is_left_to_it() -> None:
    """By torch's function, of other operands than it was offered."""
    w, out = of(Halving, W), sevens()

    with pytest.warns(FallbackWarning, match="tensor subclass Halving"):
        assert same(linear(X, w, activation="relu"), torch.relu(HALVED))
    assert torch.equal(linear(X, w, out=out), HALVED)
    for to in (None, sevens()):
        with pytest.raises(ValueError, match="kernel 'portable' needs plain tensors"):
            linear(X, w, kernel="portable", out=to)
    assert same(matmul(X, of(Halving, B), kernel="portable"), of(Halving, X @ B))


def test_a_plain_subclass_warns_where_it_is_called() -> None:
    w = W.as_subclass(Plain)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        linear(X, w, BIAS, activation="relu")

    assert (caught[0].category, caught[0].filename) == (FallbackWarning, __file__)


# ---- autocast
THIRDS = X / 3  # which bf16 has to round
WRITTEN: dict[str, tuple[Callable[[Tensor, Tensor], Any], Tensor]] = {
    "matmul out": (lambda x, out: matmul(x, W.t(), out=out), THIRDS @ W.t()),
    "linear out": (lambda x, out: linear(x, W, BIAS, out=out), F.linear(THIRDS, W, BIAS)),
    "aux": (lambda x, out: addmm(C, x, W.t(), aux=out), torch.addmm(C, THIRDS, W.t())),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_autocast_leaves_calls_that_write_a_tensor_alone(name: str) -> None:
    call, want = WRITTEN[name]
    for kind in (Tensor, Plain):
        for out in (sevens(), sevens(4, 6).t()):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                call(THIRDS.as_subclass(kind), out)

            assert torch.equal(out, want)


def test_autocast_widens_the_product_that_a_call_asks_for() -> None:
    for kind in (Tensor, Plain):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            wide = matmul(THIRDS.as_subclass(kind), W.t(), out_dtype=torch.float32, residual=C)

        assert wide.dtype == torch.float32
        assert torch.equal(wide, (THIRDS.bfloat16().float() @ W.t() + C).as_subclass(kind))


# ---- distributed tensors
@pytest.fixture(scope="module")
def mesh() -> Iterator[dist.DeviceMesh]:
    """A mesh of this one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def distributed(mesh: dist.DeviceMesh) -> dict[str, DTensor]:
    """x, w, bias and c on the mesh: weights in shards, the others whole."""
    placements: dict[str, tuple[Tensor, Placement]] = {
        "x": (X, Replicate()),
        "w": (W, Shard(0)),
        "bias": (BIAS, Shard(0)),
        "c": (C, Replicate()),
    }
    return {name: distribute_tensor(t, mesh, [how]) for name, (t, how) in placements.items()}


DISTRIBUTED: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "linear with an epilogue": (
        lambda x, w, bias, c: linear(x, w, bias, activation="gelu", residual=c),
        EPILOGUE,
    ),
    "matmul": (lambda x, w, bias, c: matmul(x, w.t()), X @ W.t()),
    "addmm": (lambda x, w, bias, c: addmm(c, x, w.t()), torch.addmm(C, X, W.t())),
}


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_distributed_tensors_are_multiplied_by_torch(
    name: str, distributed: dict[str, DTensor]
) -> None:
    call, want = DISTRIBUTED[name]

    got = call(**distributed)

    assert isinstance(got, DTensor)
    assert torch.equal(got.full_tensor(), want)


def test_distributed_tensors_have_gradients(distributed: dict[str, DTensor]) -> None:
    layer = outblas.Linear(5, 4, bias=False)
    layer.weight = torch.nn.Parameter(distributed["w"])

    layer(distributed["x"]).sum().backward()

    gradient = layer.weight.grad
    assert isinstance(gradient, DTensor)
    assert torch.equal(gradient.full_tensor(), X.sum(0).expand(4, 5))


# ---- torch.fx, torch.compile, functional tensors
def targets_of(graph: torch.fx.GraphModule) -> list[Any]:
    """The functions that a graph calls."""
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.filterwarnings("error::outblas.FallbackWarning")
def test_symbolic_trace_records_our_functions_and_what_they_were_given() -> None:
    def model(x: Tensor, w: Tensor, c: Tensor) -> Tensor:
        y = linear(x, w, c[0], activation="gelu", residual=c)
        return addmm(c, matmul(y, w, kernel="portable", batch_invariant=True), w.t(), beta=0.5)

    graph = torch.fx.symbolic_trace(model)

    nodes = {node.target: node for node in graph.graph.nodes if node.op == "call_function"}
    assert {linear, matmul, addmm} <= set(nodes)
    assert nodes[matmul].kwargs == {"kernel": "portable", "batch_invariant": True}


def test_a_traced_layer_is_one_call_and_computes_what_the_layer_does() -> None:
    layer = outblas.Linear(5, 4, activation="relu")

    graph = torch.fx.symbolic_trace(torch.nn.Sequential(layer))

    assert targets_of(graph) == [linear]
    assert torch.equal(torch.fx.GraphModule(graph, graph.graph)(X), layer(X))


@pytest.mark.parametrize("name", ["linear with an epilogue", "matmul"])
@pytest.mark.parametrize("kind", [Plain, Weight, Forwarding, Halving])
def test_compiled_calls_of_a_subclass_are_one_graph_of_our_operators(
    kind: type[Tensor], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        invariance.flag, "ever", False
    )  # or the graph breaks to look at the context
    ours, of_torch = SAME_AS_TORCHS[name]
    backend = EagerAndRecordGraphs()
    w = of(kind, W)

    got = torch.compile(ours, backend=backend, fullgraph=True)(X, w)

    assert same(got, of_torch(X, w))
    products = [str(f) for f in targets_of(backend.graphs[0]) if "outblas" in str(f)]
    assert len(products) == (kind is not Halving or name == "matmul")


def test_a_compiled_call_that_a_type_computes_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance.flag, "ever", False)  # or the graph breaks, as above
    monkeypatch.setattr(fallback, "_seen", set())
    compiled = torch.compile(lambda x, w: linear(x, w), backend="eager", fullgraph=True)

    with pytest.warns(FallbackWarning, match="tensor subclass Halving"):
        assert same(compiled(X, of(Halving, W)), HALVED)
    with warnings.catch_warnings(action="error"):
        assert same(compiled(X, of(Halving, W)), HALVED)


def test_compiled_calls_under_a_default_device_keep_the_operator() -> None:
    backend = EagerAndRecordGraphs()
    compiled = torch.compile(
        lambda x, w: linear(x, w, activation="relu"), backend=backend, fullgraph=True
    )

    with torch.device("cpu"):
        got = compiled(X, W)

    assert torch.equal(got, torch.relu(X @ W.t()))
    (graph,) = backend.graphs
    assert torch.ops.outblas.gemm.default in targets_of(graph)


def test_functional_and_fake_tensors_stay_what_they_are() -> None:
    with FunctionalTensorMode():
        assert isinstance(linear(FunctionalTensor.to_functional(X), W), FunctionalTensor)
    with FakeTensorMode() as mode:
        x, w = mode.from_tensor(X), mode.from_tensor(W)
        out = torch._neg_view(torch.empty(13, 8)[1::2, 1::2])
        assert matmul(x, w.t(), out=out) is out
