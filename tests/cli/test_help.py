"""What every command says of itself: --help, examples, the version."""

import shlex
import subprocess
import sys
from collections.abc import Iterator
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
        for part, child in command.commands.items():
            yield from walk(child, f"{name} {part}".strip())
    else:
        yield name, command


COMMANDS = dict(walk())
LINES = [line for examples in EXAMPLES.values() for line, _ in examples]


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_the_terminal_and_its_examples_can_be_copied(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", 80)

    result = CliRunner().invoke(app, [*name.split(), "--help"])

    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert max(map(cell_len, lines)) <= 80
    assert "…" not in result.output
    examples = [f"$ {line}  # {what}" for line, what in EXAMPLES.get(name, ())]
    assert examples == [line.strip() for line in lines if line.strip().startswith("$ ")]


@pytest.mark.parametrize("line", LINES)
def test_an_example_is_a_command_with_options_that_exist(line: str) -> None:
    program, *arguments = shlex.split(line)
    if arguments[0] == "--install-completion":
        return
    command: Any = ROOT
    while isinstance(command, TyperGroup):
        command = command.commands[arguments.pop(0)]

    command.make_context(program, arguments)  # raises where an option or argument is unknown


@pytest.mark.long
def test_the_version_is_printed_by_the_command_and_by_the_module() -> None:
    module = [sys.executable, "-m", "outblas", "--version"]

    done = subprocess.run(module, capture_output=True, text=True, check=True)

    assert done.stdout == commands.invoke("--version").stdout == f"outblas {__version__}\n"
    assert "Usage:" in commands.invoke("bench", "-h", code=0).stdout
