"""Defaults and old names of config fields, read from the source of the kernels. Showing or storing
a config therefore needs no DSL, whose import takes seconds.
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

Defaults = dict[str, str]  # field name -> default, written as `configs.to_text` writes values

# Errors from reading a config's source; they mean that the kernel is not available here.
_UNREADABLE = (LookupError, ValueError, OSError, ImportError, SyntaxError)


@dataclass(frozen=True)
class ConfigSource:
    """The fields of a config class with their defaults, and the old names of renamed fields, as its
    source states them.
    """

    defaults: Mapping[str, str]
    aliases: Mapping[str, str]


_EMPTY = ConfigSource({}, {})


def brief(kernel: str, config: str) -> str:
    """Returns the fields of a config that differ from the kernel's defaults, or the whole text
    where the defaults cannot be read.
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
    """Rewrites a config's text with the current names of the kernel's fields. The result equals
    that of `configs.to_text` if the text names every field in order.

    Returns the text unchanged where the source of the config cannot be read, or where the text
    gives one field by two names with different values.
    """
    try:
        renamed = source(registry.module_name(kernel), "Config").aliases
        return with_current_names(config, renamed) if renamed else config
    except _UNREADABLE:
        return config


def defaults(module: str, name: str) -> Defaults:
    """Returns the fields of the config class `name` of a module, inherited ones included, with
    their literal defaults.

    Raises ValueError where a default is not a literal or the class cannot be found in the source,
    and OSError or ImportError where there is no source to read.
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
    """Returns the config class that a module defines, assigns or imports as `name`, inherited
    fields included. Raises the same errors as `defaults`.
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
    """Returns where a module is found. `importlib.util.find_spec` would import the parent packages,
    and `outblas.hopper.gemm` imports a DSL.
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
    """Resolves a class that an expression names: `Name`, or `module.Name`."""
    first, _, rest = ast.unparse(value).partition(".")
    imported = _imported(module, first)
    if imported is None:
        if rest:
            raise ValueError(f"{module.name} does not say where {first} is from")
        return source(module.name, first)
    package, name = imported
    return source(f"{package}.{name}", rest) if rest else source(package, name)


def _imported(module: _Module, name: str) -> tuple[str, str] | None:
    """Returns the module from which `name` is imported and its name there, or None where the module
    does not import it.
    """
    for node in module.tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    start = "." * node.level + (node.module or "")
                    return importlib.util.resolve_name(start, module.package), alias.name
    return None
