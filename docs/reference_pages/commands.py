"""The commands of outblas, their arguments, options and examples."""

from __future__ import annotations

import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

from typer.core import TyperArgument, TyperGroup
from typer.main import get_command

from outblas.cli import app
from outblas.cli.examples import EXAMPLES

from .markdown import code, prose, table

WIDTH = 100


def overview() -> str:
    """A table of all commands."""
    rows = [
        (f"[`outblas {name}`](#outblas-{name.replace(' ', '-')})", prose(_summary(command)))
        for name, command in _commands()
    ]
    return table(("command", "what it does"), rows)


def details() -> str:
    """A section for each command."""
    return "\n\n".join(_section(name, command) for name, command in _commands())


def _commands() -> Iterator[tuple[str, Any]]:
    """Every command with its name, those of groups after the group's own name."""
    root: Any = get_command(app)
    for name, command in root.commands.items():
        if isinstance(command, TyperGroup):
            for each, inner in command.commands.items():
                yield f"{name} {each}", inner
        else:
            yield name, command


def _section(name: str, command: Any) -> str:
    arguments = [p for p in command.params if isinstance(p, TyperArgument)]
    options = [p for p in command.params if not isinstance(p, TyperArgument)]
    parts = [
        f"## outblas {name}",
        *map(_paragraph, _help(command)),
        table(("argument", "meaning"), [(code(_name(p)), _meaning(p)) for p in arguments]),
        table(("option", "meaning"), [(_spelling(p, command), _meaning(p)) for p in options]),
        _examples(name),
    ]
    return "\n\n".join(filter(None, parts))


def _help(command: Any) -> list[str]:
    """The paragraphs of a command's help, without those that show markers of generated parts: on a
    page they would be markers.
    """
    found = re.split(r"\n\s*\n", inspect.cleandoc(command.help or "").replace("\b", ""))
    return [paragraph for paragraph in found if "<!--" not in paragraph]


def _summary(command: Any) -> str:
    return " ".join(_help(command)[0].split())


def _paragraph(text: str) -> str:
    return textwrap.fill(
        prose(" ".join(text.split())), WIDTH, break_long_words=False, break_on_hyphens=False
    )


def _name(argument: Any) -> str:
    """The name of an argument as the usage has it, without its brackets."""
    return str(argument.metavar or argument.name).strip("[]{}")


def _spelling(option: Any, command: Any) -> str:
    """`--save PATH`, `--resume`, `--no-resume`."""
    kind = str(typing.get_type_hints(command.callback).get(option.name, bool))
    metavars = {"int": "INT", "float": "FLOAT", "Path": "PATH"}
    metavar = next((metavars[each] for each in metavars if each in kind), "TEXT")
    value = "" if option.is_flag else f" {option.metavar or metavar}"
    names: list[str] = sorted(option.opts, key=len, reverse=True)
    first, *others = names + list(option.secondary_opts)
    return ", ".join(map(code, (first + value, *others)))


def _meaning(parameter: Any) -> str:
    text = prose(re.sub(r"\\(?=\[)", "", parameter.help or ""))
    default = parameter.default
    shown = default is not None and default not in ("", False, ()) and not callable(default)
    if shown and parameter.show_default and "Default" not in text:
        flag = getattr(parameter, "is_flag", False)
        value = parameter.opts[-1] if flag else str(default)
        text = f"{text} Default: {code(value)}."
    if getattr(parameter, "required", False):
        text = f"{text} Required."
    return text


def _examples(name: str) -> str:
    lines = [f"$ {line}  # {what}" for line, what in EXAMPLES.get(name, ())]
    return "\n".join(["```console shown: an example of the help", *lines, "```"]) if lines else ""
