"""Fixtures of the tests of the short way: what plans run, and what calls go through."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from outblas.call import launcher
from outblas.torch_ops import ops

from .warm_calls import stand_in_launcher

Tensor = torch.Tensor


@pytest.fixture(params=["torch's product", "portable"])
def cpu_plans_run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What plans of CPU tensors run: torch, as ever, or a kernel of ours as on a GPU, which a test
    that makes many calls may replace by a stand-in.
    """
    if request.param != "torch's product":
        monkeypatch.setattr(launcher, "no_kernel_reason", lambda problem: None)
    if request.param == "stand-in":
        monkeypatch.setattr(launcher, "best_launcher", stand_in_launcher)


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the operators that calls go through, as they are called."""
    called: list[str] = []

    def recording(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        def record(*arguments: Any) -> Any:
            called.append(name)
            return operator(*arguments)

        return record

    for name in ("matmul", "matmul_out", "addmm", "addmm_out"):
        monkeypatch.setattr(ops, name, recording(name, getattr(ops, name)))
    return called


@pytest.fixture
def meta_by_default() -> Iterator[None]:
    """A default device on which a tensor that is made by mistake would be seen."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)
