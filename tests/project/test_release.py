"""The checks of a release: they pass what is sound, and name what is not."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from release import archives, readme, versions
from support.paths import ROOT

CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [1.2.3] - 2026-12-01\n\n## [1.2.2] - 2026-11-01\n"
CITATION = "version: 1.2.3\ndate-released: 2026-12-01\n"


def tree(root: Path, **texts: str) -> Path:
    """A tree with version 1.2.3 in four files, of which some have another text."""
    files = {
        "pyproject.toml": '[project]\nversion = "1.2.3"\n',
        "src/outblas/__init__.py": '__version__ = "1.2.3"\n',
        "CITATION.cff": CITATION,
        "CHANGELOG.md": CHANGELOG,
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts.get(path.stem.strip("_"), text))
    return root


# ---- versions


def test_the_versions_of_this_tree_agree() -> None:
    assert versions.faults(ROOT, final=False) == []


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("init", '__version__ = "1.2.4"\n', "outblas.__version__ has the version 1.2.4"),
        ("init", "", "outblas.__version__ has the version None"),
        ("CITATION", CITATION.replace("1.2.3", "1.2.2"), "CITATION.cff has the version 1.2.2"),
        ("CITATION", "version: 1.2.3\n", "CITATION.cff has no date-released"),
        (
            "CITATION",
            CITATION.replace("12-01", "12-02"),
            "CITATION.cff has the day 2026-12-02, CHANGELOG.md has 2026-12-01",
        ),
        (
            "CHANGELOG",
            CHANGELOG.replace("## [1.2.3]", "## [1.3.0] - 2026-12-09\n\n## [1.2.3]"),
            "CHANGELOG.md has 1.3.0 above 1.2.3",
        ),
        (
            "CHANGELOG",
            CHANGELOG.replace(" - 2026-12-01", ""),
            "CHANGELOG.md: 1.2.3 has no day",
        ),
        ("CHANGELOG", "## [Unreleased]\n", "CHANGELOG.md has no section 1.2.3"),
    ],
)
def test_a_version_that_differs_is_named(tmp_path: Path, name: str, text: str, fault: str) -> None:
    found = versions.faults(tree(tmp_path, **{name: text}), final=True)

    assert any(each.startswith(fault) for each in found), found


# ---- what archives hold
VERSION = versions.of_project(ROOT)
INFO = f"outblas-{VERSION}.dist-info"


@pytest.fixture
def files() -> set[str]:
    """The files of a sound wheel of this tree."""
    info = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE")
    tables = {f"outblas/autotune/tables/{p.name}" for p in ROOT.glob("autotune/tables/*.json")}
    modules = archives.expected_modules(ROOT)
    return {*modules, *tables, "outblas/py.typed", *(f"{INFO}/{name}" for name in info)}


def test_a_sound_wheel_passes(files: set[str]) -> None:
    assert archives.wheel_faults(files, ROOT, VERSION) == []


@pytest.mark.parametrize(
    "missing",
    ["outblas/py.typed", "outblas/hopper/gemm/kernel.py", f"{INFO}/licenses/LICENSE"],
)
def test_what_a_wheel_lacks_is_named(files: set[str], missing: str) -> None:
    found = archives.wheel_faults(files - {missing}, ROOT, VERSION)

    assert found == [f"the wheel lacks {missing}"]


@pytest.mark.parametrize("extra", ["tests/test_api.py", "outblas/notes.txt", "docs/conf.py"])
def test_what_does_not_belong_into_a_wheel_is_named(files: set[str], extra: str) -> None:
    found = archives.wheel_faults({*files, extra}, ROOT, VERSION)

    assert found == [f"the wheel has {extra}, which does not belong there"]


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
