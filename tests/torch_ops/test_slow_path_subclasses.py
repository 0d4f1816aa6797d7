"""Subclasses of tensors that override no function: they are checked as plain tensors are, and
torch multiplies them.
"""

import os
import socket
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.tensor_types import (
    BIAS,
    EPILOGUE,
    PRODUCT,
    C,
    Dispatched,
    Plain,
    Sealed,
    W,
    X,
    sevens,
)
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

import outblas
from outblas import FallbackWarning, OperandError, addmm, linear, matmul
from outblas.core.epilogue import Activation

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

Tensor = torch.Tensor
plain_or_subclass = pytest.mark.parametrize("kind", [torch.Tensor, Plain])


# ---- subclasses by dispatch
B = W.t().contiguous()


@pytest.mark.parametrize(
    ("call", "want"),
    [
        pytest.param(lambda: linear(X, Dispatched(W), BIAS), PRODUCT, id="linear"),
        pytest.param(
            lambda: linear(X, Dispatched(W), BIAS, activation="gelu", residual=C),
            EPILOGUE,
            id="linear with an epilogue",
        ),
        pytest.param(lambda: matmul(X, Dispatched(B)), X @ B, id="matmul"),
        pytest.param(
            lambda: addmm(C, X, Dispatched(B), beta=2), torch.addmm(C, X, B, beta=2), id="addmm"
        ),
    ],
)
def test_a_subclass_by_dispatch_is_multiplied_by_torch(
    call: Callable[[], Tensor], want: Tensor
) -> None:
    assert torch.equal(call(), want)


def test_a_subclass_by_dispatch_is_seen_by_linear_itself() -> None:
    seen = []

    class Seeing(Dispatched):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
            seen.append(func)
            return super().__torch_dispatch__(func, types, args, kwargs)

    with torch.inference_mode():
        linear(X, Seeing(W))

    assert seen == [torch.ops.aten.linear.default]


# ---- plain subclasses
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: matmul(X.as_subclass(Plain), W.t()), id="matmul"),
        pytest.param(
            lambda: linear(X, W.as_subclass(Plain), BIAS, activation="relu"), id="linear relu"
        ),
        pytest.param(lambda: addmm(C, X, W.t().as_subclass(Plain)), id="addmm"),
    ],
)
def test_a_plain_subclass_stays_what_it_is(call: Callable[[], Tensor]) -> None:
    assert type(call()) is Plain


def test_a_plain_subclass_warns_where_it_is_called() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        linear(X, W.as_subclass(Plain))

    assert [(w.category, w.filename) for w in caught] == [(FallbackWarning, __file__)]


def test_a_plain_subclass_has_gradients() -> None:
    w = W.clone().as_subclass(Plain).requires_grad_()

    linear(X, w).sum().backward()

    assert torch.equal(w.grad, X.sum(0).expand(4, 5))


def test_no_type_is_asked_about_traits() -> None:
    out, x = sevens(), X.as_subclass(Sealed)

    got = linear(x, W, out=out)

    assert torch.equal(got.as_subclass(torch.Tensor), X @ W.t())
    assert torch.equal(out, X @ W.t())


def test_out_is_checked_without_asking_a_type_about_traits() -> None:
    with pytest.raises(OperandError, match=r"out.shape is \(6, 4\), expected \(6, 3\)"):
        linear(X.as_subclass(Sealed), W[:3], out=sevens())


# ---- what is refused of plain tensors and of subclasses
LEAF = W.clone().requires_grad_()
with torch.inference_mode():
    INFERENCE = sevens()

