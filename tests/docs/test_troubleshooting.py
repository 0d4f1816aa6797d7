"""The messages that docs/troubleshooting.md quotes are those that the code prints."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import pages
from support.paths import ROOT

PAGE = pages.DOCS / "troubleshooting.md"
FOLDERS = ("src", "autotune", "hopper", "kernels", "turing")
SHORTEST = 5  # characters of a part of a message that is looked for
FAMILIAR = 0.7  # of a quoted message, at least, stands in the code; the rest are names and figures
VALUE = "…"  # in a quoted message: what differs from case to case
CATEGORY = re.compile(r"^(?:\w+Warning): ")


def literals(path: Path) -> Iterator[str]:
    """The texts in a module, each part between the values of an f-string by itself."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@functools.cache
def known() -> tuple[str, ...]:
    """Every text in the code that is long enough, the longest first."""
    files = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    found = {text.strip() for path in files for text in literals(path)}
    return tuple(sorted((t for t in found if len(t) >= SHORTEST), key=len, reverse=True))


def familiar(message: str) -> float:
    """The share of a message, without its values, that stands in the code word for word."""
    parts = [part.strip() for part in CATEGORY.sub("", message).split(VALUE)]
    total = sum(len(part.replace(" ", "")) for part in parts)
    left = sum(map(_unfamiliar, parts))
    return 1 - left / total


def _unfamiliar(part: str) -> int:
    """How many characters of a part of a message stand nowhere in the code."""
    if len(part) >= SHORTEST and any(part in text for text in known()):
        return 0
    for text in known():
        part = part.replace(text, "\0")
    return len(part.replace(" ", "").replace("\0", ""))


MESSAGES = [
    line
    for block in pages.blocks(PAGE)
    if block.language == "text"
    for line in block.text.splitlines()
]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_one_of_the_code(message: str) -> None:
    assert familiar(message) >= FAMILIAR, message


@pytest.mark.parametrize(
    "message",
    [
        "FallbackWarning: torch will take this call, because of CPU tensors (only said once)",
        "kernel 'hopper.gemm' wants sm_90, while the GPU has sm_80",
    ],
)
def test_a_message_in_other_words_is_noticed(message: str) -> None:
    assert familiar(message) < FAMILIAR
