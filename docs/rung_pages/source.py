"""The source of a rung: the parts of its docstring, its definitions, and what they override.

Everything is read from the syntax tree, so that no DSL is imported and nothing is compiled.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from outblas.core import registry

from .markdown import fill

PARTS = ("Idea", "Parent", "Changes", "Why it pays", "Source")
ROOT = Path(__file__).parents[2]
_PART = re.compile(rf"^({'|'.join(PARTS)}): ", re.MULTILINE)
_CONFIG = "Config"
_GAP = " ..."  # stands in a diff for lines that are the same
_SHORT = 30  # lines of a definition whose diff shows all of it
# Attributes of a class that a diff of its methods shows too.
_ATTRIBUTES = ("persistent", "pipeline_type")

Definition = ast.FunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Change:
    """A definition that differs from the parent's: its name, the parent's name for it (None: the
    parent has none) and the lines of a unified diff, without docstrings.
    """

    name: str
    replaces: str | None
    diff: tuple[str, ...]


class Module:
    """A source file, with the names that it defines and imports."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        self.definitions: dict[str, Definition] = {
            node.name: node
            for node in self.tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }

    @property
    def package(self) -> str:
        """The package that relative imports start from."""
        return self.name if self.path.stem == "__init__" else self.name.rpartition(".")[0]

    @property
    def file(self) -> str:
        """The path from the root of the repository."""
        return self.path.resolve().relative_to(ROOT).as_posix()

    def docstring(self) -> dict[str, str]:
        """The parts of the docstring, as Markdown. Raises ValueError where one is missing."""
        _, *pieces = _PART.split(ast.get_docstring(self.tree) or "")
        found = {
            name: _paragraphs(text) for name, text in zip(pieces[::2], pieces[1::2], strict=True)
        }
        if tuple(found) != PARTS:
            raise ValueError(f"{self.file} has the parts {list(found)}, expected {list(PARTS)}")
        return found

    def source(self, node: ast.AST) -> list[str]:
        """The lines of a definition, decorators included, docstring left out, dedented."""
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])  # type: ignore[attr-defined]
        lines = self.text.splitlines()
        kept = lines[first - 1 : node.end_lineno]  # type: ignore[attr-defined]
        body = getattr(node, "body", [])
        if body and _is_docstring(body[0]):
            start, end = body[0].lineno - first, body[0].end_lineno - first + 1
            kept[start:end] = [] if len(body) > 1 else [" " * body[0].col_offset + "pass"]
        return textwrap.dedent("\n".join(kept)).splitlines()

    def resolve(self, expression: ast.expr) -> tuple[Module, str]:
        """The module that defines what a name, or an attribute of a module, stands for."""
        match expression:
            case ast.Name(id=name) if name in self.definitions:
                return self, name
            case ast.Name(id=name):
                module, original = self._imported(name)
                return _module(module), original
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                package, module = self._imported(name)
                return _module(f"{package}.{module}"), attribute
        raise ValueError(f"{self.file}: {ast.unparse(expression)} is no name of a module")

    def _imported(self, wanted: str) -> tuple[str, str]:
        """The module, and the name in it, that a name was imported from."""
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == wanted:
                        relative = "." * node.level + (node.module or "")
                        return importlib.util.resolve_name(relative, self.package), alias.name
        raise ValueError(f"{self.file}: {wanted} is neither defined nor imported from a module")


@dataclass(frozen=True)
class Rung:
    """A kernel of the registry and its source."""

    kernel: registry.Kernel
    module: Module

    @property
    def body(self) -> tuple[Module, str]:
        """Where the class or the device function is that the rung launches."""
        for node in ast.walk(self.module.tree):
            match node:
                case ast.Call(args=[ast.Name(id="KERNEL"), body, *_]):
                    return self.module.resolve(body)
        raise ValueError(f"{self.module.file} hands no body to its entry")

    @property
    def definitions(self) -> list[str]:
        """Classes and functions that the file defines, its config left out."""
        return [name for name in self.module.definitions if name != _CONFIG]

    @property
    def config(self) -> dict[str, object]:
        """The defaults of the rung's config by field, for fields that it or a parent sets."""
        return dict(_config_fields(self.module))


@cache
def rung(name: str) -> Rung:
    """The rung of a kernel."""
    return Rung(registry.find(name), _module(registry.module_name(name)))


