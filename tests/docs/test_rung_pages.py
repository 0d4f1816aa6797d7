"""The generated pages of docs/learn/: one for each rung, as the sources and results make them."""

import re
from pathlib import Path
from typing import Any

import pytest
import rung_pages
from rung_pages import __main__ as program
from rung_pages import figures, numbers, source
from rung_pages.experiments import EXPERIMENTS
from support.paths import ROOT

from outblas.core import configs, registry
from outblas.kernels import simt_config
from outblas.turing import config as turing_config

LEARN = ROOT / "docs" / "learn"
KERNELS = [kernel.name for kernel in registry.ladder()]
RUNGS = [name for name in KERNELS if name not in ("portable", "hopper.gemm")]


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return rung_pages.pages()


def test_the_pages_in_the_tree_are_current(pages: dict[str, str]) -> None:
    outdated = [
        name for name, text in pages.items() if (LEARN / name).read_text(encoding="utf-8") != text
    ]

    assert not outdated, "run make pages"


@pytest.mark.parametrize("ladder", ["simt", "turing", "hopper"])
def test_a_ladders_page_lists_its_rungs_in_order(ladder: str) -> None:
    text = (LEARN / ladder / "index.md").read_text(encoding="utf-8")

    (tree,) = re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL)

    listed = [f"{ladder}.{line}" for line in tree.split() if not line.startswith(":")]
    assert [name for name in listed if name in KERNELS] == list(registry.LADDERS[ladder])


@pytest.mark.parametrize("name", KERNELS)
def test_a_page_has_the_parts_of_the_docstring(name: str, pages: dict[str, str]) -> None:
    text = pages[f"{name.replace('.', '/')}.md"]

    parts = source.rung(name).module.docstring()

    assert parts["Changes"][1:] in text
    assert parts["Why it pays"][1:] in text


@pytest.mark.parametrize("name", RUNGS)
def test_code_that_a_page_includes_is_there(name: str, pages: dict[str, str]) -> None:
    page = LEARN / f"{name.replace('.', '/')}.md"

    included = re.findall(
        r"\{literalinclude\} (\S+)\n:pyobject: (\S+)", pages[str(page.relative_to(LEARN))]
    )

    assert included
    for path, definition in included:
        text = (page.parent / path).resolve().read_text(encoding="utf-8")
        assert re.search(rf"^(def|class) {definition}\b", text, re.MULTILINE), (
            f"{path}: {definition}"
        )


@pytest.mark.parametrize("name", RUNGS)
def test_a_config_read_from_the_source_is_that_of_the_module(name: str) -> None:
    read = source.rung(name).config

    own = registry.load(name).Config()

    assert read == {field: getattr(own, field) for field in read}
    assert set(read) == set(vars(own))


def test_a_diff_shows_what_a_class_overrides() -> None:
    found = source.changes(source.rung("hopper.lean_barriers"), source.rung("hopper.persistent"))

    replaced = {change.name: change.replaces for change in found}
    assert replaced["LeanPipeline.arrival_counts"] == "TokenPipeline.arrival_counts"
    assert replaced["Pipeline.consumer_wait"] == "TokenPipeline.consumer_wait"
    assert "LeanBarriers.producer" not in replaced


def test_a_diff_leaves_docstrings_out() -> None:
    found = source.changes(source.rung("simt.shared"), source.rung("simt.coalesced"))

    (change,) = found
    assert (change.name, change.replaces) == ("staged", "direct")
    assert not any('"""' in line for line in change.diff)


def test_a_rung_that_changes_its_config_alone_has_no_diff() -> None:
    assert source.changes(source.rung("hopper.hilbert"), source.rung("hopper.tma_store")) == []


def test_rows_of_the_config_are_the_fields_that_changed() -> None:
    rows = numbers.config_rows(source.rung("hopper.hilbert"), source.rung("hopper.tma_store"))

    assert rows == [("`order`", "grouped", "hilbert")]


def test_multicast_saves_reads_of_l2() -> None:
    rows = numbers.number_rows(
        source.rung("hopper.cluster_multicast"), source.rung("hopper.lean_barriers")
    )

    assert ("FLOP for a byte from L2", "85.3", "128") in rows


@pytest.mark.parametrize("name", KERNELS)
def test_every_instruction_of_the_snapshot_has_a_meaning(name: str) -> None:
    code = figures.code(name, figures.architecture(registry.find(name)))

    for instruction in code.counts:
        assert figures.meaning(instruction)


def test_an_instruction_without_meaning_is_named() -> None:
    with pytest.raises(ValueError, match="FROBNICATE is in the snapshot"):
        figures.meaning("FROBNICATE")


def test_every_kernel_has_something_to_try() -> None:
    assert list(EXPERIMENTS) == KERNELS


@pytest.mark.parametrize("name", RUNGS)
def test_configs_to_try_can_be_built(name: str) -> None:
    commands = " ".join(each.command for each in EXPERIMENTS[name])
    tried = re.findall(r"([a-z]+\.\w+)\[(.*?)\]", commands)
    tried += [(name, text) for text in re.findall(r"--config (\S+)", commands)]

    for kernel, text in tried:
        module = registry.load(kernel)
        config = configs.from_text(module.Config, text)

        assert config != module.Config(), f"{kernel}[{text}] is the rung's own config"
        assert reason(kernel, config) is None, f"{kernel}[{text}]"


def reason(kernel: str, config: Any) -> str | None:
    """Why no kernel can be built from a config."""
    match kernel.partition(".")[0]:
        case "simt":
            return simt_config.invalid_reason(config)
        case "turing":
            return turing_config.invalid_reason(config)
    _, name = source.rung(kernel).body
    found: str | None = getattr(registry.load(kernel), name).invalid_reason(config)
    return found


def test_a_check_names_a_page_that_is_out_of_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "pages", lambda: {"simt/naive.md": "new\n"})
    program.main([], tmp_path)
    (tmp_path / "simt" / "naive.md").write_text("edited\n", encoding="utf-8")
    capsys.readouterr()

    code = program.main(["--check"], tmp_path)

    assert (code, capsys.readouterr().out) == (
        1,
        "docs/learn/simt/naive.md: out of date: run make pages\n",
    )


def test_a_check_says_nothing_of_current_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "pages", lambda: {"simt/naive.md": "new\n"})
    program.main([], tmp_path)

    assert program.main(["--check"], tmp_path) == 0
