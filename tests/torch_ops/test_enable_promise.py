"""`outblas.enable(batch_invariant=True)`: products that only torch computes raise, and those that
torch makes of others keep the promise. The operators are overridden on the CPU.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import outblas
from outblas.torch_ops import aten
from outblas.torch_ops.aten import Rules

pytestmark = pytest.mark.interpreter

Tensor = torch.Tensor
RULES = Rules((torch.float32,), min_flops=0, min_gain=0, filter=None, key="CPU", kernel="portable")
INVARIANT = RULES._replace(batch_invariant=True)

A, B, C = torch.randn(6, 5), torch.randn(5, 4), torch.randn(6, 4)
BATCH_A, BATCH_B, BATCH_C = torch.randn(3, 6, 5), torch.randn(3, 5, 4), torch.randn(3, 6, 4)
ENCODER = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().requires_grad_(False)


@pytest.fixture(autouse=True)
def _nothing_stays_enabled() -> Iterator[None]:
    yield
    outblas.disable()


WITH_DTYPE = {"mm": (A, B), "addmm": (C, A, B), "bmm": (BATCH_A, BATCH_B)}
WITH_DTYPE |= {"baddbmm": (BATCH_C, BATCH_A, BATCH_B)}


@pytest.fixture
def products_with_dtype() -> Iterator[None]:
    """torch's products with an `out_dtype`, which it has on a GPU only."""

    def compute(*given: Any, **named: Any) -> Tensor:
        result = Tensor(2, 3)
        return named.get("out", result)

    library = torch.library.Library("aten", "IMPL")
    for name in WITH_DTYPE:
        library.impl(f"{name}.dtype", compute, "CPU")
        library.impl(f"{name}.dtype_out", compute, "CPU")
    yield
    library._destroy()


NO_KERNEL: dict[str, Callable[[], object]] = {
    "addmm and relu": lambda: torch._addmm_activation(B[0], A, B),
    "addmm and gelu": lambda: torch._addmm_activation(B[0], A, B, use_gelu=True),
    "addmm and relu out": lambda: torch._addmm_activation(B[0], A, B, out=torch.empty(6, 4)),
    "addmv": lambda: torch.addmv(A[:, 0], A, B[:, 0]),
    "addmv out": lambda: torch.addmv(A[:, 0], A, B[:, 0], out=torch.empty(6)),
    "addmv in place": lambda: A[:, 0].clone().addmv_(A, B[:, 0]),
    "mv": lambda: torch.mv(A, B[:, 0]),
    "a matrix by a vector": lambda: A @ B[:, 0],
    "a layer of a transformer in inference": lambda: ENCODER(torch.randn(2, 3, 8)),
}


@pytest.mark.parametrize("name", NO_KERNEL)
def test_products_without_a_kernel_break_no_promise_unnoticed(name: str) -> None:
    """And they stay torch's where nothing is promised."""
    with (
        aten._enable(INVARIANT),
        pytest.raises(ValueError, match="torch alone has a kernel of aten's"),
    ):
        NO_KERNEL[name]()

    with aten._enable(RULES):
        NO_KERNEL[name]()


@pytest.mark.usefixtures("products_with_dtype")
@pytest.mark.parametrize("name", WITH_DTYPE)
def test_products_with_a_dtype_break_no_promise_unnoticed(name: str) -> None:
    operator, tensors = getattr(torch, name), WITH_DTYPE[name]
    out = torch.empty(6, 4)

    with aten._enable(INVARIANT):
        for into in ({}, {"out": out}):
            with pytest.raises(ValueError, match=f"aten's {name}.dtype"):
                operator(*tensors, out_dtype=torch.float32, **into)

    with aten._enable(RULES):
        operator(*tensors, out_dtype=torch.float32)


@pytest.mark.parametrize(
    ("call", "operator"),
    [
        (lambda: torch.addbmm(C, BATCH_A, BATCH_B), "addmm"),
        (lambda: torch.linalg.multi_dot([A, B, B.t()]), "mm"),
        (lambda: torch.chain_matmul(A, B, B.t()), "mm"),
        (lambda: torch._foreach_mm([A], [B]), "mm"),
        (lambda: torch.linalg.matrix_power(A[:5], 3), "mm"),
        (lambda: torch.cdist(A, B.t().contiguous(), compute_mode="use_mm_for_euclid_dist"), "mm"),
    ],
)
def test_what_is_made_of_products_keeps_the_promise(
    call: Callable[[], object], operator: str
) -> None:
    with aten._enable(INVARIANT) as enabled:
        call()

    assert {name.split()[0] for name in enabled.decisions} == {operator}
    assert set(enabled.decisions.values()) == {aten.OURS}


def test_nothing_that_a_vector_multiplies_keeps_the_promise() -> None:
    with aten._enable(INVARIANT):
        assert torch.equal(torch.mv(A[:, :0], B[:0, 0]), torch.zeros(6))
