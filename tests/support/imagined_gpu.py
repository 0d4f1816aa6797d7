"""A GPU that this machine has not: calls on it are looked up and planned, and never launched."""

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from outblas.autotune import lookup
from outblas.autotune.search import gpu as gpus
from outblas.autotune.store.records import BestConfig, Gpu
from outblas.autotune.store.store import Store
from outblas.base import registry
from outblas.base.configs import to_text
from outblas.call import launcher
from outblas.call.problem import Problem, problem

DEVICE = torch.device("cuda", 0)


@dataclass
class ImaginedGpu:
    """The GPU of index 0, whose tuned configs are in the store at `path`.

    `failures`: what planning a kernel raises, by the kernel's name.
    """

    gpu: Gpu
    path: Path
    failures: dict[str, Exception]

    def tune(self, *winners: BestConfig) -> None:
        """Stores winners, as a sweep does."""
        with Store(self.path) as store:
            for winner in winners:
                store.record_best(winner)
        lookup.clear_cache()

    def launched(self, call: Problem, tune: str = "") -> tuple[str, str]:
        """The kernel that `matmul` would launch, and its config as text ("": the kernel's own)."""
        launch = launcher.best_launcher(call, tune, no_product=False)
        assert isinstance(launch, Launch), launch
        return launch.kernel, launch.config


@dataclass(frozen=True)
class Launch:
    """The launch that a `PlannedKernel` plans."""

    kernel: str
    config: str

    def __call__(self, *operands: Any) -> None:
        raise AssertionError("this machine has no such GPU")


@dataclass(frozen=True)
class PlannedKernel:
    """A kernel's module that takes every problem, and compiles nothing."""

    name: str
    module: ModuleType
    failures: dict[str, Exception]

    @property
    def Config(self) -> type:
        return self.module.Config

    @property
    def EPILOGUES(self) -> bool:
        return getattr(self.module, "EPILOGUES", False)

    def unsupported(self, problem: Problem, config: Any) -> None:
        return None

    def plan(self, problem: Problem, config: Any) -> Launch:
        if self.name in self.failures:
            raise self.failures[self.name]
        return Launch(self.name, to_text(config) if config else "")


def imagine(gpu: Gpu, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ImaginedGpu:
    """Has this machine have a GPU, with the user's files in the folder and no shipped tables."""
    found = ImaginedGpu(gpu, folder / "tuning.sqlite", {})
    load = registry.load
    properties = type("Properties", (), {"multi_processor_count": gpu.sms, "name": gpu.name})()
    monkeypatch.setattr(
        registry, "load", lambda name: PlannedKernel(name, load(name), found.failures)
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: divmod(gpu.arch, 10))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(gpus, "current", lambda _=None: gpu)
    monkeypatch.setattr(lookup, "TABLES", folder)
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(folder))
    monkeypatch.delenv("OUTBLAS_TUNE", raising=False)
    monkeypatch.delenv("OUTBLAS_TUNE_BUDGET", raising=False)
    lookup.clear_cache()
    return found


def empty(*shape: int) -> torch.Tensor:
    """An operand of which only the layout counts."""
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def on_gpu(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> Problem:
    """The problem of a product on the imagined GPU."""
    return replace(problem(a, b, a @ b if out is None else out), device=DEVICE)
