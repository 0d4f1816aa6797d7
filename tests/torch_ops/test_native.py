"""The package outblas-native, where it is installed: which calls it computes, how it launches, and
what it leaves to Python. That its results and gradients are right is shown by the other tests of
eager calls, of `linear` and of `enable`, which run with it, too.
"""

import ctypes
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.warm_calls import stand_in_launcher

import outblas
from outblas import linear, matmul
from outblas.call import dispatch, fallback, ffi_call, launcher
from outblas.call.ffi_call import FfiCall, FfiView
from outblas.call.problem import Launch, Problem
from outblas.torch_ops import aten, native

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

Tensor = torch.Tensor

A, W, BIAS = torch.randn(6, 5), torch.randn(4, 5), torch.randn(4)
RESIDUAL = torch.randn(6, 4)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package, where plans of CPU tensors run what stands in for a kernel."""
    if native._package is None:
        pytest.skip("needs outblas-native")
    monkeypatch.setattr(launcher, "no_kernel_reason", lambda problem: None)
    monkeypatch.setattr(launcher, "best_launcher", stand_in_launcher)
    dispatch.clear_cache()
    yield native._package
    dispatch.clear_cache()


def computed(package: Any, call: Callable[[], object]) -> int:
    """Returns how many products of a call are computed in C++."""
    before = package.counts()[1]
    call()
    return int(package.counts()[1]) - before


def hits(package: Any, call: Callable[[], object]) -> int:
    """Calls twice, and returns how many products of the second call are computed in C++."""
    call()
    return computed(package, call)


# ---- which calls are computed
X, WEIGHT = A.clone().requires_grad_(), torch.nn.Parameter(W.clone())
LAYER = torch.nn.Linear(5, 4)
CALLS: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
    "matmul": (lambda: matmul(A, W.t()), lambda: A @ W.t()),
    "batch": (lambda: matmul(A.expand(3, 6, 5), W.t()), lambda: A.expand(3, 6, 5) @ W.t()),
    "linear": (lambda: linear(A, W), lambda: A @ W.t()),
    "bias": (lambda: linear(A, W, BIAS), lambda: A @ W.t() + BIAS),
    "residual": (
        lambda: linear(A, W, residual=RESIDUAL),
        lambda: A @ W.t() + RESIDUAL,
    ),
    "activation": (
        lambda: linear(A, W, BIAS, activation="relu"),
        lambda: (A @ W.t() + BIAS).relu(),
    ),
    "gradients": (lambda: linear(X, WEIGHT, BIAS), lambda: A @ W.t() + BIAS),
    "layer": (
        lambda: outblas.Linear.forward(patched(LAYER), A),
        lambda: torch.nn.functional.linear(A, LAYER.weight, LAYER.bias),
    ),
}


def patched(layer: torch.nn.Linear) -> outblas.Linear:
    outblas.patch(layer)
    assert isinstance(layer, outblas.Linear)
    return layer


@pytest.mark.parametrize("name", CALLS)
def test_a_warm_call_is_computed(package: Any, name: str) -> None:
    call, want = CALLS[name]

    assert hits(package, call) == 1
    torch.testing.assert_close(call(), want())
    assert call().stride() == want().stride()


OTHERS: dict[str, Callable[[], Tensor]] = {
    "out": lambda: linear(A, W, out=torch.empty(6, 4)),
    "a named kernel": lambda: linear(A, W, kernel="portable"),
    "an activation that is no str": lambda: native.linear(A, W, None, 3, None, None) or A,
    "an activation that is unknown": lambda: native.linear(A, W, None, "?", None, None) or A,
    "an activation that is recorded": lambda: linear(X, WEIGHT, activation="relu"),
    "columns": lambda: linear(A.t().contiguous().t().requires_grad_(), W),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_call_is_left_to_python(package: Any, name: str) -> None:
    assert hits(package, OTHERS[name]) == 0


def test_gradients_that_products_add_are_left_to_python(package: Any) -> None:
    x, w = A.clone().requires_grad_(), torch.nn.Parameter(W.clone())
    w.grad = torch.ones(4, 5)
    grad = torch.ones(6, 4)  # one tensor for all steps: a plan is of where operands begin in a line

    def step() -> None:
        with outblas.accumulate_gradients():
            y = linear(x, w)
        y.backward(grad)

    assert hits(package, step) == 1, "the gradient of x"
    torch.testing.assert_close(w.grad, torch.ones(4, 5) + 2 * (torch.ones(4, 6) @ A))


# ---- plans
def test_the_oldest_plan_is_forgotten(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PLAN_LIMIT", 2)
    for rows in (1, 2, 3):
        linear(A[:rows], W)

    counts = [computed(package, lambda n=n: linear(A[:n], W)) for n in (2, 3, 1)]  # type: ignore[misc]

    assert counts == [1, 1, 0]


def test_new_memory_is_filled_where_torch_fills_it(package: Any) -> None:
    """By a launch that writes nothing."""
    linear(A, W)
    torch.use_deterministic_algorithms(True)
    try:
        assert computed(package, lambda: torch.testing.assert_close(linear(A, W), A @ W.t())) == 1
    finally:
        torch.use_deterministic_algorithms(False)


# ---- launches through TVM FFI
def ffi_launcher(kernel: Any, *arguments: Any, launched: list[str]) -> Callable[..., Launch]:
    """A launcher whose launches say that they call a function of TVM FFI."""

    def best(problem: Problem, *_: object, no_product: bool) -> Launch:
        python = stand_in_launcher(problem, no_product=no_product)

        def launch(*given: Any) -> None:
            launched.append("by Python")
            python(*given)

        ffi_call.describe(launch, lambda: FfiCall(kernel, arguments))
        return launch

    return best


VIEWS = (
    FfiView(0, torch.float32, (6, 5), (5, 1)),
    FfiView(1, torch.float32, (5, 4), (1, 5)),
    FfiView(3, torch.float32, (6, 4), (4, 1)),
    FfiView(4, torch.float32, (4,), (1,)),
)


class FfiValue(ctypes.Structure):
    """TVMFFIAny: the type of a value, and its bits."""

    _fields_ = (("type", ctypes.c_int32), ("padding", ctypes.c_uint32), ("bits", ctypes.c_int64))


class Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("index", ctypes.c_int32))


class DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


FUNCTION = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(FfiValue), ctypes.c_int32, ctypes.c_void_p
)


class Kernel:
    """A function of TVM FFI that calls one of Python with what its arguments are."""

    def __init__(self, function: Callable[..., int]) -> None:
        libinfo = pytest.importorskip("tvm_ffi.libinfo")
        self.library = ctypes.CDLL(libinfo.find_libtvm_ffi())

        def called(_: Any, values: Any, count: int, __: Any) -> int:
            return function(*(read_value(values[i]) for i in range(count)))

        self.function = FUNCTION(called)
        self.handle = ctypes.c_void_p()
        made = self.library.TVMFFIFunctionCreate(
            None, self.function, None, ctypes.byref(self.handle)
        )
        assert made == 0

    def __chandle__(self) -> int | None:
        return self.handle.value


def read_value(value: FfiValue) -> Any:
    if value.type == 0:
        return None
    if value.type == 3:
        return struct.unpack("d", struct.pack("q", value.bits))[0]
    return value.bits if value.type == 1 else read_tensor(value.bits)


def read_tensor(address: int) -> Tensor:
    """Returns a tensor over the memory of a DLTensor."""
    view = DLTensor.from_address(address)
    assert (view.device.type, view.device.index, view.byte_offset) == (1, 0, 0)
    assert (view.dtype.bits, view.dtype.lanes) == (32, 1)
    shape, strides = view.shape[: view.ndim], view.strides[: view.ndim]
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_byte * (4 * count)).from_address(view.data)
    dtype = {0: torch.int32, 2: torch.float32}[view.dtype.code]
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def test_a_kernel_of_tvm_ffi_is_called_with_views(
    package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    launched: list[str] = []

    def multiply(a: Tensor, b: Tensor, out: Tensor, bias: Tensor, *others: Any) -> int:
        seen.append((others[0].tolist(), *others[1:]))
        torch.addmm(bias, a, b, out=out)
        return 0

    table = torch.arange(3, dtype=torch.int32)
    arguments = (*VIEWS, table, None, 7, "alpha", "beta", 2.5)
    best = ffi_launcher(Kernel(multiply), *arguments, launched=launched)
    monkeypatch.setattr(launcher, "best_launcher", best)

    for _ in range(3):
        torch.testing.assert_close(linear(A, W, BIAS), A @ W.t() + BIAS)

    assert launched == ["by Python"], "the first call, which made the plan"
    assert seen == [([0, 1, 2], None, 7, 1.0, 0.0, 2.5)] * 2


# Functions with what they return, and the arguments that a launch says it gives them.
UNUSED: dict[str, tuple[int, tuple[Any, ...]]] = {
    "a kernel that fails": (-1, VIEWS),
    "more arguments than there is room for": (0, VIEWS * 9),
    "a dtype that no kernel has": (0, (FfiView(0, torch.int64, (1,), (1,)),)),
}


@pytest.mark.parametrize("name", UNUSED)
def test_what_cannot_be_called_is_launched_by_python(
    name: str, package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    returned, arguments = UNUSED[name]
    best = ffi_launcher(Kernel(lambda *_: returned), *arguments, launched=launched)
    monkeypatch.setattr(launcher, "best_launcher", best)

    for _ in range(2):
        torch.testing.assert_close(linear(A, W, BIAS), A @ W.t() + BIAS)

    assert launched == ["by Python"] * 2


# ---- autograd
def test_hooks_of_saved_tensors_see_what_is_kept(package: Any) -> None:
    packed: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t

    linear(X, WEIGHT, BIAS)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        linear(X, WEIGHT, BIAS)

    assert [tuple(t.shape) for t in packed] == [(6, 5), (4, 5)]


def test_a_saved_tensor_that_was_written_is_refused(package: Any) -> None:
    linear(X, WEIGHT)
    x = A.clone()
    y = linear(x, WEIGHT)
    x.add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_compiled_autograd_runs_the_node(package: Any) -> None:
    from torch._dynamo import compiled_autograd

    linear(X, WEIGHT, BIAS).sum().backward()
    x, w = A.clone().requires_grad_(), torch.nn.Parameter(W.clone())
    y = linear(x, w, BIAS)
    with compiled_autograd._enable(lambda graph: graph):
        y.sum().backward()

    torch.testing.assert_close(x.grad, torch.ones(6, 4) @ W)
    torch.testing.assert_close(w.grad, torch.ones(4, 6) @ A)


def test_threads_share_a_graph(package: Any) -> None:
    linear(X, WEIGHT, BIAS).sum().backward()
    x, w = A.clone().requires_grad_(), torch.nn.Parameter(W.clone())
    y = linear(x, w, BIAS)
    found: list[Tensor] = []

    def step() -> None:
        (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        found.append(grad)

    threads = [threading.Thread(target=step) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(found) == 8
    for grad in found:
        torch.testing.assert_close(grad, torch.ones(6, 4) @ W)


# ---- aten
RULES = aten.Rules((torch.float32,), 0, 0, None, "CPU")
OUT, BATCH_OUT = torch.empty(6, 4), torch.empty(3, 6, 4)
OF_TORCH: dict[str, Callable[[], Tensor]] = {
    "mm out": lambda: torch.mm(A, W.t(), out=OUT),
    "bmm out": lambda: torch.bmm(A.expand(3, 6, 5), W.t().expand(3, 5, 4), out=BATCH_OUT),
    "addmm out": lambda: torch.addmm(BIAS, A, W.t(), beta=2, out=OUT),
    "mm": lambda: torch.mm(A, W.t()),
    "bmm": lambda: torch.bmm(A.expand(3, 6, 5), W.t().expand(3, 5, 4)),
    "addmm": lambda: torch.addmm(BIAS, A, W.t(), beta=2, alpha=0.5),
    "linear": lambda: torch.nn.functional.linear(A, W, BIAS),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_products_of_torch_are_computed(package: Any, name: str) -> None:
    call = OF_TORCH[name]
    want = call().clone()

    with aten._enable(RULES):
        assert hits(package, call) == 1
        got = call()

    torch.testing.assert_close(got, want)
    assert hits(package, call) == 0, "the operators are torch's again"


def test_an_output_that_overlaps_an_operand_is_left_to_python(package: Any) -> None:
    """torch computes what it accepts of them. The plan of calls alike would compute it."""
    memory, b, apart = torch.randn(80), torch.randn(6, 6), torch.empty(6, 6)
    a, beside = memory[:36].view(6, 6), memory[40:76].view(6, 6)
    within = memory[4:40].view(6, 6)
    assert within.data_ptr() % 16 == beside.data_ptr() % 16 == apart.data_ptr() % 16
    with aten._enable(RULES):
        torch.mm(a, b, out=apart)

        assert computed(package, lambda: torch.mm(a, b, out=beside)) == 1
        assert computed(package, lambda: torch.mm(a, b, out=within)) == 0


def test_products_of_a_choice_are_torchs(package: Any) -> None:
    """A kernel is chosen while others are timed beside torch's product."""
    with aten._enable(RULES):
        torch.mm(A, W.t())
        native.set_choosing(True)
        try:
            assert computed(package, lambda: torch.mm(A, W.t())) == 0
        finally:
            native.set_choosing(False)


