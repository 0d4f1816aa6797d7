"""The pages of docs/reference/: generated parts are current, and the API's page misses no name."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import reference_pages
from reference_pages import __main__ as program
from reference_pages import configs, parts
from reference_pages.markdown import prose, table
from support.paths import ROOT
from support.public_api import public_objects

import outblas
from outblas import autotune
from outblas.core import registry
from outblas.hopper.core.config import HopperConfig

REFERENCE = ROOT / "docs" / "reference"
API = (REFERENCE / "api.md").read_text(encoding="utf-8")
FORMER_NAMES = ("Subject", "Winner")
DOCUMENTED = {*re.findall(r"^\.\. auto(?:function|class|exception):: (\S+)$", API, re.MULTILINE)}


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return reference_pages.pages()


def test_the_generated_parts_in_the_tree_are_current(pages: dict[str, str]) -> None:
    outdated = [
        name
        for name, text in pages.items()
        if (REFERENCE / name).read_text(encoding="utf-8") != text
    ]

    assert not outdated, "run make pages"


@pytest.mark.parametrize("name", outblas.__all__)
def test_a_name_of_outblas_is_on_the_page_of_the_api(name: str) -> None:
    assert f"outblas.{name}" in DOCUMENTED


@pytest.mark.parametrize("name", sorted({*autotune.__all__} - {*FORMER_NAMES, "tune"}))
def test_a_name_of_autotune_is_on_the_page_of_the_api(name: str) -> None:
    assert f"outblas.autotune.{name}" in DOCUMENTED


@pytest.mark.parametrize("name", FORMER_NAMES)
def test_a_former_name_is_on_the_page_of_the_api(name: str) -> None:
    assert f"`{name}`" in API


def test_every_public_object_is_on_the_page_of_the_api_or_of_the_configs() -> None:
    classes = (REFERENCE / "configs.md").read_text(encoding="utf-8")
    missing = [
        public.name
        for public in public_objects()
        if public.name not in DOCUMENTED and f".. py:class:: {public.name}" not in classes
    ]

    assert not missing


def test_what_is_on_the_page_of_the_api_is_there() -> None:
    known = {public.name for public in public_objects()}

    assert known >= DOCUMENTED


def test_a_part_that_nothing_makes_is_an_error() -> None:
    with pytest.raises(ValueError, match="a part is 'no such part'"):
        parts.renewed("<!-- written by make pages: no such part -->\n<!-- end -->")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one page, whose part is out of date."""
    part = "<!-- written by make pages: list of commands -->\nold\n<!-- end -->\n"
    (tmp_path / "cli.md").write_text(part, encoding="utf-8")
    for module in (parts, program):
        monkeypatch.setattr(module, "REFERENCE", tmp_path)
    return tmp_path


def test_check_says_what_is_out_of_date_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (folder / "cli.md").read_text(encoding="utf-8")

    code = program.main(["--check"])

    assert code == 1
    assert "cli.md: out of date: run make pages" in capsys.readouterr().out
    assert (folder / "cli.md").read_text(encoding="utf-8") == before


def test_the_program_renews_parts(folder: Path) -> None:
    assert program.main([]) == 0
    assert "outblas doctor" in (folder / "cli.md").read_text(encoding="utf-8")
    assert program.main(["--check"]) == 0


class TestConfigs:
    @pytest.mark.parametrize("ladder", configs.LADDERS)
    def test_every_field_has_a_meaning_and_a_rung(self, ladder: str) -> None:
        made = configs.fields_of(ladder)()

        rows = [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in made.splitlines()[2:]]
        assert all(cell.strip("` ") for row in rows for cell in row)
        names = [row[0].strip("`") for row in rows]
        assert names == [field.name for field in dataclasses.fields(configs.LADDERS[ladder])]

    @pytest.mark.compile  # imports the CuTe DSL
    @pytest.mark.parametrize("name", registry.LADDERS["hopper"])
    def test_the_rung_of_a_field_is_the_first_whose_class_knows_it(self, name: str) -> None:
        introduced = configs.introducing_rungs("hopper")
        before = registry.LADDERS["hopper"][: registry.LADDERS["hopper"].index(name)]
        module = registry.load(name)
        first = {field for field, rung in introduced.items() if rung == name}

        kernel_class: Callable[..., object] = module.unsupported.args[0]
        understood = kernel_class.understood()  # type: ignore[attr-defined]

        assert first <= understood
        earlier = {field for field, rung in introduced.items() if rung in before}
        assert understood - earlier == first & {*HopperConfig.__dataclass_fields__}


class TestMarkdown:
    def test_options_are_code(self) -> None:
        assert prose("With --dry-run, or -h.") == "With `--dry-run`, or `-h`."

    def test_markup_is_escaped(self) -> None:
        assert prose("NAME[k=v], *, a_b, `x_y`") == "NAME\\[k=v\\], \\*, a\\_b, `x_y`"

    def test_a_bar_does_not_end_a_cell(self) -> None:
        assert table(("a",), [("`x|y`",)]).splitlines()[-1] == "| `x\\|y` |"
