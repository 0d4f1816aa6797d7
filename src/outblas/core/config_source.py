"""The defaults of kernels' configs, read from their sources: showing a config needs no DSL, which
takes seconds to import.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

from . import registry
from .configs import items

Defaults = dict[str, str]  # by field, as `configs.to_text` writes values


def brief(kernel: str, config: str) -> str:
    """The fields of a config that differ from the kernel's defaults; the whole text where these
    cannot be read.
    """
    found = items(config)
    try:
        own = defaults(registry.module_name(kernel), "Config")
    except (
        LookupError,
        ValueError,
        OSError,
        ImportError,
        SyntaxError,
    ):  # of a kernel that is not here, for one
        return config
    if any(name not in own for name, _ in found):
        return config
    return ",".join(f"{name}={value}" for name, value in found if value != own[name])


@cache
def defaults(module: str, name: str) -> Defaults:
    """Of the config class that a module calls so: fields with literal defaults, in the class or in
    what it derives from. Raises ValueError for a class that is written in another way, OSError,
    ImportError.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"{module} has no source")
    tree = ast.parse(Path(spec.origin).read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            found: Defaults = {}
            for base in node.bases:
                found |= _elsewhere(tree, module, base)
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    found[field.target.id] = str(_literal(field.value))
            return found
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [
            name
        ]:
            return _elsewhere(tree, module, node.value)
    if (elsewhere := _imported(tree, module, name)) is not None:
        return defaults(*elsewhere)
    raise ValueError(f"{module} has no class {name}")


def _literal(value: ast.expr | None) -> object:
    if value is None:
        raise ValueError("a field has no default")
    return ast.literal_eval(value)


def _elsewhere(tree: ast.Module, module: str, value: ast.expr) -> Defaults:
    """The defaults of a class that is named by an expression: `Name`, or `module.Name`."""
    first, _, rest = ast.unparse(value).partition(".")
    elsewhere = _imported(tree, module, first)
    if elsewhere is None and rest:
        raise ValueError(f"{module} does not say where {first} is from")
    if elsewhere is None:
        return defaults(module, first)
    place, original = elsewhere
    return defaults(f"{place}.{original}", rest) if rest else defaults(place, original)


def _imported(tree: ast.Module, module: str, name: str) -> tuple[str, str] | None:
    """The module from which `module`, whose source is `tree`, imports `name`, and what it is called
    there; None if it does not.
    """
    spec = importlib.util.find_spec(module)
    is_package = spec is not None and spec.submodule_search_locations is not None
    package = module if is_package else module.rpartition(".")[0]
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    relative = "." * node.level + (node.module or "")
                    return importlib.util.resolve_name(relative, package), alias.name
    return None
