"""Examples on the pages of docs/ and in README.md: fenced blocks, and what a test does with each.

The first word after the fence is the language. The words after it say how the block is tested, and
neither GitHub nor Sphinx shows them:

- `python` runs on a CPU, after the blocks above it on its page and with their names.
- `python gpu` needs a GPU: its syntax and the public names in it are checked here, and it runs
  among the GPU tests.
- `python file NAME` is a module: it is written to the file NAME in the current folder, from where
  the page's examples import it.
- `python shown: REASON` is never run, for the reason that it gives; its syntax is checked.
- `console` has lines that begin with `$ `. Commands of outblas and python run on a CPU; other lines
  are what they print, of which nothing is checked.
- `console gpu` needs a GPU: the options of its commands are checked here.
- `console shown: REASON` is never run, for the reason that it gives; options of commands of outblas
  are checked all the same.

Blocks in other languages (`text`, `json`, `toml` ...) are not tested.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.paths import ROOT

DOCS = ROOT / "docs"
TESTED = ("python", "console")
_FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,}|:{3,})(?P<info>[^\n`]*)\n"
    r"(?P<text>.*?)^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block: `how` is what follows its language, and `line` where its text begins."""

    page: Path
    line: int
    language: str
    how: str
    text: str

    @property
    def id(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def needs_gpu(self) -> bool:
        return self.how == "gpu"

    @property
    def is_run(self) -> bool:
        """Whether it runs on a CPU."""
        return self.language in TESTED and not self.how

    @property
    def file(self) -> str:
        """The name of the module that the block is; "" where it is none."""
        found = re.fullmatch(r"file (\w+\.py)", self.how)
        return found[1] if found and self.language == "python" else ""

    @property
    def unknown(self) -> str | None:
        """What is wrong with the words after the language, if anything is."""
        known = (
            not self.how or self.needs_gpu or self.file or re.fullmatch(r"shown: \S.*", self.how)
        )
        if known or self.language not in TESTED:
            return None
        return f"{self.how!r}, expected 'gpu', 'file NAME', 'shown: REASON' or nothing"

    def commands(self) -> Iterator[list[str]]:
        """The words of each command of a console block: a backslash continues a line, and what
        follows a # is a comment.
        """
        for line in self.text.replace("\\\n", " ").splitlines():
            if line.strip().startswith("$ "):
                yield shlex.split(line.strip()[2:], comments=True)


def pages() -> list[Path]:
    """README.md and every page below docs/, the template of a decision left out."""
    found = [path for path in sorted(DOCS.rglob("*.md")) if path.name != "0000-template.md"]
    return [ROOT / "README.md", *found]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, from its beginning to its end."""
    text = page.read_text(encoding="utf-8")
    found = []
    for fence in _FENCE.finditer(text):
        language, _, how = fence["info"].strip().partition(" ")
        line = text.count("\n", 0, fence.start("text")) + 1
        body = "".join(
            each.removeprefix(fence["indent"]) for each in fence["text"].splitlines(keepends=True)
        )
        found.append(Block(page, line, language, how.strip(), body))
    return found


def write_modules(page: Path) -> None:
    """Writes the modules of a page into the current folder."""
    for block in blocks(page):
        if block.file:
            Path(block.file).write_text(block.text, encoding="utf-8")
