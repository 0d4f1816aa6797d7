"""What commands print as JSON has the keys and types that docs/reference/json-schemas.md lists."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support import commands
from support.paths import ROOT
from support.stored import WORKLOAD
from support.tuning_reports import SWEPT, winner

from outblas.autotune import Store
from outblas.autotune.sweeps.outcome import Failure, Sweep
from outblas.cli import tune_output

PAGE = ROOT / "docs" / "reference" / "json-schemas.md"
_ROW = re.compile(r"^\| `(?P<key>[^`]+)` \| (?P<type>[^|]*) \|", re.MULTILINE)
_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\(#(?P<anchor>[\w-]+)\)")
_SCALARS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


@dataclass
class Node:
    """A key: its type as the page has it, and the keys below it."""

    type: str = "object"
    below: dict[str, "Node"] = field(default_factory=dict)

    @property
    def is_optional(self) -> bool:
        return ", optional" in self.type


def sections() -> dict[str, Node]:
    """The keys of each section of the page, by its heading."""
    roots: dict[str, Node] = {}
    _, *parts = re.split(r"^#{2,3} (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for heading, text in zip(parts[::2], parts[1::2], strict=True):
        root = roots[heading] = Node()
        for row in _ROW.finditer(text):
            node = root
            for name in _names(row["key"]):
                node = node.below.setdefault(name, Node())
            node.type = row["type"].strip()
        if set(root.below) == {"[]"}:
            root.type = "list of objects"
        if listed := re.search(r"The output is a (list of \[\w+\]\(#\w+\))", text):
            root.type = listed[1]
    return roots


def _names(key: str) -> list[str]:
    """`plans[].ranked[].kernel` as its parts: plans, [], ranked, [], kernel."""
    return re.findall(r"\[\]|[^.\[]+", key)


def problems(value: Any, heading: str) -> list[str]:
    """Where a value differs from what a section of the page says."""
    page = sections()
    return list(_problems(value, page[heading], heading, page))


def _problems(value: Any, node: Node, place: str, page: dict[str, Node]) -> Iterator[str]:
    kind = node.type.removesuffix(", optional")
    if value is None and kind.endswith(" or null"):
        return
    kind = kind.removesuffix(" or null")
    if kind.startswith("list of "):
        yield from _in_list(value, node, kind.removeprefix("list of "), place, page)
    elif kind.startswith("map"):
        if not isinstance(value, dict):
            yield f"{place} is a {type(value).__name__}, documented as {node.type}"
        elif "*" in node.below:
            for name, item in value.items():
                yield from _problems(item, node.below["*"], f"{place}.{name}", page)
    elif link := _LINK.fullmatch(kind):
        yield from _problems(value, page[_heading(link["anchor"], page)], place, page)
    elif kind == "object":
        yield from _in_object(value, node, place, page)
    elif kind not in _SCALARS:
        yield f"{place} has the type {node.type!r}, which is none"
    elif not isinstance(value, _SCALARS[kind]) or (isinstance(value, bool) and kind != "boolean"):
        yield f"{place} is {value!r}, documented as {node.type}"


def _in_list(value: Any, node: Node, of: str, place: str, page: dict[str, Node]) -> Iterator[str]:
    if not isinstance(value, list | tuple):
        yield f"{place} is a {type(value).__name__}, documented as {node.type}"
        return
    item_node = node.below.get("[]", Node())
    if of not in ("objects", "maps"):
        item_node = Node(of if _LINK.fullmatch(of) else of.removesuffix("s"))
    for item in value:
        if of == "maps":
            if not isinstance(item, dict):
                yield f"{place}[] is {item!r}, documented as {node.type}"
        else:
            yield from _problems(item, item_node, f"{place}[]", page)


def _in_object(value: Any, node: Node, place: str, page: dict[str, Node]) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{place} is a {type(value).__name__}, documented as {node.type}"
        return
    for name in value.keys() - node.below.keys():
        yield f"{place}.{name} is not documented"
    for name, below in node.below.items():
        if name in value:
            yield from _problems(value[name], below, f"{place}.{name}", page)
        elif not below.is_optional:
            yield f"{place}.{name} is documented, and missing"


def _heading(anchor: str, page: dict[str, Node]) -> str:
    return next(heading for heading in page if heading.lower().replace(" ", "-") == anchor)


TIMES = [
    path
    for path in sorted((ROOT / "results").glob("*.json"))
    if not re.search("counters|phases|host", path.stem)
]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with trials of one workload, some of which failed, and their winner."""
    path = tmp_path / "tuning.sqlite"
    with Store(path) as opened:
        opened.merge(SWEPT, [winner()])
    return path


def printed(*arguments: object) -> Any:
    """The JSON that a command prints, whatever its exit code."""
    return json.loads(commands.invoke(*arguments, "--json").stdout)


@pytest.mark.parametrize(
    ("heading", "arguments"),
    [
        ("outblas list", ("list",)),
        ("outblas inspect", ("inspect", "simt.vectorized", "--arch", "80")),
        ("outblas inspect", ("inspect", "turing.wmma", "--arch", "75")),
        (
            "outblas tune --dry-run",
            ("tune", "--dry-run", "--kernels", "portable", "--gpu", "H100", "--shapes", "256"),
        ),
        pytest.param("outblas doctor", ("doctor",), marks=pytest.mark.long),
        pytest.param(
            "outblas verify",
            ("verify", "portable", "--shapes", "16", "--dtype", "float32", "--layout", "nt"),
            marks=pytest.mark.interpreter,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_command_prints_the_keys_that_are_documented(
    heading: str, arguments: tuple[str, ...]
) -> None:
    assert not problems(printed(*arguments), heading)


@pytest.mark.parametrize(
    ("heading", "arguments"),
    [
        ("outblas cache ls", ("cache", "ls")),
        ("outblas cache show", ("cache", "show", SWEPT[0].kernel)),
        ("outblas tune --report", ("tune", "--report")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_command_that_reads_a_store_prints_the_keys_that_are_documented(
    heading: str, arguments: tuple[str, ...], store: Path
) -> None:
    assert not problems(printed(*arguments, "--store", store), heading)


@pytest.mark.long  # the tables of the H100 are searched
def test_an_explanation_has_the_keys_that_are_documented(tmp_path: Path) -> None:
    options = ("--explain", "4096x4096x4096", "--gpu", "H100", "--store", tmp_path / "none.sqlite")

    assert not problems(printed("tune", *options), "outblas tune --explain")


def test_a_sweep_and_its_winner_have_the_keys_that_are_documented() -> None:
    sweep = Sweep(failures=[Failure(WORKLOAD, "an example")], store=Path("tuning.sqlite"))

    assert not problems(tune_output.sweep_record(sweep), "outblas tune")
    assert not problems(asdict(winner()), "best config")


@pytest.mark.parametrize("path", TIMES, ids=lambda path: path.stem)
def test_a_file_of_times_has_the_keys_that_are_documented(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))

    assert not problems(content, "outblas bench")
