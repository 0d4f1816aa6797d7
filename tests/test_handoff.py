"""Operands of other types reach the functions of torch as they came, and what overrides torch's functions overrides
ours."""

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
from outblas import FallbackWarning, addmm, linear, matmul

X, W, BIAS = (torch.randint(-8, 9, shape).float() for shape in ((6, 5), (4, 5), (4,)))
C = torch.randint(-8, 9, (6, 4)).float()
PRODUCT = F.linear(X, W, BIAS)
EPILOGUE = F.gelu(PRODUCT) + C

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
strict_warning = pytest.mark.filterwarnings("error::outblas.FallbackWarning")


class Wrapper(torch.Tensor):
    """A tensor that holds another, of which operators of torch see but the traits. It knows no operator."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{cls.__name__} has no {func}")


class Quantized(Wrapper):
    """As torchao's weights: it knows `F.linear`, and has other functions run as if it overrode none."""

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
        return super().__torch_function__(func, types, args, kwargs) if func is F.linear else NotImplemented


class Knowing(Wrapper):
    """It overrides our own function."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is linear:
            return "ours", args, kwargs
        return NotImplemented


class Dispatched(Wrapper):
    """It knows operators, by unwrapping, and no functions."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrapped(t):
            return t.held if isinstance(t, cls) else t

        args, kwargs = torch.utils._pytree.tree_map(unwrapped, (args, kwargs or {}))
        found = func(*args, **kwargs)
        return cls(found) if func is torch.ops.aten.t.default else found


class Duck:
    """No tensor at all."""

    def __init__(self, known=()):
        self.known = known

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        duck = next(t for t in args if isinstance(t, cls))
        return (func, args, kwargs) if func in duck.known else NotImplemented


class Plain(torch.Tensor):
    """A subclass with torch's own `__torch_function__`."""


# ---- weights that know F.linear and nothing else
@pytest.mark.parametrize("kind", [Quantized, Refusing])
def test_a_quantized_weight_reaches_the_linear_of_torch(kind):
    with pytest.warns(FallbackWarning, match=f"tensor subclass {kind.__name__}"):
        got = linear(X, kind(W))
    assert torch.equal(got, F.linear(X, W / 2))


@pytest.mark.parametrize("kind", [Quantized, Refusing])
def test_the_bias_goes_along(kind):
    assert torch.equal(linear(X, kind(W), BIAS), F.linear(X, W / 2, BIAS))


@pytest.mark.parametrize("kind", [Quantized, Refusing])
def test_an_epilogue_follows_the_linear_of_a_quantized_weight(kind):
    got = linear(X, kind(W), BIAS, activation="gelu", residual=C)
    assert torch.equal(got, F.gelu(F.linear(X, W / 2, BIAS)) + C)


def test_a_bias_that_broadcasts_is_added_to_the_linear_of_a_quantized_weight():
    assert torch.equal(linear(X, Quantized(W), C[:, :1]), F.linear(X, W / 2) + C[:, :1])


def test_the_linear_of_a_quantized_weight_goes_to_out():
    out = torch.full((6, 4), torch.nan)
    assert linear(X, Quantized(W), out=out) is out
    assert torch.equal(out, F.linear(X, W / 2))


def test_out_of_a_wrong_shape_is_not_written():
    out = torch.full((1, 4), 7.0)
    with pytest.raises(outblas.OperandError, match=r"out\.shape is \(1, 4\), expected \(6, 4\)"):
        linear(X[:1].expand(6, 5), Quantized(W), out=out)
    assert torch.equal(out, torch.full((1, 4), 7.0))


def test_a_patched_layer_takes_a_quantized_weight():
    layer = torch.nn.Linear(5, 4)
    del layer.weight
    layer.weight = Quantized(W)
    want = layer(X)
    layer.__class__ = outblas.Linear
    assert torch.equal(layer(X), want)


def test_a_type_may_call_our_function_for_torchs():
    class Own(Wrapper):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is F.linear:
                return linear(args[0], args[1].held)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    assert torch.equal(linear(X, Own(W)), F.linear(X, W))


def test_functions_that_the_caller_disabled_stay_disabled():
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(NotImplementedError, match=r"Quantized has no aten"):
        linear(X, Quantized(W))


def test_a_named_kernel_refuses_a_quantized_weight():
    with pytest.raises(ValueError, match="kernel 'portable' needs plain tensors, and was given tensor subclass Quant"):
        linear(X, Quantized(W), kernel="portable")


def test_strict_mode_refuses_a_quantized_weight(monkeypatch):
    monkeypatch.setenv("OUTBLAS_STRICT", "1")
    with pytest.raises(RuntimeError, match=r"OUTBLAS_STRICT=1 forbids.*tensor subclass Quantized"):
        linear(X, Quantized(W))


