"""Plans of grouped GEMMs: a call like one before is not checked and described again, and has the
same result as if it were. `test_plan_keys` says which calls share a plan, `test_observers` who
sees a call that has one.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from support import grouped_calls, scaled_groups
from support.grouped_calls import FORMS, check_equal, draw, guarded

from outblas.base.compiling import CompileForbidden
from outblas.core import grouped
from outblas.core.errors import OperandError
from outblas.kernels import grouped as portable
from outblas.runtime import dispatch

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.filterwarnings("ignore:torch takes this call"),
]

ALL = "bias", "residual", "a_index", "scatter_index", "scatter_weights"


@pytest.fixture(autouse=True)
def _no_plans() -> None:
    torch.manual_seed(0)
    dispatch.clear_cache()


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Counts the calls that were checked and described."""
    counter = Mock(wraps=grouped.describe)
    monkeypatch.setattr(grouped, "describe", counter)
    return counter


CALLS: dict[str, Callable[[], grouped_calls.GroupedCall]] = {
    **{form: functools.partial(draw, form) for form in (*FORMS, "masked")},
    "everything": lambda: draw("ragged_m", *ALL, activation="relu"),
    "everything of counts": lambda: draw("masked", "bias", "residual", activation="relu"),
    **{
        f"scaled {form}": functools.partial(scaled_groups.draw, form, N=40, K=40, M=5)
        for form in scaled_groups.FORMS
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_described_once_whatever_its_groups(name: str, described: Mock) -> None:
    call = CALLS[name]()
    groups = "counts" if "counts" in call.tensors else "offs"
    step = 128 if name == "scaled ragged_k" else 1

    for shift in range(4):
        ends = torch.arange(len(call.tensors[groups]), dtype=torch.int32) * step * shift
        other = call.replaced(**{groups: ends})
        check_equal(other.run(kernel="portable"), other.expected())

    assert described.call_count == 1


def test_products_of_gradients_take_plans(described: Mock) -> None:
    call = draw("ragged_m", dtype=torch.float32)
    call.tensors["mat_b"].requires_grad_()
    for _ in range(3):
        (call.run(kernel="portable") * 2).sum().backward()

    assert described.call_count == 2  # the product, and the gradient of B


def test_a_tensor_that_is_given_twice_is_computed_as_ever() -> None:
    call, order = draw("ragged_m", ends=(5, 24)), torch.randperm(24)
    both = call.replaced(a_index=order, scatter_index=order)

    for _ in range(3):
        check_equal(both.run(kernel="portable"), both.expected())


def test_gradients_are_recorded_after_a_call_without_them() -> None:
    call = draw("ragged_m", dtype=torch.float32)
    call.tensors["mat_b"].requires_grad_()
    with torch.no_grad():
        for _ in range(2):
            assert not call.run(kernel="portable").requires_grad

    assert call.run(kernel="portable").requires_grad


def test_operands_that_do_not_fit_are_refused_after_a_call_that_has_a_plan() -> None:
    call = draw("ragged_m")
    wrong = call.replaced(mat_b=call.tensors["mat_b"][:2])
    for _ in range(2):
        call.run(kernel="portable")

    for _ in range(2):
        with pytest.raises(OperandError, match=r"mat_b.shape\[0\] is 2 but offs has 5 elements"):
            wrong.run(kernel="portable")


def test_a_kernel_that_may_not_be_compiled_any_more_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = draw("ragged_m")
    for _ in range(2):
        call.run(kernel="portable")
    monkeypatch.setattr(portable, "run", Mock(side_effect=CompileForbidden("not in the cache")))

    with pytest.raises(CompileForbidden, match="not in the cache"):
        call.run(kernel="portable")


def test_a_kernel_is_loaded_on_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the current one: a capture there has to be refused."""
    current = [0]

    @contextlib.contextmanager
    def within(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    call = guarded(draw("ragged_m", dtype=torch.float32))
    monkeypatch.setattr(portable, "_loaded", set())
    monkeypatch.setattr(portable.compiling, "check_allowed", lambda name: None)
    monkeypatch.setattr(portable.launch, "arch_of", lambda device: 90)
    monkeypatch.setitem(portable._KERNELS, "ragged_m", MagicMock())
    monkeypatch.setattr(torch.cuda, "device", within)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] == 0)

    class On:
        """The portable kernel, on a GPU of this index."""

        def __init__(self, index: int) -> None:
            self.device = torch.device("cuda", index)

        def run(self, problem: Any, *given: Any) -> None:
            portable.run(dataclasses.replace(problem, device=self.device), *given)

    kernels: list[Any] = [On(0), On(1)]
    call.launch(kernels[1])  # whose stream is not captured
    with pytest.raises(RuntimeError, match="CUDA graph"):
        call.launch(kernels[0])
