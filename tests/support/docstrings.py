"""The parts of a docstring in Google style."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field

_HEADING = re.compile(
    r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples|Note|Warning):$", re.MULTILINE
)
_ITEM = re.compile(r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*): \S", re.MULTILINE)


@dataclass(frozen=True)
class Docstring:
    """A docstring's summary, and the text of its sections by their headings."""

    summary: str
    sections: dict[str, str] = field(default_factory=dict)

    def items(self, heading: str) -> list[str]:
        """The names that a section describes, `name: text` or `name, name: text`."""
        listed = _ITEM.findall(self.sections.get(heading, ""))
        return [name.lstrip("*") for names in listed for name in names.split(", ")]


def parse(text: str) -> Docstring:
    """The parts of a docstring, as `__doc__` has it."""
    head, *parts = _HEADING.split(inspect.cleandoc(text))
    summary = " ".join(head.partition("\n\n")[0].split())
    return Docstring(summary, dict(zip(parts[::2], parts[1::2], strict=True)))
