"""`outblas tune --report`: where its trials come from, which of them it chooses, what it writes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from support import commands
from support.commands import squeezed
from support.reports import Page
from support.stored import H100, H200, WORKLOAD
from support.tuning_reports import SWEPT, winner

from outblas.autotune.store import transfer
from outblas.autotune.store.records import Gpu, Workload
from outblas.autotune.store.store import Store


def command(line: str) -> Result:
    return commands.invoke("tune", "--report", *line.split(), code=0)


def assert_refused(line: str, message: str) -> None:
    commands.refuses(message, "tune", "--report", *line.split())


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with trials in a file "export" and in a file "store".

    They are of two kernels, five workloads and two GPUs; no two of these have equally many.
    """
    folder = tmp_path_factory.mktemp("kept")
    on_h200 = [replace(trial, gpu=H200) for trial in SWEPT[:9]]
    small = [replace(trial, workload=Workload(512, 512, 512)) for trial in SWEPT[:5]]
    workload_nn = replace(WORKLOAD, layout="nn")
    portable = [replace(t, kernel="portable", workload=workload_nn) for t in SWEPT[:-1]]
    cold = [replace(trial, workload=replace(WORKLOAD, weights="cold")) for trial in SWEPT[:4]]
    fused = [replace(trial, workload=replace(WORKLOAD, epilogue="bias")) for trial in SWEPT[:3]]
    trials = [*SWEPT, *on_h200, *small, *portable, *cold, *fused]
    transfer.write(folder / "export", trials, [winner()])
    with Store(folder / "store") as store:
        store.merge(trials, [winner()])
    return folder


@pytest.fixture
def in_kept(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs in the folder of `kept`, which it leaves as it is."""
    monkeypatch.chdir(kept)


def test_the_command_says_and_writes_what_was_found(kept: Path, tmp_path: Path) -> None:
    files = {"html": tmp_path / "t.html", "chart": tmp_path / "t.png", "save": tmp_path / "t.json"}
    options = " ".join(f"--{option} {path}" for option, path in files.items())

    said = command(f"--from {kept / 'export'} {options}").stdout

    assert "hopper.hilbert, 4096 bfloat16 nt, NVIDIA H100 80GB HBM3" in said
    assert squeezed("is the first of 16 in the predicted order") in squeezed(said)
    assert "svg" in Page(files["html"].read_text()).seen
    assert files["chart"].read_bytes().startswith(b"\x89PNG")
    assert json.loads(files["save"].read_text())["counts"]["tried"] == 20


@pytest.mark.usefixtures("in_kept")
@pytest.mark.parametrize(
    ("options", "kernel", "M", "gpu", "tried"),
    [
        pytest.param("", "hopper.hilbert", 4096, H100, 20, id="no options"),
        pytest.param("--kernels portable", "portable", 4096, H100, 19, id="kernel"),
        pytest.param("--layout nn", "portable", 4096, H100, 19, id="layout"),
        pytest.param("--shapes 512", "hopper.hilbert", 512, H100, 5, id="shape"),
        pytest.param("--weights cold", "hopper.hilbert", 4096, H100, 4, id="weights"),
        pytest.param("--epilogue bias", "hopper.hilbert", 4096, H100, 3, id="epilogue"),
        pytest.param("--gpu h200", "hopper.hilbert", 4096, H200, 9, id="GPU"),
    ],
)
@pytest.mark.parametrize("source", ["--from export", "--store store"])
def test_options_choose_among_the_trials(
    source: str, options: str, kernel: str, M: int, gpu: Gpu, tried: int
) -> None:
    found = json.loads(command(f"{source} {options} --json").stdout)

    assert (found["kernel"], found["workload"]["M"]) == (kernel, M)
    assert [each["name"] for each in found["gpus"]] == [gpu.name]
    assert found["counts"]["tried"] == tried


@pytest.mark.usefixtures("in_kept")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--kernels none",
            "--kernels is 'none', expected one that has trials: hopper.hilbert, portable",
        ),
        ("--shapes 7", "--shapes is '7', expected one that has trials: 4096, 512"),
        ("--shapes 512,4096", "--shapes is '512,4096', expected one shape"),
        ("--shapes x", "--shapes is 'x'"),
        ("--dtype int8", "--dtype is 'int8'"),
        ("--layout no", "--layout is 'no', expected one that has trials: nn, nt"),
        (
            "--gpu NVIDIA",
            "--gpu is 'NVIDIA', expected one that has trials: NVIDIA H100 80GB HBM3, NVIDIA H2",
        ),
        ("--chart x.bmp", "--chart is 'x.bmp'"),
        ("--html /nowhere/x.html", "--html is '/nowhere/x.html'"),
        ("--store store", "--store and --from are both given"),
        ("--from /nowhere", "--from is '/nowhere', expected a file"),
    ],
)
def test_bad_arguments_are_usage_errors(options: str, message: str) -> None:
    assert_refused(f"--from export {options}", message)


def test_a_store_without_trials_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path))

    assert_refused("", "tuning.sqlite has no trials: run outblas tune first")
