"""One version everywhere: pyproject.toml, the package, CITATION.cff and CHANGELOG.md."""

import re
import tomllib
from pathlib import Path

_SECTION = re.compile(r"^## \[(?P<name>[^\]]+)\](?P<rest>.*)$", re.M)
_DATED = re.compile(r" - \d{4}-\d\d-\d\d")


def of_project(root: Path) -> str:
    """The version in pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def faults(root: Path, *, final: bool) -> list[str]:
    """What is wrong with the versions of a tree.

    final: the tree is about to be tagged, so that nothing may be unreleased and the day is known.
    """
    version = of_project(root)
    package = _field(root / "src" / "outblas" / "__init__.py", r'^__version__ = "(.+)"$')
    citation = _field(root / "CITATION.cff", r"^version: (.+)$")
    found = [
        f"{where} has the version {each}, pyproject.toml has {version}"
        for where, each in (("outblas.__version__", package), ("CITATION.cff", citation))
        if each != version
    ]
    return found + _of_changelog(root, version, final=final) + _of_day(root, version, final=final)


def _field(path: Path, pattern: str) -> str | None:
    found = re.search(pattern, path.read_text(encoding="utf-8"), re.M)
    return found[1].strip("\"'") if found else None


def _sections(root: Path) -> dict[str, re.Match[str]]:
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    return {section["name"]: section for section in _SECTION.finditer(text)}


def _of_changelog(root: Path, version: str, *, final: bool) -> list[str]:
    sections = _sections(root)
    released = [name for name in sections if name != "Unreleased"]
    if version in sections:
        newest = released[0]
        found = [] if newest == version else [f"CHANGELOG.md has {newest} above {version}"]
        if not _DATED.fullmatch(sections[version]["rest"]):
            found.append(
                f"CHANGELOG.md: {version} has no day, expected '## [{version}] - YYYY-MM-DD'"
            )
        return found
    if final:
        return [f"CHANGELOG.md has no section {version}"]
    return (
        [] if "Unreleased" in sections else [f"CHANGELOG.md has neither {version} nor Unreleased"]
    )


def _of_day(root: Path, version: str, *, final: bool) -> list[str]:
    """The day of the release stands in CITATION.cff as in CHANGELOG.md."""
    section = _sections(root).get(version)
    day = section["rest"].removeprefix(" - ") if section else None
    cited = _field(root / "CITATION.cff", r"^date-released: (.+)$")
    if final and cited is None:
        return ["CITATION.cff has no date-released"]
    if cited is not None and day is not None and cited != day:
        return [f"CITATION.cff has the day {cited}, CHANGELOG.md has {day}"]
    return []
