"""Keeps inspections on disk, so that a roofline of many kernels compiles each only once.

An inspection is kept without its SASS and PTX, in the folder `inspections` of outblas's cache. Its
key contains everything that it depends on: the kernel, what it was compiled for, the compilers'
versions and environment variables, and every source file of outblas. Where the folder is unusable,
nothing is kept.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from ..core import cache, ownership
from .inspection import Inspection

MOST = 500  # number of inspections in the folder; the oldest are removed first
_PACKAGES = ("outblas", "outblas.hopper", "outblas.kernels", "outblas.turing")
_COMPILERS = (
    "triton",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
    "torch",
)
# prefixes of the environment variables that compilers read
_VARIABLES = ("TRITON_", "CUTE_", "CUTLASS_")
_DROPPED = ("sass", "ptx_text")


@dataclass(frozen=True)
class Request:
    """A kernel with its default config and layout, and what it is compiled for."""

    kernel: str
    arch: int
    dtype: str
    shape: tuple[int, int, int]


def find(request: Request) -> Inspection | None:
    """Returns the inspection that `keep` has kept, with `sass` and `ptx_text` empty; None if there
    is none that can be read.
    """
    try:
        record = json.loads(ownership.read(_path(request)))
        fields_of: dict[str, Any] = {**record, **dict.fromkeys(_DROPPED, "")}
        return Inspection(**fields_of)
    except (OSError, ownership.Refused, ValueError, TypeError, RecursionError):
        return None


def keep(request: Request, inspection: Inspection) -> None:
    """Keeps an inspection; does nothing where the cache cannot be written."""
    record = {
        f.name: getattr(inspection, f.name) for f in fields(inspection) if f.name not in _DROPPED
    }
    with contextlib.suppress(OSError, ownership.Refused):
        path = _path(request)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(record, default=_plain), encoding="utf-8")
        scratch.chmod(0o600)
        scratch.replace(path)
        _prune(path.parent)


def _plain(value: Any) -> Any:
    """Converts a mapping or sequence that JSON does not support to one that it does."""
    return dict(value) if hasattr(value, "items") else list(value)


def _prune(folder: Path) -> None:
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[MOST:]:
        file.unlink(missing_ok=True)


def _path(request: Request) -> Path:
    """Returns the path of an inspection. Raises OSError or Refused for a cache that cannot be
    used.
    """
    try:
        folder = ownership.own_folder(cache.inspections())
    except ValueError as error:
        raise OSError(str(error)) from None
    return folder / f"{cache.digest({'request': vars(request), **_toolchain()})}.json"


@functools.cache
def _toolchain() -> dict[str, object]:
    """Returns what every inspection depends on, read once at first, because compilers set
    environment variables too.
    """
    found: dict[str, object] = {"source": _source()}
    for name in _COMPILERS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found | {
        name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)
    }


@functools.cache
def _source() -> str:
    """Returns a digest that changes with any source file of outblas."""
    texts: dict[str, object] = {}
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            for file in sorted(Path(root).rglob("*.py")):
                texts[f"{package}/{file.relative_to(root)}"] = file.read_text(encoding="utf-8")
    return cache.digest(texts)
