"""How `outblas profile` runs ncu, and what ncu may refuse."""

import json
import os
import select
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import fake_ncu
from support.fake_ncu import FAKE, calls, check_stops, printed, results
from support.ncu_recording import RECORDING

from outblas.inspect import counters, ncu, profiled
from outblas.inspect.profiled import Request

pytest_plugins = ("support.ncu_fixtures",)
pytestmark = pytest.mark.long


def test_ncu_is_asked_for_the_counters_of_one_call(replay: Path) -> None:
    options = ("--layout", "tn", "--dtype", "float16", "--config", "tile_m=128, jitter=1")

    assert printed("hopper.tma_wgmma", *options)

    (call,) = calls(replay)
    assert call[:14] == [
        "--csv",
        "--page",
        "raw",
        "--nvtx",
        "--clock-control",
        "none",
        "--profile-from-start",
        "off",
        "--metrics",
        ",".join(counters.metrics(90)),
        sys.executable,
        "-P",
        "-m",
        "outblas.inspect.profiled",
    ]
    request = Request(
        "hopper.tma_wgmma", (4096, 4096, 4096), "float16", "tn", "tile_m=128,jitter=1"
    )
    assert Request.from_text(call[15]) == request
    assert call[16] == "C"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("outblas_portable", "other", "and then the instructions of ['nvjet_sm90"),
        ("L1 Wavefronts Shared Ideal", "Ideal", "the source page lacks L1 Wavefronts Shared Ideal"),
        ('"Kernel Name"', '"Name"', "counted nothing"),
    ],
)
def test_a_source_page_that_cannot_be_read_is_said(
    replay: Path, page: Path, old: str, new: str, message: str
) -> None:
    page.write_text(page.read_text().replace(old, new))
    check_stops(3, message, "portable", "--instructions")


def test_a_report_that_is_missing_is_not_imported(replay: Path) -> None:
    check_stops(3, "ncu ended with exit code 0 and counted nothing", "portable", "--instructions")
    assert len(calls(replay)) == 2


def answer(**what: Any) -> str:
    """What an act does for the profiled process."""
    return f"status.write_text({json.dumps(what)!r})\n"


UNPROFILED = "print('==WARNING== No kernels were profiled.')\n"


@pytest.mark.parametrize(
    ("act", "code", "message"),
    [
        (
            answer(failed="RuntimeError")
            + UNPROFILED
            + "sys.exit('==ERROR== ERR_NVGPUCTRPERM - No permission.')",
            3,
            "Nothing can be measured here: ncu may not read the GPU's performance counters "
            "(ERR_NVGPUCTRPERM)",
        ),
        (
            answer(done=True)
            + UNPROFILED
            + "sys.exit('==ERROR== Profiling is not supported on device 0.')",
            3,
            "this ncu does not know this GPU or its driver: Profiling is not supported on device 0",
        ),
        (answer(done=True) + UNPROFILED, 3, "ncu profiled no kernels"),
        (
            "print('==ERROR== Failed to find metric lts__t_sectors.sum'); sys.exit(1)",
            3,
            "ncu refused: Failed to find",
        ),
        ("sys.exit('out of luck')", 3, "ncu ended with exit code 1 and counted nothing: out"),
        ("", 3, "ncu ended with exit code 0 and counted nothing: it printed nothing"),
        (answer(unavailable="needs cutlass"), 3, "Nothing can be measured here: needs cutlass"),
        (
            answer(started=True) + "print('==PROF== Connected')",
            1,
            "Profiling failed: the profiled process ended",
        ),
        (answer(failed="OutOfMemoryError: 1 TiB"), 1, "Profiling failed: OutOfMemoryError: 1 T"),
        (answer(refused="K is 7, expected 8") + "sys.exit(2)", 2, "K is 7, expected 8"),
    ],
)
def test_what_ncu_refuses_is_said(fake: Path, act: str, code: int, message: str) -> None:
    fake.write_text(FAKE + act)
    check_stops(code, message, "portable")
    assert fake.with_name("calls").exists()


