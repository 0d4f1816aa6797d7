"""The tree has one version, and an index can show README; `make release-check` does the rest."""

import importlib.util
from types import ModuleType
from typing import Any

import pytest
from release import readme, versions
from support.paths import ROOT


# ---- versions
def test_the_versions_of_this_tree_agree() -> None:
    assert versions.faults(ROOT, final=False) == []


# ---- README on an index
@pytest.fixture(scope="module")
def build() -> ModuleType:
    """The build script, which is no package."""
    spec = importlib.util.spec_from_file_location("build_script", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_can_be_shown_by_an_index(build: Any) -> None:
    assert readme.faults(build.description()) == []
