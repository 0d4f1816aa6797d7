"""Entries of results, and reports made of them."""

import functools
import json
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from outblas.report import evidence, ladder, readme
from support import commands

Entry = dict[str, Any]


def entry(provider: str, ratio: float, n: int = 4096, **changes: Any) -> Entry:
    """A timing, as `outblas bench` saves it."""
    known = {
        "provider": provider,
        "shape": [n, n, n],
        "dtype": "bfloat16",
        "layout": "nt",
        "mode": "burst",
        "check": "exact",
        "ratio": ratio,
        "ratio_low": ratio * 0.99,
        "ratio_high": ratio * 1.01,
        "tflops": 780 * ratio,
        "us": 175 / ratio,
    }
    return known | changes


def counted(provider: str, config: str = "", n: int = 4096, **changes: Any) -> Entry:
    """Counters, as `outblas profile` saves them."""
    known = {
        "provider": provider,
        "config": config,
        "shape": [n, n, n],
        "dtype": "float32",
        "layout": "nn",
    }
    return known | {"l2_hit_rate": 0.8} | changes


def report(*entries: Entry, **environment: Any) -> Entry:
    known = {
        "gpu": "NVIDIA H100 80GB HBM3",
        "cuda": "13.0",
        "date": "2026-01-01",
        "power_limit_w": 700.0,
    }
    return {"environment": known | environment, "results": entries}


def write(path: Path, *entries: Entry, **environment: Any) -> Path:
    path.write_text(json.dumps(report(*entries, **environment)))
    return path


def loaded(*entries: Entry, **environment: Any) -> evidence.Evidence:
    """Timings, profiles and phases of one campaign, each from a file of its own."""
    with TemporaryDirectory() as folder:
        paths = [
            write(Path(folder, f"{i}.json"), each, **environment) for i, each in enumerate(entries)
        ]
        return evidence.load(paths)


def rows_of(name: str, sizes: tuple[int, ...], *entries: Entry) -> dict[str, ladder.Row]:
    """Of a ladder, by rung."""
    given = loaded(*entries)
    return {
        row.rung.name: row for row in ladder.rows(given.measurements, name, sizes, given.profiles)
    }


def named_cells(row: ladder.Row) -> dict[str, str]:
    """The cells of a row by the heading of their column, which is written on one line."""
    headings = (" ".join(heading.split()) for heading in ladder.columns(row.ladder))
    return dict(zip(headings, row.cells(), strict=True))


def rendered(folder: Path, *parts: str) -> tuple[list[str], str]:
    """A README of generated parts in a checkout: which files were made, and its text."""
    for name in ("src/outblas", "results"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    path = folder / "README.md"
    path.write_text("\n".join(f"<!-- generated: {part} -->\n<!-- end -->" for part in parts))
    return readme.render(folder), path.read_text()


invoke = functools.partial(commands.invoke, "report")


def shown(*arguments: object) -> str:
    return invoke(*arguments, code=0).stdout


MEASURED = entry("cublas", 1.0, check="–"), entry("hopper.tma_wgmma", 0.41), entry("portable", 0.9)


class Page(HTMLParser):
    """Tags that balance, and no reference to anything outside."""

    VOID = ("meta", "br", "path", "use", "circle", "rect", "line", "image", "stop")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        for name, value in attrs:
            assert name not in ("src", "href") or (value or "").startswith(("#", "data:")), value
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
