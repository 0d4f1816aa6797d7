"""What a sweep is asked for, and how it is told that something cannot be had."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.faulty_kernel import notes
from support.sweeps import OPTIONS, SUBJECT

from outblas.autotune.search.target import TuneTarget
from outblas.autotune.sweeps.sweep import sweep, visible_gpus

pytestmark = pytest.mark.usefixtures("faulty_log")

NO_NAME_FOR_A_STORE = TuneTarget("My kernel", "support.faulty_kernel")
BAD = [
    ("trials", 0, "trials is 0, expected an integer of at least 1"),
    ("top_k", 1.5, "top_k is 1.5"),
    ("compile_workers", -1, "compile_workers is -1"),
    ("budget", 0, "budget is 0, expected seconds above 0"),
    ("budget", float("nan"), "budget is nan"),
    ("trial_seconds", -1.0, "trial_seconds is -1.0"),
    ("engine", "slurm", "engine is 'slurm', expected one of local, ray"),
    ("dtype", "float64", "dtype is 'float64'"),
    ("out_dtype", "bfloat16", "out_dtype is 'bfloat16'"),
    ("layout", "nm", "layout is 'nm'"),
    ("weights", "hot", "weights is 'hot', expected one of warm, cold"),
    ("epilogue", "gelu+bias", r"epilogue is 'gelu\+bias', expected some of bias, an activation"),
    ("epilogue", "bias", "kernel 'faulty' has no epilogue besides alpha and C, but was given bias"),
    ("shapes", [(16, 16)], "shapes is"),
    ("shapes", (16, 0, 16), "N is 0"),
    ("shapes", "16x16", "shapes is '16x16'"),
    ("kernels", [], "kernels is empty"),
    ("kernels", NO_NAME_FOR_A_STORE, "My kernel"),
    ("gpus", "9", "gpus is '9'"),
]


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    BAD,
    ids=[f"{argument} {getattr(value, 'name', value)}" for argument, value, _ in BAD],
)
def test_a_bad_argument_is_an_error_before_anything_is_measured(
    argument: str, value: Any, message: str, path: Path
) -> None:
    arguments = {"kernels": SUBJECT, "shapes": 16, "store": path, **OPTIONS, argument: value}

    with pytest.raises(ValueError, match=message):
        sweep(**arguments)
    assert notes() == []
    assert not path.exists(), "a store was made"


@pytest.mark.long
def test_a_module_that_is_not_there_is_named(path: Path) -> None:
    with pytest.raises(ImportError, match="no_such_module is not installed"):
        sweep(TuneTarget("mine", "no_such_module"), 16, store=path, **OPTIONS)


# ---- GPUs
@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch sees two GPUs."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("gpus", "named"),
    [
        ("all", ["0", "1"]),
        ("0,1", ["0", "1"]),
        ([0, 1], ["0", "1"]),
        (1, ["1"]),
        ("1,1", ["1"]),
    ],
    ids=str,
)
def test_gpus_are_named_by_their_numbers(gpus: Any, named: list[str]) -> None:
    assert visible_gpus(gpus) == named


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("gpus", "named"), [("all", ["GPU-a", "MIG-b"]), (1, ["MIG-b"])], ids=str)
def test_gpus_are_named_as_cuda_is_told_of_them(
    gpus: Any, named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, MIG-b")

    assert visible_gpus(gpus) == named


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("gpus", ["2", "-1", "", [], True, "0;1"], ids=repr)
def test_gpus_that_are_not_there_are_an_error(gpus: Any) -> None:
    with pytest.raises(ValueError, match="gpus is"):
        visible_gpus(gpus)
