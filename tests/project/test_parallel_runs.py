"""What `make test` relies on when it runs the tests in several processes."""

import subprocess
import sys
from pathlib import Path

import pytest

GROUPED = """
import os

import pytest


@pytest.mark.xdist_group("shared")
@pytest.mark.parametrize("number", range(6))
def test_of_a_group(number):
    with open("processes", "a") as file:
        file.write(f"{os.getpid()}\\n")
"""


@pytest.mark.long
def test_the_tests_of_a_group_run_in_one_process(tmp_path: Path) -> None:
    """pytest-xdist groups tests by a private name of pytest, which a new pytest may rename."""
    (tmp_path / "test_grouped.py").write_text(GROUPED)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup"]

    subprocess.run(
        [*command, "-p", "no:cacheprovider", "test_grouped.py"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )

    processes = (tmp_path / "processes").read_text().split()
    assert len(processes) == 6
    assert len(set(processes)) == 1