def test_batch_invariance_is_not_promised_for_a_quantized_weight():
    with pytest.raises(ValueError, match="batch_invariant is True, and torch would take this call"):
        linear(X, Quantized(W), batch_invariant=True)


def test_a_wrong_activation_is_refused_before_torch_is_called():
    with pytest.raises(ValueError, match="activation is 'tanh', expected"):
        linear(X, Quantized(W), activation="tanh")


# ---- types that override our functions
@strict_warning
def test_a_type_may_override_our_function():
    w = Knowing(W)
    what, args, kwargs = linear(X, w, BIAS, activation="gelu", residual=C)
    assert (what, args) == ("ours", (X, w))
    assert list(kwargs) == ["bias", "residual", "activation"]


@strict_warning
def test_a_residual_may_override_our_function():
    assert linear(X, W, residual=Knowing(C))[0] == "ours"


@strict_warning
@pytest.mark.parametrize(("ours", "given"), [(matmul, (X, None)), (addmm, (C, X, None)), (linear, (X, None))])
def test_what_is_no_tensor_may_override_our_functions(ours, given):
    duck = Duck(known=[ours])
    assert ours(*given[:-1], duck) == (ours, (*given[:-1], duck), {})


THEIRS = {matmul: torch.matmul, addmm: torch.addmm, linear: F.linear}


@pytest.mark.parametrize("ours", THEIRS)
def test_what_is_no_tensor_reaches_torch_where_it_knows_torch(ours):
    duck = Duck(known=[THEIRS[ours]])
    given = (C, X, duck) if ours is addmm else (X, duck)
    with pytest.warns(FallbackWarning, match="operands of type Duck"):
        func, args, _ = ours(*given)
    assert func is THEIRS[ours]
    assert args[: len(given)] == given


def test_what_knows_neither_is_a_type_error():
    with pytest.raises(TypeError, match=r"torch\.matmul.* returned NotImplemented"):
        matmul(X, Duck())


# ---- other subclasses
def test_a_subclass_by_dispatch_is_multiplied_by_torch():
    assert torch.equal(linear(X, Dispatched(W), BIAS), PRODUCT)
    assert torch.equal(matmul(X, Dispatched(W.t().contiguous())), X @ W.t())
    assert torch.equal(addmm(C, X, Dispatched(W.t().contiguous()), beta=2), torch.addmm(C, X, W.t(), beta=2))
    assert torch.equal(linear(X, Dispatched(W), BIAS, activation="gelu", residual=C), EPILOGUE)


def test_a_subclass_by_dispatch_is_seen_by_linear_itself():
    seen = []

    class Sees(Dispatched):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_dispatch__(func, types, args, kwargs)

    with torch.inference_mode():
        linear(X, Sees(W))
    assert seen == [torch.ops.aten.linear.default]


def test_a_plain_subclass_stays_what_it_is():
    assert type(matmul(X.as_subclass(Plain), W.t())) is Plain
    assert type(linear(X, W.as_subclass(Plain), BIAS, activation="relu")) is Plain
    assert type(addmm(C, X, W.t().as_subclass(Plain))) is Plain


def test_a_plain_subclass_warns_where_it_is_called():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        linear(X, W.as_subclass(Plain))
    assert [(w.category, w.filename) for w in caught] == [(FallbackWarning, __file__)]


def test_a_plain_subclass_has_gradients():
    w = W.clone().as_subclass(Plain).requires_grad_()
    linear(X, w).sum().backward()
    assert torch.equal(w.grad, X.sum(0).expand(4, 5))


@pytest.fixture(scope="module")
def mesh():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_distributed_tensors_are_multiplied_by_torch(mesh):
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    x, w = distribute_tensor(X, mesh, [Replicate()]), distribute_tensor(W, mesh, [Shard(0)])
    bias, c = distribute_tensor(BIAS, mesh, [Shard(0)]), distribute_tensor(C, mesh, [Replicate()])
    got = linear(x, w, bias, activation="gelu", residual=c)
    assert isinstance(got, DTensor)
    assert torch.equal(got.full_tensor(), EPILOGUE)
    assert torch.equal(matmul(x, w.t()).full_tensor(), X @ W.t())
    assert torch.equal(addmm(c, x, w.t()).full_tensor(), torch.addmm(C, X, W.t()))


