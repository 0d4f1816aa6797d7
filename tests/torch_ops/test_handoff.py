"""Operands of other types reach the functions of torch as they came, and what overrides torch's
functions overrides ours.
"""

import os
import socket
import warnings

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import outblas
from outblas import FallbackWarning, OperandError, addmm, linear, matmul
from outblas.core import invariance

X, W, BIAS = (torch.randint(-8, 9, shape).float() for shape in ((6, 5), (4, 5), (4,)))
C = torch.randint(-8, 9, (6, 4)).float()
PRODUCT = F.linear(X, W, BIAS)
EPILOGUE = F.gelu(PRODUCT) + C

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
strict_warning = pytest.mark.filterwarnings("error::outblas.FallbackWarning")


class Wrapper(torch.Tensor):
    """A tensor that holds another, of which operators of torch see but the traits. It knows no
    operator.
    """

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, device=held.device
        )

    def __init__(self, held) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func, types, args=(), kwargs=None
    ) -> None:
        raise NotImplementedError(f"{cls.__name__} has no {func}")


class Quantized(Wrapper):
    """As torchao's weights: it knows `F.linear`, and has other functions run as if it overrode
    none.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, w, bias = (*args, None)[:3]
            return F.linear(x, w.held / 2, bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Refusing(Quantized):
    """It says of functions that it does not know that it has none."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return (
            super().__torch_function__(func, types, args, kwargs)
            if func is F.linear
            else NotImplemented
        )


class Knowing(Wrapper):
    """It overrides our own function."""

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
        def unwrapped(t):
            return t.held if isinstance(t, cls) else t

        args, kwargs = torch.utils._pytree.tree_map(unwrapped, (args, kwargs or {}))
        found = func(*args, **kwargs)
        return cls(found) if func is torch.ops.aten.t.default else found


class Duck:
    """No tensor at all."""

    def __init__(self, known=()) -> None:
        self.known = known

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        duck = next(t for t in args if isinstance(t, cls))
        return (func, args, kwargs) if func in duck.known else NotImplemented


class Plain(torch.Tensor):
    """A subclass with torch's own `__torch_function__`."""


# ---- weights that know F.linear and nothing else
@pytest.mark.parametrize("kind", [Quantized, Refusing])
def test_a_quantized_weight_reaches_the_linear_of_torch(kind) -> None:
    with pytest.warns(FallbackWarning, match=f"tensor subclass {kind.__name__}"):
        got = linear(X, kind(W))
    assert torch.equal(got, F.linear(X, W / 2))


@pytest.mark.parametrize("kind", [Quantized, Refusing])
def test_the_bias_goes_along(kind) -> None:
    assert torch.equal(linear(X, kind(W), BIAS), F.linear(X, W / 2, BIAS))


@pytest.mark.parametrize("kind", [Quantized, Refusing])
def test_an_epilogue_follows_the_linear_of_a_quantized_weight(kind) -> None:
    got = linear(X, kind(W), BIAS, activation="gelu", residual=C)
    assert torch.equal(got, F.gelu(F.linear(X, W / 2, BIAS)) + C)


def test_a_bias_that_broadcasts_is_added_to_the_linear_of_a_quantized_weight() -> None:
    assert torch.equal(linear(X, Quantized(W), C[:, :1]), F.linear(X, W / 2) + C[:, :1])


def test_the_linear_of_a_quantized_weight_goes_to_out() -> None:
    out = torch.full((6, 4), torch.nan)
    assert linear(X, Quantized(W), out=out) is out
    assert torch.equal(out, F.linear(X, W / 2))


def test_out_of_a_wrong_shape_is_not_written() -> None:
    out = torch.full((1, 4), 7.0)
    with pytest.raises(outblas.OperandError, match=r"out\.shape is \(1, 4\), expected \(6, 4\)"):
        linear(X[:1].expand(6, 5), Quantized(W), out=out)
    assert torch.equal(out, torch.full((1, 4), 7.0))


def test_a_patched_layer_takes_a_quantized_weight() -> None:
    layer = torch.nn.Linear(5, 4)
    del layer.weight
    layer.weight = Quantized(W)
    want = layer(X)
    layer.__class__ = outblas.Linear
    assert torch.equal(layer(X), want)


