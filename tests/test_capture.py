"""CUDA graphs without a GPU: what a capture refuses, what it lets pass, and `warmup`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import outblas
from outblas import addmm, capture, dispatch, linear, matmul
from outblas.autotune import automatic

A, B = torch.randint(-8, 9, (6, 5)).float(), torch.randint(-8, 9, (5, 4)).float()
GROWN = A.clone().requires_grad_()
MESSAGE = r"a CUDA graph is being captured, .* outblas\.warmup\(function, \*args\)"


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    dispatch.forget()
    yield
    dispatch.forget()


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says whether a graph is being captured, on a GPU that CPU tensors stand for."""
    monkeypatch.setattr(dispatch, "_no_default", lambda problem: None)

    def say(enabled: bool) -> None:
        monkeypatch.setattr(dispatch, "capturing", lambda device: enabled)

    return say


CALLS: dict[str, Callable[[], Any]] = {
    "matmul": lambda: matmul(A, B),
    "out": lambda: matmul(A, B, out=torch.full((6, 4), torch.nan)),
    "named": lambda: matmul(A, B, kernel="portable"),
    "batch-invariant": lambda: matmul(A, B, batch_invariant=True),
    "addmm": lambda: addmm(B[0], A, B),
    "forward and backward": lambda: matmul(GROWN, B).sum().backward(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_ready_or_refused(name: str, captured: Callable[[bool], None]):
    call = CALLS[name]
    captured(True)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=MESSAGE):
            call()
    captured(False)
    outblas.warmup(call)
    captured(True)
    for _ in range(3):
        call()


def test_nothing_is_written_by_what_is_refused(captured: Callable[[bool], None]):
    captured(True)
    out = torch.full((6, 4), torch.nan)
    with pytest.raises(RuntimeError, match=MESSAGE):
        matmul(A, B, out=out)
    assert out.isnan().all()


def test_what_needs_no_kernel_passes(captured: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch):
    captured(True)
    assert matmul(A[:0], B).shape == (0, 4)
    assert not matmul(A[:, :0], B[:0]).any()
    assert torch.equal(addmm(B[0], A, B, alpha=0), B[0].expand(6, 4))
    monkeypatch.undo()
    monkeypatch.setattr(dispatch, "capturing", lambda device: True)
    with pytest.warns(outblas.FallbackWarning):
        assert torch.equal(matmul(A, B), A @ B)
    assert torch.equal(linear(A, B.t(), B[0]), A @ B + B[0])


def test_nothing_is_tuned_or_looked_up_there(captured: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(automatic, "choices", lambda *_: pytest.fail("asked"))
    captured(True)
    with pytest.raises(RuntimeError, match=MESSAGE):
        matmul(A, B, tune="on")


def test_warmup_passes_arguments_and_errors_on(monkeypatch: pytest.MonkeyPatch):
    given: list[Any] = []
    assert outblas.warmup(lambda *args, **kwargs: given.append((args, kwargs)), 1, function=2) is None
    assert given == [((1,), {"function": 2})]
    with pytest.raises(TypeError, match="function is int, expected something to call"):
        outblas.warmup(3)
    with pytest.raises(ValueError, match=r"a.shape\[1\] is 5"):
        outblas.warmup(matmul, A, A)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"call outblas\.warmup before, not inside"):
        outblas.warmup(given.append, 3)
    assert len(given) == 1
    assert not capture.capturing(A.device)
    assert capture.capturing(torch.device("cuda"))