def test_distributed_tensors_have_gradients(mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    layer = outblas.Linear(5, 4, bias=False)
    layer.weight = torch.nn.Parameter(distribute_tensor(W, mesh, [Shard(0)]))
    layer(distribute_tensor(X, mesh, [Replicate()])).sum().backward()
    assert torch.equal(layer.weight.grad.full_tensor(), X.sum(0).expand(4, 5))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_multiplied_by_torch(layout):
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
def test_symbolic_trace_records_our_functions():
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
def test_symbolic_trace_records_a_layer_as_one_call():
    layer = outblas.Linear(5, 4, activation="relu")
    graph, targets = graph_of(torch.nn.Sequential(layer))
    assert targets == [linear]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(graph(X), layer(X))


def test_a_traced_call_keeps_what_it_was_given():
    graph, _ = graph_of(lambda a, b: matmul(a, b, kernel="portable", batch_invariant=True))
    (node,) = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert node.kwargs == {"kernel": "portable", "batch_invariant": True}


def test_a_traced_graph_has_code_that_runs():
    graph, _ = graph_of(lambda a, b: matmul(a, b))
    copy = torch.fx.GraphModule({}, graph.graph)
    assert torch.equal(copy(X, W.t()), X @ W.t())


def test_compiled_calls_of_a_plain_subclass_are_one_graph():
    backend = EagerAndRecordGraphs()
    compiled = torch.compile(lambda x, w: linear(x, w), backend=backend, fullgraph=True)
    got = compiled(X, W.as_subclass(Plain))
    assert type(got) is Plain
    assert torch.equal(got.as_subclass(torch.Tensor), X @ W.t())


def test_compiled_calls_under_a_default_device_keep_the_operator():
    backend = EagerAndRecordGraphs()
    compiled = torch.compile(lambda x, w: linear(x, w, activation="relu"), backend=backend, fullgraph=True)
    with torch.device("cpu"):
        assert torch.equal(compiled(X, W), torch.relu(X @ W.t()))
    (graph,) = backend.graphs
    assert torch.ops.outblas.gemm.default in [node.target for node in graph.graph.nodes]


def test_fake_and_functional_tensors_reach_our_operators():
    with FakeTensorMode() as mode, warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        assert isinstance(linear(mode.from_tensor(X), mode.from_tensor(W)), FakeTensor)
    graph = torch.fx.experimental.proxy_tensor.make_fx(torch.func.functionalize(lambda x, w: linear(x, w)))(X, W)
    assert torch.ops.outblas.matmul.default in [node.target for node in graph.graph.nodes]
    with torch._subclasses.functional_tensor.FunctionalTensorMode():
        x = FunctionalTensor.to_functional(X)
        assert isinstance(linear(x, W), FunctionalTensor)


# ---- function modes
class Counting(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("given", [{}, {"activation": "gelu"}, {"out": torch.empty(6, 4)}, {"kernel": "portable"}])
def test_a_function_mode_sees_one_call(given):
    with Counting() as mode:
        linear(X, W, **given)
    assert mode.seen == [linear]


def test_a_function_mode_sees_the_call_of_a_quantized_weight():
    w = Quantized(W)
    with Counting() as mode:
        got = linear(X, w)
    assert mode.seen[0] is linear
    assert torch.equal(got, F.linear(X, W / 2))


def test_a_function_mode_may_replace_our_function():
    class Replacing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return "replaced" if func is matmul else func(*args, **(kwargs or {}))

    with Replacing():
        assert matmul(X, W.t()) == "replaced"


def test_a_default_device_keeps_quantized_weights_whole():
    with torch.device("meta"):
        assert torch.equal(linear(X, Quantized(W)), F.linear(X, W / 2))


# ---- lazy clones
needs_cow = pytest.mark.skipif(not hasattr(torch.Tensor, "const_data_ptr"), reason="reading would copy")


@needs_cow
def test_inputs_stay_lazy_clones():
    x, w, c = map(torch._lazy_clone, (X, W, C))
    for _ in range(3):
        for call in (
            lambda: matmul(x, w.t()), lambda: addmm(c, x, w.t()), lambda: linear(x, w, residual=c),
            lambda: matmul(x, w.t(), out=torch.empty(6, 4)), lambda: addmm(c, x, w.t(), out=torch.empty(6, 4)),
        ):  # fmt: skip
            call()
    assert all(map(torch._C._is_cow_tensor, (x, w, c)))


@needs_cow
def test_a_lazy_clone_that_is_written_has_memory_of_its_own():
    c = C.clone()
    out = torch._lazy_clone(c)
    addmm(c, X, W.t(), out=out)
    assert torch.equal(c, C)
    assert torch.equal(out, torch.addmm(C, X, W.t()))
    assert torch.equal(addmm(out, X, W.t(), out=torch._lazy_clone(out)), torch.addmm(out, X, W.t()))
