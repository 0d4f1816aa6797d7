"""Gives README.md to package indexes; pyproject.toml has everything else.

README links to other files of the repository by relative paths, which lead nowhere from an index's
page. In the wheel each of them is an address in the repository, at the tag of the version.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
RAW = "https://raw.githubusercontent.com/"
GITHUB = "https://github.com/"
PICTURES = (".svg", ".png", ".jpg", ".gif")

# Nothing is a link in code: in fenced blocks, and between backquotes on a line.
_CODE = re.compile(r"^(?P<fence>`{3,}|~{3,}).*?^(?P=fence)[^\S\n]*$|`[^`\n]+`", re.M | re.S)
# What stands before the address of a link, an image or a tag, and the address.
_ADDRESS = re.compile(r'(?P<before>\]\(|\b(?:href|src|srcset)=")(?P<to>[^)"\s]+)')


def absolute(readme: str, repository: str, tag: str) -> str:
    """The text of README with an absolute address in place of each relative one.

    Args:
        readme: The text, as it lies in the root of the repository.
        repository: The address of the repository on GitHub.
        tag: The tag of the version that is built.
    """
    parts, end = [], 0
    for code in [*_CODE.finditer(readme), None]:
        prose = readme[end : code.start() if code else None]
        parts.append(_ADDRESS.sub(lambda found: _resolved(found, repository, tag), prose))
        if code:
            parts.append(code[0])
            end = code.end()
    return "".join(parts)


def _resolved(found: re.Match[str], repository: str, tag: str) -> str:
    before, to = found["before"], found["to"]
    if re.match(r"[a-z]+:", to):
        return found[0]
    path, number_sign, anchor = to.partition("#")
    path = posixpath.normpath(path) if path else "README.md"
    if path.endswith(PICTURES):
        return f"{before}{RAW}{repository.removeprefix(GITHUB)}/{tag}/{path}"
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{before}{repository}/{kind}/{tag}/{path}{number_sign}{anchor}"


def description() -> str:
    """The long description of the package that is built from this folder."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return absolute(readme, project["urls"]["Repository"], f"v{project['version']}")


if __name__ == "__main__":
    setup(long_description=description(), long_description_content_type="text/markdown")
