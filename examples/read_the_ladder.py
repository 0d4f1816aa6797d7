"""The story of a ladder: each rung's idea, and how much code it takes.

Prints the rungs from the first to the last, what each changes in its parent, and how many lines
differ, all read from the sources without a compiler or a GPU.

    python examples/read_the_ladder.py
    python examples/read_the_ladder.py --ladder simt
    python examples/read_the_ladder.py --rung hopper.large_tile
"""

import argparse
import ast
import difflib
import importlib.util
from pathlib import Path

import outblas

MODULES = {"simt": "outblas.kernels", "turing": "outblas.turing", "hopper": "outblas.hopper"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Read a ladder of kernels.")
    parser.add_argument("--ladder", choices=tuple(MODULES), default="hopper")
    parser.add_argument("--rung", help="show the whole docstring of one rung")
    given = parser.parse_args()

    if given.rung:
        print(ast.get_docstring(ast.parse(source(given.rung))))
        return
    climbed: set[str | None] = set()
    for kernel in outblas.ladder(given.ladder):
        print(f"{kernel.name}: {kernel.idea}")
        print(f"    follows {kernel.source}")
        if kernel.parent in climbed and file_of(kernel.name).name != "__init__.py":
            print(f"    {changed_lines(kernel.parent, kernel.name)} lines are not its parent's")
        climbed.add(kernel.name)


def changed_lines(parent: str, rung: str) -> int:
    """Lines of a rung's file that are not in its parent's."""
    diff = difflib.unified_diff(source(parent).splitlines(), source(rung).splitlines(), n=0)
    return sum(line.startswith("+") and not line.startswith("+++") for line in diff)


def source(rung: str) -> str:
    return file_of(rung).read_text(encoding="utf-8")


def file_of(rung: str) -> Path:
    """The file of a rung. That of `hopper.gemm`, which is a folder, is its `__init__.py`."""
    ladder, _, name = rung.partition(".")
    spec = importlib.util.find_spec(f"{MODULES[ladder]}.{name}")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


if __name__ == "__main__":
    main()
