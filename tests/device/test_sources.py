"""The key of a kernel on disk changes with any source file that its device code imports."""

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

from outblas.base import cache
from outblas.device import sources

LADDERS = ("outblas.hopper", "outblas.kernels", "outblas.turing")
JITTED = ("@cute.jit", "@cute.kernel", "@triton.jit", "@gluon.jit")


def imported(name: str, path: Path) -> set[str]:
    """The modules of the package that a module imports, wherever it does."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(start, package)
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return {name for name in names if name.startswith("outblas.")}


def source_of(name: str) -> Path | None:
    """The file of a module; None for other names that are imported from one."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin).resolve() if spec and spec.origin else None


def reached(names: set[str]) -> set[Path]:
    """The files of modules and of those that they import, but for those of packages."""
    files: set[Path] = set()
    waiting, seen = sorted(names), set(names)
    while waiting:
        name = waiting.pop()
        path = source_of(name)
        if path is None or path.name == "__init__.py":
            continue
        files.add(path)
        more = imported(name, path) - seen
        seen |= more
        waiting += sorted(more)
    return files


@pytest.mark.parametrize("ladder", LADDERS)
def test_all_that_device_code_imports_is_in_the_key(
    ladder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = importlib.import_module(ladder)
    folder = sources.folder(package)
    modules = {
        ".".join((ladder, *path.relative_to(folder).with_suffix("").parts))
        for path in folder.rglob("*.py")
        if any(mark in path.read_text(encoding="utf-8") for mark in JITTED)
    }
    digested: dict[str, str] = {}
    monkeypatch.setattr(cache, "digest", lambda texts: digested.update(texts) or "")
    sources._digest.cache_clear()

    sources.fingerprint(package)

    sources._digest.cache_clear()
    assert len(modules) > 3
    texts = set(digested.values())
    files = reached(modules)
    assert [path for path in files if path.read_text(encoding="utf-8") not in texts] == []
