"""What a wheel and an sdist hold: every module, and nothing that does not belong there."""

import email.message
import email.parser
import hashlib
import os
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

MAX_WHEEL_MIB = 4
URLS = ("Homepage", "Documentation", "Repository", "Changelog", "Issues")
# Folders of an sdist. Links lead nowhere from an archive, so it holds what they lead to.
SOURCES = ("src",)
BESIDE = (
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "MANIFEST.in",
    "PKG-INFO",
    "README.md",
    "pyproject.toml",
    "setup.cfg",
    "setup.py",
)


def of_wheel(path: Path) -> dict[str, str]:
    """The files of a wheel by name, each with the SHA-256 of its content."""
    with zipfile.ZipFile(path) as wheel:
        return {
            info.filename: hashlib.sha256(wheel.read(info)).hexdigest()
            for info in wheel.infolist()
            if not info.is_dir()
        }


def of_sdist(path: Path) -> list[str]:
    """The files of an sdist, without the folder that holds them all."""
    with tarfile.open(path) as sdist:
        files = [PurePosixPath(member.name) for member in sdist.getmembers() if member.isfile()]
    return ["/".join(file.parts[1:]) for file in files]


def expected_modules(root: Path) -> set[str]:
    """The modules of a tree by the names that they have in a wheel."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    modules = {f"{name}.py" for name in settings["tool"]["setuptools"].get("py-modules", ())}
    source = root / "src"
    for folder, _, files in os.walk(source, followlinks=True):
        place = Path(folder).relative_to(source).as_posix()
        if "__init__.py" in files:
            modules |= {f"{place}/{file}" for file in files if file.endswith(".py")}
    return modules


def wheel_faults(files: Iterable[str], root: Path, version: str) -> list[str]:
    """What a wheel lacks, and what it should not have."""
    files, info = set(files), f"outblas-{version}.dist-info"
    required = {
        *expected_modules(root),
        "outblas/py.typed",
        *(f"outblas/autotune/tables/{path.name}" for path in root.glob("autotune/tables/*.json")),
        *(f"outblas/packs/{path.name}" for path in root.glob("src/outblas/packs/*.pack")),
        *(f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt")),
        f"{info}/licenses/LICENSE",
    }
    allowed = required | {f"{info}/top_level.txt"}
    return [f"the wheel lacks {file}" for file in sorted(required - files)] + [
        f"the wheel has {file}, which does not belong there" for file in sorted(files - allowed)
    ]


def sdist_faults(files: Iterable[str]) -> list[str]:
    """What an sdist should not have: tests, documents, caches."""
    return [
        f"the sdist has {file}, which does not belong there"
        for file in sorted(files)
        if file.split("/")[0] not in (*SOURCES, *BESIDE) or "__pycache__" in file
    ]


def differences(first: dict[str, str], second: dict[str, str]) -> list[str]:
    """Files that differ between the wheel of a tree and the one that its sdist makes."""
    return [
        f"{file} differs between the wheel of the tree and that of the sdist"
        for file in sorted(first.keys() | second.keys())
        if first.get(file) != second.get(file) and not file.endswith("/RECORD")
    ]


def metadata(path: Path) -> email.message.Message:
    """The metadata of a wheel."""
    with zipfile.ZipFile(path) as wheel:
        name = next(each for each in wheel.namelist() if each.endswith(".dist-info/METADATA"))
        return email.parser.Parser().parsestr(wheel.read(name).decode())


def metadata_faults(found: email.message.Message, version: str, known: set[str]) -> list[str]:
    """What metadata lacks. `known`: the classifiers that indexes accept."""
    wanted = {
        "Name": "outblas",
        "Version": version,
        "License-Expression": "Apache-2.0",
        "License-File": "LICENSE",
        "Author": "The outblas contributors",
        "Requires-Python": ">=3.11",
        "Description-Content-Type": "text/markdown",
    }
    faults = [
        f"metadata: {name} is {found[name]!r}, expected {value!r}"
        for name, value in wanted.items()
        if found[name] != value
    ]
    urls = dict(line.split(", ", 1) for line in found.get_all("Project-URL", []))
    faults += [f"metadata: there is no URL {name}" for name in URLS if name not in urls]
    faults += [
        f"metadata: the URL {name} is {url}, expected https"
        for name, url in urls.items()
        if not url.startswith("https://")
    ]
    classifiers = found.get_all("Classifier", [])
    faults += [f"metadata: no index knows {each!r}" for each in classifiers if each not in known]
    if "Typing :: Typed" not in classifiers:
        faults.append("metadata: the classifier 'Typing :: Typed' is missing")
    return faults
