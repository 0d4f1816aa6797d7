"""Fixtures of all tests: a private cache, one warning per cause for each test, a watchdog around
GPU tests.
"""

import atexit
import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support import interpreter_shortcuts, own_cases, shared_compiles

import outblas
from outblas.call import dispatch, fallback, launcher
from outblas.verify.watchdog import real_stderr, watchdog

if TYPE_CHECKING:
    from support.precompiled import Ahead

    from outblas.autotune.store.store import Store

GPU_TEST_SECONDS = 120


def pytest_addoption(parser: pytest.Parser) -> None:
    own_cases.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
        gc.disable()  # until all tests are collected: what they import stays
    real_stderr()
    _one_thread_for_torch()
    _no_vectors_for_inductor()
    os.environ.setdefault("OUTBLAS_COMPILE", "block")  # a call that is tested needs its kernel
    os.environ["COLUMNS"] = "140"  # what commands print does not depend on a terminal
    if own_cases.narrowed(config):
        own_cases.calls(config)  # says what is wrong with an option before anything is collected
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it


def _one_thread_for_torch() -> None:
    """Has torch compute on one thread in the tests and in the processes that they start.

    A pool of its own beside as many test processes as there are cores mostly spins: products of a
    few numbers took eight times the processor time with two threads on two busy cores.
    """
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _no_vectors_for_inductor() -> None:
    """Has Inductor compile scalar loops for the CPU.

    It probes for vector instructions with a timeout, which a busy machine exceeds now and then.
    That process then compiled, without vectors, code that another had made with them and left in
    the cache, and the compiler refused it.
    """
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Cases on a GPU take seconds to make, where none of them is wanted."""
    unwanted = "not gpu" in config.option.markexpr and collection_path.name == "gpu"
    return unwanted or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    for item in items:
        if item.get_closest_marker("sm90"):
            item.add_marker(pytest.mark.gpu)
            if capability is not None and capability != (9, 0):
                item.add_marker(pytest.mark.skip(reason="needs sm_90"))
        if item.get_closest_marker("no_gpu") and capability is not None:
            item.add_marker(pytest.mark.skip(reason="checks what a machine without a GPU is told"))
        if item.get_closest_marker("gpu") and capability is None:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    items.sort(key=_turn)  # stable: within a turn the order stays as it was


def _turn(item: pytest.Item) -> int:
    """What one process has to run whole begins first: none is to run alone at the end."""
    return 0 if item.get_closest_marker("xdist_group") else 1


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is there now stays until the end: the collector of garbage need not look through
    thousands of tests and all of torch again and again. And what tests import has been imported.
    """
    interpreter_shortcuts.take()
    gc.collect()
    gc.freeze()
    gc.enable()
    # Libraries of C++ say at the end what was never freed. Before that, pytest collects garbage
    # several times.
    atexit.register(gc.unfreeze)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A kernel that hangs ends the run with every stack dumped, in the test that launched it."""
    if not (item.get_closest_marker("gpu") or item.get_closest_marker("watched")):
        return (yield)
    seconds = GPU_TEST_SECONDS * (10 if item.get_closest_marker("slow") else 1)
    with watchdog(seconds, item.nodeid):
        result = yield
        torch.cuda.synchronize()
        return result


@pytest.fixture(autouse=True, scope="session")
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("OUTBLAS_CACHE_DIR")
    os.environ["OUTBLAS_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    yield
    os.environ.pop("OUTBLAS_CACHE_DIR")
    if before is not None:
        os.environ["OUTBLAS_CACHE_DIR"] = before


@pytest.fixture(scope="session")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> shared_compiles.Store:
    """What compilers and tools made of kernels, which all processes of this run pay for once."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    return shared_compiles.Store(folder / "compiled")


@pytest.fixture(scope="session")
def ahead() -> Iterator["Ahead"]:
    """Compiles what calls of hopper.gemm need, in processes, before they are made."""
    from support import precompiled

    with precompiled.compilers() as compile_ahead:
        yield compile_ahead


@pytest.fixture(autouse=True)
def _share_compiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests that compile share what came of it, but those that are marked `own_compile`."""
    if request.node.get_closest_marker("compile") is None:
        yield
        return
    store: shared_compiles.Store = request.getfixturevalue("shared_store")
    store.share()
    store.active = request.node.get_closest_marker("own_compile") is None
    yield
    store.active = True


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a store of the test's own, in a folder that is not there yet."""
    return tmp_path / "cache" / "tuning.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator["Store"]:
    """An empty store."""
    from outblas.autotune.store.store import Store

    with Store(path) as store:
        yield store


@pytest.fixture
def faulty_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tests/support/faulty_kernel.py notes who compiles and measures it."""
    monkeypatch.setenv("FAULTY_LOG", str(tmp_path / "log"))


@pytest.fixture(autouse=True)
def _as_if_it_were_the_first() -> Iterator[None]:
    """The same numbers in every order of tests. Nothing was planned, and nothing stays enabled."""
    torch.manual_seed(0)
    dispatch.clear_cache()
    yield
    outblas.disable()


@pytest.fixture(autouse=True)
def _fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "_seen", set())
    monkeypatch.delenv("OUTBLAS_STRICT", raising=False)


@pytest.fixture
def float32_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 calls that name no kernel take one, although torch is faster."""
    monkeypatch.setattr(launcher, "slower_reason", lambda problem, tune: None)


@pytest.fixture
def as_in_the_fuzz():
    """One thread, and no log of what fake tensors refuse, as in a process of the fuzz."""
    from fuzz import runner

    threads = torch.get_num_threads()
    runner.prepare()
    yield
    logging.disable(logging.NOTSET)
    torch.set_num_threads(threads)


@pytest.fixture
def fused_gemms(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The activations of the GEMMs that fused MLPs compute, in the order of the calls."""
    from outblas.patching import gated

    activations: list[str | None] = []
    linear = gated.linear

    def recording(*operands: Any, activation: Any) -> torch.Tensor:
        activations.append(activation)
        return linear(*operands, activation=activation)

    monkeypatch.setattr(gated, "linear", recording)
    return activations
