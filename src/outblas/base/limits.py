"""The cores and the memory that this process may use, within the bounds of its control groups."""

import os
from collections.abc import Iterator
from pathlib import Path

PER_WORKER = 2 << 30  # bytes of memory that a compile takes


def cores(root: Path = Path("/")) -> int:
    """Returns how many whole cores this process may keep busy, at least 1. `root` is the root of
    the file system, for tests.
    """
    bounds = [float(len(os.sched_getaffinity(0)))]
    for group in _groups(root, "cpu"):
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if not quota:  # version 1, where -1 means no quota
            quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():
            bounds.append(int(quota) / int(period))
    return max(1, int(min(bounds)))


def memory(root: Path = Path("/")) -> int:
    """Returns how many bytes this process may hold, according to the machine and its control
    groups.
    """
    bounds = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in _groups(root, "memory"):
        bound = _read(group / "memory.max") or _read(group / "memory.limit_in_bytes")
        if bound.isdecimal():
            bounds.append(int(bound))
    return min(bounds)


def default_workers() -> int:
    """Returns how many processes compile by default: as many as there are cores minus one, limited
    by memory.
    """
    return max(1, min(cores() - 1, memory() // PER_WORKER))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yields the control groups of this process for a controller, and the groups that contain
    them, as they are mounted by default: version 2 has one tree, version 1 one for a controller.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        # In a container the path may be that of the host, and the container's group be the top.
        group = top / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
