"""What `outblas.grouped_mm` and `outblas.moe_mlp` promise beside their values: finite gradients,
second gradients where nothing is multiplied, no bits that are claimed to depend on nothing else.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch

import outblas
from outblas.core.grouped import NO_TENSORS, describe
from outblas.kernels import grouped as kernels

Tensor = torch.Tensor

pytestmark = pytest.mark.filterwarnings("ignore:torch takes this call")

ENDS = torch.tensor([2, 4], dtype=torch.int32)


def test_a_gradient_of_a_row_that_nothing_names_reaches_no_operand() -> None:
    """One row is scattered outside of the result, whose last row is therefore undefined."""
    a, b = torch.randn(4, 8, requires_grad=True), torch.randn(2, 8, 6, requires_grad=True)
    bias = torch.randn(2, 6, requires_grad=True)
    index = torch.tensor([0, 1, 2, 99], dtype=torch.int32)

    y = outblas.grouped_mm(a, b, offs=ENDS, bias=bias, scatter_index=index)
    y.backward(torch.tensor([1.0, 1.0, 1.0, torch.nan]).unsqueeze(1).expand(4, 6))

    for leaf in (a, b, bias):
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
    assert a.grad is not None
    assert (a.grad[3] == 0).all()


def test_no_gathered_rows_have_second_gradients() -> None:
    a, b = torch.randn(5, 8, requires_grad=True), torch.randn(2, 8, 6, requires_grad=True)
    none = torch.empty(0, dtype=torch.int32)

    y = outblas.grouped_mm(a, b, offs=torch.zeros(2, dtype=torch.int32), a_index=none)
    first = torch.autograd.grad(y.square().sum(), (a, b), create_graph=True)
    second = torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), (a, b))

    assert [g.shape for g in second] == [a.shape, b.shape]
    assert all((g == 0).all() for g in (*first, *second))


CALLS: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: outblas.grouped_mm(torch.ones(4, 8), torch.ones(2, 8, 6), offs=ENDS),
    "columns": lambda: outblas.grouped_mm(torch.ones(2, 8, 8), torch.ones(8, 4), offs=ENDS),
    "terms": lambda: outblas.grouped_mm(torch.ones(8, 4), torch.ones(4, 6), offs=ENDS),
    "counts": lambda: outblas.grouped_mm(torch.ones(2, 4, 8), torch.ones(2, 8, 6), counts=ENDS),
    "a layer": lambda: outblas.moe_mlp(
        torch.ones(4, 8),
        torch.ones(2, 8, 12),
        torch.ones(2, 6, 8),
        torch.zeros(4, 1).long(),
        torch.ones(4, 1),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_promise_of_batch_invariance_is_refused(name: str) -> None:
    """Also where the call has a plan from before."""
    for _ in range(2):
        CALLS[name]()

    with (
        outblas.batch_invariant(),
        pytest.raises(ValueError, match=r"batch_invariant is True, and \w+( of groups)? does not"),
    ):
        CALLS[name]()
    with outblas.batch_invariant(), outblas.batch_invariant(False):
        CALLS[name]()


def test_a_kernel_is_loaded_on_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the current one: a capture there has to be refused."""
    current = [0]

    @contextlib.contextmanager
    def within(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    a, b, out = torch.ones(4, 16), torch.ones(2, 16, 16), torch.empty(4, 16)
    problem = describe("ragged_m", a, b, out, 2)
    monkeypatch.setattr(kernels, "_loaded", set())
    monkeypatch.setattr(kernels.compiling, "check_allowed", lambda name: None)
    monkeypatch.setattr(kernels.launch, "arch_of", lambda device: 90)
    monkeypatch.setitem(kernels._KERNELS, "ragged_m", MagicMock())
    monkeypatch.setattr(torch.cuda, "device", within)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] == 0)

    def run(index: int) -> None:
        on = replace(problem, device=torch.device("cuda", index))
        kernels.run(on, a, b, out, ENDS, NO_TENSORS)

    run(1)  # whose stream is not captured
    with pytest.raises(RuntimeError, match="CUDA graph"):
        run(0)
