"""Fills in the pages of the rungs while Sphinx reads them.

A page of `docs/learn/` has the line `<!-- rung: NAME -->`. In its place come the parts of the
rung's docstring, its row of `results/`, what its config changes, its row of the snapshot of machine
code in `tests/data/`, its device code, and the diff to the device code of its parent. What a reader
can try with the rung is written on the page itself.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import operator
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outblas.base import registry
from outblas.base.registry import Kernel

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
LEARN = ROOT / "docs" / "learn"
SNAPSHOT = ROOT / "tests" / "data" / "machine_code.json"
CAMPAIGNS = tuple(
    ROOT / "results" / f"h100_{name}.json"
    for name in ("simt", "simt_sizes", "simt_mixed", "turing", "hopper", "hopper_8192", "gemm")
)
LADDERS = {
    "simt": "the CUDA-core ladder",
    "turing": "the tensor-core ladder for Turing and Ampere",
    "hopper": "the Hopper ladder",
}
LANGUAGES = {"gluon": "Gluon", "cute": "CuTe DSL", "triton": "Triton"}
WITH_THEIR_OWN_PAGES = ("portable", "hopper.gemm")  # which show the code as the story needs it
NONE = "–"
_MARKER = re.compile(r"^<!-- rung: (\S+) -->$", re.MULTILINE)
_PART = re.compile(r"^(Idea|Parent|Changes|Why it pays|Source): ", re.MULTILINE)
_SHORT = 30  # lines of a definition whose diff shows all of it


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the extension."""
    app.connect("source-read", _fill_in)
    return {"parallel_read_safe": True}


def _fill_in(app: Sphinx, name: str, source: list[str]) -> None:
    def sections(marker: re.Match[str]) -> str:
        kernel = registry.find(marker[1])
        for path in (SNAPSHOT, *CAMPAIGNS, _source_file(kernel.name)):
            app.env.note_dependency(str(path))
        return text(kernel)

    source[0] = _MARKER.sub(sections, source[0])


def text(kernel: Kernel) -> str:
    """What stands on the page of a kernel, as Markdown."""
    parts = docstring(kernel.name)
    parent = registry.find(kernel.parent) if kernel.parent else None
    sections = [
        _sentence(parts["Idea"]),
        _facts(kernel, parts["Source"]),
        "## What changes",
        _sentence(parts["Changes"]),
        "## Why it pays",
        _sentence(parts["Why it pays"]),
        *_measured(kernel),
        *_config(kernel, parent),
        *_machine_code(kernel, parent),
    ]
    if kernel.name not in WITH_THEIR_OWN_PAGES:
        sections += [*_code(kernel), *_differences(kernel, parent)]
    return "\n\n".join(filter(None, sections))


def docstring(name: str) -> dict[str, str]:
    """The parts of a rung's docstring. Raises ValueError where one is missing."""
    tree = ast.parse(_source_file(name).read_text(encoding="utf-8"))
    _, *pieces = _PART.split(ast.get_docstring(tree) or "")
    parts = {
        title: inspect.cleandoc(body).strip()
        for title, body in zip(pieces[::2], pieces[1::2], strict=True)
    }
    if len(parts) != 5:
        raise ValueError(f"the docstring of {name} has the parts {list(parts)}, expected 5")
    return parts


def _facts(kernel: Kernel, source: str) -> str:
    newer = "" if kernel.max_arch == kernel.min_arch else " and newer"
    rows = [
        ("ladder", LADDERS.get(kernel.ladder, "")),
        ("parent", _page_link(kernel, kernel.parent) if kernel.parent else ""),
        ("document", " ".join(source.split()).rstrip(".")),
        ("written in", LANGUAGES[kernel.dsl]),
        ("runs on", f"sm_{kernel.min_arch}{newer}; operands in {', '.join(kernel.dtypes)}"),
    ]
    return table(("", ""), (row for row in rows if row[1]))


def _measured(kernel: Kernel) -> Iterator[str]:
    """The times of a kernel with their ratios to cuBLAS, and to its parent in the same campaign."""
    rows, environments = [], {}
    for campaign in map(_content, CAMPAIGNS):
        entries = {
            (e["provider"], e["config"], e["shape"][0], e["dtype"]): e for e in campaign["results"]
        }
        for (provider, config, n, dtype), entry in entries.items():
            if provider != kernel.name:
                continue
            before = entries.get((kernel.parent, "", n, dtype))
            ratio = f"{entry['ratio']:.3f} ({entry['ratio_low']:.3f}–{entry['ratio_high']:.3f})"
            gain = f"{entry['ratio'] / before['ratio']:.3f}" if before and not config else NONE
            cells = (str(n), dtype, code(config), f"{entry['tflops']:.4g}", ratio, gain)
            rows.append((bool(config), dtype != kernel.dtypes[0], n, config, cells))
            environment = campaign["environment"]
            environments[environment["gpu"]] = environment
    if not rows:
        return
    yield "## Measured"
    columns = ("N", "operands", "config", "TFLOP/s", "× cuBLAS", "× parent")
    yield table(columns, (row[-1] for row in sorted(rows)))
    where = "; ".join(
        f"{gpu} with driver {e['driver']}, torch {e['torch']}, triton {e['triton']} and CuTe DSL "
        f"{e['nvidia-cutlass-dsl']}"
        for gpu, e in environments.items()
    )
    yield (
        "Square GEMMs by the burst protocol, with the 10th and 90th percentile of rounds in "
        "brackets. *× parent* is the gain in the ratio to cuBLAS within one campaign. A config "
        f"names what differs from the rung's own. Measured on an {where}."
    )


