"""The config classes: what each field means, its default, and the rung that brings it in."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outblas.core import config_source, registry
from outblas.hopper.core.config import HopperConfig
from outblas.kernels.portable_config import PortableConfig
from outblas.kernels.simt_config import SimtConfig
from outblas.turing.config import TuringConfig

from .markdown import code, prose, table

LADDERS: Mapping[str, type] = {
    "hopper": HopperConfig,
    "turing": TuringConfig,
    "simt": SimtConfig,
    "portable": PortableConfig,
}
_ITEM = re.compile(r"^ {4}(\w+): (.*(?:\n {8,}.*)*)", re.MULTILINE)


def fields_of(ladder: str) -> Callable[[], str]:
    """What makes the table of a config class's fields."""

    def made() -> str:
        kind = LADDERS[ladder]
        meanings, introduced = _meanings(kind), introducing_rungs(ladder)
        columns = ["field", "default", "first read by", "meaning"]
        rows = [
            [
                code(f.name),
                code(str(f.default)),
                code(introduced[f.name].rpartition(".")[2]),
                prose(meanings[f.name]),
            ]
            for f in dataclasses.fields(kind)
        ]
        if ladder == "portable":
            del columns[2]
            for row in rows:
                del row[2]
        return table(columns, rows)

    return made


def rungs_of(ladder: str) -> Callable[[], str]:
    """What makes the table of the configs of a ladder's rungs."""

    def made() -> str:
        rows, before = [], {f.name: str(f.default) for f in dataclasses.fields(LADDERS[ladder])}
        for name in registry.LADDERS[ladder]:
            own = config_source.defaults(registry.module_name(name), "Config")
            changes = [f"{field}={own[field]}" for field in own if own[field] != before[field]]
            rows.append((code(name), ", ".join(map(code, changes)) or "nothing"))
            before = own
        return table(("kernel", "what its config changes"), rows)

    return made


def introducing_rungs(ladder: str) -> dict[str, str]:
    """The first rung of a ladder that reads each field."""
    names = registry.LADDERS[ladder]
    read = _read_by_hopper if ladder == "hopper" else _read_by_gluon
    fields = [f.name for f in dataclasses.fields(LADDERS[ladder])]
    if ladder == "portable":
        return dict.fromkeys(fields, ladder)
    by_rung = {name: read(name, fields) for name in names}
    return {f: next((name for name in names if f in by_rung[name]), "") for f in fields}


def _read_by_gluon(name: str, fields: list[str]) -> set[str]:
    rung: Any = importlib.import_module(registry.module_name(name)).unsupported.__self__
    return {*fields} - {*rung.unread}


def _read_by_hopper(name: str, fields: list[str]) -> set[str]:
    """What the rung itself brings in, and for the first rung what the base does. The sources say
    so: importing them would import the CuTe DSL.
    """
    modules = [registry.module_name(name)]
    if name == registry.LADDERS["hopper"][0]:
        modules.append("outblas.hopper.core.base")
    if name == "hopper.gemm":
        modules.append("outblas.hopper.gemm.kernel")
    return {field for module in modules for field in _introduced(module)} & {*fields}


def _introduced(module: str) -> set[str]:
    """The fields in `introduces = frozenset({...})` of a module's classes."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(_path(module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "introduces":
            assert isinstance(node.value, ast.Call)
            found |= ast.literal_eval(node.value.args[0])
    return found


def _path(module: str) -> Path:
    """The source of a module of the hopper ladder, without importing it."""
    package = importlib.util.find_spec("outblas.hopper")
    assert package is not None
    assert package.submodule_search_locations is not None
    path = Path(package.submodule_search_locations[0], *module.split(".")[2:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _meanings(kind: type) -> dict[str, str]:
    """What the docstring of a config class says of each field."""
    text = inspect.cleandoc(kind.__doc__ or "")
    attributes = text.partition("\nAttributes:\n")[2].partition("\nExample:\n")[0]
    return {name: " ".join(meaning.split()) for name, meaning in _ITEM.findall(attributes)}