# ---- whether it is used
VERSION = torch.__version__.partition("+")[0]
FITS = f'INTERFACE, TORCH = {native.INTERFACE}, "{VERSION}"'


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Loads a package of this text, which is installed in the place of the real one."""

    def load(text: str) -> Any:
        (tmp_path / "outblas_native.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "outblas_native", raising=False)
        try:
            return native._load()
        finally:
            sys.modules.pop("outblas_native", None)

    monkeypatch.delenv("OUTBLAS_NATIVE", raising=False)
    monkeypatch.setattr(fallback, "_seen", set())
    return load


def test_a_package_that_fits_is_used_unless_it_is_switched_off(
    installed: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert installed(FITS).TORCH == VERSION
    monkeypatch.setenv("OUTBLAS_NATIVE", "0")
    assert installed(FITS) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('INTERFACE, TORCH = 1, "2.0.0"', r"was built for torch 2\.0\.0 \(interface 1\)"),
        (
            f'INTERFACE, TORCH = 99, "{VERSION}"',
            rf"\(interface 99\), expected torch .*{native.INTERFACE}\)",
        ),
        ('raise ImportError("undefined symbol")', "it does not load: undefined symbol"),
    ],
    ids=["another torch", "another interface", "broken"],
)
def test_a_package_that_does_not_fit_is_not_used(
    text: str, said: str, installed: Callable[[str], Any]
) -> None:
    with pytest.warns(RuntimeWarning, match=said):
        assert installed(text) is None
