"""How the measuring worker checks and times configs with what follows the product, in this process
and without a GPU.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.fused_kernel import Config

from outblas.autotune.measure import worker
from outblas.autotune.measure.compile_pool import Compilers
from outblas.autotune.measure.worker import Entry, Screened
from outblas.autotune.search.target import TuneTarget
from outblas.autotune.store.records import Workload
from outblas.core.configs import to_text

TARGET = TuneTarget("fused", "support.fused_kernel")
WORKLOAD = Workload(24, 32, 16, "float32", layout="nn", epilogue="bias+gelu+residual")
EPILOGUES = ("bias", "gelu", "residual", "bias+residual", "bias+gelu+residual", "swiglu+residual")


def entry(fault: str = "") -> Entry:
    return TARGET, to_text(Config(fault=fault))


def screened(workload: Workload, fault: str = "") -> Screened:
    """What the worker finds of a config with a fault at a workload."""
    worker.open_bench(workload, on_gpu=False)
    return worker.screen(entry(fault), None)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_a_config_is_timed_with_its_epilogue(epilogue: str, dtype: str, layout: str) -> None:
    workload = Workload(24, 32, 16, dtype, layout=layout, epilogue=epilogue)

    found = screened(workload)

    assert (found.status, found.reason) == ("ok", "")
    assert found.us is not None


def test_a_config_that_is_wrong_without_the_epilogue_is_found_out() -> None:
    found = screened(WORKLOAD, "wrong")

    assert found.status == "wrong"
    assert "bias+gelu" not in found.reason, "the product alone is wrong"


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("fault", ["wrong-epilogue", "silent-epilogue"])
def test_a_config_that_is_wrong_with_the_epilogue_is_found_out(epilogue: str, fault: str) -> None:
    workload = replace(WORKLOAD, epilogue=epilogue)
    assert screened(workload).status == "ok"  # and leaves its result in memory

    found = screened(workload, fault)

    assert found.status == "wrong"
    assert found.reason.startswith(f"{epilogue}: wrong: ")


def test_a_config_that_is_refused_with_the_epilogue_says_why() -> None:
    found = screened(WORKLOAD, "refuse-epilogue")

    assert found.status == "refused"
    assert found.reason == "fault is refuse-epilogue, expected none with bias, gelu, residual"


@pytest.mark.parametrize("fault", ["wrong-epilogue", "refuse-epilogue"])
def test_a_fault_of_an_epilogue_is_none_of_the_product(fault: str) -> None:
    assert screened(replace(WORKLOAD, epilogue=""), fault).status == "ok"


def test_the_base_is_torch_with_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("linear", "gelu"):
        function = getattr(torch.nn.functional, name)

        def recording(*arguments: object, name: str = name, function: object = function) -> object:
            calls.append(name)
            return function(*arguments)  # type: ignore[operator]

        monkeypatch.setattr(torch.nn.functional, name, recording)
    worker.open_bench(replace(WORKLOAD, epilogue="bias"), on_gpu=False)

    worker.race([], 1)

    assert calls
    assert set(calls) == {"linear"}


def test_an_epilogue_is_timed_with_cold_weights_too() -> None:
    assert screened(replace(WORKLOAD, weights="cold")).status == "ok"


@pytest.mark.long
def test_a_config_is_compiled_with_its_epilogue_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product alone is checked first, and nothing is left to compile in the worker."""
    log = tmp_path / "compiled"
    monkeypatch.setenv("FUSED_LOG", str(log))

    with Compilers(1) as compilers:
        compilers.submit(TARGET, WORKLOAD, to_text(Config()), 90).result(60)

    assert log.read_text() == "bias, gelu, residual\n\n"
