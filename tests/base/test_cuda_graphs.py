"""CUDA graphs without a GPU: what a capture refuses, what it lets pass, and `warmup`."""

from collections.abc import Callable

import pytest
import torch

import outblas
from outblas import addmm, linear, matmul
from outblas.autotune import automatic
from outblas.base import cuda_graphs
from outblas.call import dispatch, launcher

A, B = torch.randint(-8, 9, (6, 5)).float(), torch.randint(-8, 9, (5, 4)).float()
GROWN, OUT = A.clone().requires_grad_(), torch.empty(6, 4)
MESSAGE = r"a CUDA graph is being captured, .* outblas\.warmup\(function, \*args\)"
CALLS = {
    "out": lambda: matmul(A, B, out=OUT),
    "named": lambda: matmul(A, B, kernel="portable"),
    "tuned": lambda: matmul(A, B, tune="on"),
    "batch-invariant": lambda: addmm(B[0], A, B, batch_invariant=True),
    "forward and backward": lambda: matmul(GROWN, B).sum().backward(),
}


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says whether a graph is being captured, on a GPU that CPU tensors stand for."""
    monkeypatch.setattr(launcher, "no_kernel_reason", lambda problem: None)
    return lambda enabled: monkeypatch.setattr(dispatch, "capturing", lambda device: enabled)


@pytest.fixture(autouse=True)
def _unwritten() -> None:
    """What `OUT` holds before each test."""
    OUT.fill_(torch.nan)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_ready_or_refused(
    name: str, captured: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automatic, "choices", lambda *_: pytest.fail("asked"))
    captured(True)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=MESSAGE):
            CALLS[name]()
    assert OUT.isnan().all() or name != "out"
    captured(False)
    outblas.warmup(CALLS[name])
    captured(True)
    for _ in range(3):
        CALLS[name]()


def test_what_needs_no_kernel_passes(
    captured: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured(True)
    assert matmul(A[:0], B).shape == (0, 4)
    assert not matmul(A[:, :0], B[:0]).any()
    assert torch.equal(addmm(B[0], A, B, alpha=0), B[0].expand(6, 4))
    monkeypatch.setattr(launcher, "no_kernel_reason", lambda problem: "CPU tensors")
    with pytest.warns(outblas.FallbackWarning):
        assert torch.equal(linear(A, B.t(), B[0]), A @ B + B[0])


def test_warmup_calls_once_and_never_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    outblas.warmup(lambda *args, **kwargs: given.append((args, kwargs)), 1, function=2)
    with pytest.raises(TypeError, match="function is int, expected something to call"):
        outblas.warmup(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"input.shape\[1\] is 5 but other.shape\[0\] is 6"):
        outblas.warmup(matmul, A, A)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"call outblas\.warmup before, not inside"):
        outblas.warmup(given.append, 3)
    assert given == [((1,), {"function": 2})]
    assert not cuda_graphs.capturing(A.device)
    assert cuda_graphs.capturing(torch.device("cuda"))
