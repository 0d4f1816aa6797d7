"""torch's own samples (OpInfo) of the operators that multiply, on a GPU, in random order: every
operator and dtype mixed in one process, so that calls of one kind meet the plans of all others.
"""

import random

import pytest
import torch
from support.opinfo import PRODUCTS, Sample, assert_as_near, operator, samples

import outblas
from outblas.torch_ops import aten

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
NAMES = *PRODUCTS, "addmv", "mv"
WITH_OUT = ("mm", "bmm", "addmm", "baddbmm", "matmul")
DTYPES = torch.float32, torch.bfloat16, torch.float16


def call(name: str, sample: Sample, with_out: bool) -> list[Tensor]:
    """The value of a sample, and its gradients where the result is not written to an `out`."""
    op = operator(name).op
    if with_out:
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
        (name, dtype, sample, with_out)
        for name in NAMES
        for dtype in DTYPES
        for sample in samples(name, "cuda", dtype)
        for with_out in ((False, True) if name in WITH_OUT else (False,))
    ]
    random.Random(seed).shuffle(calls)
    theirs = [call(name, sample, with_out) for name, _, sample, with_out in calls]
    truths = [call(name, sample.widened(), False) for name, _, sample, _ in calls]

    with outblas.enable(dtypes=DTYPES, min_gain=0) as enabled:
        first = [call(name, sample, with_out) for name, _, sample, with_out in calls]
        random.Random(seed + 1).shuffle(order := list(range(len(calls))))
        second = {i: call(calls[i][0], calls[i][2], calls[i][3]) for i in order}

    assert aten.OURS in enabled.decisions.values()
    for i, (name, dtype, sample, with_out) in enumerate(calls):
        message = f"{name} {dtype} out={with_out} {sample}"
        for got, again, want, truth in zip(first[i], second[i], theirs[i], truths[i], strict=False):
            assert_as_near(got, want, truth, message)
            assert torch.allclose(got, again, rtol=0, atol=0, equal_nan=True), (
                f"other bits in another order: {message}"
            )
