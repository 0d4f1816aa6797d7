"""A digest of the sources that a kernel may call, which is part of its key in the cache on disk."""

import functools
import sys
from pathlib import Path
from types import ModuleType

from outblas import base, call
from outblas.base import cache


def fingerprint(*modules: ModuleType) -> str:
    """Returns a digest that changes with any source file in the folders of these modules, of
    `device`, `call` and `base`.
    """
    folders = {folder(module) for module in (*modules, base, call, sys.modules[__name__])}
    return _digest(tuple(sorted(folders)))


def folder(module: ModuleType) -> Path:
    """Returns the folder that holds a module, or a package and its modules."""
    return Path(str(module.__file__)).parent


@functools.cache
def _digest(folders: tuple[Path, ...]) -> str:
    texts: dict[str, object] = {
        f"{place.name}/{path.relative_to(place)}": path.read_text(encoding="utf-8")
        for place in folders
        for path in sorted(place.rglob("*.py"))
    }
    return cache.digest(texts)
