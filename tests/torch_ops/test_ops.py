"""The operators as torch sees them: schema, fake, mutation, tracing."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from outblas import OperandError, addmm, matmul

ops = torch.ops.outblas
A, B, C = (torch.randint(-8, 9, shape).float() for shape in ((6, 5), (5, 4), (6, 4)))

CALLS = {
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


@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
@pytest.mark.parametrize("grown", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str, grown: bool) -> None:
    op, arguments = CALLS[name]
    if grown and "_out" not in name:
        arguments = tuple(
            t.clone().requires_grad_() if isinstance(t, torch.Tensor) else t for t in arguments
        )
    torch.library.opcheck(op, arguments)


def test_fake_checks_like_the_real_one() -> None:
    with FakeTensorMode() as mode:
        a, b = mode.from_tensor(A), mode.from_tensor(B)
        assert ops.matmul(a, b).shape == (6, 4)
        assert ops.matmul(a.half(), b.half(), torch.float32).dtype == torch.float32
        with pytest.raises(ValueError, match=r"a.shape\[1\] is 5 but b.shape\[0\] is 4"):
            ops.matmul(a, b[:4])
        with pytest.raises(ValueError, match=r"out\.dtype is"):
            ops.matmul_out(a, b, mode.from_tensor(torch.empty(6, 4, dtype=torch.float64)))


OUTS = {
    "matmul_out": lambda out, aux: ops.matmul_out(A.to(out.device), B.to(out.device), out),
    "addmm_out": lambda out, aux: ops.addmm_out(*(t.to(out.device) for t in (C, A, B)), out),
    "gemm_out": lambda out, aux: ops.gemm_out(
        out, aux, *(t.to(out.device) for t in (A, B)), None, None, None
    ),
}


@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
@pytest.mark.parametrize("kind", ["real", "fake", "meta"])
@pytest.mark.parametrize("name", OUTS)
def test_versions_of_what_is_written_grow(name, kind: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) if kind == "fake" else contextlib.nullcontext():
        out, aux = (torch.empty(6, 4, device="meta" if kind == "meta" else "cpu") for _ in range(2))
        before = out._version, aux._version
        OUTS[name](out, aux)
        assert out._version > before[0]
        assert (aux._version > before[1]) == (name == "gemm_out")


@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
@pytest.mark.parametrize("kind", ["real", "fake", "meta"])
@pytest.mark.parametrize("operator", ["gemm", "gemm_aux", "gemm_out"])
def test_a_name_that_is_no_activation(operator: str, kind: str) -> None:
    with FakeTensorMode() as mode:
        make = {"fake": mode.from_tensor, "meta": lambda t: t.to("meta"), "real": lambda t: t}[kind]
    a, b, c, out, aux = map(make, (A, B, C, torch.full((6, 4), 7.0), torch.full((6, 4), 7.0)))
    written = [out, aux] if operator == "gemm_out" else []
    for given in ((a, b), (a.clone().requires_grad_(), b)):
        if written and given[0].requires_grad:
            continue
        with pytest.raises(
            ValueError, match="activation is 'tanh', expected '' or one of relu, gelu"
        ):
            getattr(ops, operator)(*written, *given, c, None, None, 1, 1, "tanh")
    if kind == "real":
        assert out.eq(7).all()
        assert aux.eq(7).all()


@pytest.mark.interpreter
@pytest.mark.parametrize("written", [False, True])
def test_an_operator_without_an_epilogue(written: bool) -> None:
    """Its call brings an epilogue of nothing, with which a kernel is planned as for a bare
    product.
    """
    a, b = torch.randn(8, 16), torch.randn(16, 8)
    if written:
        found = torch.full((8, 8), float("nan"))
        torch.ops.outblas.gemm_out(found, None, a, b, None, None, None, 1, 0, "", None, "portable")
    else:
        found = torch.ops.outblas.gemm(a, b, None, None, None, 1, 0, "", None, "portable")
    torch.testing.assert_close(found, a @ b)


def test_torchs_errors_are_caught_as_its_own() -> None:
    x, out = A.clone().requires_grad_(), torch.full((6, 4), 7.0)
    calls = [
        lambda: ops.matmul_out(x, B, out),
        lambda: ops.addmm_out(C, x, B, out),
        lambda: ops.gemm_out(out, None, x, B),
        lambda: ops.gemm(A, B, None, None, None, 2),
        lambda: ops.gemm(A.half(), B.half(), C.half(), None, None, 1, 1, "", torch.float32),
        lambda: ops.activation_backward(C[:, :3], C, "gelu"),
        lambda: ops.activation_backward(C[:, :3], C, "swiglu"),
        lambda: ops.activation_backward(C[:, :1], C[:, :3], "swiglu"),
        lambda: ops.activation_backward(C[0, 0], C[0, 0], "swiglu"),
    ]
    for call in calls:
        with pytest.raises(OperandError) as caught:
            call()
        assert isinstance(caught.value, RuntimeError)
        assert isinstance(caught.value, ValueError)
    assert out.eq(7).all()


@pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")
@pytest.mark.parametrize("lazy", ["neg", "conj", "neg conj"])
def test_operators_write_through_lazy_views(lazy: str) -> None:
    dtype = torch.complex64 if "conj" in lazy else torch.float32
    a, b, c = (t.to(dtype) for t in (A, B, C))
    if dtype.is_complex:
        a = a + 1j

    def view(t):
        t = torch._neg_view(t) if "neg" in lazy else t
        return t.conj() if "conj" in lazy else t

    calls = {
        "matmul": (lambda out, a: ops.matmul_out(a, b, out), lambda a: matmul(a, b)),
        "addmm": (
            lambda out, a: ops.addmm_out(c, a, b, out, 2, 3),
            lambda a: addmm(c, a, b, alpha=2, beta=3),
        ),
        "gemm": (
            lambda out, a: ops.gemm_out(out, None, a, b, None, c),
            lambda a: matmul(a, b, bias=c),
        ),
    }
    for write, make in calls.values():
        for operand in (a, view(a)):
            out = view(torch.full((6, 4), torch.nan, dtype=dtype))
            version = out._version
            write(out, operand)
            assert torch.equal(out, make(operand))
            assert out._version > version
    memory = c.clone()
    out = view(memory)
    want = addmm(out.clone(), a, b)
    ops.addmm_out(out, a, b, out)
    assert torch.equal(out, want)


def test_a_lazy_view_that_does_not_fit_is_not_written() -> None:
    out = torch.full((6, 4), 7.0)
    for wrong in (A[:, :4], A[:5]):
        with pytest.raises(OperandError):
            ops.matmul_out(wrong, B, torch._neg_view(out))
    with pytest.raises(OperandError, match="out overlaps a in memory"):
        ops.matmul_out(out, B[:4], torch._neg_view(out))
    with pytest.raises(OperandError, match="elements share memory"):
        ops.matmul_out(A, B, torch._neg_view(out[:1].expand(6, 4)))
    assert out.eq(7).all()
