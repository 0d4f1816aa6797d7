"""The operators as torch sees them: schema, fake tensors, mutation, errors, lazy views."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.every_function import (
    A8,
    B8,
    BATCH,
    COUNTS,
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
CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "matmul": (ops.matmul.default, (A, B)),
    "matmul batched": (ops.matmul.default, (A.expand(3, 6, 5), B)),
    "matmul 1-D": (ops.matmul.default, (A[0], B)),
    "matmul wide": (ops.matmul.default, (A.half(), B.half(), torch.float32)),
    "matmul named": (ops.matmul.default, (A, B, None, "portable", "block_m=32")),
    "matmul_out": (ops.matmul_out.default, (A, B, torch.empty(6, 4))),
    "addmm": (ops.addmm.default, (C, A, B, 0.5, 2.0)),
    "addmm row": (ops.addmm.default, (C[0], A, B)),
    "addmm_out": (ops.addmm_out.default, (C, A, B, torch.empty(6, 4), 0.5, 2.0)),
    "gemm": (ops.gemm.default, (A, B, None, C[0], C, 1, 1, "gelu")),
    "gemm gated": (ops.gemm.default, (A, B, C[0], None, None, 0.5, 2.0, "swiglu")),
    "gemm_aux": (ops.gemm_aux.default, (A, B, None, C[0], None, 1, 1, "silu")),
    "gemm_out": (
        ops.gemm_out.default,
        (torch.empty(6, 4), torch.empty(6, 4), A, B, None, C[0], None, 1, 1, "gelu"),
    ),
    "activation_backward": (ops.activation_backward.default, (C[:, :2], C, "geglu")),
}
BIASES, INDEX = torch.randn(2, 16), torch.arange(6)
BESIDE = BIASES, torch.randn(6, 8), INDEX, INDEX.flip(0), torch.rand(6), "swiglu"
GROUPS = {
    "grouped_mm": (ops.grouped_mm.default, (ROWS, EXPERTS, OFFS)),
    "grouped_gemm": (ops.grouped_gemm.default, (ROWS, EXPERTS, OFFS, *BESIDE)),
    "grouped_gemm_aux": (ops.grouped_gemm_aux.default, (ROWS, EXPERTS, OFFS, *BESIDE)),
    "grouped_gemm_to_aux_out": (
        ops.grouped_gemm_to_aux.default,
        (torch.zeros(6, 16), ROWS, EXPERTS, OFFS, *BESIDE),
    ),
    "grouped_gemm with counts_out": (
        ops.grouped_gemm.default,
        (BATCH, EXPERTS, *[None] * 6, "swiglu", None, "", False, COUNTS),
    ),
    "moe_mlp": (
        ops.moe_mlp.default,
        (ROWS, EXPERTS, torch.randn(2, 8, 8), ROUTES, WEIGHTS, "swiglu", BIASES, None),
    ),
    "moe_mlp of transposed matrices": (
        ops.moe_mlp.default,
        (ROWS, EXPERTS.mT.contiguous().mT, torch.randn(2, 8, 8), ROUTES, WEIGHTS, "swiglu"),
    ),
    "quantize_out": (ops.quantize.default, (torch.randn(130, 200), "1x128")),
}
CALLS |= GROUPS
CALLS_WITH_GRADIENTS = [name for name in CALLS if "_out" not in name]
BLOCK_SCALES = torch.ones(6, 3), torch.ones(3, 2)
OF_FP8: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "scaled_mm": (ops.scaled_mm.default, (A8, B8, ONE, ONE)),
    "scaled_mm with scales of blocks": (
        ops.scaled_mm.default,
        (torch.zeros(6, 300).to(E4M3), torch.zeros(200, 300).to(E4M3).t(), *BLOCK_SCALES),
    ),
    "scaled_mm with gradients": (
        ops.scaled_mm.default,
        (A8, B8, ONE, ONE, torch.ones(8).bfloat16().requires_grad_(), None, False, "gelu"),
    ),
    "scaled_mm_quantized": (
        ops.scaled_mm_quantized.default,
        (A8, B8, ONE, ONE, "1x128", torch.randn(8), True, False, "gelu"),
    ),
    "scaled_grouped_mm": (
        ops.scaled_grouped_mm.default,
        (ROWS.to(E4M3), EXPERTS.to(E4M3), *GROUP_SCALES, OFFS),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    operator, arguments = CALLS[name]

    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("name", CALLS_WITH_GRADIENTS)
def test_opcheck_where_tensors_need_gradients(name: str) -> None:
    operator, arguments = CALLS[name]
    leaves = tuple(
        t.clone().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t
        for t in arguments
    )

    torch.library.opcheck(operator, leaves)


@pytest.mark.parametrize("name", OF_FP8)
def test_opcheck_of_fp8(name: str) -> None:
    """The check of the schema knows no fp8."""
    operator, arguments = OF_FP8[name]
    checks = ["test_autograd_registration", "test_faketensor"]
    checks += ["test_aot_dispatch_dynamic"] * ("grouped" not in name)

    torch.library.opcheck(operator, arguments, test_utils=checks)


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
TOO_LARGE = {
    "addmm": lambda: ops.addmm(C, A, B, 1, 1e39),
    "addmm_out": lambda: ops.addmm_out(C, A, B, torch.empty(6, 4), 1, 1e39),
    "gemm": lambda: ops.gemm(A, B, C, C[0], None, 1, 1e39),
    "gemm_aux": lambda: ops.gemm_aux(A, B, C, None, None, 1, 1e39, "gelu"),
    "gemm_out": lambda: ops.gemm_out(torch.empty(6, 4), None, A, B, C, C[0], None, 1, 1e39),
}


@pytest.mark.parametrize("operator", TOO_LARGE)
def test_a_scalar_that_float32_cannot_hold_is_refused(operator: str) -> None:
    """A kernel would take it for infinity."""
    with pytest.raises(OperandError, match=r"beta is 1e\+39, expected a number that float32 can"):
        TOO_LARGE[operator]()


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


@pytest.mark.parametrize("error", [RuntimeError, ValueError, OperandError])
@pytest.mark.parametrize("name", REFUSED)
def test_an_error_is_caught_as_torchs_and_as_ours(name: str, error: type[Exception]) -> None:
    out = sevens()

    with pytest.raises(error) as caught:
        REFUSED[name](out)

    assert type(caught.value) is OperandError
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
@pytest.mark.parametrize("lazy_operand", [False, True], ids=["plain a", "lazy a"])
@pytest.mark.parametrize("operator", PRODUCTS)
def test_operators_write_through_lazy_views(operator: str, lazy_operand: bool, lazy: str) -> None:
    write, product = PRODUCTS[operator]
    view, (a, b, c) = LAZY_VIEWS[lazy], operands_for(lazy)
    a = view(a) if lazy_operand else a
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


@pytest.mark.parametrize(
    ("write", "message"),
    [
        pytest.param(
            lambda out: ops.matmul_out(A[:, :4], B, torch._neg_view(out)),
            r"a.shape\[1\] is 4",
            id="inner size",
        ),
        pytest.param(
            lambda out: ops.matmul_out(A[:5], B, torch._neg_view(out)), "out.shape", id="rows"
        ),
        pytest.param(
            lambda out: ops.matmul_out(out, B[:4], torch._neg_view(out)),
            "out overlaps a in memory",
            id="overlap",
        ),
        pytest.param(
            lambda out: ops.matmul_out(A, B, torch._neg_view(out[:1].expand(6, 4))),
            "elements share memory",
            id="expanded",
        ),
    ],
)
def test_a_lazy_view_that_does_not_fit_is_not_written(
    write: Callable[[Tensor], object], message: str
) -> None:
    out = sevens()

    with pytest.raises(OperandError, match=message):
        write(out)

    assert out.eq(7).all()
