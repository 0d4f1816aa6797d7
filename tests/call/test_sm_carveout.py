"""SMs that products leave to other kernels: torch's setting, plans that depend on it, and the
kernels that keep it.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fp8 import E4M3
from support.grouped_calls import draw as draw_groups
from support.imagined_gpu import ImaginedGpu, empty, imagine, on_gpu
from support.scaled_groups import draw as draw_scaled_groups

import outblas
from outblas.autotune import lookup
from outblas.autotune.store.records import Gpu
from outblas.base.compat.torch_private import get_sm_carveout, set_sm_carveout
from outblas.call import launcher, sm_carveout
from outblas.call.problem import Problem
from outblas.torch_ops import scaled_operator as scaled

Tensor = torch.Tensor

assert set_sm_carveout is not None
PRODUCTION = launcher.KEEPS_CARVEOUT


@pytest.fixture(autouse=True)
def _no_carveout() -> Iterator[None]:
    yield
    assert set_sm_carveout is not None
    set_sm_carveout(None)
    lookup.clear_cache()


# ---- the setting
def test_the_setting_is_torchs_and_ends_with_its_context() -> None:
    assert sm_carveout.reserved() == 0

    with outblas.sm_carveout(16):
        assert (get_sm_carveout(), sm_carveout.reserved()) == (16, 16)
        with outblas.sm_carveout(0):
            assert sm_carveout.reserved() == 16
        assert sm_carveout.reserved() == 16

    assert get_sm_carveout() is None


def test_contexts_that_overlap_end_in_any_order() -> None:
    """And in any thread: what is left free is what the others need, and at last what it was."""
    assert set_sm_carveout is not None
    set_sm_carveout(4)
    for order in itertools.permutations((8, 32, 16)):
        contexts = {count: outblas.sm_carveout(count) for count in (8, 32, 16)}
        for context in contexts.values():
            with ThreadPoolExecutor(1) as pool:
                pool.submit(context.__enter__).result()

        for count in order:
            assert get_sm_carveout() == max(contexts)
            with ThreadPoolExecutor(1) as pool:
                pool.submit(contexts.pop(count).__exit__, None, None, None).result()

        assert get_sm_carveout() == 4


def test_a_wrong_count_or_limit_changes_nothing() -> None:
    wrong: list[Any] = [2.0, True, "8"]
    for count in wrong:
        message = f"count is {type(count).__name__}, expected an int"
        with pytest.raises(TypeError, match=message):
            outblas.sm_carveout(count)
        for call in CALLS.values():
            with pytest.raises(
                TypeError, match=f"sms is {type(count).__name__}, expected an int or"
            ):
                call(torch.ones(8, 16), torch.ones(24, 16), count)
    with pytest.raises(ValueError, match="count is -1, expected at least 0"):
        outblas.sm_carveout(-1)
    for call in CALLS.values():
        with pytest.raises(ValueError, match="sms is 0, expected at least 1"):
            call(torch.ones(8, 16), torch.ones(24, 16), 0)

    assert get_sm_carveout() is None


def test_a_torch_without_the_setting_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm_carveout, "set_sm_carveout", None)

    with pytest.raises(RuntimeError, match="no setting"):
        outblas.sm_carveout(8)


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


CALLS: dict[str, Callable[[Tensor, Tensor, "int | None"], Tensor]] = {
    "matmul": lambda x, w, sms: outblas.matmul(x, w.t(), sms=sms),
    "matmul into": lambda x, w, sms: outblas.matmul(
        x, w.t(), out=torch.empty(x.shape[0], w.shape[0]), sms=sms
    ),
    "addmm": lambda x, w, sms: outblas.addmm(torch.zeros(w.shape[0]), x, w.t(), sms=sms),
    "linear": lambda x, w, sms: outblas.linear(x, w, activation="gelu", sms=sms),
}


@pytest.fixture
def on_132_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands on the CPU count as on a GPU of so many SMs."""
    monkeypatch.setattr(sm_carveout, "_present", lambda operands: 132)


