"""The versions that outblas is tested with, read from its package metadata, and the installed
versions.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PYTHON = "Python"
OUTSIDE = "outside the tested range"
_CLASSIFIER = "Programming Language :: Python :: "


@dataclass(frozen=True)
class Status:
    """Python or one dependency: the tested versions and the installed one (None: absent)."""

    name: str
    tested: str
    installed: str | None

    @property
    def problem(self) -> str | None:
        """Why the installed version is not suitable, or None."""
        if self.name == PYTHON:
            minor = ".".join(str(self.installed).split(".")[:2])
            tested = minor in python_versions() or self.tested == "any"
            return None if tested else f"{OUTSIDE}: use Python {self.tested}"
        if self.installed is None:
            return f"not installed: {install_command(self.name)}"
        if not _requirement(self.name).specifier.contains(self.installed, prereleases=True):
            return f"{OUTSIDE}: {install_command(self.name)}"
        return None


def statuses() -> list[Status]:
    """Returns the status of Python and of every dependency that applies to this platform, extras
    excluded.
    """
    versions = python_versions()
    tested = f"{versions[0]} to {versions[-1]}" if versions else "any"
    return [Status(PYTHON, tested, platform.python_version())] + [
        Status(r.name, _tested(r), installed(r.name)) for r in _requirements() if _applies(r)
    ]


def python_versions() -> list[str]:
    """Returns the Python versions that outblas is tested with, read from the classifiers."""
    listed = metadata.metadata("outblas").get_all("Classifier") or []
    found = (each.removeprefix(_CLASSIFIER) for each in listed if each.startswith(_CLASSIFIER))
    return [version for version in found if "." in version]


def install_command(name: str) -> str:
    """Returns the command that installs a dependency in the tested range."""
    requirement = _requirement(name)
    where = "" if _applies(requirement) else " (Linux only)"
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"pip install '{requirement.name}{extras}{_tested(requirement)}'{where}"


def installed(name: str) -> str | None:
    """Returns the version of a package, or None where it is absent."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _requirements() -> list[Requirement]:
    from packaging.requirements import Requirement

    return [Requirement(line) for line in metadata.requires("outblas") or []]


def _requirement(name: str) -> Requirement:
    return next(r for r in _requirements() if r.name == name)


def _tested(requirement: Requirement) -> str:
    """The tested range, its lower bound first: ">=2.11,<2.16"."""
    bounds = map(str, requirement.specifier)
    return ",".join(sorted(bounds, key=lambda bound: bound.startswith("<")))


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})
