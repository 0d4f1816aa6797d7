"""The shape of the package's code: names that mean one thing, and functions that can be read."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from support.paths import PACKAGES, ROOT

import outblas

MOST_LINES, MOST_LINES_ON_A_DEVICE, MOST_PARAMETERS = 90, 150, 12
DEVICE = ("cute.jit", "cute.kernel", "triton.jit", "gluon.jit")


@dataclass(frozen=True)
class Function:
    """A function of the package.

    is_face: whether it is a public call or the definition of a command, whose parameters are what
        a caller may say.
    is_on_device: whether a DSL compiles it, so that its parameters are those of the launch.
    """

    name: str
    lines: int
    parameters: int
    is_face: bool
    is_on_device: bool


@cache
def trees() -> tuple[tuple[str, ast.Module], ...]:
    """The modules of the package, by their paths."""
    return tuple(
        (str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8")))
        for folder in PACKAGES.values()
        for path in sorted((ROOT / folder).rglob("*.py"))
    )


def functions() -> Iterator[Function]:
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                arguments = node.args
                decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
                yield Function(
                    f"{path}: {node.name}",
                    (node.end_lineno or 0) - node.lineno + 1,
                    len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs),
                    node.name in outblas.__all__ or "Option(" in ast.unparse(arguments),
                    any(decorator.startswith(DEVICE) for decorator in decorators),
                )


def test_no_function_is_longer_than_can_be_read() -> None:
    long = {
        function.name
        for function in functions()
        if function.lines > (MOST_LINES_ON_A_DEVICE if function.is_on_device else MOST_LINES)
        and not function.is_face
    }

    assert long == set()


def test_no_function_has_more_parameters_than_can_be_kept_in_mind() -> None:
    wide = {
        function.name
        for function in functions()
        if function.parameters > MOST_PARAMETERS and not (function.is_face or function.is_on_device)
    }

    assert wide == set()


def test_no_two_packages_have_one_name() -> None:
    packages = defaultdict(list)
    for path, _ in trees():
        folder, _, file = path.rpartition("/")
        if file == "__init__.py":
            packages[folder.rpartition("/")[2]].append(folder)

    assert {name: folders for name, folders in packages.items() if len(folders) > 1} == {}


def test_no_two_classes_have_one_name() -> None:
    """But `Config`: every kernel has one, by which the registry finds it; and private ones."""
    classes = defaultdict(list)
    for path, tree in trees():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith(("Config", "_")):
                classes[node.name].append(path)

    assert {name: paths for name, paths in classes.items() if len(paths) > 1} == {}
