"""torch's own samples (OpInfo) of the operators that multiply, on a GPU, in random order: every
operator and dtype mixed in one process, so that calls of one kind meet the plans of all others.
"""

import random
from collections.abc import Iterator

import pytest
import torch
from support.opinfo import PRODUCTS, Sample, assert_as_near, operator, samples

import outblas
from outblas.torch_ops import aten

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
NAMES = *PRODUCTS, "addmv", "mv"
WITH_OUT = ("mm", "bmm", "addmm", "baddbmm", "matmul")
WITH_DTYPE = ("mm", "bmm", "addmm")
DTYPES = torch.float32, torch.bfloat16, torch.float16


def ways(name: str, dtype: torch.dtype, sample: Sample) -> Iterator[str]:
    """How a sample is called: with nothing else, with an `out`, or with an `out_dtype`. torch adds
    matrices alone to a product with an `out_dtype`, and has no such products of nothing.
    """
    yield ""
    if name in WITH_OUT:
        yield "out"
    tensors = [t for t in sample.given if isinstance(t, Tensor)]
    is_matrix = tensors[0].dim() == tensors[-1].dim() and all(t.numel() for t in tensors)
    if name in WITH_DTYPE and dtype != torch.float32 and is_matrix:
        yield "out_dtype"


def call(name: str, sample: Sample, way: str) -> list[Tensor]:
    """The value of a sample, and its gradients where it is called with nothing else."""
    op = operator(name).op
    if way == "out_dtype":
        return [op(*sample.given, **sample.how, out_dtype=torch.float32)]
    if way == "out":
        like = op(*sample.given, **sample.how)
        out = torch.full_like(like, torch.nan)
        assert op(*sample.given, **sample.how, out=out) is out
        return [out]
    leaves = sample.with_leaves()
    y = op(*leaves.given, **leaves.how)
    wanted = [t for t in leaves.given if isinstance(t, Tensor)]
    arriving = torch.linspace(-1, 1, max(y.numel(), 1), dtype=torch.float64, device=y.device)
    arriving = arriving[: y.numel()].view(y.shape).to(y.dtype)
    grads = torch.autograd.grad(y, wanted, arriving, allow_unused=True) if wanted else ()
    return [y.detach(), *(g for g in grads if g is not None)]


# With float32 by kernels too, more kinds of calls meet in one table.
@pytest.mark.usefixtures("float32_by_kernels")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("seed", range(3))
def test_samples_in_random_order_are_near_plain_and_enabled(seed: int) -> None:
    calls = [
        (name, dtype, sample, way)
        for name in NAMES
        for dtype in DTYPES
        for sample in samples(name, "cuda", dtype)
        for way in ways(name, dtype, sample)
    ]
    random.Random(seed).shuffle(calls)
    theirs = [call(name, sample, way) for name, _, sample, way in calls]
    truths = [call(name, sample.widened(), "") for name, _, sample, _ in calls]

    with outblas.enable(dtypes=DTYPES, min_gain=0) as enabled:
        first = [call(name, sample, way) for name, _, sample, way in calls]
        random.Random(seed + 1).shuffle(order := list(range(len(calls))))
        second = {i: call(calls[i][0], calls[i][2], calls[i][3]) for i in order}

    assert aten.OURS in enabled.decisions.values()
    assert {f"{name}.dtype" for name in WITH_DTYPE} <= {
        product.partition(" ")[0] for product, by in enabled.decisions.items() if by == aten.OURS
    }
    for i, (name, dtype, sample, way) in enumerate(calls):
        message = f"{name} {dtype} {way} {sample}"
        for got, again, want, truth in zip(first[i], second[i], theirs[i], truths[i], strict=False):
            assert_as_near(got, want, truth, message)
            assert torch.allclose(got, again, rtol=0, atol=0, equal_nan=True), (
                f"other bits in another order: {message}"
            )