def test_a_type_may_call_our_function_for_torchs() -> None:
    class Own(Wrapper):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is F.linear:
                return linear(args[0], args[1].held)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    assert torch.equal(linear(X, Own(W)), F.linear(X, W))


def test_functions_that_the_caller_disabled_stay_disabled() -> None:
    with (
        torch._C.DisableTorchFunctionSubclass(),
        pytest.raises(NotImplementedError, match=r"Quantized has no aten"),
    ):
        linear(X, Quantized(W))


def test_a_named_kernel_refuses_a_quantized_weight() -> None:
    with pytest.raises(
        ValueError,
        match="kernel 'portable' needs plain tensors, and was given tensor subclass Quant",
    ):
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
        linear(X, Quantized(W), activation="tanh")


# ---- types that override our functions
@strict_warning
def test_a_type_may_override_our_function() -> None:
    w = Knowing(W)
    what, args, kwargs = linear(X, w, BIAS, activation="gelu", residual=C)
    assert (what, args) == ("ours", (X, w))
    assert list(kwargs) == ["bias", "residual", "activation"]


@strict_warning
def test_a_residual_may_override_our_function() -> None:
    assert linear(X, W, residual=Knowing(C))[0] == "ours"


@strict_warning
@pytest.mark.parametrize(
    ("ours", "given"), [(matmul, (X, None)), (addmm, (C, X, None)), (linear, (X, None))]
)
def test_what_is_no_tensor_may_override_our_functions(ours, given) -> None:
    duck = Duck(known=[ours])
    assert ours(*given[:-1], duck) == (ours, (*given[:-1], duck), {})


THEIRS = {matmul: torch.matmul, addmm: torch.addmm, linear: F.linear}


@pytest.mark.parametrize("ours", THEIRS)
def test_what_is_no_tensor_reaches_torch_where_it_knows_torch(ours) -> None:
    duck = Duck(known=[THEIRS[ours]])
    given = (C, X, duck) if ours is addmm else (X, duck)
    with pytest.warns(FallbackWarning, match="operands of type Duck"):
        func, args, _ = ours(*given)
    assert func is THEIRS[ours]
    assert args[: len(given)] == given


def test_what_knows_neither_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"torch\.matmul.* returned NotImplemented"):
        matmul(X, Duck())


# ---- other subclasses
def test_a_subclass_by_dispatch_is_multiplied_by_torch() -> None:
    assert torch.equal(linear(X, Dispatched(W), BIAS), PRODUCT)
    assert torch.equal(matmul(X, Dispatched(W.t().contiguous())), X @ W.t())
    assert torch.equal(
        addmm(C, X, Dispatched(W.t().contiguous()), beta=2), torch.addmm(C, X, W.t(), beta=2)
    )
    assert torch.equal(linear(X, Dispatched(W), BIAS, activation="gelu", residual=C), EPILOGUE)


def test_a_subclass_by_dispatch_is_seen_by_linear_itself() -> None:
    seen = []

    class Sees(Dispatched):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
            seen.append(func)
            return super().__torch_dispatch__(func, types, args, kwargs)

    with torch.inference_mode():
        linear(X, Sees(W))
    assert seen == [torch.ops.aten.linear.default]


def test_a_plain_subclass_stays_what_it_is() -> None:
    assert type(matmul(X.as_subclass(Plain), W.t())) is Plain
    assert type(linear(X, W.as_subclass(Plain), BIAS, activation="relu")) is Plain
    assert type(addmm(C, X, W.t().as_subclass(Plain))) is Plain


def test_a_plain_subclass_warns_where_it_is_called() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        linear(X, W.as_subclass(Plain))
    assert [(w.category, w.filename) for w in caught] == [(FallbackWarning, __file__)]


def test_a_plain_subclass_has_gradients() -> None:
    w = W.clone().as_subclass(Plain).requires_grad_()
    linear(X, w).sum().backward()
    assert torch.equal(w.grad, X.sum(0).expand(4, 5))


