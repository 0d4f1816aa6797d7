"""What control groups leave of a machine, by files as containers and both versions have them."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from outblas.autotune.measure import compile_pool
from outblas.base import limits

GIB = 1 << 30
MACHINE = 1 << 50  # bytes; more than any bound here


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 64 cores."""
    sizes = {"SC_PAGE_SIZE": 1 << 12, "SC_PHYS_PAGES": MACHINE >> 12}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)


@pytest.mark.parametrize(
    ("membership", "files", "cores", "memory"),
    [
        (  # the tightest of a group and those that contain it
            "0::/user/job\n",
            {
                "user/job/cpu.max": "max 100000",
                "user/cpu.max": "350000 100000",
                "user/job/memory.max": f"{8 * GIB}",
                "user/memory.max": f"{6 * GIB}",
                "other/memory.max": f"{GIB}",
            },
            3,
            6 * GIB,
        ),
        ("0::/\n", {"cpu.max": "50000 100000", "memory.max": f"{4 * GIB}"}, 1, 4 * GIB),
        (
            "9:name=systemd:/\n5:memory:/docker/abc\n4:cpu,cpuacct:/slurm\n",
            {
                "cpu/slurm/cpu.cfs_quota_us": "400000",
                "cpu/slurm/cpu.cfs_period_us": "100000",
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": f"{2 * GIB}",  # seen by a container as the top
            },
            4,
            2 * GIB,
        ),
        ("0::/\n", {"cpu.max": "garbage", "memory.max": "max"}, 64, MACHINE),
        ("", {}, 64, MACHINE),
    ],
)
def test_bounds_of_control_groups(
    tmp_path: Path, membership: str, files: Mapping[str, str], cores: int, memory: int
) -> None:
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in {**files, "proc/self/cgroup": membership}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    assert limits.cores(tmp_path) == cores
    assert limits.memory(tmp_path) == memory


@pytest.mark.parametrize(("cores", "memory", "workers"), [(3, 100, 2), (64, 5, 2), (64, 1, 1)])
def test_compile_processes_keep_within_them(
    monkeypatch: pytest.MonkeyPatch, cores: int, memory: int, workers: int
) -> None:
    monkeypatch.setattr(limits, "cores", lambda: cores)
    monkeypatch.setattr(limits, "memory", lambda: memory * GIB)

    assert limits.default_workers() == workers
    assert compile_pool.Compilers().memory < memory * GIB
