"""A page of `docs/learn/` for each rung of the ladders: its idea, figures, machine code and code.

`python -m docs.rung_pages` writes the pages from the docstrings and the code of the rungs, from
`results/` and from the snapshot of machine code in `tests/data/`. Nothing is compiled.
"""

from .page import pages

__all__ = ["pages"]