class Sealed(Plain):
    """It knows products and copies. Who asks about its traits is told that there is no such
    function.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (F.linear, torch.Tensor.copy_):
            return super().__torch_function__(func, types, args, kwargs)
        return NotImplemented


GROWN = W.clone().requires_grad_()
with torch.inference_mode():
    INFERENCE = torch.full((6, 4), 7.0)


def written(*shape, **how):
    return torch.full(shape or (6, 4), 7.0, **how)


# What is refused of X (6, 5), of plain ones and of others: the call, and what it is not to write.
REFUSED = {
    "out_dtype is torch.bfloat16, expected torch.float32": lambda x, o: matmul(
        x, W.t(), out_dtype=torch.bfloat16
    ),
    "other.dtype is torch.float32 but input.dtype is torch.bfloat16": lambda x, o: matmul(
        x.bfloat16(), W.t(), out_dtype=torch.float32
    ),
    "out is given with inputs that need gradients": lambda x, o: matmul(x, GROWN.t(), out=o),
    "aux is given with inputs that need gradients": lambda x, o: matmul(
        x, W.t(), bias=GROWN[:, 0], aux=o
    ),
    "out requires grad": lambda x, o: addmm(C, x, W.t(), out=o.requires_grad_()),
    "out is an inference tensor": lambda x, o: linear(x, W, out=INFERENCE),
    "out is on meta but": lambda x, o: linear(x, W, out=o.to("meta")),
    r"out.shape is \(6, 4\), expected \(5, 4\)": lambda x, o: matmul(x[:5], W.t(), out=o),
    "out.dtype is torch.float32, expected torch.float64": lambda x, o: matmul(
        x.double(), W.t().double(), out=o
    ),
    r"out has strides \(0, 1\)": lambda x, o: addmm(C, x, W.t(), out=o[:1].expand(6, 4)),
    "out is a view that negates": lambda x, o: linear(
        x, W, activation="relu", out=torch._neg_view(o)
    ),
    r"an even number of them, got shape \(6, 3\)": lambda x, o: linear(
        x, W[:3], BIAS[:1], activation="geglu"
    ),
    r"an even number of them, got shape \(6, 1\)": lambda x, o: matmul(
        x, W[:1].t(), activation="reglu"
    ),
    r"an even number of them, got shape \(\)": lambda x, o: matmul(
        x[0], W[0], activation="geglu", aux=o[0, 0]
    ),
    r"residual.shape is \(2, 6, 4\), expected a shape that broadcasts": lambda x, o: linear(
        x, W, residual=C.expand(2, 6, 4)
    ),
    "residual.dtype is torch.float64": lambda x, o: addmm(C, x, W.t(), residual=C.double(), out=o),
    "input is NoneType, expected a torch.Tensor": lambda x, o: addmm(None, x, W.t(), out=o),
}


@pytest.mark.parametrize("message", REFUSED)
@pytest.mark.parametrize("kind", [torch.Tensor, Plain])
def test_subclasses_are_checked_as_plain_tensors(kind, message: str) -> None:
    out = written()
    with pytest.raises((OperandError, TypeError), match=message):
        REFUSED[message](X.as_subclass(kind), out)
    assert bool((out == 7).all())
    assert bool((INFERENCE == 7).all())


def test_an_odd_number_of_columns_is_refused_before_anything_is_computed() -> None:
    seen = []

    class Sees(Plain):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    with pytest.raises(OperandError, match="an even number"):
        linear(X.as_subclass(Sees), W[:3], activation="swiglu")
    assert F.linear not in seen


def test_no_type_is_asked_about_traits() -> None:
    out, x = written(), X.as_subclass(Sealed)
    assert torch.equal(linear(x, W, out=out).as_subclass(torch.Tensor), X @ W.t())
    assert torch.equal(out, X @ W.t())
    with pytest.raises(OperandError, match=r"out.shape is \(6, 4\), expected \(6, 3\)"):
        linear(x, W[:3], out=out)


def test_what_says_nothing_of_its_product_is_checked_after_it() -> None:
    class Shapeless(Quantized):
        """As a packed weight, whose shape is not that of the matrix."""

        @staticmethod
        def __new__(cls, held):
            return torch.Tensor._make_wrapper_subclass(cls, (20,), dtype=torch.uint8)

    assert torch.equal(linear(X, Shapeless(W), BIAS), F.linear(X, W / 2, BIAS))
    out = written(6, 3)
    with pytest.raises(OperandError, match=r"an even number of them, got shape \(6, 3\)"):
        linear(X, Shapeless(W[:3]), activation="geglu", out=out)
    with pytest.raises(OperandError, match=r"out.shape is \(6, 3\), expected \(6, 4\)"):
        linear(X, Shapeless(W), out=out)
    assert bool((out == 7).all())


@pytest.mark.parametrize("kind", [torch.Tensor, Plain])
def test_autocast_of_subclasses_is_that_of_plain_tensors(kind) -> None:
    x = (X / 3).as_subclass(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert matmul(x, W.t()).dtype == torch.bfloat16
        wide = matmul(x, W.t(), out_dtype=torch.float32, residual=C)
        assert wide.dtype == torch.float32
        with pytest.raises(OperandError, match=r"out_dtype is torch\.float64"):
            matmul(x, W.t(), out_dtype=torch.float64)
        out, aux, strided, summed = written(), written(), written(4, 6).t(), written()
        assert matmul(x, W.t(), out=out).dtype == torch.float32
        addmm(C, x, W.t(), aux=aux)
        matmul(x, W.t(), out=strided)
        linear(x, W, BIAS, out=summed)
        with pytest.raises(OperandError, match=r"out\.dtype is torch\.bfloat16"):
            linear(x, W, out=written(dtype=torch.bfloat16))
    assert torch.equal(wide, ((X / 3).bfloat16().float() @ W.t() + C).as_subclass(kind))
    assert torch.equal(out, X / 3 @ W.t())
    assert torch.equal(strided, X / 3 @ W.t())
    assert torch.equal(aux, torch.addmm(C, X / 3, W.t()))
    assert torch.equal(summed, F.linear(X / 3, W, BIAS))


def test_forward_mode_gradients_under_autocast_have_the_dtype_that_is_asked_for() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wide, tangent = torch.func.jvp(
            lambda x: matmul(x, W.t(), out_dtype=torch.float32), (X / 3,), (X,)
        )
        out = written(4, 6).t()
        with torch.autograd.forward_ad.dual_level():
            matmul(X / 3, W.t(), out=out)
    assert (wide.dtype, tangent.dtype) == (torch.float32, torch.float32)
    assert torch.equal(wide, (X / 3).bfloat16().float() @ W.t())
    assert torch.equal(out, X / 3 @ W.t())


@pytest.fixture(scope="module")
def mesh():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_distributed_tensors_are_multiplied_by_torch(mesh) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    x, w = distribute_tensor(X, mesh, [Replicate()]), distribute_tensor(W, mesh, [Shard(0)])
    bias, c = distribute_tensor(BIAS, mesh, [Shard(0)]), distribute_tensor(C, mesh, [Replicate()])
    for got, want in (
        (linear(x, w, bias, activation="gelu", residual=c), EPILOGUE),
        (matmul(x, w.t()), X @ W.t()),
        (addmm(c, x, w.t()), torch.addmm(C, X, W.t())),
    ):
        assert isinstance(got, DTensor)
        assert torch.equal(got.full_tensor(), want)


def test_distributed_tensors_have_gradients(mesh) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    layer = outblas.Linear(5, 4, bias=False)
    layer.weight = torch.nn.Parameter(distribute_tensor(W, mesh, [Shard(0)]))
    layer(distribute_tensor(X, mesh, [Replicate()])).sum().backward()
    gradient = layer.weight.grad
    assert isinstance(gradient, DTensor)
    assert torch.equal(gradient.full_tensor(), X.sum(0).expand(4, 5))


def test_nested_tensors_are_checked_too() -> None:
    x = torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)
    for a, b in ((x, W.t()), (X, x)):
        with pytest.raises(
            OperandError, match=r"out_dtype is torch\.bfloat16, expected torch\.float32"
        ):
            matmul(a, b, out_dtype=torch.bfloat16)
    with pytest.raises(OperandError, match=r"an even number of them, got shape \(2, j\d+, 3\)"):
        linear(x, W[:3], activation="geglu")
    wide = matmul(x.bfloat16(), W.t().bfloat16(), out_dtype=torch.float32)
    assert torch.equal(wide.unbind()[0], X @ W.t())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_multiplied_by_torch(layout: str) -> None:
    x = torch.nested.nested_tensor([X, X[:2]], layout=layout)
    want = [F.linear(t, W, BIAS) for t in (X, X[:2])]
    assert all(map(torch.equal, linear(x, W, BIAS).unbind(), want))
    relu = linear(x, W, BIAS, activation="relu")
    assert all(map(torch.equal, relu.unbind(), map(torch.relu, want)))


# ---- tracers
def graph_of(function):
    graph = torch.fx.symbolic_trace(function)
    return graph, [node.target for node in graph.graph.nodes if node.op == "call_function"]


@strict_warning
def test_symbolic_trace_records_our_functions() -> None:
    def model(x, w, c):
        y = linear(x, w, c[0], activation="gelu", residual=c)
        return addmm(c, matmul(y, w), w.t(), beta=0.5)

    graph, targets = graph_of(model)
    assert [target for target in targets if getattr(target, "__module__", "") == "outblas.api"] == [
        linear,
        matmul,
        addmm,
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CPU tensors
        assert torch.equal(graph(X, W, C), model(X, W, C))


@strict_warning
def test_symbolic_trace_records_a_layer_as_one_call() -> None:
    layer = outblas.Linear(5, 4, activation="relu")
    graph, targets = graph_of(torch.nn.Sequential(layer))
    assert targets == [linear]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(graph(X), layer(X))


def test_a_traced_call_keeps_what_it_was_given() -> None:
    graph, _ = graph_of(lambda a, b: matmul(a, b, kernel="portable", batch_invariant=True))
    (node,) = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert node.kwargs == {"kernel": "portable", "batch_invariant": True}


def test_a_traced_graph_has_code_that_runs() -> None:
    graph, _ = graph_of(lambda a, b: matmul(a, b))
    copy = torch.fx.GraphModule({}, graph.graph)
    assert torch.equal(copy(X, W.t()), X @ W.t())


def test_compiled_calls_of_a_plain_subclass_are_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "_ever", False)  # or the graph breaks to look at the context
    backend = EagerAndRecordGraphs()
    compiled = torch.compile(lambda x, w: linear(x, w), backend=backend, fullgraph=True)
    got = compiled(X, W.as_subclass(Plain))
    assert type(got) is Plain
    assert torch.equal(got.as_subclass(torch.Tensor), X @ W.t())


def test_compiled_calls_under_a_default_device_keep_the_operator() -> None:
    backend = EagerAndRecordGraphs()
    compiled = torch.compile(
        lambda x, w: linear(x, w, activation="relu"), backend=backend, fullgraph=True
    )
    with torch.device("cpu"):
        assert torch.equal(compiled(X, W), torch.relu(X @ W.t()))
    (graph,) = backend.graphs
    assert torch.ops.outblas.gemm.default in [node.target for node in graph.graph.nodes]


def test_fake_and_functional_tensors_reach_our_operators() -> None:
    with FakeTensorMode() as mode, warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        assert isinstance(linear(mode.from_tensor(X), mode.from_tensor(W)), FakeTensor)
    graph = torch.fx.experimental.proxy_tensor.make_fx(
        torch.func.functionalize(lambda x, w: linear(x, w))
    )(X, W)
    assert torch.ops.outblas.matmul.default in [node.target for node in graph.graph.nodes]
    with torch._subclasses.functional_tensor.FunctionalTensorMode():
        x = FunctionalTensor.to_functional(X)
        assert isinstance(linear(x, W), FunctionalTensor)


def test_a_fake_out_that_negates_is_written() -> None:
    with FakeTensorMode() as mode:
        x, w = mode.from_tensor(X), mode.from_tensor(W)
        out = torch._neg_view(torch.empty(13, 8)[1::2, 1::2])
        assert matmul(x, w.t(), out=out) is out


# ---- function modes
class Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "given", [{}, {"activation": "gelu"}, {"out": torch.empty(6, 4)}, {"kernel": "portable"}]
)
def test_a_function_mode_sees_one_call(given) -> None:
    with Counting() as mode:
        linear(X, W, **given)
    assert mode.seen == [linear]


def test_a_function_mode_sees_the_call_of_a_quantized_weight() -> None:
    w = Quantized(W)
    with Counting() as mode:
        got = linear(X, w)
    assert mode.seen[0] is linear
    assert torch.equal(got, F.linear(X, W / 2))


def test_a_missing_operand_is_a_type_error_under_a_function_mode() -> None:
    with Counting(), pytest.raises(TypeError, match=r"input is NoneType, expected a torch\.Tensor"):
        addmm(None, X, W.t())


def test_a_function_mode_may_replace_our_function() -> None:
    class Replacing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return "replaced" if func is matmul else func(*args, **(kwargs or {}))

    with Replacing():
        assert matmul(X, W.t()) == "replaced"


def test_a_default_device_keeps_quantized_weights_whole() -> None:
    with torch.device("meta"):
        assert torch.equal(linear(X, Quantized(W)), F.linear(X, W / 2))


# ---- lazy clones
needs_cow = pytest.mark.skipif(
    not hasattr(torch.Tensor, "const_data_ptr"), reason="reading would copy"
)


def is_lazy_clone(t: torch.Tensor) -> bool:
    return torch._C._is_cow_tensor(t)  # type: ignore[attr-defined]


@needs_cow
def test_inputs_stay_lazy_clones() -> None:
    x, w, c = map(torch._lazy_clone, (X, W, C))
    for _ in range(3):
        for call in (
            lambda: matmul(x, w.t()),
            lambda: addmm(c, x, w.t()),
            lambda: linear(x, w, residual=c),
            lambda: matmul(x, w.t(), out=torch.empty(6, 4)),
            lambda: addmm(c, x, w.t(), out=torch.empty(6, 4)),
        ):
            call()
    assert all(map(is_lazy_clone, (x, w, c)))


@needs_cow
@pytest.mark.parametrize("b", [W.t(), W.t().double()])
def test_lazy_clones_without_elements_stay_lazy(b) -> None:
    held = torch.zeros(30, dtype=b.dtype)
    a, c = torch.empty(0, 5, dtype=b.dtype), torch.zeros(4, dtype=b.dtype)
    for call in (
        lambda out: matmul(a, b, out=out),
        lambda out: addmm(c, a, b, out=out),
        lambda out: addmm(out, a, b, out=out),
    ):
        out = torch._lazy_clone(held)[:0].view(0, 4)
        for _ in range(3):
            call(out)
        assert is_lazy_clone(out)


@needs_cow
def test_a_lazy_clone_stays_lazy_where_an_empty_out_shares_its_memory() -> None:
    w = torch._lazy_clone(W)
    out = torch.empty(0).set_(w.untyped_storage(), 0, (0, 4), (4, 1))
    for _ in range(3):
        matmul(X[:0], w.t(), out=out)
    assert is_lazy_clone(w)


@needs_cow
def test_a_lazy_clone_that_is_written_has_memory_of_its_own() -> None:
    c = C.clone()
    out = torch._lazy_clone(c)
    addmm(c, X, W.t(), out=out)
    assert torch.equal(c, C)
    assert torch.equal(out, torch.addmm(C, X, W.t()))
    assert torch.equal(addmm(out, X, W.t(), out=torch._lazy_clone(out)), torch.addmm(out, X, W.t()))


def test_the_wrong_type_of_a_scale_is_said_before_shapes_of_a_subclass() -> None:
    class Tagged(torch.Tensor):
        pass

    a, b, c = torch.ones(3, 4), torch.ones(4, 5).as_subclass(Tagged), torch.ones(3, 5)
    with pytest.raises(TypeError, match=r"beta is a tensor of shape \(2,\)"):
        outblas.addmm(c, a, b, beta=torch.ones(2), activation="geglu")