def changes(own: Rung, parent: Rung) -> list[Change]:
    """The definitions in which a rung's device code differs from its parent's: methods of its class
    and of its pipeline, or its device function and the functions that its file adds.
    """
    module, name = own.body
    if isinstance(module.definitions[name], ast.ClassDef):
        found = _class_changes(own.body, parent.body)
        pipelines = [_pipeline(*each.body) for each in (own, parent)]
        return found + (_class_changes(*pipelines) if pipelines[0] != pipelines[1] else [])
    if own.body == parent.body:
        return []
    helpers = [each for each in own.definitions if each != name] if module == own.module else []
    return [
        *(_diff(each, None, [], own.module.source(module.definitions[each])) for each in helpers),
        _function_change(own.body, parent.body),
    ]


def _function_change(own: tuple[Module, str], parent: tuple[Module, str]) -> Change:
    (module, name), (before, former) = own, parent
    return _diff(
        name,
        former,
        before.source(before.definitions[former]),
        module.source(module.definitions[name]),
    )


def _class_changes(own: tuple[Module, str], parent: tuple[Module, str]) -> list[Change]:
    now, before = _members(*own), _members(*parent)
    found = []
    for member, (owner, lines) in now.items():
        former, previous = before.get(member, (None, []))
        if lines != previous:
            replaces = None if former is None else f"{former}.{member}"
            found.append(_diff(f"{owner}.{member}", replaces, previous, lines))
    return found


def _members(module: Module, name: str) -> dict[str, tuple[str, list[str]]]:
    """The methods of a class, inherited ones too, by name: the class that defines each, and its
    lines.
    """
    found: dict[str, tuple[str, list[str]]] = {}
    for owner, node in _lineage(module, name):
        for member in node.body:
            if isinstance(member, ast.FunctionDef):
                found.setdefault(member.name, (node.name, owner.source(member)))
            elif (attribute := _attribute(member)) in _ATTRIBUTES:
                found.setdefault(str(attribute), (node.name, owner.source(member)))
    return found


def _lineage(module: Module, name: str) -> Iterator[tuple[Module, ast.ClassDef]]:
    """A class and its bases, each with the module that defines it."""
    while isinstance(node := module.definitions.get(name), ast.ClassDef):
        yield module, node
        if not node.bases:
            return
        module, name = module.resolve(node.bases[0])


def _pipeline(module: Module, name: str) -> tuple[Module, str]:
    """The class of the pipeline of a rung's class."""
    for owner, node in _lineage(module, name):
        for member in node.body:
            if _attribute(member) == "pipeline_type":
                assert isinstance(member, ast.Assign | ast.AnnAssign)
                assert member.value is not None
                return owner.resolve(member.value)
    raise ValueError(f"{module.file}: {name} has no pipeline_type")


def _attribute(node: ast.stmt) -> str | None:
    match node:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return None


def _diff(name: str, replaces: str | None, before: list[str], now: list[str]) -> Change:
    context = _SHORT if max(len(before), len(now)) <= _SHORT else 3
    _, _, _, *lines = difflib.unified_diff(before, now, lineterm="", n=context)
    shown = (_GAP if line.startswith("@@") else line.rstrip() for line in lines)
    return Change(name, replaces, tuple(shown))


def _config_fields(module: Module) -> Iterator[tuple[str, object]]:
    """Fields of a module's Config with their defaults, those of its bases first."""
    aliases = [
        node.value
        for node in module.tree.body
        if isinstance(node, ast.Assign) and _attribute(node) == _CONFIG  # Config = HopperConfig
    ]
    name = _CONFIG
    if aliases or name not in module.definitions:
        module, name = module.resolve(aliases[0] if aliases else ast.Name(name))
    node = module.definitions.get(name)
    if not isinstance(node, ast.ClassDef):
        yield from _config_fields(module)
        return
    for base in node.bases:
        of, inherited = module.resolve(base)
        own = inherited == _CONFIG
        yield from _config_fields(of) if own else _fields(of.definitions[inherited])
    yield from _fields(node)


def _fields(node: Definition) -> Iterator[tuple[str, object]]:
    for member in node.body:
        match member:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=value)):
                yield name, value


def _is_docstring(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


def _paragraphs(text: str) -> str:
    """The text of a part in Markdown: paragraphs and lists, whose items begin with a dash."""
    return "\n\n".join(map(_filled, re.split(r"\n\s*\n", text.strip())))


def _filled(paragraph: str) -> str:
    first, *items = re.split(r"(?:^|\n) *- ", paragraph)
    if not items:
        return fill(" ".join(first.split()))
    return "\n".join(fill(f"- {' '.join(item.split())}", "  ") for item in items)


@cache
def _module(name: str) -> Module:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ImportError(f"{name} is not installed")
    return Module(name, Path(spec.origin))
