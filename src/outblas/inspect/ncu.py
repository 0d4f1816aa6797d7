"""Runs NVIDIA's ncu (Nsight Compute) around one product, and explains in one sentence why it could
not.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from . import instructions
from .counters import Launch, in_range, metrics, parse
from .profiled import Request

TIMEOUT_SECONDS = 240.0

# metrics that the section SourceCounters omits
_BY_INSTRUCTION = "memory_l1_wavefronts_shared,memory_l1_wavefronts_shared_ideal"
_AS_IT_IS = ("--clock-control", "none", "--profile-from-start", "off")

_PERMISSION = (
    "ncu may not read the GPU's performance counters (ERR_NVGPUCTRPERM): run it as root, load the "
    "nvidia module with "
    "NVreg_RestrictProfilingToAdminUsers=0, or give the container CAP_SYS_ADMIN; see "
    "https://developer.nvidia.com/ERR_NVGPUCTRPERM"
)


class CannotMeasure(RuntimeError):
    """ncu is missing, or cannot measure on this machine."""


class Refused(Exception):
    """The kernel does not support the product."""


def find() -> str:
    """Returns the path of ncu: from PATH, otherwise from the CUDA toolkit. Raises CannotMeasure."""
    if found := shutil.which("ncu"):
        return found
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [str(Path(root) / "bin") for root in roots if root]
    if found := shutil.which("ncu", path=os.pathsep.join(folders)):
        return found
    raise CannotMeasure(
        f"ncu (NVIDIA Nsight Compute) is not on PATH, nor in {' or '.join(folders)}: it comes with "
        "the CUDA toolkit, "
        "or alone as nsight-compute from NVIDIA's package repository"
    )


def version() -> str:
    """Returns ncu's version, "2025.3.1.0". Raises CannotMeasure."""
    done = subprocess.run([find(), "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"Version (\S+)", done.stdout)
    if found is None:
        raise CannotMeasure(
            f"ncu did not print its version: {' '.join((done.stdout + done.stderr).split())[:200]}"
        )
    return found[1]


def profile(request: Request, arch: int) -> dict[str, list[Launch]]:
    """Returns the kernel launches of one call of each of `request.providers`, with their counters
    on sm_`arch`.

    ncu replays every launch once per pass with the caches flushed, and does not change the clocks.

    Raises:
        CannotMeasure: ncu or the kernel's DSL is missing, or ncu refuses or takes longer than
            TIMEOUT_SECONDS.
        Refused: the kernel does not support the product.
        RuntimeError: the profiled process failed.
    """
    options = ("--csv", "--page", "raw", "--nvtx", *_AS_IT_IS, "--metrics", ",".join(metrics(arch)))
    with tempfile.TemporaryDirectory(prefix="outblas-ncu-") as folder:
        ran, answer = _watch(options, request, Path(folder))
    try:
        launches = parse(ran.output)
    except ValueError as error:
        raise CannotMeasure(f"ncu's output cannot be read: {error}") from None
    found = {name: in_range(launches, name) for name in request.providers}
    if "done" not in answer or not all(found.values()):
        raise _failure(ran, answer)
    return found


def source_page(
    request: Request, found: Mapping[str, Sequence[Launch]]
) -> dict[str, list[instructions.Code]]:
    """Returns the memory instructions of the launches that `profile` found, from a second run;
    their operands stay unknown.

    Raises the errors of `profile`, and CannotMeasure if the second run launches other kernels.
    """
    with tempfile.TemporaryDirectory(prefix="outblas-ncu-") as folder:
        report = Path(folder, "report")
        options = (
            *_AS_IT_IS,
            "--section",
            "SourceCounters",
            "--metrics",
            _BY_INSTRUCTION,
            "-o",
            str(report),
        )
        ran, answer = _watch(options, request, Path(folder))
        report = report.with_suffix(".ncu-rep")
        if "done" not in answer or not report.exists():
            raise _failure(ran, answer)
        read = _run([find(), "--import", str(report), "--csv", "--page", "source"], Path(folder))
    try:
        codes = instructions.parse(read.output)
    except ValueError as error:
        raise CannotMeasure(f"ncu's output cannot be read: {error}") from None
    if not codes:
        raise _failure(read, {})
    expected = [launch.kernel for launches in found.values() for launch in launches]
    if (names := [code.kernel for code in codes]) != expected:
        raise CannotMeasure(
            f"ncu counted the launches {expected}, and then the instructions of {names}"
        )
    order = iter(codes)
    return {name: [next(order) for _ in launches] for name, launches in found.items()}


class _Ran(NamedTuple):
    """Exit code, standard output and standard error."""

    code: int
    output: str
    errors: str


def _watch(options: Sequence[str], request: Request, folder: Path) -> tuple[_Ran, dict[str, str]]:
    """Runs ncu around the request; returns ncu's output and the profiled process's answer."""
    status = folder / "status.json"
    watched = (
        sys.executable,
        "-P",
        "-m",
        "outblas.inspect.profiled",
        str(status),
        request.to_text(),
    )
    ran = _run([find(), *options, *watched], folder)
    answer = json.loads(status.read_text()) if status.exists() else {}
    if "refused" in answer:
        raise Refused(answer["refused"])
    if "unavailable" in answer:
        raise CannotMeasure(answer["unavailable"])
    return ran, answer


def _run(command: list[str], folder: Path) -> _Ran:
    """Runs a command with its output in files: if an orphan of ncu kept a pipe open, reading it
    would block after a timeout.
    """
    output, errors = folder / "output", folder / "errors"
    environment = {**os.environ, "LC_ALL": "C"}  # ncu formats numbers by the locale
    with output.open("wb") as out, errors.open("wb") as err:
        try:
            process = subprocess.Popen(
                command, stdout=out, stderr=err, env=environment, start_new_session=True
            )
        except OSError as error:
            raise CannotMeasure(f"{command[0]} does not start: {error}") from None
        try:
            code = process.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise CannotMeasure(f"ncu did not end within {TIMEOUT_SECONDS:g} s") from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)  # ncu and the process that it watches
                process.wait()
    return _Ran(code, output.read_text(errors="replace"), errors.read_text(errors="replace"))


def _failure(ran: _Ran, answer: dict[str, str]) -> RuntimeError:
    """Returns the error that explains why there are no counters, from the output of ncu and of the
    profiled process.
    """
    text = f"{ran.output}\n{ran.errors}"
    lines = [
        line.strip() for line in text.splitlines() if line.strip() and not line.startswith('"')
    ]
    errors = [
        line.removeprefix("==ERROR==").strip() for line in lines if line.startswith("==ERROR==")
    ]
    if "ERR_NVGPUCTRPERM" in text:
        return CannotMeasure(_PERMISSION)
    if unsupported := [line for line in errors if "not supported" in line]:
        return CannotMeasure(f"this ncu does not know this GPU or its driver: {unsupported[0]}")
    if "failed" in answer:
        return RuntimeError(answer["failed"])
    last = " | ".join(lines[-3:]) or "it printed nothing"
    if "started" in answer:
        return RuntimeError(
            f"the profiled process ended early, and ncu ended with exit code {ran.code}: {last}"
        )
    if errors:
        return CannotMeasure(f"ncu refused: {errors[0]}")
    if "No kernels were profiled" in text:
        return CannotMeasure("ncu profiled no kernels: it did not see the launches of the process")
    return CannotMeasure(f"ncu ended with exit code {ran.code} and counted nothing: {last}")
