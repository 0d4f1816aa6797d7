"""Gradients against finite differences and against torch's autograd, what they cost, where they lie
in memory, and the kernel of an activation's derivative.
"""

import contextlib
import random
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from triton.runtime.interpreter import InterpretedFunction

from outblas import FallbackWarning, addmm, batch_invariant, linear, matmul
from outblas.core import invariance
from outblas.core.epilogue import ACTIVATIONS, GATED, apply
from outblas.kernels import activation as kernels
from outblas.runtime import dispatch
from outblas.torch_ops import activation_backward, autograd, autograd_levels, ops
from outblas.torch_ops.activation_backward import formula

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")


def grown(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def fused(activation: str | None) -> Callable[..., Any]:
    return lambda x, w, bias, residual: linear(x, w, bias, activation=activation, residual=residual)


CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    f"matmul {a} {b}": (matmul, [a, b])
    for a, b in [
        ((3, 4), (4, 2)),
        ((4,), (4,)),
        ((4,), (4, 2)),
        ((3, 4), (4,)),
        ((2, 3, 4), (4, 2)),
        ((2, 2, 3, 4), (1, 4, 2)),
        ((3, 4), (2, 4, 2)),
        ((2, 1, 3, 4), (3, 4, 2)),
        ((2, 3, 4), (4,)),
        ((4,), (2, 4, 2)),
    ]
}
for alpha, beta in ((1, 1), (0.5, -2.0), (3, 0)):
    for c in ((3, 2), (2,), (3, 1), ()):
        call = lambda c, a, b, s=alpha, t=beta: addmm(c, a, b, alpha=s, beta=t)  # noqa: E731
        CASES[f"addmm {c} {alpha} {beta}"] = call, [c, (3, 4), (4, 2)]
for name in (None, *ACTIVATIONS):
    columns = 4 if name in GATED else 2
    CASES[f"linear {name}"] = fused(name), [(2, 3, 4), (columns, 4), (columns,), (3, 2)]
CASES["addmm swiglu"] = (
    lambda c, a, b, bias: addmm(c, a, b, alpha=0.5, beta=-2.0, bias=bias, activation="swiglu"),
    [(1, 4), (3, 4), (4, 4), (3, 1)],
)
CASES["dot gelu"] = lambda a, b, bias: matmul(a, b, bias=bias, activation="gelu"), [(4,), (4,), ()]
CASES["gemm_aux"] = (
    lambda a, b, bias: ops.gemm_aux(a, b, None, bias, None, 1, 1, "gelu"),
    [(3, 4), (4, 2), (2,)],
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_first_and_second_derivatives(name: str, dtype) -> None:
    call, shapes = CASES[name]
    tensors = grown(*shapes, dtype=dtype)
    if dtype.is_complex and not torchs_own(call, tensors):
        return
    assert gradcheck(call, tensors)
    assert gradgradcheck(call, tensors)


@pytest.mark.parametrize(
    "shapes",
    [((0, 4), (4, 2)), ((3, 0), (0, 2)), ((0, 3, 4), (4, 2))],
    ids=["no rows", "no terms", "no batch"],
)
def test_empty_products_have_torchs_gradients(shapes: tuple[tuple[int, ...], ...]) -> None:
    tensors = grown(*shapes)
    got, want = matmul(*tensors), torch.matmul(*tensors)
    torch.testing.assert_close(got, want)
    weight = torch.ones_like(want)
    torch.testing.assert_close(
        torch.autograd.grad(got, tensors, weight), torch.autograd.grad(want, tensors, weight)
    )


def torchs_own(call, tensors):
    """Whether torch's activations take complex tensors: if not, its own error comes."""
    try:
        call(*tensors)
    except (RuntimeError, NotImplementedError) as error:
        assert re.search(
            "not supported for complex|not implemented for 'Complex|outputs with complex",
            str(error),
        )
        return False
    return True


def test_a_wide_product_has_gradients_of_its_operands_dtype() -> None:
    a, b, bias = *grown((9, 16), (16, 8), dtype=torch.bfloat16), *grown((8,), dtype=torch.float32)
    wide = [t.detach().float().requires_grad_() for t in (a, b, bias)]
    matmul(a, b, out_dtype=torch.float32, bias=bias, activation="silu").square().sum().backward()
    torch.nn.functional.silu(wide[0] @ wide[1] + wide[2]).square().sum().backward()
    for got, want in zip((a, b, bias), wide, strict=True):
        assert got.grad.dtype == got.dtype
        assert torch.linalg.vector_norm(got.grad - want.grad) < 2**-7 * torch.linalg.vector_norm(
            want.grad
        )


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[torch.Size, ...]]]:
    """Shapes of A and B, and of x where it was stored, of each product."""
    seen = []

    def by_torch(*given: Any, made: Any = dispatch._fallback_plan) -> Any:
        run = made(*given)

        def execute(*tensors: Any) -> Any:
            seen.append(tuple(t.shape for t in (*tensors[:2], *tensors[8:]) if t is not None))
            return run(*tensors)

        return execute

    monkeypatch.setattr(dispatch, "_fallback_plan", by_torch)
    dispatch.clear_cache()
    yield seen
    dispatch.clear_cache()


