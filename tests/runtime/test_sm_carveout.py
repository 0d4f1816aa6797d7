"""SMs that products leave to other kernels: torch's setting, plans that depend on it, and the
kernels that keep it.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fp8 import E4M3
from support.imagined_gpu import ImaginedGpu, empty, imagine, on_gpu

import outblas
from outblas.autotune import lookup
from outblas.autotune.store.records import Gpu
from outblas.core import sm_carveout
from outblas.core.compat.torch_private import get_sm_carveout, set_sm_carveout
from outblas.core.problem import Problem
from outblas.runtime import dispatch, launcher
from outblas.torch_ops import scaled_mm as scaled

Tensor = torch.Tensor

assert set_sm_carveout is not None
PRODUCTION = launcher.KEEPS_CARVEOUT


@pytest.fixture(autouse=True)
def _no_carveout() -> Iterator[None]:
    dispatch.clear_cache()
    yield
    assert set_sm_carveout is not None
    set_sm_carveout(None)
    dispatch.clear_cache()
    lookup.clear_cache()


# ---- the setting
def test_the_setting_is_torchs_and_ends_with_its_context() -> None:
    assert sm_carveout.reserved() == 0

    with outblas.sm_carveout(16):
        assert (get_sm_carveout(), sm_carveout.reserved()) == (16, 16)
        with outblas.sm_carveout(0):
            assert sm_carveout.reserved() == 0
        assert sm_carveout.reserved() == 16

    assert get_sm_carveout() is None


def test_an_error_ends_the_context() -> None:
    with pytest.raises(KeyError), outblas.sm_carveout(8):
        raise KeyError

    assert get_sm_carveout() is None


@pytest.mark.parametrize(
    ("count", "error", "message"),
    [
        (-1, ValueError, "count is -1, expected at least 0"),
        (2.0, TypeError, "count is float, expected an int"),
        (True, TypeError, "count is bool, expected an int"),
        (None, TypeError, "count is NoneType, expected an int"),
    ],
)
def test_a_wrong_count_changes_nothing(count: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        outblas.sm_carveout(count)

    assert get_sm_carveout() is None


def test_a_torch_without_the_setting_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm_carveout, "set_sm_carveout", None)

    with pytest.raises(RuntimeError, match="no setting"):
        outblas.sm_carveout(8)


@pytest.mark.parametrize(
    ("asked", "count", "cluster", "found"),
    [
        (0, 0, 1, 132),
        (0, 16, 2, 116),
        (100, 16, 1, 100),
        (100, 40, 1, 92),
        (0, 131, 2, 2),
        (0, 500, 4, 4),
    ],
)
def test_a_kernel_may_use_what_is_left_and_one_cluster_at_least(
    asked: int, count: int, cluster: int, found: int
) -> None:
    assert sm_carveout.usable(132, asked, count, cluster) == found


# ---- plans
class Recorder:
    """Stands for the choice of a kernel on a GPU: records the problems that are planned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.problems: list[Problem] = []
        monkeypatch.setattr(launcher, "no_kernel_reason", lambda problem: None)
        monkeypatch.setattr(launcher, "best_launcher", self.plan)
        monkeypatch.setattr(launcher, "named_launcher", lambda *given, **how: self.plan(given[2]))

    def plan(self, problem: Problem, *given: Any, **how: Any) -> Any:
        self.problems.append(problem)
        return lambda *operands: None

    @property
    def carveouts(self) -> list[int]:
        return [problem.sm_carveout for problem in self.problems]


def linear(x: Tensor, w: Tensor) -> Tensor:
    return outblas.linear(x, w)


def with_bias(x: Tensor, w: Tensor) -> Tensor:
    return outblas.linear(x, w, torch.zeros(w.shape[0]), activation="gelu")


def addmm(x: Tensor, w: Tensor) -> Tensor:
    return outblas.addmm(torch.zeros(x.shape[0], w.shape[0]), x, w.t())


def product(x: Tensor, w: Tensor) -> Tensor:
    return outblas.matmul(x, w.t())


def into(x: Tensor, w: Tensor) -> Tensor:
    return outblas.matmul(x, w.t(), out=torch.empty(x.shape[0], w.shape[0]))


@pytest.mark.parametrize("call", [product, into, addmm, linear, with_bias])
def test_calls_have_a_plan_for_each_carveout(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And take the one that they had when it comes back."""
    planned, x, w = Recorder(monkeypatch), torch.ones(8, 16), torch.ones(24, 16)

    for count in (0, 16, 32, 16, 0):
        with outblas.sm_carveout(count):
            for _ in range(2):
                call(x, w)

    assert planned.carveouts == [0, 16, 32]


def test_a_backward_pass_keeps_the_carveout_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Recorder(monkeypatch)
    x, w = torch.ones(8, 16, requires_grad=True), torch.ones(24, 16, requires_grad=True)
    y = outblas.linear(x, w)

    with outblas.sm_carveout(16):
        y.sum().backward()

    assert planned.carveouts == [0, 16, 16]


def test_products_of_scaled_operands_have_a_plan_for_each_carveout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = Recorder(monkeypatch)
    monkeypatch.setattr(scaled, "_no_kernel_reason", lambda a: None)
    a, b, one = torch.ones(16, 32).to(E4M3), torch.ones(48, 32).to(E4M3), torch.ones(())

    for count in (0, 16, 16, 0):
        with outblas.sm_carveout(count):
            outblas.scaled_mm(a, b.t(), one, one)

    assert planned.carveouts == [0, 16]


# ---- the kernels that keep it
@pytest.fixture
def h100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImaginedGpu:
    return imagine(Gpu("NVIDIA H100 80GB HBM3", arch=90, sms=132), tmp_path, monkeypatch)


def call(carveout: int) -> Problem:
    return replace(on_gpu(empty(4096, 4096), empty(4096, 4096)), sm_carveout=carveout)


def test_a_hopper_gpu_runs_the_kernel_that_keeps_it(h100: ImaginedGpu) -> None:
    assert launcher.no_kernel_reason(call(16)) is None
    assert h100.launched(call(16))[0] == PRODUCTION


def test_a_kernel_that_uses_all_sms_is_refused_by_name(h100: ImaginedGpu) -> None:
    for kernel in ("portable", "hopper.hilbert"):
        launcher.named_launcher(kernel, "", call(0), no_product=False)
        with pytest.raises(ValueError, match=f"{kernel}.* SM carveout of 16 .*{PRODUCTION}"):
            launcher.named_launcher(kernel, "", call(16), no_product=False)


def test_where_nothing_is_multiplied_a_carveout_does_not_matter(h100: ImaginedGpu) -> None:
    assert launcher.named_launcher("portable", "", call(16), no_product=True)
    assert launcher.best_launcher(replace(call(16), M=0), "", no_product=False)


def test_another_gpu_leaves_the_product_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imagine(Gpu("NVIDIA A100-SXM4-80GB", arch=80, sms=108), tmp_path, monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")

    assert launcher.no_kernel_reason(call(0)) is None
    assert "an SM carveout of 16, for which kernel" in str(launcher.no_kernel_reason(call(16)))
