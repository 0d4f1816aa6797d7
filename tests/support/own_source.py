"""Device code of the CuTe DSL on Python's numbers: a module's own source over stand-ins for what it
imports.
"""

import ast
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple


def run_source(module: ModuleType, *names: str, **stand_ins: Any) -> dict[str, Any]:
    """Executes a module without its imports, or its definitions of `names` alone, where the DSL's
    decorator and constant expressions do nothing. Returns what it defines beside the `stand_ins`.
    """

    def is_wanted(node: ast.stmt) -> bool:
        if isinstance(node, ast.Import | ast.ImportFrom):
            return False
        return not names or getattr(node, "name", "") in names

    path = str(module.__file__)
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if is_wanted(node)]
    cute = SimpleNamespace(jit=lambda function: function, **stand_ins.pop("cute", {}))
    cutlass = {"const_expr": bool, "range_constexpr": range, "Constexpr": object}
    cutlass |= {"min": min, "max": max} | stand_ins.pop("cutlass", {})
    scope = {"NamedTuple": NamedTuple, "dataclass": dataclass, "Any": Any}
    scope |= {"cute": cute, "cutlass": SimpleNamespace(**cutlass), "__name__": module.__name__}
    scope |= stand_ins
    exec(compile(tree, path, "exec", dont_inherit=True), scope)
    return scope
