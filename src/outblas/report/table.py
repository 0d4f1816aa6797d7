"""A table of text, which can be shown on a terminal, in Markdown or in HTML."""

from collections.abc import Sequence
from typing import NamedTuple


class TextTable(NamedTuple):
    """A heading, the columns and the cells of each row."""

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