@pytest.mark.parametrize("needed", ["", "x", "w", "bias", "x w bias"])
def test_nothing_needless_is_multiplied_or_kept(needed: str, launched: list[Any]) -> None:
    tensors = {"x": torch.randn(2, 3, 4), "w": torch.randn(5, 4), "bias": torch.randn(5)}
    for name, t in tensors.items():
        t.requires_grad_(name in needed.split())
    backward = {"x": ((2, 3, 5), (5, 4)), "w": ((5, 6), (6, 4))}
    for activation in (None, "gelu"):
        for _ in range(3):  # cold and warm
            launched.clear()
            y = linear(*tensors.values(), activation=activation)
            assert launched == [
                ((2, 3, 4), (4, 5), *([(2, 3, 5)] if activation and needed else []))
            ]
            launched.clear()
            if needed:
                y.sum().backward()
            assert launched == [backward[name] for name in needed.split() if name in backward]


def test_warm_calls_go_on_having_gradients() -> None:
    a, b = grown((6, 5), (5, 4), dtype=torch.float32)
    for i in range(4):
        (first,) = torch.autograd.grad(matmul(a, b).square().sum(), a, create_graph=i % 2 == 0)
        torch.testing.assert_close(first, 2 * a @ b @ b.t())
        assert first.requires_grad == (i % 2 == 0)
        with torch.no_grad():
            assert not matmul(a, b).requires_grad
        assert not matmul(a.detach(), b.detach()).requires_grad
    matmul(a, b, kernel="portable").sum().backward()
    torch.testing.assert_close(a.grad, b.detach().sum(1).expand(6, 5))
    for written in ({"out": torch.empty(6, 4)}, {"bias": b[0], "aux": torch.empty(6, 4)}):
        with pytest.raises(ValueError, match="is given with inputs that need gradients"):
            matmul(a, b, **written)
    with pytest.raises(ValueError, match="out is given with inputs that need gradients"):
        ops.matmul_out(a, b, torch.empty(6, 4))


def test_checkpointed() -> None:
    tensors = grown((6, 5), (4, 5), (4,), (4,))
    y = torch.utils.checkpoint.checkpoint(fused("gelu"), *tensors, use_reentrant=False)
    want = apply(torch.nn.functional.linear(*tensors[:3]), "gelu", tensors[3])
    torch.testing.assert_close(*(torch.autograd.grad(t.square().sum(), tensors) for t in (y, want)))


# ---- against torch's autograd
SIZES = 0, 1, 2, 3, 5
CALLS = 400


