"""torch's products with an `out_dtype` under `outblas.enable`: their results, and their gradients,
which torch does not have.

torch has these products on a GPU only. Operators that compute them, without a product, stand for
torch's on the CPU here.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import outblas
from outblas.torch_ops import aten, aten_gradients
from outblas.torch_ops.aten import Rules

pytestmark = pytest.mark.interpreter

Tensor = torch.Tensor
BF16, F32 = torch.bfloat16, torch.float32
RULES = Rules((BF16, F32), min_flops=0, min_gain=0, filter=None, key="CPU", kernel="portable")
INVARIANT = RULES._replace(batch_invariant=True)


def small(*shape: int) -> Tensor:
    """Small integers, whose products have one right result."""
    return torch.randint(-4, 5, shape).to(BF16)


A, B, C, BATCH_A, BATCH_B = small(6, 5), small(5, 4), small(6, 4), small(3, 6, 5), small(3, 5, 4)
BATCH_C = small(3, 6, 4)


def product(a: Tensor, b: Tensor) -> Tensor:
    return (a.float().unsqueeze(-1) * b.float().unsqueeze(-3)).sum(-2)


def bare(a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    result = product(a, b).to(dtype)
    return result if out is None else out.copy_(result)


def with_addend(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
) -> Tensor:
    result = (alpha * product(a, b) + beta * c.float() if beta else alpha * product(a, b)).to(dtype)
    return result if out is None else out.copy_(result)


@pytest.fixture(autouse=True)
def _torchs_products() -> Iterator[None]:
    """On a CPU. Nothing stays enabled."""
    library = torch.library.Library("aten", "IMPL")
    for name in ("mm", "bmm", "addmm", "baddbmm"):
        for overload in ("dtype", "dtype_out"):
            library.impl(f"{name}.{overload}", with_addend if "add" in name else bare, "CPU")
    yield
    outblas.disable()
    library._destroy()


PRODUCTS: dict[str, Callable[[], Tensor]] = {
    "mm": lambda: torch.mm(A, B, out_dtype=F32),
    "mm of its own dtype": lambda: torch.mm(A, B, out_dtype=BF16),
    "mm out": lambda: torch.mm(A, B, out_dtype=F32, out=torch.full((6, 4), 7.0)),
    "bmm": lambda: torch.bmm(BATCH_A, BATCH_B, out_dtype=F32),
    "bmm out": lambda: torch.bmm(BATCH_A, BATCH_B, out_dtype=F32, out=torch.full((3, 6, 4), 7.0)),
    "addmm": lambda: torch.addmm(C, A, B, out_dtype=F32),
    "addmm of a wide addend": lambda: torch.addmm(C.float(), A, B, out_dtype=F32),
    "addmm of a row": lambda: torch.addmm(C[0], A, B, out_dtype=F32),
    "addmm without its addend": lambda: torch.addmm(C, A, B, out_dtype=F32, beta=0),
    "addmm out": lambda: torch.addmm(C, A, B, out_dtype=F32, out=torch.full((6, 4), 7.0)),
    "baddbmm": lambda: torch.baddbmm(BATCH_C, BATCH_A, BATCH_B, out_dtype=F32),
}


@pytest.mark.parametrize("rules", [RULES, INVARIANT], ids=["plain", "invariant"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_has_torchs_result_by_a_kernel_of_outblas(name: str, rules: Rules) -> None:
    expected = PRODUCTS[name]()

    with aten._enable(rules) as enabled:
        got = [PRODUCTS[name]() for _ in range(2)]

    for result in got:
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)
    assert list(enabled.decisions.values()) == [aten.OURS]
    assert next(iter(enabled.decisions)).startswith(f"{name.partition(' ')[0]}.dtype ")


def test_products_of_two_dtypes_have_two_plans() -> None:
    with aten._enable(RULES):
        for dtype in (F32, BF16, F32):
            assert torch.mm(A, B, out_dtype=dtype).dtype == dtype
            assert torch.mm(A, B).dtype == BF16


SCALED: dict[str, Callable[[], Tensor]] = {
    "alpha": lambda: torch.addmm(C, A, B, out_dtype=F32, alpha=2),
    "beta": lambda: torch.baddbmm(BATCH_C, BATCH_A, BATCH_B, out_dtype=F32, beta=0.5),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_scaled_addend_stays_with_torch_and_breaks_no_promise(name: str) -> None:
    with aten._enable(RULES) as enabled:
        got = SCALED[name]()
    assert not any(".dtype" in decided for decided in enabled.decisions)
    assert torch.equal(got, SCALED[name]())

    with aten._enable(INVARIANT), pytest.raises(ValueError, match=r"mm\.dtype scales"):
        SCALED[name]()


def test_rows_have_the_same_bits_in_every_batch() -> None:
    a, b = torch.randn(17, 40).to(BF16), torch.randn(40, 20).to(BF16)

    with aten._enable(INVARIANT):
        whole = torch.mm(a, b, out_dtype=F32)
        parts = [torch.mm(a[i : i + 1], b, out_dtype=F32) for i in range(17)]

    assert torch.equal(torch.cat(parts), whole)


# ---- gradients
Differentiable = Callable[..., Tensor]
GRADIENTS: dict[str, tuple[Differentiable, Differentiable, tuple[Tensor, ...]]] = {
    "mm": (lambda a, b: torch.mm(a, b, out_dtype=F32), torch.matmul, (A, B)),
    "bmm": (lambda a, b: torch.bmm(a, b, out_dtype=F32), torch.matmul, (BATCH_A, BATCH_B)),
    "addmm": (
        lambda c, a, b: torch.addmm(c, a, b, out_dtype=F32),
        lambda c, a, b: c + a @ b,
        (C, A, B),
    ),
    "addmm that scales": (
        lambda c, a, b: torch.addmm(c, a, b, out_dtype=F32, alpha=2, beta=3),
        lambda c, a, b: 3 * c + 2 * (a @ b),
        (C, A, B),
    ),
    "addmm of a wide row": (
        lambda c, a, b: torch.addmm(c, a, b, out_dtype=F32),
        lambda c, a, b: c + a @ b,
        (C[0].float(), A, B),
    ),
    "baddbmm": (
        lambda c, a, b: torch.baddbmm(c, a, b, out_dtype=F32),
        lambda c, a, b: c + a @ b,
        (BATCH_C[:1], BATCH_A, BATCH_B),
    ),
}


def gradients(function: Differentiable, given: tuple[Tensor, ...], dtype: Any) -> list[Tensor]:
    """Those of first order, of which each is rounded to its own dtype, and of second order."""
    leaves = [t.clone().to(dtype or t.dtype).requires_grad_() for t in given]
    y = function(*leaves)
    arriving = (torch.arange(y.numel(), device=y.device) % 3 - 1.0).view(y.shape)
    first = torch.autograd.grad(y, leaves, arriving, create_graph=True)
    total = torch.stack([g.sum().double() for g in first]).sum()
    second = torch.autograd.grad(total, leaves, allow_unused=True)
    return [g for g in (*first, *second) if g is not None]


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_a_wide_product_and_have_the_dtypes_of_operands(name: str) -> None:
    function, wide, given = GRADIENTS[name]
    expected = gradients(wide, given, torch.float64)

    with aten._enable(RULES) as enabled:
        got = gradients(function, given, None)

    assert [g.dtype for g in got[: len(given)]] == [t.dtype for t in given]
    assert len(got) == len(expected)
    assert all(torch.equal(g, e.to(g.dtype)) for g, e in zip(got, expected, strict=True))
    assert {by for product, by in enabled.decisions.items() if "bfloat16" in product} == {aten.OURS}


def test_a_compiled_program_has_gradients() -> None:
    compiled = torch.compile(lambda a, b: torch.mm(a, b, out_dtype=F32) * 2, backend="aot_eager")
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()

    with aten._enable(RULES) as enabled:
        compiled(a, b).sum().backward()

    assert enabled.decisions["mm.dtype 6x4x5 bfloat16"] == aten.OURS
    ones = torch.ones(6, 4)
    assert a.grad is not None
    assert b.grad is not None
    assert torch.equal(a.grad, (2 * ones @ B.float().t()).to(BF16))
    assert torch.equal(b.grad, (2 * A.float().t() @ ones).to(BF16))


def test_what_torch_refuses_it_refuses_again_after_disable() -> None:
    """And forward-mode gradients while enabled, too."""

    def backward() -> None:
        torch.mm(A.clone().requires_grad_(), B, out_dtype=F32).sum().backward()

    def forward() -> None:
        torch.func.jvp(lambda a: torch.mm(a, B, out_dtype=F32), (A,), (A,))

    assert aten_gradients.are_missing()
    with pytest.raises(NotImplementedError) as by_torch:
        forward()
    with aten._enable(RULES):
        backward()
        with pytest.raises(NotImplementedError) as raised:
            forward()
    assert str(raised.value) == str(by_torch.value)
    with pytest.raises(RuntimeError, match="derivative for aten::mm is not implemented"):
        backward()


# ---- on a GPU, with torch's own operators
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mm", "bmm", "addmm"])
def test_products_and_gradients_on_a_gpu_are_exact(name: str) -> None:
    function, wide, given = GRADIENTS[name]
    expected = gradients(wide, given, torch.float64)

    with outblas.enable(min_gain=0) as enabled:
        got = gradients(function, tuple(t.cuda() for t in given), None)

    assert all(torch.equal(g.cpu(), e.to(g.dtype)) for g, e in zip(got, expected, strict=True))
    assert enabled.decisions[f"{name}.dtype {'3x' * (name == 'bmm')}6x4x5 bfloat16"] == aten.OURS