# By message: a call of x, which is X or a subclass of it, and out, which it must not write.
REFUSED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "out_dtype is torch.bfloat16, expected torch.float32": lambda x, out: matmul(
        x, W.t(), out_dtype=torch.bfloat16
    ),
    "other.dtype is torch.float32 but input.dtype is torch.bfloat16": lambda x, out: matmul(
        x.bfloat16(), W.t(), out_dtype=torch.float32
    ),
    "out is given with inputs that need gradients": lambda x, out: matmul(x, LEAF.t(), out=out),
    "aux is given with inputs that need gradients": lambda x, out: matmul(
        x, W.t(), bias=LEAF[:, 0], aux=out
    ),
    "out requires grad": lambda x, out: addmm(C, x, W.t(), out=out.requires_grad_()),
    "out is an inference tensor": lambda x, out: linear(x, W, out=INFERENCE),
    "out is on meta but": lambda x, out: linear(x, W, out=out.to("meta")),
    r"out.shape is \(6, 4\), expected \(5, 4\)": lambda x, out: matmul(x[:5], W.t(), out=out),
    "out.dtype is torch.float32, expected torch.float64": lambda x, out: matmul(
        x.double(), W.t().double(), out=out
    ),
    r"out has strides \(0, 1\)": lambda x, out: addmm(C, x, W.t(), out=out[:1].expand(6, 4)),
    "out is a view that negates": lambda x, out: linear(
        x, W, activation="relu", out=torch._neg_view(out)
    ),
    r"an even number of them, got shape \(6, 3\)": lambda x, out: linear(
        x, W[:3], BIAS[:1], activation="geglu"
    ),
    r"an even number of them, got shape \(6, 1\)": lambda x, out: matmul(
        x, W[:1].t(), activation="reglu"
    ),
    r"an even number of them, got shape \(\)": lambda x, out: matmul(
        x[0], W[0], activation="geglu", aux=out[0, 0]
    ),
    r"residual.shape is \(2, 6, 4\), expected a shape that broadcasts": lambda x, out: linear(
        x, W, residual=C.expand(2, 6, 4)
    ),
    "residual.dtype is torch.float64": lambda x, out: addmm(
        C, x, W.t(), residual=C.double(), out=out
    ),
    "input is NoneType, expected a torch.Tensor": lambda x, out: addmm(None, x, W.t(), out=out),
}


@plain_or_subclass
@pytest.mark.parametrize("message", REFUSED)
def test_subclasses_are_checked_as_plain_tensors(message: str, kind: type[Tensor]) -> None:
    out = sevens()

    with pytest.raises((OperandError, TypeError), match=message):
        REFUSED[message](X.as_subclass(kind), out)

    assert bool((out == 7).all())
    assert bool((INFERENCE == 7).all())


def test_an_odd_number_of_columns_is_refused_before_anything_is_computed() -> None:
    seen = []

    class Seeing(Plain):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    with pytest.raises(OperandError, match="an even number"):
        linear(X.as_subclass(Seeing), W[:3], activation="swiglu")

    assert F.linear not in seen


def test_the_wrong_type_of_a_scale_is_said_before_shapes_of_a_subclass() -> None:
    a, b, c = torch.ones(3, 4), torch.ones(4, 5).as_subclass(Plain), torch.ones(3, 5)

    with pytest.raises(TypeError, match=r"beta is a tensor of shape \(2,\)"):
        addmm(c, a, b, beta=torch.ones(2), activation="geglu")


# ---- autocast
THIRDS = X / 3  # which bf16 has to round
WIDE_PRODUCT = THIRDS.bfloat16().float() @ W.t()


