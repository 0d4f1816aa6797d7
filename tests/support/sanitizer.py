"""compute-sanitizer over a script that prints a line "right:" for each kernel whose results it
found right.
"""

import os
import shutil
import subprocess
import sys

import pytest

FOUND = 7  # exit status
SECONDS = 560  # less than a test may take


def run(tool: str, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    """`code` under memcheck, racecheck or synccheck; the exit status is `FOUND` if that found
    anything.

    Every tensor is an allocation of its own: a read past its end is no other tensor's. Skips
        without the sanitizer.
    """
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer")
    # torch asks the driver what some of them lack, and handles the refusal: no finding of ours.
    quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
    return subprocess.run(
        [
            sanitizer,
            "--tool",
            tool,
            "--error-exitcode",
            str(FOUND),
            *quiet,
            *options,
            sys.executable,
            "-c",
            code,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )


def finds_nothing(tool: str, code: str, right: int, *options: str) -> None:
    """Run `code`: no finding, and so many lines "right:"."""
    done = run(tool, code, *options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert done.stdout.count("right:") == right
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "RACECHECK SUMMARY: 0 hazards" in done.stdout
