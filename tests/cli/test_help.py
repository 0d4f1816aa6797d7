"""What every command says of itself: --help, examples, the version, names that are nearly right."""

import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer
from rich.cells import cell_len
from support import commands
from typer import rich_utils
from typer.core import TyperGroup
from typer.testing import CliRunner

from outblas import __version__
from outblas.cli import app
from outblas.cli.examples import EXAMPLES

ROOT = typer.main.get_command(app)


def walk(command: Any = ROOT, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every command that does something, by the name that follows `outblas`."""
    if isinstance(command, TyperGroup):
        for part, each in command.commands.items():
            yield from walk(each, f"{name} {part}".strip())
    else:
        yield name, command


COMMANDS = dict(walk())
LINES = [line for examples in EXAMPLES.values() for line, _ in examples]


Help = Callable[[str, int], str]


@pytest.fixture
def help_of(monkeypatch: pytest.MonkeyPatch) -> Help:
    """What `outblas NAME --help` prints on a terminal of a width."""

    def printed(name: str, width: int) -> str:
        monkeypatch.setattr(rich_utils, "MAX_WIDTH", width)
        found = CliRunner().invoke(app, [*name.split(), "--help"])
        assert found.exit_code == 0, found.output
        return found.output

    return printed


def test_every_command_has_examples() -> None:
    assert set(EXAMPLES) == {"", *COMMANDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_the_examples(name: str, help_of: Help) -> None:
    text = " ".join(help_of(name, 140).split())

    for line, what in EXAMPLES[name]:
        assert f"$ {line} # {what}" in text


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_an_example_can_be_copied_from_a_narrow_terminal(name: str, help_of: Help) -> None:
    lines = [line.strip() for line in help_of(name, 80).splitlines()]

    assert [f"$ {line}  # {what}" for line, what in EXAMPLES[name]] == [
        line for line in lines if line.startswith("$ ")
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_in_one_short_sentence_what_a_command_does(name: str) -> None:
    summary = COMMANDS[name].help.split("\n\n")[0]

    assert "\n" not in summary
    assert summary.endswith(".")
    assert len(summary) <= 80, summary


@pytest.mark.parametrize("line", LINES)
def test_an_example_is_a_command_with_options_that_exist(line: str) -> None:
    program, *arguments = shlex.split(line)
    if arguments[0] == "--install-completion":
        return
    command: Any = ROOT
    while isinstance(command, TyperGroup):
        command = command.commands[arguments.pop(0)]

    command.make_context(program, arguments)  # raises where an option or argument is unknown


@pytest.mark.parametrize("name", ["", *COMMANDS])
@pytest.mark.parametrize("width", [80, 140])
def test_help_fits_the_terminal(name: str, width: int, help_of: Help) -> None:
    assert max(map(cell_len, help_of(name, width).splitlines())) <= width


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_cuts_no_word_off_in_a_narrow_terminal(name: str, help_of: Help) -> None:
    assert "…" not in help_of(name, 80)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_breaks_lines_between_paragraphs_only(name: str) -> None:
    paragraphs = COMMANDS[name].help.split("\n\n")

    assert [each for each in paragraphs if "\n" in each] == []


def test_help_shows_brackets_as_they_are(help_of: Help) -> None:
    text = help_of("bench", 140)

    assert "NAME[k=v,...]" in text
    assert "hopper.gemm[tile_n=128]" in text


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_has_a_short_option_too(option: str) -> None:
    done = commands.invoke("bench", option, code=0)

    assert "Usage:" in done.stdout


def test_the_version_is_printed() -> None:
    done = commands.invoke("--version", code=0)

    assert done.stdout == f"outblas {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "guess"),
    [
        pytest.param(("inspect", "hoper.gemm"), "did you mean 'hopper.gemm'?", id="kernel"),
        pytest.param(("verify", "portabel"), "did you mean 'portable'?", id="kernel of verify"),
        pytest.param(("bnch",), "Did you mean 'bench'?", id="command"),
    ],
)
def test_a_name_that_is_nearly_right_is_guessed(arguments: tuple[str, ...], guess: str) -> None:
    commands.refuses(guess, *arguments)


def test_a_name_that_is_like_no_other_is_not_guessed() -> None:
    done = commands.invoke("inspect", "qwertz", code=2)

    assert "did you mean" not in done.output


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "outblas", "--version"], capture_output=True, text=True, check=True
    )

    assert done.stdout == commands.invoke("--version").stdout
