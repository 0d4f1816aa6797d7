"""The tree has one version, and an index can show README; `make release-check` does the rest."""

import runpy

from release import readme, versions
from support.paths import ROOT


def test_the_versions_of_this_tree_agree() -> None:
    assert versions.faults(ROOT, final=False) == []


def test_readme_can_be_shown_by_an_index() -> None:
    build_script = runpy.run_path(str(ROOT / "setup.py"))

    assert readme.faults(build_script["description"]()) == []
