"""Fingerprints of kernels' sources by name."""

from __future__ import annotations

from .subjects import fingerprint as _of_module
from .subjects import of


def fingerprint(kernel: str) -> str:
    """Changes with the source of a registered kernel. Raises ValueError for another name."""
    return _of_module(of(kernel).module)
