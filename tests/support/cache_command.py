"""`outblas cache`, as tests run it."""

import json
from typing import Any

from click.testing import Result

from support import commands


def invoke(*arguments: object, code: int = 0) -> Result:
    """What came of `outblas cache` with these arguments, which exits with this code."""
    return commands.invoke("cache", *arguments, code=code)


def shown(*arguments: object, code: int = 0) -> str:
    """What `outblas cache` prints on standard output."""
    return invoke(*arguments, code=code).stdout


def parsed(*arguments: object) -> Any:
    """What `outblas cache` prints with `--json`, read."""
    return json.loads(shown(*arguments, "--json"))


def refused(message: str, *arguments: object) -> None:
    """`outblas cache` refuses these arguments with this message."""
    commands.refuses(message, "cache", *arguments)
