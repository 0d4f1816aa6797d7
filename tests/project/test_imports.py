"""Imports form no circle and run down the layers; a ladder never imports another.

All `import` statements count: those at the top of a module, those inside functions, and those for
types alone (`if TYPE_CHECKING`). What `importlib` loads by name does not: that is how the registry
finds kernels, and `outblas/__init__` what it exports lazily.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
import setuptools
from support.paths import PACKAGES, ROOT

from outblas.base import registry

# From the bottom up. A module belongs to the longest prefix of its name, and imports modules of its
# own layer and of those below. `outblas` is the face, which names what it exports.
LAYERS = (
    ("outblas.base",),
    ("outblas.call",),
    ("outblas.device",),
    ("outblas.hopper", "outblas.kernels", "outblas.turing"),
    ("outblas.torch_ops",),
    ("outblas.api", "outblas.fp8"),
    ("outblas.patching",),
    ("outblas.nn", "outblas.inductor"),
    ("outblas.bench", "outblas.verify", "outblas.inspect"),
    ("outblas.autotune",),
    ("outblas.packing",),
    ("outblas",),
    ("outblas.report",),
    ("outblas.cli",),
    ("outblas.__main__",),
)
LADDERS = LAYERS[3]
LAYER_OF = {prefix: level for level, prefixes in enumerate(LAYERS) for prefix in prefixes}


@dataclass(frozen=True)
class Source:
    """The text of a module; `is_package` if it is an `__init__`."""

    text: str
    is_package: bool = False


Edges = dict[str, set[str]]


def sources() -> dict[str, Source]:
    """All modules of the product by name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join((package, *(parts[:-1] if is_package else parts)))
            found[name] = Source(path.read_text(encoding="utf-8"), is_package)
    return found


def imported(module: str, source: Source, modules: Mapping[str, Source]) -> Iterator[str]:
    """The modules, of those given, that the import statements of one of them name."""
    package = module.split(".") if source.is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join((*base, *([node.module] if node.module else [])))
            for alias in node.names:
                name = f"{origin}.{alias.name}"
                if name in modules or origin in modules:
                    yield name if name in modules else origin


def edges(modules: Mapping[str, Source]) -> Edges:
    return {
        name: {other for other in imported(name, source, modules) if other != name}
        for name, source in modules.items()
    }


def circles(graph: Edges) -> set[frozenset[str]]:
    """Sets of modules that reach one another: Tarjan's strongly connected components."""
    found: set[frozenset[str]] = set()
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> None:
        index[name] = lowest[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
            if other in stack:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == index[name]:
            component = frozenset(stack[stack.index(name) :])
            del stack[stack.index(name) :]
            if len(component) > 1:
                found.add(component)

    for name in graph:
        if name not in index:
            visit(name)
    return found


def layer(module: str) -> int:
    parts = module.split(".")
    prefixes = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
    prefix = next(prefix for prefix in prefixes if prefix in LAYER_OF)
    if prefix == "outblas" != module:
        raise ValueError(f"{module} belongs to no layer: give it one in LAYERS")
    return LAYER_OF[prefix]


def upward(graph: Edges) -> list[str]:
    """Imports of a higher layer, in words."""
    return [
        f"{name} -> {other}"
        for name in sorted(graph)
        for other in sorted(graph[name])
        if layer(other) > layer(name)
    ]


def between_ladders(graph: Edges) -> list[str]:
    """Imports of one ladder by another, in words."""

    def ladder(module: str) -> str:
        return ".".join(module.split(".")[:2])

    return [
        f"{name} -> {other}"
        for name in sorted(graph)
        for other in sorted(graph[name])
        if {ladder(name), ladder(other)} <= {*LADDERS} and ladder(name) != ladder(other)
    ]


# ---- the product
@pytest.fixture(scope="module")
def product() -> Edges:
    return edges(sources())


def test_no_circle(product: Edges) -> None:
    assert circles(product) == set()


def test_imports_run_down(product: Edges) -> None:
    assert upward(product) == []


def test_no_ladder_imports_another(product: Edges) -> None:
    assert between_ladders(product) == []


def test_every_package_is_read_and_has_a_layer(product: Edges) -> None:
    """A package that is installed; and layers of modules that there are."""
    packages = {name for name, source in sources().items() if source.is_package}

    assert set(setuptools.find_packages(str(ROOT / "src"))) == packages
    assert [name for name in product if layer(name) < 0] == []
    assert set(LAYER_OF) - set(product) == set()


def test_every_kernel_of_the_registry_is_read(product: Edges) -> None:
    """`importlib` loads them, which no import statement shows."""
    kernels = {registry.module_name(kernel.name) for kernel in registry.ladder()}

    assert kernels - set(product) == set()


def test_all_kinds_of_imports_are_read(product: Edges) -> None:
    assert "outblas.call.problem" in product["outblas.call.dispatch"]
    assert "outblas.autotune.automatic" in product["outblas"]  # inside a function
