"""Every example on every page runs as it stands, or says why it does not."""

import ast
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import commands, pages
from typer.core import TyperGroup
from typer.main import get_command

from outblas import inductor
from outblas.cli import app

pytest_plugins = ("support.batch_invariance",)
pytestmark = pytest.mark.usefixtures("no_context_before")  # a page enters a context

PAGES = pages.pages()
BLOCKS = [block for page in PAGES for block in pages.blocks(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
CONSOLE = [block for block in BLOCKS if block.language == "console"]


def with_examples(language: str) -> list[Path]:
    """Pages that have blocks of this language which run on a CPU."""
    return list(dict.fromkeys(b.page for b in BLOCKS if b.language == language and b.is_run))


def name(page: Path) -> str:
    return str(page.relative_to(pages.ROOT))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder, from which modules are imported, and an empty cache; what an example
    says to Inductor and to the environment ends with the test.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    # The package first: it looks the name up in the module, and the name is put back as it was.
    monkeypatch.setattr("outblas.inductor_choice", lambda: None)
    monkeypatch.setattr(inductor, "inductor_choice", lambda: None)
    before = dict(os.environ)
    yield tmp_path
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", with_examples("python"), ids=name)
def test_the_python_of_a_page_runs(page: Path, elsewhere: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    pages.write_modules(page)
    for block in pages.blocks(page):
        if block.language == "python" and block.is_run:
            code = "\n" * (block.line - 1) + block.text  # a traceback names the page's own line

            exec(compile(code, str(page), "exec"), names)


@pytest.mark.long
@pytest.mark.parametrize("page", with_examples("console"), ids=name)
def test_the_commands_of_a_page_run(page: Path, elsewhere: Path) -> None:
    pages.write_modules(page)
    for block in pages.blocks(page):
        if block.language == "console" and block.is_run:
            for words in block.commands():
                assert words[0] == "outblas", f"{block.id}: only commands of outblas are run"

                done = commands.invoke(*words[1:])

                assert done.exit_code == 0, f"{block.id}: {' '.join(words)}\n{done.output}"


@pytest.mark.parametrize("block", [b for b in PYTHON if not b.is_run], ids=lambda b: b.id)
def test_python_that_does_not_run_here_is_python(block: pages.Block) -> None:
    ast.parse(block.text)


@pytest.mark.parametrize("block", [b for b in CONSOLE if not b.is_run], ids=lambda b: b.id)
def test_commands_that_do_not_run_here_have_options_that_exist(block: pages.Block) -> None:
    for program, *arguments in block.commands():
        if program == "outblas":
            command: Any = get_command(app)
            while isinstance(command, TyperGroup):
                command = command.commands[arguments.pop(0)]

            command.make_context(program, arguments)  # raises where an option is unknown


def test_blocks_say_how_they_are_tested() -> None:
    assert [f"{block.id}: {block.unknown}" for block in BLOCKS if block.unknown] == []


# ---- on a GPU, where a page's commands may take minutes
FEW_SHAPES = {"suite": "512,16x4096x4096", "decode:llama-3-8b": "1x4096x4096,64x4096x4096"}


def shortened(words: list[str]) -> list[str]:
    """A command that takes seconds: a few shapes of many, and a budget of 20 s."""
    for at, (option, value) in enumerate(itertools.pairwise(words), 1):
        if option == "--shapes":
            words[at] = FEW_SHAPES.get(value, value)
        elif option == "--budget":
            words[at] = "20s"
    return words


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", dict.fromkeys(b.page for b in BLOCKS if b.needs_gpu), ids=name)
def test_the_blocks_of_a_page_run_on_a_gpu(page: Path, elsewhere: Path) -> None:
    """In one folder and with one set of names, for some read what others make."""
    names: dict[str, Any] = {"__name__": "__main__"}
    pages.write_modules(page)
    for block in pages.blocks(page):
        if block.language == "python" and (block.is_run or block.needs_gpu):
            exec(compile(block.text, str(page), "exec"), names)
        elif block.language == "console" and block.needs_gpu:
            for words in map(shortened, block.commands()):
                done = commands.invoke(*words[1:])

                assert done.exit_code == 0, f"{block.id}: {words}\n{done.output}"