@pytest.fixture
def autocast() -> Iterator[None]:
    """Autocast of the CPU to bf16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


@plain_or_subclass
@pytest.mark.usefixtures("autocast")
def test_autocast_narrows_operands(kind: type[Tensor]) -> None:
    assert matmul(THIRDS.as_subclass(kind), W.t()).dtype == torch.bfloat16


@plain_or_subclass
@pytest.mark.usefixtures("autocast")
def test_autocast_widens_the_product_that_a_call_asks_for(kind: type[Tensor]) -> None:
    wide = matmul(THIRDS.as_subclass(kind), W.t(), out_dtype=torch.float32, residual=C)

    assert wide.dtype == torch.float32
    assert torch.equal(wide, (WIDE_PRODUCT + C).as_subclass(kind))


@plain_or_subclass
@pytest.mark.usefixtures("autocast")
def test_autocast_refuses_dtypes_that_no_kernel_writes(kind: type[Tensor]) -> None:
    with pytest.raises(OperandError, match=r"out_dtype is torch\.float64"):
        matmul(THIRDS.as_subclass(kind), W.t(), out_dtype=torch.float64)


@plain_or_subclass
@pytest.mark.usefixtures("autocast")
def test_autocast_takes_no_out_of_the_narrow_dtype(kind: type[Tensor]) -> None:
    with pytest.raises(OperandError, match=r"out\.dtype is torch\.bfloat16"):
        linear(THIRDS.as_subclass(kind), W, out=sevens(dtype=torch.bfloat16))


@plain_or_subclass
@pytest.mark.parametrize(
    ("call", "want"),
    [
        pytest.param(lambda x, out: matmul(x, W.t(), out=out), THIRDS @ W.t(), id="matmul out"),
        pytest.param(
            lambda x, out: linear(x, W, BIAS, out=out), F.linear(THIRDS, W, BIAS), id="linear out"
        ),
        pytest.param(
            lambda x, out: addmm(C, x, W.t(), aux=out), torch.addmm(C, THIRDS, W.t()), id="aux"
        ),
    ],
)
@pytest.mark.parametrize("columns_first", [False, True], ids=["row-major", "column-major"])
def test_autocast_leaves_calls_that_write_a_tensor_alone(
    call: Callable[[Tensor, Tensor], Any], want: Tensor, columns_first: bool, kind: type[Tensor]
) -> None:
    out = sevens(4, 6).t() if columns_first else sevens()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        call(THIRDS.as_subclass(kind), out)

    assert torch.equal(out, want)


def test_writing_out_under_autocast_returns_fp32() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert matmul(THIRDS, W.t(), out=sevens()).dtype == torch.float32


def test_forward_mode_gradients_under_autocast_have_the_dtype_that_is_asked_for() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wide, tangent, *_ = torch.func.jvp(
            lambda x: matmul(x, W.t(), out_dtype=torch.float32), (THIRDS,), (X,)
        )

    assert (wide.dtype, tangent.dtype) == (torch.float32, torch.float32)
    assert torch.equal(wide, WIDE_PRODUCT)


def test_out_is_written_under_autocast_at_a_level_of_forward_mode() -> None:
    out = sevens(4, 6).t()

    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autograd.forward_ad.dual_level():
        matmul(THIRDS, W.t(), out=out)

    assert torch.equal(out, THIRDS @ W.t())


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


@pytest.mark.parametrize(
    ("call", "want"),
    [
        pytest.param(
            lambda x, w, bias, c: linear(x, w, bias, activation="gelu", residual=c),
            EPILOGUE,
            id="linear with an epilogue",
        ),
        pytest.param(lambda x, w, bias, c: matmul(x, w.t()), X @ W.t(), id="matmul"),
        pytest.param(
            lambda x, w, bias, c: addmm(c, x, w.t()), torch.addmm(C, X, W.t()), id="addmm"
        ),
    ],
)
def test_distributed_tensors_are_multiplied_by_torch(
    call: Callable[..., Any], want: Tensor, distributed: dict[str, DTensor]
) -> None:
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


# ---- nested tensors
def nested(layout: torch.layout) -> Tensor:
    """Two matrices, of six rows and of two."""
    return torch.nested.nested_tensor([X, X[:2]], layout=layout)


@pytest.mark.parametrize("other", ["matrix", "nested"])
def test_out_dtype_of_nested_tensors_is_checked(other: str) -> None:
    x = nested(torch.jagged)
    a, b = (x, W.t()) if other == "matrix" else (X, x)

    with pytest.raises(
        OperandError, match=r"out_dtype is torch\.bfloat16, expected torch\.float32"
    ):
        matmul(a, b, out_dtype=torch.bfloat16)


def test_an_odd_number_of_columns_of_nested_tensors_is_refused() -> None:
    with pytest.raises(OperandError, match=r"an even number of them, got shape \(2, j\d+, 3\)"):
        linear(nested(torch.jagged), W[:3], activation="geglu")


def test_nested_tensors_have_wider_products() -> None:
    x = nested(torch.jagged).bfloat16()

    wide = matmul(x, W.t().bfloat16(), out_dtype=torch.float32)

    assert torch.equal(wide.unbind()[0], X @ W.t())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_nested_tensors_are_multiplied_by_torch(
    activation: Activation | None, layout: torch.layout
) -> None:
    got = linear(nested(layout), W, BIAS, activation=activation).unbind()

    for part, x in zip(got, (X, X[:2]), strict=True):
        want = F.linear(x, W, BIAS)
        assert torch.equal(part, torch.relu(want) if activation else want)
