"""Kernels that the worker compiles for sm_90a, in a process of its own, while calls go on."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outblas.base import cache, compile_worker, compiling, machines, registry
from outblas.base.compile_worker import CompileWorker
from outblas.base.compiling import CompilePending
from outblas.call import dispatch, launcher
from outblas.call.artifact import example
from outblas.device.triton_variant import Kept
from outblas.hopper.gemm import host, smid_probe
from outblas.hopper.gemm.config import Config
from outblas.hopper.gemm.variant import example_variant
from outblas.hopper.parts import compile, tile_order

pytestmark = [pytest.mark.compile, pytest.mark.own_compile, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def worker(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileWorker]:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("OUTBLAS_COMPILE", "background")
    monkeypatch.setattr(compile, "_loaded", {})
    monkeypatch.setattr(compile_worker, "_worker", worker := CompileWorker())
    yield worker
    worker.close()


def test_kernels_are_compiled_elsewhere_and_loaded_here() -> None:
    problem = example(torch.bfloat16, None, "nt", (512, 512, 512))
    variant = example_variant(problem, Config())
    probe = smid_probe.ProbeVariant(2)
    portable = registry.load("portable").pack_variant(problem, machines.find("H100"))

    def load() -> list[Any]:
        return [
            compile.load(variant, lambda: pytest.fail("compiled in the call")),
            compile.load(probe, lambda: pytest.fail("compiled in the call")),
            portable.kept(Kept.from_bytes),
        ]

    with compiling.deferred():
        for each in (variant, probe):
            with pytest.raises(CompilePending, match=each.name):
                compile.load(each, lambda: pytest.fail("compiled in the call"))
        with pytest.raises(CompilePending, match=portable.name):
            portable.kept(Kept.from_bytes)
        compile_worker.await_all(lambda left: None)
        kernel, _, of_triton = load()

    assert compile_worker.failures() == {}
    assert callable(kernel)
    assert of_triton.cubin.startswith(b"\x7fELF")
    assert compile.is_loaded(variant)
    for each in (variant, probe, portable):
        assert cache.packed_object(each.cache_key_fields)


@pytest.mark.usefixtures("worker")
def test_a_call_takes_its_kernel_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the tensors are on a CPU, so nothing is launched."""
    dispatch.clear_cache()
    monkeypatch.setattr(launcher, "no_kernel_reason", lambda problem: None)
    monkeypatch.setattr(launcher, "best_launcher", lambda problem, *_, **__: host.plan(problem))
    monkeypatch.setattr(host, "own_config", lambda problem: Config(gpc_local=False))
    monkeypatch.setattr(tile_order, "clusters", lambda *_: 66)
    monkeypatch.setattr(compile, "_alone", lambda build: pytest.fail("compiled in the call"))
    a, b = torch.ones(64, 128).bfloat16(), torch.ones(32, 128).bfloat16().t()
    call = dispatch.Call(a, b, None, None, None, 1, 0, "", "")

    assert torch.equal(dispatch.run(call), torch.full((64, 32), 128.0).bfloat16())
    compile_worker.await_all(lambda left: None)

    plan = dispatch.at_rows(dispatch.find_plan(call), a.shape)
    assert dispatch.parts_of(plan) is not None
    assert compile_worker.failures() == {}
    dispatch.clear_cache()