class Draw(random.Random):
    """Random operands, and how they lie in memory."""

    def tensor(self, shape, dtype):
        """A leaf, and a view of it that has this shape: as it is, transposed, with gaps, repeated,
        turned around.
        """
        form, shape = self.choice(["", "transposed", "gaps", "repeated", "outer"]), list(shape)
        if form == "transposed" and len(shape) > 1:
            leaf = torch.randn(*shape[:-2], shape[-1], shape[-2], dtype=dtype)
            return leaf, lambda t: t.mT
        if form == "gaps" and shape:
            leaf = torch.randn(*shape[:-1], 2 * shape[-1] + 1, dtype=dtype)
            return leaf, lambda t: t[..., 1::2]
        if form == "repeated" and shape:
            narrow = list(shape)
            narrow[self.randrange(len(shape))] = 1
            return torch.randn(narrow, dtype=dtype), lambda t: t.expand(shape)
        if form == "outer" and len(shape) > 2:
            leaf = torch.randn(*shape[1:], shape[0], dtype=dtype)
            return leaf, lambda t: t.movedim(-1, 0)
        return torch.randn(shape, dtype=dtype), lambda t: t

    def part(self, shape):
        """A shape that broadcasts to this one."""
        kept = [n if self.random() < 0.7 else 1 for n in shape]
        return kept[self.randrange(len(kept) + 1) :] if self.random() < 0.4 else kept

    def call(self, dtype):
        """A call of ours and torch's, as functions of leaves; the leaves; which of them need
        gradients.
        """
        M, N, K = (self.choice(SIZES) for _ in range(3))
        with_c = self.random() < 0.4
        activation = "" if dtype.is_complex or self.random() < 0.5 else self.choice(ACTIVATIONS)
        N = 2 * N if activation in GATED else N
        if with_c:
            batch_a, batch_b = [], []
        else:
            batch = [self.choice(SIZES) for _ in range(self.choice((0, 0, 1, 2)))]
            batch_a, batch_b = self.part(batch), self.part(batch)
        shape_a = [K] if not (with_c or batch_a) and self.random() < 0.3 else [*batch_a, M, K]
        shape_b = (
            [K]
            if not (with_c or batch_b or activation in GATED) and self.random() < 0.3
            else [*batch_b, K, N]
        )
        shape_x = (torch.empty(shape_a) @ torch.empty(shape_b)).shape
        shape_y = (*shape_x[:-1], shape_x[-1] // 2) if activation in GATED else shape_x
        shapes = {"a": shape_a, "b": shape_b}
        if with_c:
            shapes["c"] = self.part(shape_x)
        for name, shape in (("bias", shape_x), ("residual", shape_y)):
            if self.random() < 0.4:
                shapes[name] = self.part(shape)
        made = {name: self.tensor(shape, dtype) for name, shape in shapes.items()}
        leaves = [leaf.requires_grad_(self.random() < 0.7) for leaf, _ in made.values()]
        alpha, beta = (self.choice((0, 1, 1, -0.5, 2)) if with_c else 1 for _ in range(2))

        def operands(leaves):
            found = {
                name: view(leaf)
                for leaf, (name, (_, view)) in zip(leaves, made.items(), strict=True)
            }
            return [found.get(name) for name in ("a", "b", "c", "bias", "residual")]

        def ours(*leaves):
            a, b, c, bias, residual = operands(leaves)
            how = {"bias": bias, "residual": residual, "activation": activation or None}
            return addmm(c, a, b, alpha=alpha, beta=beta, **how) if with_c else matmul(a, b, **how)

        def torchs(*leaves):
            a, b, c, bias, residual = operands(leaves)
            x = torch.addmm(c, a, b, alpha=alpha, beta=beta) if with_c else torch.matmul(a, b)
            return apply(x if bias is None else x + bias, activation, residual)

        return (ours, torchs), leaves, (shapes, activation, alpha, beta)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_random_calls_have_torchs_gradients(dtype) -> None:
    """Of first and second order, for random shapes, views, subsets of leaves that need gradients,
    and strided g.
    """
    draw = Draw(7)
    torch.manual_seed(7)
    for _ in range(CALLS):
        pair, leaves, what = draw.call(dtype)
        grown = [leaf for leaf in leaves if leaf.requires_grad]
        outputs = [call(*leaves) for call in pair]
        torch.testing.assert_close(*outputs, msg=lambda text, what=what: f"{what}: {text}")
        assert outputs[0].requires_grad == bool(grown), what
        if not grown:
            continue
        memory, view = draw.tensor(outputs[0].shape, dtype)
        memory.requires_grad_()
        orders = []
        for y in outputs:
            first = torch.autograd.grad(
                y, grown, view(memory), create_graph=True, materialize_grads=True
            )
            loss = sum((t * t.conj()).sum().real for t in first if t.requires_grad)
            leaves_of_g = [memory, *grown]
            second: tuple[torch.Tensor, ...] = ()
            if isinstance(loss, torch.Tensor) and loss.requires_grad:
                second = torch.autograd.grad(loss, leaves_of_g, materialize_grads=True)
            orders.append([*first, *second])
        torch.testing.assert_close(*orders, msg=lambda text, what=what: f"{what}: {text}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_of_two_outputs_one_may_have_no_gradient(used, dtype) -> None:
    tensors = grown((3, 4), (4, 2), (2,), (3, 2), dtype=dtype)
    a, b, bias, residual = tensors
    activation = "" if dtype.is_complex else "gelu"
    ours = ops.gemm_aux(a, b, None, bias, residual, 1, 1, activation)
    x = a @ b + bias
    torchs = apply(x, activation, residual), x
    how: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    first, second = (
        torch.autograd.grad(sum(t[i].abs().sum() for i in used), tensors, **how)
        for t in (ours, torchs)
    )
    torch.testing.assert_close(first, second)


# ---- complex and forward-mode gradients, which are torch's
COMPLEX = {
    "matmul": (lambda a, b, c: matmul(a, b), lambda a, b, c: a @ b),
    "addmm": (
        lambda a, b, c: addmm(c, a, b, alpha=2 - 1j),
        lambda a, b, c: torch.addmm(c, a, b, alpha=2 - 1j),
    ),
    "linear": (lambda a, b, c: linear(a, b.mH, c), lambda a, b, c: a @ b.mH.mT + c),
    "ops.matmul": (lambda a, b, c: ops.matmul(a, b), lambda a, b, c: a @ b),
    "ops.addmm": (lambda a, b, c: ops.addmm(c, a, b), lambda a, b, c: c + a @ b),
    "ops.gemm": (lambda a, b, c: ops.gemm(a, b, None, c, c), lambda a, b, c: a @ b + 2 * c),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_gradients_are_conjugated(name) -> None:
    """Cold, warm, without gradients in between, compiled, and transformed."""
    ours, torchs = COMPLEX[name]
    tensors = grown((3, 4), (4, 2), (2,), dtype=torch.complex64)
    g = torch.randn(3, 2, dtype=torch.complex64)
    calls = [ours] * 4 + [torch.compile(ours, backend="aot_eager", fullgraph=True)]
    for call in calls:
        with torch.no_grad():
            torch.testing.assert_close(ours(*tensors), torchs(*tensors))
        results = [
            torch.autograd.grad(f(*tensors), tensors, g, allow_unused=True) for f in (call, torchs)
        ]
        torch.testing.assert_close(*([t for t in found if t is not None] for found in results))
    plain = [t.detach() for t in tensors]
    losses = [lambda a, f=f: (f(a, *plain[1:]) * g).abs().square().sum() for f in (ours, torchs)]
    torch.testing.assert_close(*(torch.func.grad(loss)(plain[0]) for loss in losses))


def test_integers_have_no_gradients() -> None:
    a, b = torch.randint(-9, 9, (3, 4)), torch.randint(-9, 9, (4, 2))
    for call in (matmul, ops.matmul, lambda a, b: addmm(b[0], a, b) - b[0]):
        y = call(a, b)
        assert torch.equal(y, a @ b)
        assert not y.requires_grad


def test_complex_gradients_say_who_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = grown((3, 4), (4, 2), dtype=torch.complex64)
    with pytest.warns(FallbackWarning, match="gradients of complex64 tensors"):
        matmul(a, b)
    for kernel in ("portable", "hopper.gemm"):
        with pytest.raises(
            ValueError, match=f"kernel '{kernel}' takes no gradients of complex64 tensors"
        ):
            matmul(a, b, kernel=kernel)
    with pytest.raises(ValueError, match="batch_invariant is True"):
        matmul(a, b, batch_invariant=True)
    with pytest.raises(ValueError, match=r"a.shape\[1\] is 4 but b.shape\[0\] is 2"):
        ops.matmul(a, b.t())
    monkeypatch.setenv("OUTBLAS_STRICT", "1")
    with pytest.raises(RuntimeError, match="forbids the fallback to torch: gradients of complex64"):
        matmul(a, b)


def test_operators_have_forward_mode_gradients() -> None:
    a, b, bias = (t.detach() for t in grown((3, 4), (4, 2), (2,)))
    pairs = [
        (lambda a: ops.matmul(a, b), lambda a: a @ b),
        (lambda a: ops.addmm(bias, a, b, 0.5), lambda a: bias + a @ b / 2),
        (
            lambda a: ops.gemm(a, b, None, bias, None, 1, 1, "gelu"),
            lambda a: torch.nn.functional.gelu(a @ b + bias),
        ),
        (lambda a: ops.gemm_aux(a, b, None, bias, None, 1, 1, "silu")[1], lambda a: a @ b + bias),
    ]
    for pair in pairs:
        torch.testing.assert_close(*(torch.func.jvp(f, (a,), (a.cos(),)) for f in pair))
        torch.testing.assert_close(
            *(torch.func.hessian(lambda a, f=f: f(a).square().sum())(a) for f in pair)
        )
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(a, a.cos())
            torch.testing.assert_close(*(forward_ad.unpack_dual(f(dual)).tangent for f in pair))
            with pytest.raises(
                ValueError, match="kernel 'portable' takes no forward-mode gradients"
            ):
                ops.matmul(dual, b, None, "portable")
            with pytest.raises(ValueError, match="carry forward-mode gradients, expected no out"):
                ops.matmul_out(dual, b, torch.empty(3, 2).double())
    # A tangent of g, through a backward pass.
    tangents, leaf = [], a.clone().requires_grad_()
    for f in pairs[2]:
        y = f(leaf)
        with forward_ad.dual_level():
            g = forward_ad.make_dual(torch.ones_like(y), y.detach().cos())
            (found,) = torch.autograd.grad(y, leaf, g)
            tangents.append(forward_ad.unpack_dual(found).tangent)
    torch.testing.assert_close(*tangents)


def test_a_gradient_that_negates_when_read_is_resolved_for_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels read memory, where such a view has the other sign."""
    seen = []

    def kernel(grad, x, activation):
        seen.append(grad.is_neg())
        return formula(grad, x, activation)

    monkeypatch.setattr(activation_backward, "_compute", kernel)
    a, b, g = torch.randn(3, 4).requires_grad_(), torch.randn(4, 2), torch.randn(3, 2)
    for _ in range(3):
        y = matmul(a, b, activation="relu")
        (found,) = torch.autograd.grad(y, a, torch._neg_view(g))
        torch.testing.assert_close(found, torch.where(y > 0, -g, 0) @ b.t())
    assert not any(seen)


# ---- where gradients lie
def turned(*shape):
    return torch.randn(*shape).mT.requires_grad_()


PLACES = {
    "linear": (lambda x, w: linear(x, w), (2, 6, 5), (4, 5)),
    "linear gelu": (lambda x, w: linear(x, w, activation="gelu"), (6, 5), (4, 5)),
    "one output": (lambda x, w: linear(x, w), (6, 5), (1, 5)),
    "matmul": (lambda x, w: matmul(x, w), (6, 5), (5, 4)),
    "matmul b.t()": (lambda x, w: matmul(x, w.t()), (6, 5), (4, 5)),
    "matmul a.t()": (lambda x, w: matmul(w.t(), x), (5, 6), (5, 4)),
    "batches b.mT": (lambda x, w: matmul(x, w.mT), (3, 6, 5), (3, 4, 5)),
    "batches a.mT": (lambda x, w: matmul(w.mT, x), (3, 5, 6), (3, 5, 4)),
    "a.mT by vectors": (lambda x, w: matmul(w.t(), x), (5,), (5, 4)),
    "shared b.mT": (lambda x, w: matmul(x, w.mT), (3, 6, 5), (4, 5)),
    "shared batch b.mT": (lambda x, w: matmul(x, w.mT), (2, 3, 6, 5), (3, 4, 5)),
    "batch of one b.mT": (lambda x, w: matmul(x, w.mT), (3, 6, 5), (1, 4, 5)),
    "addmm": (lambda x, w: addmm(x[:, :1], x, w.t(), alpha=0.5), (6, 5), (4, 5)),
    "ops.gemm": (
        lambda x, w: ops.gemm(x, w.t(), None, x[:, :1], None, 1, 1, "relu"),
        (6, 5),
        (4, 5),
    ),
}


def kept(call, w):
    """Whether a backward pass leaves the gradient that reaches the leaf w in its memory, and lies
    as w does.
    """
    reached = []
    handle = w.register_hook(lambda g: reached.append((g.data_ptr(), g.stride())))
    w.grad = None
    call().square().sum().backward()
    handle.remove()
    ((address, strides),) = reached
    sizes = [i for i, n in enumerate(w.shape) if n > 1]
    lies = all(w.grad.stride(i) == w.stride(i) == strides[i] for i in sizes)
    return lies and w.grad.data_ptr() == address


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", PLACES)
def test_a_gradient_is_written_where_it_stays(name, transposed: bool) -> None:
    call, shape_x, shape_w = PLACES[name]
    x = torch.randn(shape_x)
    w = (
        turned(*shape_w[:-2], *shape_w[:-3:-1])
        if transposed
        else torch.randn(shape_w).requires_grad_()
    )
    assert w.shape == shape_w
    for _ in range(4):  # cold and warm
        assert kept(lambda: call(x, w), w)


def test_its_memory_is_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    def by_torch(*given, made=dispatch._fallback_plan):
        run = made(*given)

        def execute(*tensors):
            found = run(*tensors)
            written.append(found.data_ptr())
            return found

        return execute

    monkeypatch.setattr(dispatch, "_fallback_plan", by_torch)
    dispatch.clear_cache()
    x, w = torch.randn(6, 5), torch.randn(4, 5).requires_grad_()
    for _ in range(3):
        w.grad = None
        linear(x, w).sum().backward()
        assert cast(torch.Tensor, w.grad).data_ptr() == written[-1]
    dispatch.clear_cache()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_program_copies_no_gradient(backend: str) -> None:
    torch._dynamo.reset()
    x, w = torch.randn(6, 5), torch.randn(4, 5).requires_grad_()
    compiled = torch.compile(
        lambda x, w: linear(x, w, activation="gelu"), backend=backend, fullgraph=True
    )
    for _ in range(2):
        assert kept(lambda: compiled(x, w), w)


def test_a_compiled_backward_pass_has_no_copies() -> None:
    torch._dynamo.reset()
    called = []

    def backward(graph, inputs):
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph)

    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph), bw_compiler=backward
    )
    x, w = grown((6, 5), (4, 5), dtype=torch.float32)
    torch.compile(linear, backend=backend, fullgraph=True)(x, w).square().sum().backward()
    assert called.count("outblas.matmul.default") == 2
    assert not [name for name in called if re.search("clone|copy|contiguous", name)], called


def test_without_the_class_for_one_level_only_transforms_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(autograd_levels, "OneLevelFunction", torch.autograd.Function)
    monkeypatch.setattr(autograd, "_record", autograd_levels.recorder(autograd.Product))
    a, b = grown((3, 4), (4, 2))
    (found,) = torch.autograd.grad(ops.matmul(a, b).sum(), a)
    torch.testing.assert_close(found, b.detach().sum(1).expand(3, 4))
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda a: ops.matmul(a, b).sum())(a.detach())


# ---- the activation's derivative
@pytest.mark.interpreter
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_its_kernel(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        kernels, "_value_and_slope", InterpretedFunction(kernels._value_and_slope.fn)
    )
    kernel = InterpretedFunction(kernels.backward_kernel.fn)
    gate = activation in GATED
    grad, x = torch.randn(37, 70), 3 * torch.randn(37, 70 * (1 + gate))
    x[0, :3] = torch.tensor([0.0, torch.nan, -30.0])
    want = formula(grad.double(), x.double(), activation).float()
    for wide in (False, True):
        out = torch.full_like(x, -7)
        with np.errstate(all="ignore"):
            function = GATED.get(activation, activation)
            kernel[(3,)](grad, x, out, grad.numel(), 70, function, gate, wide, kernels.BLOCK)
        torch.testing.assert_close(out, want, equal_nan=True, atol=3e-6, rtol=3e-6)


@pytest.mark.compile
@pytest.mark.parametrize("arch", [75, 90])
def test_its_kernel_moves_16_bytes_at_a_time(arch: int) -> None:
    for pointer in ("*bf16", "*fp32"):
        assert (
            "ld.global.v4"
            in kernels.compile_for(("gelu", False, False, pointer, (16, 16, 16, 1)), arch).asm[
                "ptx"
            ]
        )
    assert kernels.compile_for(("silu", True, True, "*fp16", (2, 16, 2, 2)), arch).asm["cubin"]


# ---- what the backward pass of a call that was allowed does
@pytest.mark.parametrize(
    "call",
    [
        lambda a, b, **how: matmul(a, b, **how),
        lambda a, b, **how: addmm(a[:, :1], a, b, alpha=2, **how),
        lambda a, b, **how: linear(a, b.t(), activation="gelu", **how),
    ],
)
def test_a_batch_invariant_call_has_batch_invariant_gradients_on_the_cpu(
    call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel that the CPU has: what was named for the forward pass is for the backward pass
    too.
    """
    monkeypatch.setattr(
        invariance, "_ever", False
    )  # as before, for programs that are compiled later
    a, b = grown((6, 5), (5, 4), dtype=torch.float32)
    want = torch.autograd.grad(call(a, b).sin().sum(), (a, b), create_graph=True)
    want = *want, *torch.autograd.grad(sum(t.square().sum() for t in want), (a, b))
    for how, context in (
        ({}, batch_invariant()),
        ({"batch_invariant": True}, contextlib.nullcontext()),
    ):
        with context:
            y = call(a, b, kernel="portable", **how)
            rows = call(a[:2], b, kernel="portable", **how)
        first = torch.autograd.grad(y.sin().sum(), (a, b), create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in first), (a, b))
        torch.testing.assert_close((*first, *second), want, atol=1e-3, rtol=1e-4)
        (of_rows,) = torch.autograd.grad(rows.sin().sum(), a)
        assert torch.equal(of_rows[:2], first[0][:2])  # no row of dA depends on another


@pytest.mark.parametrize("activation", ["relu", "reglu"])
def test_relu_has_a_second_derivative_which_is_zero(activation: str) -> None:
    """As torch's: zeros that reach A and B, and NaN where those hold NaN."""
    for special in (1.0, torch.nan):
        a, b, bias = grown((3, 4), (4, 2), (2,))
        with torch.no_grad():
            b[0, 0] = special
        results = []
        torchs = apply(a @ b + bias, activation, None)
        for y in (matmul(a, b, bias=bias, activation=activation), torchs):
            g = torch.ones_like(y).requires_grad_()
            first = torch.autograd.grad(y, (a, b, bias), g, create_graph=True)
            loss = sum(t.square().sum() for t in first)
            results.append(torch.autograd.grad(loss, (a, b, bias, g), allow_unused=True))
        assert [t is None for t in results[0]] == [t is None for t in results[1]]
        torch.testing.assert_close(
            *([t for t in found if t is not None] for found in results), equal_nan=True
        )
    x = torch.tensor([-1.0, 0.0, 2.0, torch.nan])
    assert torch.equal(formula(torch.ones(4), x, "relu"), torch.tensor([0.0, 0.0, 1.0, 1.0]))


@pytest.mark.parametrize("activation", ["", "gelu", "swiglu"])
def test_aux_needs_no_gradient_where_only_the_residual_does(activation: str) -> None:
    a, b, residual = torch.randn(3, 4), torch.randn(4, 2), torch.randn(3, 1).requires_grad_()
    y, x = ops.gemm_aux(a, b, None, None, residual, 1, 1, activation)
    assert (y.requires_grad, x.requires_grad, x.is_leaf, x.grad_fn) == (True, False, True, None)
    y.sum().backward()
    assert torch.equal(residual.grad, torch.full((3, 1), float(y.shape[1])))
    grad = torch.func.grad(lambda r: ops.gemm_aux(a, b, None, None, r, 1, 1, activation)[0].sum())
    assert torch.equal(grad(residual.detach()), residual.grad)
    assert ops.gemm_aux(a.requires_grad_(), b, None, None, residual, 1, 1, activation)[
        1
    ].requires_grad


def test_forward_mode_through_a_view_that_negates() -> None:
    a, b, bias = (t.detach() for t in grown((3, 4), (4, 2), (2,)))
    for call in (matmul, lambda a, b, bias: ops.gemm(a, b, None, bias)):
        named = {"bias": bias} if call is matmul else {}
        given = () if named else (bias,)
        found = torch.func.jvp(
            lambda b, c=call, n=named, g=given: c(a, b, *g, **n), (torch._neg_view(b),), (b,)
        )
        torch.testing.assert_close(found, (bias - a @ b, a @ b))


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_a_derivative_of_a_sparse_tensor_is_refused(layout: str) -> None:
    """As torch's dispatcher does for operators, also where gradients are asked for."""
    x = getattr(torch.randn(3, 4), layout)()
    for given in (x, x.clone().requires_grad_()):
        with pytest.raises(NotImplementedError):
            torch.ops.outblas.activation_backward(torch.randn(3, 4), given, "relu")


@pytest.mark.parametrize("shape", [(13, 32), (1, 13, 32), (32,)])
@pytest.mark.parametrize("columns", [False, True])
def test_the_gradient_of_a_shared_a_is_one_sum(shape, columns: bool) -> None:
    """Parts of it, of matrices of the batch, are beyond what fp16 holds, and it is not."""
    if columns and len(shape) == 1:
        return
    a = torch.ones(shape, dtype=torch.float16)
    a = (a.mT.contiguous().mT if columns else a).requires_grad_()
    b = torch.full((2, 32, 8), 100.0, dtype=torch.float16)
    y = matmul(a, b)
    g = torch.full_like(y, 100.0)
    g[1] = -99.0
    y.backward(g)
    assert torch.equal(a.grad, torch.full_like(a, 800.0))
    assert a.grad.stride() == a.stride()
