"""Who would see, record or change the operator of a warm call, and which tensors are no warm ones:
the short way leaves these calls to the operator.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.recording_modes import RecordingDispatch, RecordingFunctions
from support.warm_calls import A, B, C, product, warm
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._device import DeviceContext

from outblas import Linear, addmm, linear, matmul, scaled_mm

pytest_plugins = ("support.eager_fixtures",)
pytestmark = [
    pytest.mark.usefixtures("cpu_plans_run"),
    pytest.mark.filterwarnings("ignore::outblas.FallbackWarning", "ignore::DeprecationWarning"),
]

Tensor = torch.Tensor
OPERATORS = torch.ops.outblas


# ---- modes
OUT = torch.empty(6, 4)
WEIGHT = B.t().contiguous()


@pytest.mark.parametrize(
    ("call", "operator"),
    [
        pytest.param(product, OPERATORS.matmul.default, id="matmul"),
        pytest.param(lambda: matmul(A, B, out=OUT), OPERATORS.matmul_out.default, id="out"),
    ],
)
def test_a_dispatch_mode_sees_the_operator(call: Callable[[], Tensor], operator: Any) -> None:
    warm(call)

    with RecordingDispatch() as mode:
        call()

    assert operator in mode.seen


@pytest.mark.parametrize(
    ("call", "function"),
    [
        pytest.param(product, matmul, id="matmul"),
        pytest.param(lambda: addmm(C, A, B), addmm, id="addmm"),
        pytest.param(lambda: linear(A, WEIGHT, C, activation="relu"), linear, id="linear"),
    ],
)
def test_a_function_mode_sees_the_function_once(
    call: Callable[[], Tensor], function: Callable[..., Tensor]
) -> None:
    warm(call)

    with RecordingFunctions() as mode:
        call()

    assert mode.seen == [function]


def test_tensors_in_the_mode_of_fake_ones_become_fake() -> None:
    warm(product)

    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(product(), FakeTensor)


@pytest.mark.usefixtures("meta_by_default")
def test_a_default_device_is_asked_about_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    warm(product)
    asked: list[Callable[..., Any]] = []
    monkeypatch.setattr(
        DeviceContext, "__torch_function__", lambda mode, func, *_: asked.append(func)
    )

    product()

    assert asked == []


@pytest.mark.usefixtures("meta_by_default")
def test_a_mode_beside_a_default_device_sees_the_call() -> None:
    warm(product)

    with RecordingFunctions() as mode:
        product()

    assert mode.seen == [matmul]


# ---- tracers and compilers
def test_make_fx_records_the_operator() -> None:
    warm(product)

    graph = make_fx(lambda a, b: matmul(a, b))(A, B)

    assert OPERATORS.matmul.default in [node.target for node in graph.graph.nodes]


def test_jit_trace_records_the_operator() -> None:
    warm(product)

    traced = torch.jit.trace(lambda a, b: matmul(a, b), (A, B))

    assert "outblas::matmul" in str(traced.graph)


EIGHTHS = A.to(torch.float8_e4m3fn), WEIGHT.to(torch.float8_e4m3fn).t()
ONE = torch.ones(())
LAYER = Linear(5, 4)
PROFILED: dict[str, tuple[Callable[[], Tensor], list[list[int]]]] = {
    "outblas::matmul": (lambda: matmul(A, B), [[6, 5], [5, 4]]),
    "outblas::addmm": (lambda: addmm(C, A, B), [[4], [6, 5], [5, 4]]),
    "outblas::gemm": (lambda: linear(A, WEIGHT, activation="relu"), [[6, 5], [5, 4]]),
    "outblas::scaled_mm": (lambda: scaled_mm(*EIGHTHS, ONE, ONE), [[6, 5], [5, 4], [], []]),
}


@pytest.mark.parametrize("name", PROFILED)
def test_the_profiler_records_the_operator_and_its_shapes(name: str) -> None:
    call, shapes = PROFILED[name]
    warm(call)

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        call()

    (event,) = [event for event in profile.events() if event.name == name]
    assert [shape for shape in event.input_shapes if shape][:3] == [s for s in shapes if s]


def test_the_profiler_records_both_passes_of_a_layer() -> None:
    warm(lambda: LAYER(A))

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        LAYER(A).sum().backward()

    products = [event.name for event in profile.events() if event.name.startswith("outblas::")]
    assert len(products) >= 2


@pytest.mark.gpu
def test_ranges_of_nvtx_have_the_operator(operators: list[str]) -> None:
    """As Nsight Systems shows them: a warm call would leave no range by itself."""
    a, b = A.cuda().half(), B.cuda().half()
    warm(lambda: matmul(a, b))
    operators.clear()

    with torch.autograd.profiler.emit_nvtx(record_shapes=True):
        matmul(a, b)

    assert operators == ["matmul"]


def test_compiled_calls_keep_the_operator_in_one_graph() -> None:
    warm(product)
    backend = EagerAndRecordGraphs()
    compiled = torch.compile(lambda a, b: matmul(a, b) + 1, backend=backend, fullgraph=True)

    got = compiled(A, B)

    assert torch.equal(got, A @ B + 1)
    (graph,) = backend.graphs
    assert OPERATORS.matmul.default in [node.target for node in graph.graph.nodes]


# ---- transforms
def test_vmap_is_not_passed_by() -> None:
    warm(lambda: matmul(A[0], B))

    assert torch.equal(torch.func.vmap(matmul, in_dims=(0, None))(A, B), A @ B)


def test_autocast_is_not_passed_by() -> None:
    warm(product)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert matmul(A, B).dtype == torch.bfloat16


def test_forward_mode_is_not_passed_by() -> None:
    warm(product)

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(A, torch.ones_like(A))
        tangent = forward_ad.unpack_dual(matmul(dual, B)).tangent

    assert torch.allclose(tangent, torch.ones_like(A) @ B)


def test_gradients_are_recorded_after_calls_without_them() -> None:
    a = A.clone().requires_grad_()
    with torch.no_grad():
        warm(lambda: matmul(a, B))
        assert not matmul(a, B).requires_grad

    matmul(a, B).sum().backward()

    assert torch.allclose(a.grad, B.sum(1).expand(6, 5))


def test_a_view_that_negates_is_not_taken_for_what_it_shows() -> None:
    warm(product)

    assert torch.equal(matmul(torch._neg_view(A), B), -A @ B)


# ---- other tensors of the same shapes
class Tagged(torch.Tensor):
    """A subclass that overrides nothing."""


def test_a_subclass_is_not_taken_for_a_warm_tensor() -> None:
    warm(product)

    assert type(matmul(A.as_subclass(Tagged), B)) is Tagged


def test_a_meta_tensor_is_not_taken_for_a_warm_one() -> None:
    warm(product)

    assert matmul(A.to("meta"), B.to("meta")).is_meta


def test_a_fake_tensor_is_not_taken_for_a_warm_one() -> None:
    warm(product)

    with FakeTensorMode() as mode:
        fake = OPERATORS.matmul(mode.from_tensor(A), mode.from_tensor(B))

    assert isinstance(fake, FakeTensor)


def test_cold_and_warm_results_in_inference_mode_are_inference_tensors() -> None:
    with torch.inference_mode():
        cold = product()
        warm(product)

        assert cold.is_inference()
        assert product().is_inference()


def test_inference_mode_leaves_nothing_to_later_calls() -> None:
    with torch.inference_mode():
        warm(product)

    assert not product().is_inference()


@pytest.mark.parametrize(
    ("a", "message"),
    [
        pytest.param(A.to("meta"), "other is on cpu but input is on meta", id="device"),
        pytest.param(A.half(), "other.dtype is torch.float32", id="dtype"),
    ],
)
def test_an_operand_that_does_not_fit_is_refused_after_warm_calls(a: Tensor, message: str) -> None:
    warm(product)

    with pytest.raises(ValueError, match=message):
        matmul(a, B)


def test_a_list_is_no_tensor_after_warm_calls() -> None:
    warm(product)

    with pytest.raises(TypeError, match="input is list"):
        matmul([[1.0]], B)  # type: ignore[arg-type]


def test_a_storage_is_no_out_after_warm_calls() -> None:
    warm(lambda: matmul(A, B, out=torch.empty(6, 4)))

    with pytest.raises(TypeError, match="out is UntypedStorage"):
        matmul(A, B, out=torch.empty(24).untyped_storage())  # type: ignore[arg-type]


def test_an_out_of_a_wrong_shape_is_refused_after_warm_calls() -> None:
    warm(lambda: matmul(A.expand(2, 6, 5), B, out=torch.empty(2, 6, 4)))

    with pytest.raises(ValueError, match=r"out\.\w+ is"):
        matmul(A.expand(2, 6, 5), B, out=torch.empty(1, 6, 4))


def test_nested_tensors_are_not_taken_for_warm_ones() -> None:
    warm(product)
    a, b = torch.nested.nested_tensor([A, A]), torch.nested.nested_tensor([B, B])

    assert torch.equal(matmul(a, b).unbind()[0], A @ B)
