"""torch's own samples (OpInfo) of the operators that multiply, under `outblas.enable`: values
and gradients of both orders. (`test_enable` has the errors.)

`portable` takes float32 products of CPU tensors here, in Triton's interpreter where results are
written to an output, and a stand-in computes where there are gradients; a product of another dtype
stays with torch.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.opinfo import (
    PRODUCTS,
    Sample,
    assert_as_near,
    first_of_each_kind,
    operator,
    samples,
)
from support.warm_calls import stand_in_launcher

import outblas
from outblas.core.problem import Launch, Problem
from outblas.runtime import dispatch, launcher
from outblas.torch_ops import aten
from outblas.torch_ops.aten import Rules

pytestmark = [pytest.mark.interpreter, pytest.mark.timeout(600)]

Tensor = torch.Tensor
RULES = Rules((torch.float32,), min_flops=0, min_gain=0, filter=None, key="CPU", kernel="portable")
# Products that outblas does not compute as such, and the reason.
BY_TORCH = {
    "mv": "aten's own operator, which is no matrix product",
    "addmv": "aten's own operator, which is no matrix product",
    "dot": "aten's own operator, which is no matrix product",
    "addr": "a product of columns and rows, computed by elements",
    "inner": "torch's samples are vectors",
}

names = pytest.mark.parametrize("name", PRODUCTS)


@pytest.fixture(autouse=True)
def _nothing_stays_enabled() -> Iterator[None]:
    yield
    outblas.disable()


def leaves_of(given: Any) -> list[Tensor]:
    """The tensors that need gradients among arguments, in lists as well."""
    if isinstance(given, Tensor):
        return [given] if given.requires_grad else []
    return [t for each in given for t in leaves_of(each)] if isinstance(given, list | tuple) else []


def with_leaves(given: Any, dtype: torch.dtype) -> Any:
    """The arguments in this dtype, with tensors of their own that need gradients."""
    if isinstance(given, Tensor):
        return given.detach().clone().to(dtype).requires_grad_()
    if isinstance(given, list | tuple):
        return type(given)(with_leaves(each, dtype) for each in given)
    return given


def results(name: str, sample: Sample, dtype: torch.dtype) -> list[Tensor]:
    """The value of a sample, its gradients, and gradients of the sum of their squares."""
    given = with_leaves(sample.given, dtype)
    leaves = leaves_of(given)
    y = operator(name).op(*given, **sample.how)
    arriving = torch.linspace(-1, 1, max(y.numel(), 1), dtype=dtype)[: y.numel()].view(y.shape)
    first = torch.autograd.grad(y, leaves, arriving, create_graph=True, allow_unused=True)
    squares = sum((g.square().sum() for g in first if g is not None), y.new_zeros(()))
    second: tuple[Tensor | None, ...] = ()
    if squares.requires_grad:
        second = torch.autograd.grad(squares, leaves, allow_unused=True)
    return [t.detach() for t in (y, *first, *second) if t is not None]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What takes the place of `portable`."""

    def launcher_of(kernel: str, config: str, problem: Problem, *, no_product: bool) -> Launch:
        return stand_in_launcher(problem, no_product=no_product)

    monkeypatch.setattr(launcher, "named_launcher", launcher_of)
    dispatch.clear_cache()
    yield
    dispatch.clear_cache()


@pytest.mark.usefixtures("stand_in")
@pytest.mark.filterwarnings("ignore::UserWarning")
@names
def test_each_kind_of_sample_is_near_with_gradients_of_both_orders(name: str) -> None:
    taken = set[str]()
    for sample in first_of_each_kind(samples(name, "cpu", torch.float32)):
        theirs = results(name, sample, torch.float32)
        truths = results(name, sample, torch.float64)

        with aten._enable(RULES) as enabled:
            ours = results(name, sample, torch.float32)

        taken |= set(enabled.decisions.values())
        for got, want, truth in zip(ours, theirs, truths, strict=True):
            assert_as_near(got, want, truth, str(sample))
    assert aten.OURS in taken


def near(got: Tensor, want: Tensor) -> bool:
    """Whether results differ by roundings of sums of a few terms, relative to the largest."""
    largest = max(1.0, float(want.abs().amax())) if want.numel() else 1.0
    return got.shape == want.shape and torch.allclose(got, want, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "baddbmm"])
def test_samples_are_written_to_out(name: str) -> None:
    for sample in samples(name, "cpu", torch.float32):
        want = operator(name).op(*sample.given, **sample.how)
        out = torch.full_like(want, torch.nan)

        with aten._enable(RULES):
            found = operator(name).op(*sample.given, **sample.how, out=out)

        assert found is out
        assert near(out, want), sample


@pytest.mark.parametrize("name", BY_TORCH)
def test_operators_that_are_no_matrix_products_are_left_alone(name: str) -> None:
    with aten._enable(RULES) as enabled:
        for sample in samples(name, "cpu", torch.float32):
            operator(name).op(*sample.given, **sample.how)

    assert not enabled.decisions, BY_TORCH[name]


@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "baddbmm", "matmul"])
def test_samples_of_other_dtypes_are_torchs(name: str) -> None:
    dtypes = torch.complex64, torch.float64, torch.int64
    given = [sample for dtype in dtypes for sample in samples(name, "cpu", dtype)]
    expected = [operator(name).op(*sample.given, **sample.how) for sample in given]

    with aten._enable(RULES) as enabled:
        got = [operator(name).op(*sample.given, **sample.how) for sample in given]

    assert all(map(torch.equal, got, expected))
    assert aten.OURS not in enabled.decisions.values()
