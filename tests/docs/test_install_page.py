"""The versions that the page on installation names are those that pyproject.toml allows."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from support import pages

PROJECT = tomllib.loads((pages.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIREMENTS = {each.name: each for each in map(Requirement, PROJECT["dependencies"])}
ROWS = dict(
    re.findall(
        r"^\| (torch|triton|nvidia-cutlass-dsl|numpy) \| ([\d.]+(?: to [\d.]+)?) \|$",
        (pages.DOCS / "install.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
)


@pytest.mark.parametrize("package", ["torch", "triton", "nvidia-cutlass-dsl", "numpy"])
def test_the_page_names_the_versions_that_the_package_allows(package: str) -> None:
    oldest, _, newest = ROWS[package].partition(" to ")
    allowed = {each.operator: Version(each.version) for each in REQUIREMENTS[package].specifier}

    assert allowed[">="].release[:2] == Version(oldest).release
    newest_release = Version(newest or oldest).release
    following = (*newest_release[:-1], newest_release[-1] + 1)
    assert allowed["<"].release == following
