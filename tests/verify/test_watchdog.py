"""The watchdog ends a process whose test hangs, and says where."""

from pathlib import Path

import pytest
from support.fresh_torch import run_beside_torch


def test_watchdog_ends_a_hang_that_holds_the_gil() -> None:
    """The inner watchdog ended in time, and the outer one still bites."""
    code = """
import ctypes, time
from outblas.verify.watchdog import watchdog
def hangs_in_c():
    ctypes.PyDLL(None).sleep(50)
with watchdog(0.1, "quick"):
    pass
time.sleep(0.5)
print("alive", flush=True)
with watchdog(0.5, "outer"):
    with watchdog(40, "inner"):
        pass
    hangs_in_c()
print("not reached")
"""

    ended = run_beside_torch(code)

    assert (ended.returncode, ended.stdout) == (1, "alive\n")
    assert "in hangs_in_c" in ended.stderr
    assert "quick" not in ended.stderr


def test_watchdog_is_heard_through_pytests_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conftest.py").write_text(
        "from outblas.verify.watchdog import real_stderr\ndef pytest_configure(config):\n    "
        "real_stderr()\n"
    )
    (tmp_path / "test_hang.py").write_text(
        "import time\nfrom outblas.verify.watchdog import watchdog\n"
        "def test_hang():\n    with watchdog(0.3, 'my kernel'):\n        time.sleep(50)\n"
    )

    ended = run_beside_torch("import pytest; pytest.main(['-p', 'no:cacheprovider', '-q'])")

    assert ended.returncode == 1
    assert "watchdog: my kernel: not done after 0.3 s" in ended.stderr
    assert "in test_hang" in ended.stderr
