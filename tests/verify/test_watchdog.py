"""The watchdog ends a process whose test hangs, and says where."""

import subprocess
from pathlib import Path

import pytest
from support.fresh_torch import run_beside_torch

HANG = """
import ctypes, time
from outblas.verify.watchdog import watchdog

def hangs_in_c():
    ctypes.PyDLL(None).sleep(50)
"""


def run(code: str) -> "subprocess.CompletedProcess[str]":
    """Runs a program that may hang in C, where it holds the GIL."""
    return run_beside_torch(HANG + code)


@pytest.mark.long
def test_a_hang_that_holds_the_gil_is_ended() -> None:
    ended = run("""
with watchdog(0.2, "my kernel"):
    hangs_in_c()
print("not reached")
""")

    assert (ended.returncode, ended.stdout) == (1, "")
    assert "in hangs_in_c" in ended.stderr


def test_what_is_done_in_time_goes_on() -> None:
    ended = run("""
with watchdog(0.1, "quick"):
    pass
time.sleep(0.3)
print("alive")
""")

    assert (ended.returncode, ended.stdout) == (0, "alive\n")
    assert "quick" not in ended.stderr


def test_a_watchdog_still_watches_after_one_inside_it() -> None:
    ended = run("""
with watchdog(0.2, "outer"):
    with watchdog(40, "inner"):
        pass
    hangs_in_c()
""")

    assert ended.returncode == 1
    assert "in hangs_in_c" in ended.stderr


def test_a_watchdog_is_heard_through_pytest_s_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds to import
    Path("conftest.py").write_text("""
from outblas.verify.watchdog import real_stderr

def pytest_configure(config):
    real_stderr()
""")
    Path("test_hang.py").write_text("""
import time
from outblas.verify.watchdog import watchdog

def test_hang():
    with watchdog(0.3, "my kernel"):
        time.sleep(50)
""")

    ended = run_beside_torch("import pytest; pytest.main(['-p', 'no:cacheprovider', '-q'])")

    assert ended.returncode == 1
    assert "watchdog: my kernel did not end within 0.3 s" in ended.stderr
    assert "in test_hang" in ended.stderr
