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
    raise ValueError(f"{module} has no class {name}")


def _literal(value: ast.expr | None) -> object:
    if value is None:
        raise ValueError("a field has no default")
    return ast.literal_eval(value)


def _elsewhere(tree: ast.Module, module: str, value: ast.expr) -> Defaults:
    """The defaults of a class that is named by an expression: `Name`, or `module.Name`."""
    first, _, rest = ast.unparse(value).partition(".")
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == first:
                    package = "." * node.level + (node.module or "")
                    place = importlib.util.resolve_name(package, module.rpartition(".")[0])
                    if rest:
                        return defaults(f"{place}.{alias.name}", rest)
                    return defaults(place, alias.name)
    if rest:
        raise ValueError(f"{module} does not say where {first} is from")
    return defaults(module, first)