def _config(kernel: Kernel, parent: Kernel | None) -> Iterator[str]:
    """The fields of the config that differ from those of the parent's."""
    if parent is None or parent.ladder != kernel.ladder:
        return
    before = registry.defaults(parent.name)
    rows = [(code(field), str(before[field]), str(value)) for field, value in kernel.config.items()]
    if rows:
        yield "## Config"
        yield table(("field", parent.name, kernel.name), rows)


def _machine_code(kernel: Kernel, parent: Kernel | None) -> Iterator[str]:
    """Registers, memory and instructions of the rung's own config, beside its parent's."""
    arch = f"sm_{kernel.min_arch}" if kernel.ladder == "turing" else "sm_90"
    now = _compiled(kernel.name, arch)
    before = _compiled(parent.name, arch) if parent is not None else None
    if now is None:
        return
    names = ("registers", "spill_stores", "spill_loads", "smem_bytes", "threads", "instructions")
    rows = [
        (name.replace("_", " "), f"{before[name]:,}" if before else NONE, f"{now[name]:,}")
        for name in names
    ]
    earlier = before["counts"] if before else {}
    rows += [
        (code(name), str(earlier.get(name, 0)), str(now["counts"].get(name, 0)))
        for name in sorted({*now["counts"], *earlier})
        if now["counts"].get(name, 0) != earlier.get(name, 0)
    ]
    yield "## Machine code"
    yield table(("", parent.name if parent else "", kernel.name), rows)
    yield (
        f"The rung's own config, compiled for {arch}, as "
        "[a snapshot](path:tests/data/machine_code.json) has it that tests compare with a fresh "
        "compile. Instructions of which both have as many are left out."
    ).replace("path:", "../" * (2 + kernel.name.count(".")))


def _code(kernel: Kernel) -> Iterator[str]:
    launched = device_code(kernel.name)
    path = Path(inspect.getsourcefile(launched) or "").resolve()
    yield "## The code"
    if path == _source_file(kernel.name):
        lines = path.read_text(encoding="utf-8").splitlines()
        last = next(at for at, line in enumerate(lines) if line.startswith("KERNEL = "))
        docstring_end = ast.parse("\n".join(lines)).body[0].end_lineno or 0
        selection = f":lines: {docstring_end + 2}-{last}"
    else:
        selection = f":pyobject: {launched.__name__}"
        yield (
            f"The rung adds no device code. It launches `{launched.__name__}` of "
            f"`{path.relative_to(ROOT)}` with its own config, which gives it other layouts:"
        )
    include = "../" * (2 + kernel.name.count(".")) + path.relative_to(ROOT).as_posix()
    yield f"```{{literalinclude}} {include}\n{selection}\n:language: python\n```"


def _differences(kernel: Kernel, parent: Kernel | None) -> Iterator[str]:
    """The diff of the device code to the parent's: of the methods that the rung's classes replace,
    or of the device function.
    """
    if parent is None:
        return
    launched, before = device_code(kernel.name), device_code(parent.name)
    if launched is before:
        return
    if isinstance(launched, type):
        changes = [change for kind in _classes(kernel.name) for change in _overrides(kind)]
    else:
        changes = [_diff(launched.__name__, _lines(before), _lines(launched))]
    if changes:
        yield f"## The diff to {parent.name}"
        yield "```diff\n" + "\n\n".join(changes) + "\n```"


def device_code(name: str) -> Any:
    """The class or the device function that a rung launches."""
    module = registry.load(name)
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        match node:
            case ast.Call(args=[ast.Name(id="KERNEL"), body, *_]):
                launched = operator.attrgetter(ast.unparse(body))(module)
                return getattr(launched, "fn", launched)  # a function that Triton compiles
    raise ValueError(f"{name} hands no device code to its entry")


def _classes(name: str) -> Iterator[type]:
    """The classes that a rung's module defines, its config left out."""
    module = registry.load(name)
    for title, kind in inspect.getmembers(module, inspect.isclass):
        if kind.__module__ == module.__name__ and title != "Config":
            yield kind


def _overrides(kind: type) -> Iterator[str]:
    """The diffs of the methods of a class that take the place of those of its bases."""
    for name, method in vars(kind).items():
        base = next((base for base in kind.__mro__[1:] if name in vars(base)), None)
        if inspect.isfunction(method) and base is not None and not name.startswith("__"):
            title = f"{kind.__name__}.{name}, in place of {base.__name__}.{name}"
            yield _diff(title, _lines(vars(base)[name]), _lines(method))


def _lines(function: Any) -> list[str]:
    return textwrap.dedent(inspect.getsource(inspect.unwrap(function))).splitlines()


def _diff(title: str, before: Sequence[str], now: Sequence[str]) -> str:
    context = _SHORT if max(len(before), len(now)) <= _SHORT else 3
    _, _, _, *lines = difflib.unified_diff(before, now, lineterm="", n=context)
    shown = (" ..." if line.startswith("@@") else line.rstrip() for line in lines)
    return "\n".join((f"# {title}", *shown))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(words: str) -> str:
    """The words as code; "" for none."""
    return f"`{words}`" if words else ""


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:]


def _page_link(kernel: Kernel, name: str) -> str:
    return f"[`{name}`]({'../' * kernel.name.count('.')}{name.replace('.', '/')}.md)"


@cache
def _source_file(name: str) -> Path:
    return Path(inspect.getsourcefile(registry.load(name)) or "").resolve()


@cache
def _content(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _compiled(name: str, arch: str) -> dict[str, Any] | None:
    variants = _content(SNAPSHOT)["variants"]
    entry = variants.get(name) or variants.get(f"{name} {arch}")
    return entry["code"] if entry else None
