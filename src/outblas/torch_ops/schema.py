"""The arguments of the operators, parsed from the text that defines them, because torch has no
public name for its own parsed form.
"""

import ast
import re
from typing import Any, NamedTuple

import torch

library = torch.library.Library("outblas", "DEF")


class Argument(NamedTuple):
    """One argument of an operator."""

    name: str
    default: Any = None
    is_written: bool = False


# operator name -> its arguments
ARGUMENTS: dict[str, tuple[Argument, ...]] = {}


def define(text: str) -> None:
    """Defines `name(type argument=default, ...) -> type` as an operator of outblas."""
    library.define(text)
    name, _, rest = text.partition("(")
    listed, _, _ = rest.rpartition(" -> ")
    ARGUMENTS[name] = tuple(map(_argument, listed.removesuffix(")").split(", ")))


def _argument(text: str) -> Argument:
    declared, _, default = text.partition("=")
    kind, _, name = declared.rpartition(" ")
    is_written = re.search(r"\(\w+!\)", kind) is not None
    return Argument(name, ast.literal_eval(default) if default else None, is_written)
