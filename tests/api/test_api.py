"""The public calls without a GPU: the semantics of torch.matmul and torch.addmm, through torch and
through the interpreted kernel; what is written, and what torch takes.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.causes import CAUSES, A, B, Tagged
from support.gradients import COLD_THEN_WARM

from outblas import FallbackWarning, OperandError, addmm, linear, matmul

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

Tensor = torch.Tensor
LEAF = A.clone().requires_grad_()


@pytest.fixture(params=[None, "portable"], ids=["torch", "portable"])
def kernel(request: pytest.FixtureRequest) -> str | None:
    """The kernel that a call names: none, so that torch computes it, or the interpreted one."""
    return request.param


def integers(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Tensors of small integers, whose products are exact."""
    return [torch.randint(-8, 9, shape).float() for shape in shapes]


# ---- products
SHAPES = [
    ((5,), (5,)),
    ((5,), (5, 4)),
    ((6, 5), (5,)),
    ((6, 5), (3, 5, 4)),
    ((2, 1, 6, 5), (3, 5, 4)),
    ((3, 6, 5), (5,)),
    ((5,), (3, 5, 4)),
    ((0, 5), (5, 4)),
    ((6, 5), (5, 0)),
    ((0,), (0,)),
    ((0, 6, 5), (5, 4)),
    ((3, 6, 0), (3, 0, 4)),
]


@pytest.mark.parametrize(
    ("shape_a", "shape_b"), [pytest.param(a, b, id=f"{a} {b}") for a, b in SHAPES]
)
def test_matmul_is_torch_matmul(
    shape_a: tuple[int, ...], shape_b: tuple[int, ...], kernel: str | None
) -> None:
    a, b = integers(shape_a, shape_b)
    want = torch.matmul(a, b)
    out = torch.full_like(want, torch.nan)

    got = matmul(a, b, kernel=kernel)

    assert got.dtype == want.dtype
    assert torch.equal(got, want)
    assert matmul(a, b, out=out, kernel=kernel) is out
    assert torch.equal(out, want)


def test_a_product_is_rounded_to_the_dtype_of_its_operands_or_out_dtype(kernel: str | None) -> None:
    a, b = torch.full((3, 300), 3.0).bfloat16(), torch.full((300, 2), 3.0).bfloat16()

    wide = matmul(a, b, out_dtype=torch.float32, kernel=kernel)

    assert matmul(a, b, kernel=kernel)[0, 0] == 2704  # the sum is 2700, which bf16 does not have
    assert wide.dtype == torch.float32
    assert torch.equal(wide, torch.full((3, 2), 2700.0))


@pytest.mark.parametrize("shape", [(6, 4), (4,), (6, 1), ()], ids=str)
def test_addmm_is_torch_addmm(shape: tuple[int, ...], kernel: str | None) -> None:
    a, b, c = integers((6, 5), (5, 4), shape)
    without: dict[str, Any] = {}

    for scales in (without, {"alpha": 0.5, "beta": -2.0}):
        got = addmm(c, a, b, kernel=kernel, **scales)
        assert torch.equal(got, torch.addmm(c, a, b, **scales))
    unread = torch.full(shape, torch.nan)
    assert torch.equal(addmm(unread, a, b, beta=0, kernel=kernel), a @ b)
    no_terms = addmm(c, a[:, :0], b[:0], beta=3, kernel=kernel)
    assert torch.equal(no_terms, (3 * c).expand(6, 4))


@pytest.mark.parametrize(
    ("shape", "dtype"), [((6, 4), torch.bfloat16), ((), torch.float32)], ids=str
)
def test_addmm_with_an_alpha_of_zero_reads_neither_operand(
    shape: tuple[int, ...], dtype: torch.dtype, kernel: str | None
) -> None:
    a, b, c = (t.to(dtype).requires_grad_() for t in integers((6, 5), (5, 4), shape))
    a.data.fill_(torch.nan), b.data.fill_(torch.inf)
    out, residual = torch.empty_like(a @ b).detach(), torch.ones(6, 4, dtype=dtype)

    got = addmm(c, a, b, alpha=0, kernel=kernel)
    got.sum().backward()
    with torch.no_grad():
        addmm(c, a, b, alpha=torch.tensor(0.0), out=out, kernel=kernel)
        more = addmm(c, a, b, alpha=0.0, beta=0, residual=residual, kernel=kernel)

    assert torch.equal(got, c.expand(6, 4))
    assert torch.equal(out, got)
    assert torch.equal(more, residual)
    for gradient in (a.grad, b.grad):
        assert gradient is not None
        assert not gradient.any()


