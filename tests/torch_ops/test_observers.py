"""Who would see, record or change a call of a public function sees it, also where the call is warm
and would take the short way; and which tensors are no warm ones.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.causes import Tagged
from support.every_function import CALLS, FunctionCall
from support.warm_calls import A, B, product, warm
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import outblas
from outblas import matmul

pytest_plugins = ("support.eager_fixtures",)
pytestmark = pytest.mark.filterwarnings(
    "ignore::outblas.FallbackWarning", "ignore::DeprecationWarning"
)
every_call = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.interpreter if "by a kernel" in n else ()) for n in CALLS],
)

Tensor = torch.Tensor
OPERATORS = torch.ops.outblas
CPU = torch.profiler.ProfilerActivity.CPU


class RecordingFunctions(TorchFunctionMode):
    """Notes every function, and calls it, or has another answer for it."""

    def __init__(self, answer: Any = None) -> None:
        super().__init__()
        self.answer = answer
        self.seen: list[Callable[..., Any]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return self.answer or func(*args, **(kwargs or {}))


class RecordingDispatch(TorchDispatchMode):
    """Notes every operator, and runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def outputs(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


# ---- observers
def dispatch_mode(call: FunctionCall) -> None:
    with RecordingDispatch() as mode:
        call()

    assert getattr(OPERATORS, call.operator).default in mode.seen


def function_mode(call: FunctionCall) -> None:
    with RecordingFunctions() as mode:
        call()

    assert mode.seen == [call.function]


def mode_of_fake_tensors(call: FunctionCall) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert all(isinstance(t, FakeTensor) for t in outputs(call()))


def tracer(call: FunctionCall) -> None:
    graph = make_fx(lambda *tensors: call.of(*tensors))(*call.all_tensors)

    targets = [node.target for node in graph.graph.nodes]
    assert getattr(OPERATORS, call.operator).default in targets


def profiler(call: FunctionCall) -> None:
    with torch.profiler.profile(activities=[CPU], record_shapes=True) as profile:
        call()

    (event,) = [e for e in profile.events() if e.name == f"outblas::{call.operator}"]
    assert list(call.operands[0].shape) in event.input_shapes


def compiler(call: FunctionCall) -> None:
    torch._dynamo.reset()
    backend = EagerAndRecordGraphs()
    compiled = torch.compile(lambda *tensors: call.of(*tensors), backend=backend, fullgraph=True)

    got = compiled(*call.all_tensors)

    for result, want in zip(outputs(got), outputs(call()), strict=True):
        torch.testing.assert_close(result.float(), want.float(), rtol=0, atol=0, equal_nan=True)
    (graph,) = backend.graphs
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert getattr(OPERATORS, call.operator).default in targets


def counter_of_flop(call: FunctionCall) -> None:
    with FlopCounterMode(display=False) as counter:
        call()

    assert counter.get_total_flops() == call.flops


OBSERVERS: dict[str, Callable[[FunctionCall], None]] = {
    f.__name__: f
    for f in (
        dispatch_mode,
        function_mode,
        mode_of_fake_tensors,
        tracer,
        profiler,
        compiler,
        counter_of_flop,
    )
}


# The compiler sees operators: one call of each is compiled.
COMPILED = {call.operator: name for name, call in reversed(CALLS.items())}
SEEN = [
    pytest.param(name, observer, marks=pytest.mark.interpreter if "by a kernel" in name else ())
    for name in CALLS
    for observer in OBSERVERS
    if observer != "compiler" or name in COMPILED.values()
]


@pytest.mark.parametrize(("name", "observer"), SEEN)
def test_a_warm_call_is_seen(name: str, observer: str) -> None:
    with FlopCounterMode(display=False):
        matmul(A, B)  # torch's counter knows the formulas once it has seen a function of outblas
    warm(CALLS[name])

    OBSERVERS[observer](CALLS[name])


@every_call
def test_inference_leaves_nothing_to_later_calls(name: str) -> None:
    with torch.inference_mode():
        warm(CALLS[name])
        assert all(t.is_inference() for t in outputs(CALLS[name]()))

    assert not any(t.is_inference() for t in outputs(CALLS[name]()))


class Overriding(torch.Tensor):
    """A tensor type that overrides functions."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return "overridden", function, inspect.signature(function).bind(*args, **(kwargs or {}))


@every_call
def test_every_tensor_may_override_the_function(name: str) -> None:
    call = CALLS[name]
    warm(call)

    for i, t in enumerate(call.all_tensors):
        tensors = [*call.all_tensors]
        tensors[i] = t.as_subclass(Overriding)

        answer, function, bound = call.of(*tensors)

        assert answer == "overridden"
        assert function.__name__ in name.split()[0]
        assert set(call.tensors) <= set(bound.arguments)


# ---- what only products of two matrices are asked
@pytest.mark.gpu
def test_ranges_of_nvtx_have_the_operator(operators: list[str]) -> None:
    """As Nsight Systems shows them: a warm call would leave no range by itself."""
    a, b = A.cuda().half(), B.cuda().half()
    warm(lambda: matmul(a, b))
    operators.clear()

    with torch.autograd.profiler.emit_nvtx(record_shapes=True):
        matmul(a, b)

    assert operators == ["matmul"]


def flops(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def test_gradients_of_groups_and_models_have_their_flop() -> None:
    """Twice those of a forward pass, and in a patched model those of the model."""
    for name in ("grouped_mm", "grouped_mm of columns", "grouped_mm of terms", "moe_mlp"):
        call = CALLS[name]
        leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in call.all_tensors]
        counted = flops(lambda call=call, leaves=leaves: call.of(*leaves).sum().backward())  # type: ignore[misc]
        assert counted == 3 * call.flops, name
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    expected = flops(lambda: model(A).sum().backward())
    outblas.patch(model, fuse=True)
    assert flops(lambda: model(A).sum().backward()) == expected


@pytest.mark.usefixtures("meta_by_default")
def test_a_default_device_is_asked_about_nothing_and_a_mode_beside_it_sees_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warm(product)
    functions: list[Callable[..., Any]] = []
    with monkeypatch.context() as patched:
        patched.setattr(
            DeviceContext, "__torch_function__", lambda mode, func, *_: functions.append(func)
        )
        product()

    assert functions == []
    with RecordingFunctions() as mode:
        product()
    assert mode.seen == [matmul]


@every_call
def test_a_function_mode_may_replace_the_function(name: str) -> None:
    warm(CALLS[name])

    with RecordingFunctions("replaced"):
        assert CALLS[name]() == "replaced"


# ---- transforms and other tensors, of the shapes of a warm call
def under_autocast() -> bool:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return matmul(A, B).dtype == torch.bfloat16


def in_forward_mode() -> bool:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(A, torch.ones_like(A))
        tangent = forward_ad.unpack_dual(matmul(dual, B)).tangent
    return torch.allclose(tangent, torch.ones_like(A) @ B)


def with_gradients() -> bool:
    leaf = A.clone().requires_grad_()
    with torch.no_grad():
        warm(lambda: matmul(leaf, B))
        assert not matmul(leaf, B).requires_grad
    matmul(leaf, B).sum().backward()
    return torch.allclose(leaf.grad, B.sum(1).expand(6, 5))


def of_fake_tensors() -> bool:
    with FakeTensorMode() as mode:
        return isinstance(OPERATORS.matmul(mode.from_tensor(A), mode.from_tensor(B)), FakeTensor)


def of_nested_tensors() -> bool:
    a, b = torch.nested.nested_tensor([A, A]), torch.nested.nested_tensor([B, B])
    return torch.equal(matmul(a, b).unbind()[0], A @ B)


OTHERS: dict[str, Callable[[], bool]] = {
    "vmap": lambda: torch.equal(torch.func.vmap(matmul, in_dims=(0, None))(A, B), A @ B),
    "autocast": under_autocast,
    "forward mode": in_forward_mode,
    "gradients": with_gradients,
    "a view that negates": lambda: torch.equal(matmul(torch._neg_view(A), B), -A @ B),
    "a subclass": lambda: type(matmul(A.as_subclass(Tagged), B)) is Tagged,
    "meta tensors": lambda: matmul(A.to("meta"), B.to("meta")).is_meta,
    "fake tensors": of_fake_tensors,
    "nested tensors": of_nested_tensors,
}


@pytest.mark.usefixtures("cpu_plans_run")
@pytest.mark.parametrize("name", OTHERS)
def test_another_call_is_not_taken_for_the_warm_one(name: str) -> None:
    warm(product)
    warm(lambda: matmul(A[0], B))

    assert OTHERS[name]()
