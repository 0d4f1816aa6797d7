"""The operators as torch sees them: schema, fake tensors, mutation, errors, lazy views."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.every_function import (
    A8,
    B8,
    E4M3,
    EXPERTS,
    GROUP_SCALES,
    OFFS,
    ONE,
    ROUTES,
    ROWS,
    WEIGHTS,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from outblas import OperandError, addmm, matmul

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

Tensor = torch.Tensor
ops = torch.ops.outblas
A, B, C = (torch.randint(-8, 9, shape).float() for shape in ((6, 5), (5, 4), (6, 4)))


def sevens() -> Tensor:
    """An output that is full of sevens, so that a test sees whether it was written."""
    return torch.full((6, 4), 7.0)


# ---- schemas
BIASES, INDEX = torch.randn(2, 16), torch.arange(6)
BESIDE = BIASES, torch.randn(6, 8), INDEX, INDEX.flip(0), torch.rand(6), "swiglu"
CALLS: dict[str, tuple[Any, ...]] = {
    "matmul": (A.expand(3, 6, 5), B),
    "matmul_out": (A, B, torch.empty(6, 4)),
    "addmm": (C[0], A, B, 0.5, 2.0),
    "addmm_out": (C, A, B, torch.empty(6, 4), 0.5, 2.0),
    "gemm": (A, B, C[0], None, None, 0.5, 2.0, "swiglu"),
    "gemm_aux": (A, B, None, C[0], None, 1, 1, "silu"),
    "gemm_out": (torch.empty(6, 4), torch.empty(6, 4), A, B, None, C[0], None, 1, 1, "gelu"),
    "activation_backward": (C[:, :2], C, "geglu"),
    "grouped_mm": (ROWS, EXPERTS, OFFS),
    "grouped_gemm": (ROWS, EXPERTS, OFFS, *BESIDE),
    "grouped_gemm_aux": (ROWS, EXPERTS, OFFS, *BESIDE),
    "grouped_gemm_to_aux": (torch.zeros(6, 16), ROWS, EXPERTS, OFFS, *BESIDE),
    "moe_mlp": (ROWS, EXPERTS, torch.randn(2, 8, 8), ROUTES, WEIGHTS, "swiglu", BIASES, None),
    "quantize": (torch.randn(130, 200), "1x128"),
}
WITHOUT_GRADIENTS = "matmul_out", "addmm_out", "gemm_out", "grouped_gemm_to_aux", "quantize"
OF_FP8: dict[str, tuple[str, tuple[Any, ...]]] = {
    "scales of blocks": (
        "scaled_mm",
        (
            *(torch.zeros(6, 300).to(E4M3), torch.zeros(200, 300).to(E4M3).t()),
            *(torch.ones(6, 3), torch.ones(3, 2)),
        ),
    ),
    "gradients": (
        "scaled_mm",
        (A8, B8, ONE, ONE, torch.ones(8).bfloat16().requires_grad_(), None, False, "gelu"),
    ),
    "an fp8 result": (
        "scaled_mm_quantized",
        (A8, B8, ONE, ONE, "1x128", torch.randn(8), True, False, "gelu"),
    ),
    "groups": (
        "scaled_grouped_mm",
        (ROWS.to(E4M3), EXPERTS.to(E4M3), *GROUP_SCALES, OFFS),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    """With gradients where the operator has them."""
    arguments = tuple(
        t.clone().requires_grad_(t.is_floating_point() and name not in WITHOUT_GRADIENTS)
        if isinstance(t, Tensor)
        else t
        for t in CALLS[name]
    )

    torch.library.opcheck(getattr(ops, name).default, arguments)


@pytest.mark.parametrize("name", OF_FP8)
def test_opcheck_of_fp8(name: str) -> None:
    """The check of the schema knows no fp8."""
    operator, arguments = OF_FP8[name]
    checks = ["test_autograd_registration", "test_faketensor"]
    checks += ["test_aot_dispatch_dynamic"] * ("grouped" not in operator)

    torch.library.opcheck(getattr(ops, operator).default, arguments, test_utils=checks)


# ---- what operators write
def device_of(kind: str) -> str:
    return "meta" if kind == "meta" else "cpu"


def mode_of(kind: str) -> contextlib.AbstractContextManager[Any]:
    """The mode in which tensors are of this kind."""
    return (
        FakeTensorMode(allow_non_fake_inputs=True) if kind == "fake" else contextlib.nullcontext()
    )


kinds = pytest.mark.parametrize("kind", ["real", "fake", "meta"])
# Operators that write `out`, and the operands that they take beside it.
WRITERS: dict[str, Callable[..., object]] = {
    "matmul_out": lambda a, b, c, out, aux: ops.matmul_out(a, b, out),
    "addmm_out": lambda a, b, c, out, aux: ops.addmm_out(c, a, b, out),
    "gemm_out": lambda a, b, c, out, aux: ops.gemm_out(out, aux, a, b, None, None, None),
}


@kinds
@pytest.mark.parametrize("operator", WRITERS)
def test_versions_of_what_is_written_grow(operator: str, kind: str) -> None:
    device = device_of(kind)
    with mode_of(kind):
        out, aux = (torch.empty(6, 4, device=device) for _ in range(2))
        versions = out._version, aux._version

        WRITERS[operator](*(t.to(device) for t in (A, B, C)), out, aux)

        assert out._version > versions[0]
        assert (aux._version > versions[1]) == (operator == "gemm_out")


# ---- scalars
TOO_LARGE: list[Callable[[], object]] = [
    lambda: ops.addmm(C, A, B, 1, 1e39),
    lambda: ops.addmm_out(C, A, B, torch.empty(6, 4), 1, 1e39),
    lambda: ops.gemm(A, B, C, C[0], None, 1, 1e39),
    lambda: ops.gemm_aux(A, B, C, None, None, 1, 1e39, "gelu"),
    lambda: ops.gemm_out(torch.empty(6, 4), None, A, B, C, C[0], None, 1, 1e39),
]


def test_a_scalar_that_float32_cannot_hold_is_refused() -> None:
    """A kernel would take it for infinity."""
    for call in TOO_LARGE:
        with pytest.raises(OperandError, match=r"beta is 1e\+39, expected a number that float32"):
            call()


# ---- activations and epilogues
@pytest.fixture
def of_kind(kind: str) -> Callable[[Tensor], Tensor]:
    """Makes a tensor one of this kind."""
    if kind == "fake":
        return FakeTensorMode().from_tensor
    return lambda t: t.to(device_of(kind))


UNKNOWN_ACTIVATION = "activation is 'tanh', expected '' or one of relu, gelu"


@kinds
def test_a_name_that_is_no_activation_is_refused_and_nothing_written(
    kind: str, of_kind: Callable[[Tensor], Tensor]
) -> None:
    a, b, c, out, aux = (of_kind(t) for t in (A, B, C, sevens(), sevens()))

    with pytest.raises(ValueError, match=UNKNOWN_ACTIVATION):
        ops.gemm_out(out, aux, a, b, c, None, None, 1, 1, "tanh")
    for operator in (ops.gemm, ops.gemm_aux):
        with pytest.raises(ValueError, match=UNKNOWN_ACTIVATION):
            operator(a, b, c, None, None, 1, 1, "tanh")
    if kind == "real":  # the others have no values
        assert out.eq(7).all()
        assert aux.eq(7).all()


# ---- errors
LEAF = A.clone().requires_grad_()
REFUSED: dict[str, Callable[[Tensor], object]] = {
    "matmul_out with gradients": lambda out: ops.matmul_out(LEAF, B, out),
    "addmm_out with gradients": lambda out: ops.addmm_out(C, LEAF, B, out),
    "gemm_out with gradients": lambda out: ops.gemm_out(out, None, LEAF, B),
    "alpha without c": lambda out: ops.gemm(A, B, None, None, None, 2),
    "wide product beside a narrow c": lambda out: ops.gemm(
        A.half(), B.half(), C.half(), None, None, 1, 1, "", torch.float32
    ),
    "gradient of too few columns": lambda out: ops.activation_backward(C[:, :3], C, "gelu"),
    "gradient of no half": lambda out: ops.activation_backward(C[:, :3], C, "swiglu"),
    "odd number of columns": lambda out: ops.activation_backward(C[:, :1], C[:, :3], "swiglu"),
    "no columns": lambda out: ops.activation_backward(C[0, 0], C[0, 0], "swiglu"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_is_caught_as_torchs_and_as_ours(name: str) -> None:
    out = sevens()

    with pytest.raises(OperandError) as caught:
        REFUSED[name](out)

    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, ValueError)
    assert out.eq(7).all()


# ---- views that change what they show
LAZY_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch._neg_view,
    "conj": lambda t: t.conj(),
    "neg conj": lambda t: torch._neg_view(t).conj(),
}
# Operators that write a product, and the function that returns it.
PRODUCTS: dict[str, tuple[Callable[..., object], Callable[..., Tensor]]] = {
    "matmul_out": (
        lambda out, a, b, c: ops.matmul_out(a, b, out),
        lambda a, b, c: matmul(a, b),
    ),
    "addmm_out": (
        lambda out, a, b, c: ops.addmm_out(c, a, b, out, 2, 3),
        lambda a, b, c: addmm(c, a, b, alpha=2, beta=3),
    ),
    "gemm_out": (
        lambda out, a, b, c: ops.gemm_out(out, None, a, b, None, c),
        lambda a, b, c: matmul(a, b, bias=c),
    ),
}
lazy_views = pytest.mark.parametrize("lazy", LAZY_VIEWS)


def operands_for(lazy: str) -> list[Tensor]:
    """A, B and C, complex where a view conjugates."""
    if "conj" not in lazy:
        return [A, B, C]
    a, b, c = (t.to(torch.complex64) for t in (A, B, C))
    return [a + 1j, b, c]


@lazy_views
@pytest.mark.parametrize("operator", PRODUCTS)
def test_operators_write_through_lazy_views(operator: str, lazy: str) -> None:
    write, product = PRODUCTS[operator]
    view, (plain, b, c) = LAZY_VIEWS[lazy], operands_for(lazy)
    for a in (plain, view(plain)):
        out = view(torch.full((6, 4), torch.nan, dtype=a.dtype))
        version = out._version

        write(out, a, b, c)

        assert torch.equal(out, product(a, b, c))
        assert out._version > version


@lazy_views
def test_a_lazy_view_may_be_addend_and_out(lazy: str) -> None:
    a, b, c = operands_for(lazy)
    out = LAZY_VIEWS[lazy](c.clone())
    want = addmm(out.clone(), a, b)

    ops.addmm_out(out, a, b, out)

    assert torch.equal(out, want)


WRONG_VIEWS: dict[str, Callable[[Tensor], object]] = {
    r"a.shape\[1\] is 4": lambda out: ops.matmul_out(A[:, :4], B, torch._neg_view(out)),
    "out.shape": lambda out: ops.matmul_out(A[:5], B, torch._neg_view(out)),
    "out overlaps a in memory": lambda out: ops.matmul_out(out, B[:4], torch._neg_view(out)),
    "elements share memory": lambda out: ops.matmul_out(
        A, B, torch._neg_view(out[:1].expand(6, 4))
    ),
}


@pytest.mark.parametrize("message", WRONG_VIEWS)
def test_a_lazy_view_that_does_not_fit_is_not_written(message: str) -> None:
    out = sevens()

    with pytest.raises(OperandError, match=message):
        WRONG_VIEWS[message](out)

    assert out.eq(7).all()