@pytest.mark.parametrize(
    ("addend", "beta", "right"),
    [
        (torch.tensor([0, 2**-14], dtype=torch.float16), 2.0**17, [0, 8]),
        (torch.tensor([3, 5], dtype=torch.bfloat16), 1 + 2.0**-8, [3.015625, 5.03125]),
        (torch.tensor([complex(torch.inf, 2), 1j]), 1, [complex(torch.inf, 2), 1j]),
    ],
    ids=["a beta beyond float16", "a beta between numbers of bfloat16", "a complex infinity"],
)
def test_addmm_with_an_alpha_of_zero_scales_the_addend_in_one_rounding(
    addend: Tensor, beta: float, right: list[complex]
) -> None:
    a, b = (torch.full(shape, torch.nan).to(addend.dtype) for shape in ((3, 2), (2, 2)))

    got = addmm(addend, a, b, alpha=0, beta=beta)

    assert torch.equal(got, torch.tensor(right, dtype=addend.dtype).expand(3, 2))


def test_addmm_with_an_alpha_of_zero_has_a_forward_gradient_of_negated_views() -> None:
    a, b, c = integers((3, 2), (2, 4), (3, 4))
    primals = torch._neg_view(a), b, c
    tangents = tuple(torch.ones_like(t) for t in primals)

    _, tangent, *_ = torch.func.jvp(lambda *t: addmm(t[2], t[0], t[1], alpha=0), primals, tangents)

    assert torch.equal(tangent, tangents[2])


# ---- gated activations of a product with a vector
def reglu(x: Tensor) -> Tensor:
    """relu of the first half of the last dimension, times the second half."""
    gate, value = x.chunk(2, -1)
    return torch.relu(gate) * value


matmul_or_linear = pytest.mark.parametrize(
    "function", [matmul, linear], ids=lambda function: function.__name__
)


@pytest.mark.parametrize("shape", [(6, 5), (3, 6, 5)], ids=["matrix", "batch"])
@matmul_or_linear
def test_a_gated_product_with_a_vector_pairs_rows(
    function: Callable[..., Tensor], shape: tuple[int, ...], kernel: str | None
) -> None:
    a, v, bias, residual = integers(shape, (5,), (6,), (3,))
    want = reglu(a @ v + bias) + residual
    out = torch.full_like(want, torch.nan)
    options: Any = {"activation": "reglu", "kernel": kernel}

    for call in COLD_THEN_WARM:
        got = function(a, v, bias=bias, residual=residual, **options)
        assert torch.equal(got, want), f"call {call}"
        out.fill_(torch.nan)
        function(a, v, bias=bias, residual=residual, out=out, **options)
        assert torch.equal(out, want), f"call {call} with out"
    with pytest.raises(
        ValueError, match=r"batch_invariant is True, but activation 'reglu' .* pairs rows"
    ):
        function(a, v, activation="reglu", kernel="portable", batch_invariant=True)


def test_the_product_of_two_vectors_has_no_columns_to_pair(kernel: str | None) -> None:
    aux = torch.tensor(7.0)

    for written in (None, aux):
        with pytest.raises(OperandError, match=r"'geglu' pairs the columns.*got shape \(\)"):
            matmul(A[0], A[1], activation="geglu", aux=written, kernel=kernel)

    assert aux == 7


# ---- what torch takes
def test_each_fallback_warns_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            matmul(A, B)
            matmul(LEAF, B)
            matmul(LEAF.to("meta"), B.to("meta"))

    cpu, meta = (w for w in caught if w.category is FallbackWarning)
    assert "CPU tensors" in str(cpu.message)
    assert "meta tensors" in str(meta.message)
    assert [cpu.filename, meta.filename] == [__file__, __file__]


@pytest.mark.parametrize("cause", CAUSES)
def test_strict_mode_names_the_cause(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_STRICT", "1")

    with pytest.raises(RuntimeError, match=f"OUTBLAS_STRICT=1 forbids.*{cause}"):
        CAUSES[cause]()


# ---- what is written


@pytest.mark.parametrize(
    ("first", "second"), [("out", "residual"), ("aux", "residual"), ("out", "aux")]
)
@pytest.mark.parametrize(
    "a",
    [
        pytest.param(A, id="float32"),
        pytest.param(A.as_subclass(Tagged), id="subclass"),
    ],
)
def test_what_an_epilogue_writes_shares_memory_with_nothing(
    a: Tensor, first: str, second: str
) -> None:
    buffer = torch.full((6, 8), 7.0, dtype=a.dtype)
    overlapping: dict[str, Any] = {first: buffer[:, :4], second: buffer[:, 2:6]}

    with pytest.raises(OperandError, match=f"{first} overlaps {second}"):
        matmul(a, B.to(a.dtype), **overlapping)

    assert bool((buffer == 7).all())


def test_overlap_is_checked_under_autocast_and_on_the_short_way() -> None:
    square, x = torch.rand(6, 6), torch.randn(6, 6)
    before = square.clone()
    for _ in COLD_THEN_WARM:
        linear(x, square, out=torch.empty(6, 6))

    with pytest.raises(OperandError, match="out overlaps weight in memory"):
        linear(x, square, out=square)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ValueError, match="out overlaps mat1"),
    ):
        addmm(torch.zeros(6), square, x, out=square)

    assert torch.equal(square, before)
