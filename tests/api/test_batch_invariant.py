"""Batch-invariance: who asks for it, what is chosen then, and what is refused."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.causes import CAUSES
from torch.fx.experimental.proxy_tensor import make_fx

from outblas import addmm, batch_invariant, matmul
from outblas.autotune import automatic
from outblas.base import machines
from outblas.call import default_kernel, dispatch, launcher
from outblas.call.problem import Launch, Problem, problem
from outblas.kernels import portable
from outblas.kernels.portable_config import PortableConfig

pytest_plugins = ("support.batch_invariance",)
pytestmark = pytest.mark.usefixtures("no_context_before")

Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


A, B = torch.randn(6, 5), torch.randn(5, 4)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """CPU tensors as on a GPU: a kernel of ours takes them. Of each call that is planned, whether
    it is batch-invariant.
    """
    asked: list[bool] = []
    best = launcher.best_launcher

    def recording_launcher(problem: Problem, tune: str, *, no_product: bool) -> Launch:
        asked.append(problem.batch_invariant)
        return best(problem, tune, no_product=no_product)

    monkeypatch.setattr(launcher, "no_kernel_reason", lambda problem: None)
    monkeypatch.setattr(launcher, "best_launcher", recording_launcher)
    return asked


# ---- what is chosen
def asked(M: int, dtype: torch.dtype = BF16, **changed: Any) -> Problem:
    """A batch-invariant problem of M rows, 384 columns and K of 512, on a GPU."""
    a, b = (
        torch.empty(M, 512, dtype=dtype, device="meta"),
        torch.empty(384, 512, dtype=dtype, device="meta").t(),
    )
    out = torch.empty(M, 384, dtype=dtype, device="meta")
    found = problem(a, b, out, batch_invariant=True)
    return replace(
        found, **{"device": torch.device("cuda", 0), "alignment": (16, 16, 16), **changed}
    )


def config_on(arch: int, found: Problem) -> PortableConfig:
    """The config of `portable` for a problem on the reference machine of an architecture."""
    machine = machines.reference(arch)
    return portable.choose(found, machine.sms, machine.arch, machine.shared_memory_per_cta)


def alike(dtype: torch.dtype) -> list[Problem]:
    """Problems of the same N and K and other rows, strides, alignments and batches."""
    found = [
        asked(1, dtype, a=(0, 1)),
        asked(9, dtype, alignment=(2, 2, 2)),
        asked(9, dtype, alignment=(4, 8, 2, 2), c=(384, 1)),
        asked(9, dtype, batch=(3, 2), a=(1, 99, 512, 1), b=(0, 7, 1, 512), out=(1, 9999, 384, 1)),
    ]
    for M in (1, 2, 16, 63, 128, 4096, 8192, 100_000):
        found += [asked(M, dtype), asked(M, dtype, a=(1, M), out=(1, M))]
    return found


@pytest.mark.parametrize(("arch", "dtype"), [(75, FP16), (80, FP32), (90, BF16)], ids=str)
def test_portable_has_one_config_for_all_rows(arch: int, dtype: torch.dtype) -> None:
    assert len({config_on(arch, found) for found in alike(dtype)}) == 1


@pytest.mark.parametrize("M", [1, 8192])
@pytest.mark.parametrize(
    ("arch", "sms", "dtype", "kernel"),
    [
        (90, 132, BF16, "hopper.gemm"),
        (90, 132, FP32, "portable"),
        (80, 108, BF16, "portable"),
        (75, 40, FP16, "portable"),
    ],
    ids=str,
)
def test_the_kernel_is_fixed_by_architecture_and_dtype(
    arch: int, sms: int, dtype: torch.dtype, kernel: str, M: int
) -> None:
    assert default_kernel.by_rule(asked(M, dtype), arch, sms) == kernel


def test_what_was_tuned_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel_and_config(kernel: str, config: str, *_: Any, no_product: bool) -> tuple[str, str]:
        return kernel, config

    monkeypatch.setattr(automatic, "choices", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr(default_kernel, "kernel_for", lambda problem: "portable")
    monkeypatch.setattr(launcher, "named_launcher", kernel_and_config)

    assert launcher.best_launcher(asked(64), "on", no_product=False) == ("portable", "")


def test_a_kernel_that_promises_nothing_is_refused_in_the_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(portable, "BATCH_INVARIANT")

    with (
        batch_invariant(),
        pytest.raises(ValueError, match="'portable' does not promise batch_invariant=True"),
    ):
        addmm(B[0], A, B, kernel="portable")


# ---- what torch would take
@pytest.mark.filterwarnings("error::outblas.FallbackWarning")
@pytest.mark.parametrize("cause", CAUSES)
def test_what_torch_takes_is_refused_in_the_context(cause: str) -> None:
    refused = rf"batch_invariant is True, and torch would take this call \(.*{cause}"

    for _ in range(3):  # the first of a kind, and later ones
        with batch_invariant(), pytest.raises(ValueError, match=refused):
            CAUSES[cause]()


def test_the_argument_is_a_bool() -> None:
    wrong: Any = 1

    for call in (matmul, partial(addmm, B[0])):
        with pytest.raises(TypeError, match="batch_invariant is int, expected a bool"):
            call(A, B, batch_invariant=wrong)
    with pytest.raises(TypeError, match="enabled is int, expected a bool"):
        batch_invariant(wrong)


# ---- the context
def planned(found: list[bool]) -> bool:
    """Whether one more call is planned as batch-invariant, with no warm call before it."""
    dispatch.clear_cache()
    matmul(A, B)
    return found.pop()


def test_contexts_nest_and_end_with_an_error_inside(on_cpu: list[bool]) -> None:
    assert not planned(on_cpu)
    with batch_invariant():
        with batch_invariant(False):
            assert not planned(on_cpu)
            with batch_invariant(enabled=True):
                assert planned(on_cpu)
            assert not planned(on_cpu)
        with pytest.raises(ZeroDivisionError), batch_invariant(False):
            raise ZeroDivisionError
        assert planned(on_cpu)
    assert not planned(on_cpu)


def test_other_threads_are_not_asked(on_cpu: list[bool]) -> None:
    with batch_invariant(), ThreadPoolExecutor(1) as pool:
        assert not pool.submit(planned, on_cpu).result()
        assert planned(on_cpu)


# ---- graphs
def test_graphs_carry_it(on_cpu: list[bool]) -> None:
    graph = make_fx(lambda a, b: matmul(a, b, batch_invariant=True))(A, B)
    on_cpu.clear()
    dispatch.clear_cache()

    got = graph(A, B)

    assert on_cpu == [True]
    assert torch.equal(got, matmul(A, B, batch_invariant=True))


def test_compiled_calls_ask_the_context_around_them(on_cpu: list[bool]) -> None:
    compiled = torch.compile(lambda a, b: matmul(a, b) + 1, backend="eager", fullgraph=True)

    for enabled in (False, True, False):
        dispatch.clear_cache()
        with batch_invariant(enabled):
            compiled(A, B)
        assert on_cpu.pop() == enabled