@pytest.mark.usefixtures("on_132_sms")
@pytest.mark.parametrize("name", CALLS)
def test_calls_have_a_plan_for_what_they_leave_free(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a context or for one call, and take the one that they had when it comes back."""
    planned, x, w = Recorder(monkeypatch), torch.ones(8, 16), torch.ones(24, 16)

    for count, sms in ((0, None), (16, None), (0, 100), (16, 100), (0, 132), (0, 200), (16, None)):
        with outblas.sm_carveout(count):
            for _ in range(2):
                CALLS[name](x, w, sms)

    assert planned.carveouts == [0, 16, 32]
    assert get_sm_carveout() is None


@pytest.mark.usefixtures("on_132_sms")
def test_a_limit_is_of_its_call_and_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other threads see while a call with a limit is planned."""
    seen: list[int] = []

    def plan(problem: Problem, *given: Any, **how: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(sm_carveout.reserved).result())
        return lambda *operands: seen.append(sm_carveout.reserved())

    monkeypatch.setattr(launcher, "no_kernel_reason", lambda problem: None)
    monkeypatch.setattr(launcher, "best_launcher", plan)

    outblas.matmul(torch.ones(8, 16), torch.ones(16, 24), sms=100)

    assert seen == [0, 32]
    assert sm_carveout.reserved() == 0


class OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.usefixtures("on_132_sms")
def test_what_torch_computes_on_a_gpu_keeps_the_limit_of_its_call() -> None:
    """By torch's own setting, for as long as it computes; on a CPU nothing is set."""
    settings: list[int | None] = []

    @sm_carveout.kept_by_torch
    def product(a: Tensor) -> None:
        settings.append(get_sm_carveout())

    on_gpu = torch.ones(2).as_subclass(OnGpu)
    with sm_carveout.limit(100):
        product(on_gpu)
        product(torch.ones(2))
        with outblas.sm_carveout(48):
            product(on_gpu)
    product(on_gpu)

    assert settings == [32, None, 48, None]
    assert get_sm_carveout() is None


@pytest.mark.usefixtures("on_132_sms")
def test_products_of_scaled_operands_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Recorder(monkeypatch)
    monkeypatch.setattr(scaled, "unsupported_reason", lambda device: None)
    a, b, one = torch.ones(16, 32).to(E4M3), torch.ones(48, 32).to(E4M3), torch.ones(())
    recipe = torch.nn.functional.ScalingType.TensorWise

    outblas.scaled_mm(a, b.t(), one, recipe, one, recipe, sms=100)

    assert planned.carveouts == [32]
    assert get_sm_carveout() is None


@pytest.mark.usefixtures("on_132_sms")
@pytest.mark.parametrize("name", ["grouped_mm", "scaled_grouped_mm"])
def test_groups_are_limited(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    limit = sm_carveout.limit

    def recorded(*given: Any) -> Any:
        seen.append(given[0])
        return limit(*given)

    monkeypatch.setattr(sm_carveout, "limit", recorded)
    draw: Any = draw_groups if name == "grouped_mm" else draw_scaled_groups
    call = draw("ragged_m", "bias")

    assert torch.equal(call.run(sms=100), call.run())
    assert seen == [100]
    assert get_sm_carveout() is None
    assert "sms" in inspect.signature(getattr(outblas, name)).parameters


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_program_breaks_its_graph_for_a_limit() -> None:
    x, w = torch.randn(8, 16), torch.randn(24, 16)

    def program(x: Tensor, w: Tensor) -> Tensor:
        return outblas.linear(x, w, sms=100) + 1

    broken = torch.compile(program, backend="eager")
    assert torch.allclose(broken(x, w), x @ w.t() + 1, atol=1e-5)
    torch.compiler.reset()
    with pytest.raises(Exception, match="sms is 100 in a program that is compiled"):
        torch.compile(program, backend="eager", fullgraph=True)(x, w)


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


def test_another_gpu_leaves_the_product_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imagine(Gpu("NVIDIA A100-SXM4-80GB", arch=80, sms=108), tmp_path, monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")

    assert launcher.no_kernel_reason(call(0)) is None
    assert "an SM carveout of 16, for which kernel" in str(launcher.no_kernel_reason(call(16)))
