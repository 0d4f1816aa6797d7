"""The cores and the memory that this process may use, within the bounds of its control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # bytes; version 1 expresses "no limit" by a number near 2^63


def cores(root: Path = Path("/")) -> int:
    """Returns how many whole cores this process may keep busy, at least 1. `root` is the root of
    the file system, for tests.
    """
    affinity = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min([affinity, *map(int, _cpu_quotas(root))]))


def memory(root: Path = Path("/")) -> int:
    """Returns how many bytes this process may hold, according to the machine and its control
    groups.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_memory_bounds(root)])


def _cpu_quotas(root: Path) -> Iterator[float]:
    for group in _groups("cpu", root):
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if not quota:  # version 1, where -1 means no quota
            quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):
            yield int(quota) / int(period)


def _memory_bounds(root: Path) -> Iterator[int]:
    for group in _groups("memory", root):
        bound = _read(group / "memory.max") or _read(group / "memory.limit_in_bytes")
        if bound.isdecimal() and int(bound) < _UNLIMITED:
            yield int(bound)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yields the control groups of this process for a controller, each followed by the groups that
    contain it.
    """
    paths = dict(_memberships(root))
    for mount in _mounts(root):
        if mount.version == 2:
            path = paths.get("")
        else:
            path = paths.get(controller) if controller in mount.controllers else None
        if path is None:
            continue
        inside = path.removeprefix(mount.group.rstrip("/")).strip(
            "/"
        )  # a container may see a part of the tree
        top = root / mount.point.lstrip("/")
        group = top / inside if ".." not in inside.split("/") else top
        yield from (
            folder for folder in (group, *group.parents) if folder == top or top in folder.parents
        )


@dataclass(frozen=True)
class _Mount:
    """A mounted file system of control groups: the group that is mounted, where, and in version 1
    for which controllers.
    """

    version: int
    group: str
    point: str
    controllers: list[str]


def _memberships(root: Path) -> Iterator[tuple[str, str]]:
    """Yields controllers and the groups of this process; version 2 has one group, for the
    controller "".
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            yield controller, path


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _read(root / "proc/self/mountinfo").splitlines():
        place, _, system = line.partition(" - ")
        _, _, _, group, point, *_ = place.split(" ")
        kind, _, options = system.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            yield _Mount(2 if kind == "cgroup2" else 1, group, point, options.split(","))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