def test_a_provider_without_launches_is_said(replay: Path) -> None:
    first_provider = RECORDING.read_text().splitlines(keepends=True)[:6]
    replay.with_name("recording").write_text("".join(first_provider))

    assert [result["provider"] for result in results("cublas")] == ["cublas"]
    check_stops(3, "counted nothing", "portable")


def test_a_unit_that_is_unknown_is_said(replay: Path) -> None:
    replay.with_name("recording").write_text(RECORDING.read_text().replace('"ns"', '"fortnight"'))

    check_stops(3, "the unit of gpu__time_duration.sum is 'fortnight'", "portable")


def test_a_run_that_takes_too_long_is_ended(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu, "TIMEOUT_SECONDS", 3.0)
    sleep = "[sys.executable, '-S', '-c', 'import time; time.sleep(10**6)']"
    fake.write_text(
        f"{FAKE}(here / 'pid').write_text(str(subprocess.Popen({sleep}).pid)); time.sleep(10**6)"
    )

    check_stops(3, "ncu did not end within 3 s", "portable")

    assert ends(int(fake.with_name("pid").read_text())), "the watched process lives on"


def ends(pid: int, seconds: float = 20) -> bool:
    """Whether a process ends within some seconds, or has ended."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:  # it was reaped already
        return True
    try:
        readable, _, _ = select.select([watched], [], [], seconds)
        return bool(readable)
    finally:
        os.close(watched)


def test_ncu_is_looked_for_on_path_and_in_cuda_s_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_ncu.pretend_h100(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))

    if Path("/usr/local/cuda/bin/ncu").exists():
        assert ncu.find() == "/usr/local/cuda/bin/ncu"
    else:
        check_stops(3, "is not on PATH, nor in", "portable")


def test_cuda_home_is_the_first_of_cuda_s_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "cuda" / "bin" / "ncu"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))

    assert ncu.find() == str(program)


def test_without_a_gpu_ncu_is_not_started(replay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_stops(3, "Nothing can be measured here: there is no NVIDIA GPU", "portable")
    assert not replay.exists()


@pytest.fixture
def output(capfd: pytest.CaptureFixture[str]) -> Iterator[pytest.CaptureFixture[str]]:
    """What goes to the process's standard output and error, which a test may redirect."""
    before = os.dup(1)
    yield capfd
    os.dup2(before, 1)
    os.close(before)


@pytest.mark.parametrize(
    ("error", "code", "answer"),
    [
        pytest.param(
            ValueError("K is 7,\n expected 8"), 2, {"refused": "K is 7, expected 8"}, id="refused"
        ),
        pytest.param(ImportError("no cutlass"), 3, {"unavailable": "no cutlass"}, id="no DSL"),
        pytest.param(
            RuntimeError("illegal address"),
            1,
            {"failed": "RuntimeError: illegal address"},
            id="failed",
        ),
    ],
)
class TestTheProfiledProcess:
    """A call that fails in the process that ncu watches."""

    @pytest.fixture
    def code_of_a_call_that_fails(
        self, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[[], int]:
        """Profiles a call that writes its request to standard output and fails."""

        def fail(request: Request) -> None:
            os.write(1, repr(request).encode())
            raise error

        monkeypatch.setattr(profiled, "_calls", fail)
        request = Request("portable", (8, 8, 7), "bfloat16", "nt").to_text()
        return lambda: profiled.main(str(tmp_path / "status.json"), request)

    def test_answers_with_its_error(
        self,
        code_of_a_call_that_fails: Callable[[], int],
        output: pytest.CaptureFixture[str],
        tmp_path: Path,
        code: int,
        answer: dict[str, str],
    ) -> None:
        assert code_of_a_call_that_fails() == code

        assert json.loads((tmp_path / "status.json").read_text()) == answer

    def test_keeps_its_own_output_out_of_ncu_s(
        self,
        code_of_a_call_that_fails: Callable[[], int],
        output: pytest.CaptureFixture[str],
        code: int,
        answer: dict[str, str],
    ) -> None:
        code_of_a_call_that_fails()

        out, err = output.readouterr()
        assert out == ""
        assert "shape=(8, 8, 7)" in err
