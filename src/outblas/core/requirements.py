"""The versions outblas is tested with, read from its own package metadata, and what is installed
here.
"""

from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement


@dataclass(frozen=True)
class Status:
    """One dependency: the versions tested, and the one installed (None: absent)."""

    name: str
    tested: str
    installed: str | None

    @property
    def problem(self) -> str | None:
        """Why the installed version will not do, or None."""
        if self.installed is None:
            return f"not installed: {install_command(self.name)}"
        if not _requirement(self.name).specifier.contains(self.installed, prereleases=True):
            return f"outside the tested range: {install_command(self.name)}"
        return None


def statuses() -> list[Status]:
    """Every dependency that applies to this platform, without those of extras."""
    return [
        Status(r.name, str(r.specifier), installed(r.name)) for r in _requirements() if _applies(r)
    ]


def install_command(name: str) -> str:
    """How to install a dependency in the tested range."""
    requirement = _requirement(name)
    where = "" if _applies(requirement) else " (Linux only)"
    return f"pip install '{requirement.name}{requirement.specifier}'{where}"


def installed(name: str) -> str | None:
    """The version of a package, None where it is absent."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _requirements() -> list[Requirement]:
    return [Requirement(line) for line in metadata.requires("outblas") or []]


def _requirement(name: str) -> Requirement:
    return next(r for r in _requirements() if r.name == name)


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})
