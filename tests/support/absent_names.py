"""Runs outblas as if torch, Triton and the CuTe DSL lacked private names that it takes.

`hide` has to come before outblas is imported. As a plugin (`pytest -p tests.support.absent_names`)
the module hides what OUTBLAS_TEST_ABSENT says: patterns as of file names, with commas between.
"""

import fnmatch
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

COMPAT = "outblas.base.compat"


class _Hiding:
    """Finds `outblas.base.compat`, and has its `find` miss names."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = patterns

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != COMPAT:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            miss(module, self.patterns)

        loader.exec_module = exec_module
        return spec


def miss(compat: Any, patterns: Sequence[str]) -> None:
    """Has `compat.find` miss the names that match a pattern."""
    find = compat.find

    def find_or_miss(name: str) -> tuple[bool, Any]:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            return False, None
        return find(name)

    compat.find = find_or_miss


def hide(patterns: Sequence[str]) -> None:
    """Hides private names from outblas, which nothing has imported yet."""
    if COMPAT in sys.modules:
        raise RuntimeError("outblas is imported already")
    sys.meta_path.insert(0, _Hiding(patterns))


if wanted := os.environ.get("OUTBLAS_TEST_ABSENT"):
    hide(wanted.split(","))
