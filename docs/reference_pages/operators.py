"""The operators `torch.ops.outblas.*`, as their schemas declare them."""

from __future__ import annotations

import torch

import outblas.torch_ops.ops
import outblas.torch_ops.scaled_mm  # noqa: F401 (which registers its operators)
from outblas.torch_ops.schema import ARGUMENTS


def schemas() -> str:
    """A list of all operators and their schemas."""
    return "\n".join(f"- `{_schema(name)}`" for name in ARGUMENTS)


def _schema(name: str) -> str:
    schema = str(getattr(torch.ops.outblas, name).default._schema)
    return schema.removeprefix("outblas::").replace("''", '""')
