"""What control groups leave of a machine, by files as containers, batch systems and both versions
have them.
"""

import os
from pathlib import Path

import pytest

from outblas.autotune.measure import compile_pool, limits

GIB = 1 << 30
MACHINE = 1 << 50  # bytes; more than any bound here
V2 = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = (
    "33 25 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 25 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file system that has these files, on a machine with 64 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(
        os, "sysconf", lambda name: {"SC_PAGE_SIZE": 1 << 12, "SC_PHYS_PAGES": MACHINE >> 12}[name]
    )

    def make(mounts, membership, **files):
        files |= {"proc/self/mountinfo": mounts, "proc/self/cgroup": membership}
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


def test_version_2(system) -> None:
    """The tightest of a group and those that contain it."""
    root = system(
        V2,
        "0::/user/session/job\n",
        **{
            "sys/fs/cgroup/user/session/job/cpu.max": "max 100000\n",
            "sys/fs/cgroup/user/session/cpu.max": "350000 100000\n",
            "sys/fs/cgroup/user/cpu.max": "800000 100000\n",
            "sys/fs/cgroup/user/session/job/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/user/session/memory.max": "max\n",
            "sys/fs/cgroup/user/memory.max": f"{6 * GIB}\n",
            "sys/fs/cgroup/other/memory.max": f"{GIB}\n",
        },
    )
    assert limits.cores(root) == 3
    assert limits.memory(root) == 6 * GIB


def test_a_container_of_version_2(system) -> None:
    """Whose own group is mounted, and is called /."""
    root = system(
        V2,
        "0::/\n",
        **{
            "sys/fs/cgroup/cpu.max": "50000 100000\n",
            "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
        },
    )
    assert limits.cores(root) == 1
    assert limits.memory(root) == 4 * GIB


def test_version_1(system) -> None:
    root = system(
        V1,
        "9:name=systemd:/\n5:memory:/slurm/job\n4:cpu,cpuacct:/slurm\n",
        **{
            "sys/fs/cgroup/cpu,cpuacct/slurm/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu,cpuacct/slurm/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/slurm/job/memory.limit_in_bytes": f"{10 * GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert limits.cores(root) == 4
    assert limits.memory(root) == 10 * GIB


def test_a_container_of_version_1(system) -> None:
    """Which sees its group by the host's name of it, and has only that mounted."""
    mounts = "35 25 0:30 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    root = system(
        mounts,
        "5:memory:/docker/abc\n",
        **{
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
        },
    )
    assert limits.memory(root) == 2 * GIB


@pytest.mark.parametrize("text", ["", "garbage", "0 0", "max", "-5 100000"])
def test_what_cannot_be_read_bounds_nothing(system, text: str) -> None:
    root = system(
        V2,
        "0::/\n",
        **{"sys/fs/cgroup/cpu.max": text, "sys/fs/cgroup/memory.max": text.split(" ")[0]},
    )
    assert limits.cores(root) in (64, 1)
    assert limits.memory(root) in (MACHINE, 0)


def test_without_control_groups(tmp_path: Path, system) -> None:
    system("", "")
    assert limits.cores(tmp_path / "nothing") == 64
    assert limits.memory(tmp_path / "nothing") == MACHINE


def test_compile_processes_keep_within_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "cores", lambda: 3)
    monkeypatch.setattr(limits, "memory", lambda: 100 * GIB)
    assert compile_pool.default_workers() == 2
    monkeypatch.setattr(limits, "cores", lambda: 64)
    monkeypatch.setattr(limits, "memory", lambda: 5 * GIB)
    assert compile_pool.default_workers() == 2
    assert compile_pool.Compilers().memory < 5 * GIB
    monkeypatch.setattr(limits, "memory", lambda: GIB)
    assert compile_pool.default_workers() == 1
