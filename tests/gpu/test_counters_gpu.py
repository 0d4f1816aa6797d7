"""The program that counts by ncu, with ncu itself."""

import json
import subprocess
import sys
from typing import Any

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.gpu

OPERANDS_BYTES = 2 * 2 * 1024**2


def measured(*arguments: str) -> list[dict[str, Any]]:
    """The results for a GEMM of 1024 x 1024 x 1024; skips where nobody may count."""
    command = [sys.executable, "-m", "tools.counters", *arguments, "--shape", "1024"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    if done.returncode == 3:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    return results


@pytest.mark.parametrize(
    "kernel", ["portable", pytest.param("hopper.tma_wgmma", marks=pytest.mark.sm90)]
)
def test_counters_are_plausible(kernel: str) -> None:
    results = cublas, ours = measured(kernel, "--instructions")

    assert all(launch["kernel"].startswith("outblas_") for launch in ours["launches"])
    assert not any(launch["kernel"].startswith("outblas_") for launch in cublas["launches"])
    assert ours["ffma"] == 0
    for result in results:
        assert result["us"] > 1
        assert result["l2_to_sm_bytes"] >= OPERANDS_BYTES
        assert 0 < result["flop_per_l2_byte"] <= 2 * 1024**3 / OPERANDS_BYTES
        assert 0 < result["tensor_active"] <= 1
        assert 0 < result["occupancy"] <= 1
        assert sum(result["stalls"].values()) > 0
        assert sum(row["executed"] for row in result["memory"]) > 0


@pytest.mark.sm90
def test_phases_are_counted_by_role() -> None:
    (result,) = measured("hopper.hilbert", "--phases")

    assert len(result["phases"]) > 1
    assert all(role["total"] > 0 for role in result["phases"])
