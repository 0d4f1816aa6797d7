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


PAGE = "https://github.com/o/r"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/migrate.md)", f"[a]({PAGE}/blob/v1/docs/migrate.md)"),
        ("[a](docs/migrate.md#dtypes)", f"[a]({PAGE}/blob/v1/docs/migrate.md#dtypes)"),
        ("[a](./docs/decisions/)", f"[a]({PAGE}/tree/v1/docs/decisions)"),
        ("[a](#tuning)", f"[a]({PAGE}/blob/v1/README.md#tuning)"),
        ("[a](https://example.org/x)", "[a](https://example.org/x)"),
        ("![a](results/x.svg)", "![a](https://raw.githubusercontent.com/o/r/v1/results/x.svg)"),
        ('<img src="x.png">', '<img src="https://raw.githubusercontent.com/o/r/v1/x.png">'),
        ("`[a](b.md)`", "`[a](b.md)`"),
        ("```\n[a](b.md)\n```\n[c](d.md)", f"```\n[a](b.md)\n```\n[c]({PAGE}/blob/v1/d.md)"),
    ],
)
def test_addresses_become_absolute(build: Any, text: str, expected: str) -> None:
    assert build.absolute(text, PAGE, "v1") == expected


def test_readme_can_be_shown_by_an_index(build: Any) -> None:
    assert readme.faults(build.description()) == []
