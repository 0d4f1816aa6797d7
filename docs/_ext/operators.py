"""Lists the schemas of `torch.ops.outblas.*` where a page has `<!-- operators -->`."""

from __future__ import annotations

import torch
from sphinx.application import Sphinx

from outblas.torch_ops.schema import SCHEMAS

MARKER = "<!-- operators -->"


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the extension."""
    app.connect("source-read", _fill_in)
    return {"parallel_read_safe": True}


def _fill_in(app: Sphinx, name: str, source: list[str]) -> None:
    if MARKER in source[0]:
        source[0] = source[0].replace(MARKER, schemas())


def schemas() -> str:
    """The schemas as a list in Markdown."""
    declared = (str(getattr(torch.ops.outblas, name).default._schema) for name in SCHEMAS)
    return "\n".join(f"- `{schema.removeprefix('outblas::')}`" for schema in declared)
