"""The short way of an eager call: taken when warm, and not where somebody would see or change the
operator.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from outblas import FallbackWarning, addmm, linear, matmul
from outblas.runtime import dispatch, launcher
from outblas.torch_ops import ops

OPERATORS = torch.ops.outblas
A, B, C = (torch.randint(-8, 9, shape).float() for shape in ((6, 5), (5, 4), (4,)))

pytestmark = pytest.mark.filterwarnings(
    "ignore::outblas.FallbackWarning", "ignore::DeprecationWarning"
)


@pytest.fixture(params=["torch's product", "portable"], autouse=True)
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What plans of CPU tensors run: torch, as ever, or a kernel of ours as on a GPU."""
    if request.param == "portable":
        monkeypatch.setattr(launcher, "no_kernel_reason", lambda problem: None)
    dispatch.clear_cache()
    yield
    dispatch.clear_cache()


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that calls go through."""
    called = []
    for name in ("matmul", "matmul_out", "addmm", "addmm_out"):
        real = getattr(ops, name)

        def counted(*arguments: Any, name: str = name, real: Any = real) -> Any:
            called.append(name)
            return real(*arguments)

        monkeypatch.setattr(ops, name, counted)
    return called


def warm(call: Callable[[], Any], operators: list[str] | None = None) -> None:
    for _ in range(3):
        call()
    if operators is not None:
        operators.clear()
        call()
        assert operators == []


def product() -> torch.Tensor:
    return matmul(A, B)


CALLS = {
    "matmul": (product, lambda: A @ B),
    "vector": (lambda: matmul(A[0], B), lambda: A[0] @ B),
    "batch": (lambda: matmul(A.expand(3, 6, 5), B), lambda: A.expand(3, 6, 5) @ B),
    "out": (lambda: matmul(A, B, out=torch.full((6, 4), torch.nan, device="cpu")), lambda: A @ B),
    "addmm": (
        lambda: addmm(C, A, B, alpha=0.5, beta=2),
        lambda: torch.addmm(C, A, B, alpha=0.5, beta=2),
    ),
    "addmm beta 0": (lambda: addmm(C, A, B, beta=0), lambda: A @ B),
    "addmm out": (
        lambda: addmm(C, A, B, out=torch.full((6, 4), torch.nan, device="cpu")),
        lambda: torch.addmm(C, A, B),
    ),
    "parameter": (lambda: matmul(A, torch.nn.Parameter(B, requires_grad=False)), lambda: A @ B),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_warm_call_skips_the_operator(name: str, operators: list[str]) -> None:
    call, want = CALLS[name]
    cold = call()
    warm(call, operators)
    assert torch.equal(call(), cold)
    assert torch.equal(call(), want())
    assert call().stride() == want().stride()


def test_kinds_of_one_shape_keep_apart(operators: list[str]) -> None:
    transposed = B.t().contiguous().t()
    for _ in range(4):
        assert torch.equal(matmul(A, transposed), A @ B)
        assert torch.equal(matmul(A, B), A @ B)
        assert matmul(A.bfloat16(), B.bfloat16()).dtype == torch.bfloat16
        assert torch.equal(addmm(C, A, B), A @ B + C)
        assert torch.equal(addmm(C, A, B, beta=0), A @ B)
    operators.clear()
    matmul(A, transposed)
    assert operators == []


def test_many_kinds_of_one_shape_stay_right() -> None:
    for step in range(5, 30):
        a = torch.empty(6, step)[:, :5].copy_(A)
        for _ in range(3):
            assert torch.equal(matmul(a, B), A @ B)


def test_forgetting_and_tf32_plan_anew(
    operators: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = []

    def prepare(call: Any, prepare: Any = dispatch._prepare) -> Any:
        planned.append(dispatch.tf32_requested())
        return prepare(call)

    monkeypatch.setattr(dispatch, "_prepare", prepare)
    warm(product, operators)
    dispatch.clear_cache()
    product()
    assert (operators, planned) == (["matmul"], [False, False])
    warm(product, operators)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        warm(product, operators)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    warm(product, operators)
    assert planned == [False, False, True]


# ---- who must see the operator, or is in the way
def test_dispatch_modes_see_the_operator() -> None:
    seen = []

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    out = torch.empty(6, 4)
    calls = {
        OPERATORS.matmul.default: product,
        OPERATORS.matmul_out.default: lambda: matmul(A, B, out=out),
    }
    for operator, call in calls.items():
        warm(call)
        seen.clear()
        with Dispatched():
            call()
        assert operator in seen


def test_function_modes_see_the_function_once() -> None:
    seen = []

    class Called(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    w = B.t().contiguous()
    calls = {
        matmul: product,
        addmm: lambda: addmm(C, A, B),
        linear: lambda: linear(A, w, C, activation="relu"),
    }
    for function, call in calls.items():
        warm(call)
        seen.clear()
        with Called():
            call()
        assert seen == [function]


def test_tensors_in_the_mode_of_fake_ones_become_fake() -> None:
    warm(product)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(product(), FakeTensor)


# ---- a default device, which torch holds in a function mode
@pytest.fixture
def default_device():
    torch.set_default_device("meta")  # on which a tensor made by mistake would be seen
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("name", CALLS)
def test_a_warm_call_skips_the_operator_under_a_default_device(
    name, operators: list[str], default_device
) -> None:
    test_a_warm_call_skips_the_operator(name, operators)


def test_linear_is_warm_under_a_default_device(operators: list[str]) -> None:
    w, bias = torch.nn.Parameter(B.t().contiguous(), requires_grad=False), C.clone()
    with torch.device("meta"):
        warm(lambda: linear(A, w), operators)
        assert torch.equal(linear(A, w, bias), torch.nn.functional.linear(A, w, bias))


def test_training_is_warm_under_a_default_device(operators: list[str], default_device) -> None:
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    grad = A @ B
    warm(lambda: matmul(a, b).backward(grad), operators)
    assert torch.equal(a.grad, 4 * grad @ B.t())


def test_a_default_device_is_asked_about_nothing(
    default_device, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm(product)
    asked = []
    monkeypatch.setattr(
        DeviceContext, "__torch_function__", lambda mode, func, *_: asked.append(func)
    )
    product()
    assert asked == []


def test_a_mode_beside_a_default_device_sees_the_call(default_device) -> None:
    seen = []

    class Called(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    warm(product)
    with Called():
        product()
    assert seen == [matmul]


def test_tracers_record_the_operator() -> None:
    warm(product)
    graph = make_fx(lambda a, b: matmul(a, b))(A, B)
    assert OPERATORS.matmul.default in [node.target for node in graph.graph.nodes]
    traced = torch.jit.trace(lambda a, b: matmul(a, b), (A, B))
    assert "outblas::matmul" in str(traced.graph)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        matmul(A, B)
    assert "outblas::matmul" in [event.key for event in profile.key_averages()]


def test_compiled_calls_keep_the_operator_in_one_graph() -> None:
    warm(product)
    backend = EagerAndRecordGraphs()
    compiled = torch.compile(lambda a, b: matmul(a, b) + 1, backend=backend, fullgraph=True)
    assert torch.equal(compiled(A, B), A @ B + 1)
    (graph,) = backend.graphs
    assert OPERATORS.matmul.default in [node.target for node in graph.graph.nodes]


def test_what_torch_transforms_stays_transformed() -> None:
    warm(product)
    warm(lambda: matmul(A[0], B))
    batched = torch.func.vmap(matmul, in_dims=(0, None))(A, B)
    assert torch.equal(batched, A @ B)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert matmul(A, B).dtype == torch.bfloat16
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(A, torch.ones_like(A))
        assert torch.allclose(
            forward_ad.unpack_dual(matmul(dual, B)).tangent, torch.ones_like(A) @ B
        )
    grown = A.clone().requires_grad_()
    with torch.no_grad():
        warm(lambda: matmul(grown, B))
        assert not matmul(grown, B).requires_grad
    matmul(grown, B).sum().backward()
    assert torch.allclose(grown.grad, B.sum(1).expand(6, 5))
    assert torch.equal(matmul(torch._neg_view(A), B), -A @ B)


def test_other_tensors_are_not_taken_for_warm_ones() -> None:
    class Tagged(torch.Tensor):
        pass

    warm(product)
    assert type(matmul(A.as_subclass(Tagged), B)) is Tagged
    assert matmul(A.to("meta"), B.to("meta")).is_meta
    with FakeTensorMode() as mode:
        fake = OPERATORS.matmul(mode.from_tensor(A), mode.from_tensor(B))
    assert isinstance(fake, FakeTensor)
    with torch.inference_mode():
        assert product().is_inference()
        warm(product)
        assert product().is_inference()
    assert not product().is_inference()
    for bad, message in (
        (A.to("meta"), "other is on cpu but input is on meta"),
        (A.half(), "other.dtype is torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            matmul(bad, B)
    with pytest.raises(TypeError, match="input is list"):
        matmul([[1.0]], B)
    warm(lambda: matmul(A, B, out=torch.empty(6, 4)))
    with pytest.raises(TypeError, match="out is UntypedStorage"):
        matmul(A, B, out=torch.empty(24).untyped_storage())
    nested = torch.nested.nested_tensor([A, A])
    with pytest.raises(ValueError, match=r"out\.\w+ is"):
        matmul(
            A.expand(2, 6, 5),
            B,
            out=torch.nested.nested_tensor([A @ B, A @ B]).to_padded_tensor(0.0)[:1],
        )
    assert torch.equal(matmul(nested, torch.nested.nested_tensor([B, B])).unbind()[0], A @ B)


# ---- out
def test_out_is_checked_and_its_version_moves(operators: list[str]) -> None:
    out = torch.empty(6, 4)
    warm(lambda: matmul(A, B, out=out), operators)
    before = out._version
    assert matmul(A, B, out=out) is out
    assert out._version > before
    weight = torch.rand(6, 4, requires_grad=True)
    loss = (weight * out).sum()
    matmul(A, B, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

    buffer = torch.zeros(64)
    a, b, apart, c = (
        buffer[:30].view(6, 5),
        buffer[30:50].view(5, 4),
        torch.zeros(6, 4),
        torch.zeros(6, 4),
    )
    warm(lambda: matmul(a, B, out=apart), operators)
    with pytest.raises(ValueError, match="out overlaps input"):
        matmul(a, B, out=buffer[20:44].view(6, 4))
    warm(lambda: matmul(A, b, out=apart), operators)
    with pytest.raises(ValueError, match="out overlaps other"):
        matmul(A, b, out=buffer[16:40].view(6, 4))
    assert not buffer.any()
    assert addmm(c, A, B, out=c) is c
    with pytest.raises(ValueError, match="out requires grad"):
        matmul(A, B, out=torch.empty(6, 4, requires_grad=True))
    negated = torch.zeros(6, 4, dtype=torch.complex64).conj().imag
    assert torch.equal(matmul(A, B, out=negated), A @ B)
    with torch.inference_mode():
        inference = torch.empty(6, 4)
        warm(lambda: matmul(A, B, out=inference), operators)


def test_new_memory_is_filled_where_torch_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "no_kernel_reason", lambda problem: None)
    monkeypatch.setattr(launcher, "best_launcher", lambda *_, no_product: lambda *_: None)
    warm(product)
    torch.use_deterministic_algorithms(True)
    try:
        assert matmul(A, B).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_every_thread_takes_it() -> None:
    def work(_: int) -> None:
        for i in range(200):
            n = 1 + i % 7
            assert torch.equal(matmul(A[:n], B), A[:n] @ B)
            if i % 50 == 0:
                dispatch.clear_cache()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_strict_mode_is_read_on_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    if launcher.no_kernel_reason.__name__ == "<lambda>":
        pytest.skip("nothing goes to torch")
    with pytest.warns(FallbackWarning, match="CPU tensors"):
        warm(product)
    monkeypatch.setenv("OUTBLAS_STRICT", "1")
    with pytest.raises(RuntimeError, match="OUTBLAS_STRICT=1 forbids"):
        matmul(A, B)


# ---- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("index", range(max(1, torch.cuda.device_count())))
def test_warm_calls_keep_to_their_device_and_stream(index: int, operators: list[str]) -> None:
    a, b = (
        torch.randn(256, 256, device=f"cuda:{index}").bfloat16(),
        torch.randn(256, 256, device=f"cuda:{index}"),
    )
    b, out = b.bfloat16(), torch.empty_like(a)
    want = matmul(a, b)
    for call in (lambda: matmul(a, b), lambda: matmul(a, b, out=out)):
        warm(call, operators)
        assert call().device == a.device
        assert torch.equal(call(), want)
    stream, late = torch.cuda.Stream(a.device), torch.zeros_like(a)
    torch.cuda.synchronize(index)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(a)
        got = matmul(late, b)
    stream.synchronize()
    assert torch.equal(got, want)
    with torch.cuda.device(index):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, stream=stream
        ):  # the default one is of the device that captured first
            kept = matmul(a, b)
            matmul(a, b, out=out)
    a.zero_()
    graph.replay()
    torch.cuda.synchronize(index)
    assert not kept.any()
    assert not out.any()
    assert operators == []
