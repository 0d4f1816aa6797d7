"""A copy of the installed package's shape, made of links, in which one file may be another."""

import contextlib
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .fault import Fault


class NotShadowed(Exception):
    """Python imports a package from elsewhere than the shadow."""


@dataclass(frozen=True)
class Project:
    """A checkout.

    root: its folder.
    packages: the folder, from the root, of each package that it installs.
    """

    root: Path
    packages: dict[str, Path]

    @classmethod
    def at(cls, root: Path) -> "Project":
        """The project of this folder, by the `[tool.setuptools]` of its pyproject.toml."""
        content = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
        setuptools = content["tool"]["setuptools"]
        folders = setuptools["package-dir"]
        packages = {}
        for package in setuptools["packages"]:
            parts = package.split(".")
            at = next(i for i in range(len(parts), -1, -1) if ".".join(parts[:i]) in folders)
            packages[package] = Path(folders[".".join(parts[:at])], *parts[at:])
        return cls(root.resolve(), packages)

    @property
    def tests(self) -> Path:
        """The folder of tests."""
        return self.root / "tests"


class Shadow:
    """The packages of a project below `folder`: folders of their own, and links to their files.

    A folder that is a link would hide its files from a search that does not follow links, such as
    that of the fingerprints of sources.
    """

    def __init__(self, project: Project, folder: Path) -> None:
        self.project, self.folder = project, folder
        self._link_packages()

    def _link_packages(self) -> None:
        sources = set(self.project.packages.values())
        for package, source in self.project.packages.items():
            target = self._folder_of(package)
            target.mkdir(parents=True, exist_ok=True)
            for entry in (self.project.root / source).iterdir():
                of_a_package = entry.relative_to(self.project.root) in sources
                if entry.name != "__pycache__" and not of_a_package:
                    (target / entry.name).symlink_to(entry)

    def _folder_of(self, package: str) -> Path:
        return self.folder.joinpath(*package.split("."))

    def path_of(self, file: str) -> Path:
        """Where a source file, given from the root of the project, lies in the shadow."""
        for package, source in self.project.packages.items():
            if Path(file).parent == source:
                return self._folder_of(package) / Path(file).name
        raise ValueError(f"{file} is in no package of {self.project.root}")

    @contextlib.contextmanager
    def with_fault(self, fault: Fault) -> Iterator[None]:
        """Has the fault in the shadow meanwhile. Raises StaleFault where it does not fit."""
        text, path = fault.planted(self.project.root), self.path_of(fault.file)
        original = path.readlink()
        path.unlink()
        path.write_text(text, encoding="utf-8")
        _drop_bytecode(path)
        try:
            yield
        finally:
            path.unlink()
            path.symlink_to(original)
            _drop_bytecode(path)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of processes that import the shadow, with caches of their own."""
        others = os.environ.get("PYTHONPATH")
        return os.environ | {
            "PYTHONPATH": f"{self.folder}{os.pathsep}{others}" if others else str(self.folder),
            "OUTBLAS_CACHE_DIR": str(self.folder.parent / "cache"),
            "TRITON_CACHE_DIR": str(self.folder.parent / "triton"),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self.folder.parent / "hypothesis"),
        }

    def check_imported(self) -> None:
        """Raises NotShadowed unless Python finds every package of the project in the shadow."""
        program = (
            "import importlib.util, os, sys\n"
            "for name in sys.argv[1:]:\n"
            "    print(*importlib.util.find_spec(name).submodule_search_locations, sep=os.pathsep)"
        )
        names = list(self.project.packages)
        done = subprocess.run(
            [sys.executable, "-c", program, *names],
            env=self.environment,
            cwd=self.project.root,
            capture_output=True,
            text=True,
            check=True,
        )
        for name, folders in zip(names, done.stdout.splitlines(), strict=True):
            expected = self._folder_of(name)
            if folders != str(expected):
                raise NotShadowed(f"{name} is imported from {folders}, expected {expected}")


def _drop_bytecode(path: Path) -> None:
    """Removes what was compiled of a file: a change within a second may go unnoticed."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
