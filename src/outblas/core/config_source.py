"""Defaults and old names of kernels' configs, read from their sources: showing or storing a config
needs no DSL, which takes seconds to import.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path

from . import registry
from .configs import items, with_current_names

Defaults = dict[str, str]  # by field, as `configs.to_text` writes values

# What reading the source of a kernel's config may raise, where the kernel is not here for one.
_UNREADABLE = (LookupError, ValueError, OSError, ImportError, SyntaxError)


@dataclass(frozen=True)
class ConfigSource:
    """A config class as its source has it: fields with their defaults, and old names of fields."""

    defaults: Mapping[str, str]
    aliases: Mapping[str, str]


_EMPTY = ConfigSource({}, {})


def brief(kernel: str, config: str) -> str:
    """The fields of a config that differ from the kernel's defaults; the whole text where these
    cannot be read.
    """
    try:
        own = defaults(registry.module_name(kernel), "Config")
    except _UNREADABLE:
        return config
    config = current_text(kernel, config)
    found = items(config)
    if any(name not in own for name, _ in found):
        return config
    return ",".join(f"{name}={value}" for name, value in found if value != own[name])


def current_text(kernel: str, config: str) -> str:
    """A config's text with the names that the kernel's fields have now, as `configs.to_text` writes
    it if the text names every field in its order. The text as it is where the source of the
    kernel's config cannot be read, or where it gives a field by two names with different values.
    """
    try:
        renamed = source(registry.module_name(kernel), "Config").aliases
        return with_current_names(config, renamed) if renamed else config
    except _UNREADABLE:
        return config


def defaults(module: str, name: str) -> Defaults:
    """Of the config class that a module calls so: fields with literal defaults, in the class or in
    what it derives from. Raises ValueError for a class that is written in another way, OSError,
    ImportError.
    """
    return dict(source(module, name).defaults)


@dataclass(frozen=True)
class _Module:
    """A module's syntax tree, and the package that its relative imports start from."""

    name: str
    package: str
    tree: ast.Module


@cache
def source(module: str, name: str) -> ConfigSource:
    """The config class that a module defines, assigns or imports by this name, with what it derives
    from. Errors are those of `defaults`.
    """
    spec = _spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"{module} has no source")
    read = _Module(module, spec.parent or "", ast.parse(Path(spec.origin).read_text()))
    for node in read.tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _of_class(read, node)
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [
            name
        ]:
            return _elsewhere(read, node.value)
    if (imported := _imported(read, name)) is not None:
        return source(*imported)
    raise ValueError(f"{module} has no class {name}")


def _spec(module: str) -> ModuleSpec | None:
    """Where a module is. `importlib.util.find_spec` would import the packages above it, of which
    `outblas.hopper.gemm` imports a DSL.
    """
    package = module.rpartition(".")[0]
    path: Iterable[str] | None = None
    if package in sys.modules:
        path = sys.modules[package].__path__
    elif package:
        above = _spec(package)
        path = above.submodule_search_locations if above else None
        if path is None:
            return None
    places = None if path is None else list(path)
    specs = (finder.find_spec(module, places) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)


def _of_class(module: _Module, node: ast.ClassDef) -> ConfigSource:
    found = _EMPTY
    for base in node.bases:
        inherited = _elsewhere(module, base)
        found = ConfigSource(
            {**found.defaults, **inherited.defaults}, {**found.aliases, **inherited.aliases}
        )
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        field = statement.target.id
        if field == "ALIASES":
            found = replace(found, aliases={**found.aliases, **_aliases(statement.value)})
        elif "ClassVar" not in ast.unparse(statement.annotation):
            found = replace(
                found, defaults={**found.defaults, field: str(_literal(statement.value))}
            )
    return found


def _aliases(value: ast.expr | None) -> dict[str, str]:
    renamed = _literal(value)
    if not isinstance(renamed, dict):
        raise ValueError(f"ALIASES is {renamed!r}, expected a dict of names")
    return renamed


def _literal(value: ast.expr | None) -> object:
    if value is None:
        raise ValueError("a field has no default")
    return ast.literal_eval(value)


def _elsewhere(module: _Module, value: ast.expr) -> ConfigSource:
    """The class that is named by an expression: `Name`, or `module.Name`."""
    first, _, rest = ast.unparse(value).partition(".")
    imported = _imported(module, first)
    if imported is None:
        if rest:
            raise ValueError(f"{module.name} does not say where {first} is from")
        return source(module.name, first)
    package, name = imported
    return source(f"{package}.{name}", rest) if rest else source(package, name)


def _imported(module: _Module, name: str) -> tuple[str, str] | None:
    """The module and the name in it from which a module imports `name`; None where it does not."""
    for node in module.tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    start = "." * node.level + (node.module or "")
                    return importlib.util.resolve_name(start, module.package), alias.name
    return None
