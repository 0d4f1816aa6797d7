"""Gradients of random products against torch's: random shapes, views, activations, subsets of
operands that need gradients, and gradients that arrive with strides.
"""

import pytest
import torch
from support.random_products import Draw, Operand, RandomProduct

pytestmark = pytest.mark.filterwarnings("ignore::outblas.FallbackWarning")

Tensor = torch.Tensor

SEEDS = range(8)
PRODUCTS_PER_SEED = 50


def derivatives(y: Tensor, leaves: list[Tensor], grad: Operand) -> list[Tensor]:
    """The gradients of the leaves where `grad` arrives, and those of the sum of their squares, of
    the leaf of `grad` too.
    """
    arriving = grad.view(grad.leaf)
    first = torch.autograd.grad(y, leaves, arriving, create_graph=True, materialize_grads=True)
    squares = [(t * t.conj()).sum().real for t in first if t.requires_grad]
    loss = torch.stack(squares).sum() if squares else torch.zeros(())
    if not loss.requires_grad:
        return list(first)
    second = torch.autograd.grad(loss, [grad.leaf, *leaves], materialize_grads=True)
    return [*first, *second]


def assert_torchs(product: RandomProduct, draw: Draw) -> None:
    """The value of a product, whether it needs gradients, and its derivatives are torch's."""

    def message(difference: str) -> str:
        return f"{product}: {difference}"

    needed = [leaf for leaf in product.leaves if leaf.requires_grad]
    got, want = product.ours(), product.torchs()
    torch.testing.assert_close(got, want, msg=message)
    assert got.requires_grad == bool(needed), str(product)
    if needed:
        grad = draw.operand(got.shape)
        grad.leaf.requires_grad_()
        torch.testing.assert_close(
            derivatives(got, needed, grad), derivatives(want, needed, grad), msg=message
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_products_have_torchs_gradients(seed: int, dtype: torch.dtype) -> None:
    draw = Draw(seed, dtype)

    for _ in range(PRODUCTS_PER_SEED):
        assert_torchs(draw.product(), draw)
