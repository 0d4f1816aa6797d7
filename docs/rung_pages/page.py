"""The page of a rung, as Markdown for Sphinx."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from outblas.core import registry
from outblas.core.registry import Kernel

from . import figures
from .experiments import EXPERIMENTS, Experiment
from .markdown import block, fill, join, link, listed, relative, sentence, table
from .numbers import config_rows, number_rows
from .source import ROOT, Change, Module, Rung, changes, rung

DOCS = ROOT / "docs"
LEARN = DOCS / "learn"
LADDERS = {
    "simt": "the CUDA-core ladder",
    "turing": "the tensor-core ladder for Turing and Ampere",
    "hopper": "the Hopper ladder",
}
PRODUCTION, PORTABLE = "hopper.gemm", "portable"
_DSL = {"gluon": "Gluon", "cute": "CuTe DSL", "triton": "Triton"}
_DEVICE_CODE_OF_PORTABLE = ("add_product", "store_tile", "matmul_kernel")


def pages() -> dict[str, str]:
    """The text of every page, by its path below docs/learn/."""
    return {path_of(kernel.name): RungPage(kernel).text() for kernel in registry.ladder()}


def path_of(name: str) -> str:
    """The page of a kernel below docs/learn/."""
    return f"{name.replace('.', '/')}.md"


class RungPage:
    """The page of one kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.rung: Rung = rung(kernel.name)
        self.parent: Kernel | None = registry.find(kernel.parent) if kernel.parent else None
        self.path = LEARN / path_of(kernel.name)

    def text(self) -> str:
        """The page."""
        parts = self.rung.module.docstring()
        sections = (
            f"<!-- Written by: make pages -->\n# {self.kernel.name}",
            sentence(parts["Idea"]),
            self._facts(parts["Source"]),
            "## What changes",
            sentence(parts["Changes"]),
            "## Why it pays",
            sentence(parts["Why it pays"]),
            self._measured(),
            self._config(),
            self._machine_code(),
            self._code(),
            self._differences(),
            "## Try this",
            *map(_experiment, EXPERIMENTS[self.kernel.name]),
            self._neighbours(),
        )
        return join(sections) + "\n"

    # ---- what it is
    def _facts(self, source: str) -> str:
        kernel = self.kernel
        documents = self._link("what the documents are", LEARN / "sources.md")
        newer = "" if kernel.max_arch == kernel.min_arch else " and newer"
        rows = [
            ("ladder", self._place()),
            ("parent", self._rung_link(kernel.parent) if kernel.parent else ""),
            ("document", f"{source.replace(chr(10), ' ').rstrip('.')} ({documents})"),
            ("source", self._file_link(self.rung.module)),
            ("written in", _DSL[kernel.dsl]),
            ("runs on", f"sm_{kernel.min_arch}{newer}; operands in {listed(kernel.dtypes)}"),
        ]
        return table(("", ""), (row for row in rows if row[1]))

    def _place(self) -> str:
        kernel = self.kernel
        if kernel.name == PORTABLE:
            return ""
        ladder = LADDERS[kernel.ladder]
        if kernel.name == PRODUCTION:
            story = self._link("its story, file by file", LEARN / "production-kernel.md")
            return f"above {ladder}: {story}"
        names = [name for name in registry.LADDERS[kernel.ladder] if name != PRODUCTION]
        return f"[{ladder}](index.md), rung {names.index(kernel.name) + 1} of {len(names)}"

    # ---- figures
    def _measured(self) -> str:
        if self.kernel.name == PORTABLE:
            suite = self._link("the suite", DOCS / "results" / "suite.md")
            text = f"Its times are compared with those of the production kernel in {suite}."
            return join(("## Measured", fill(text)))
        timings, where = figures.measured(self.kernel)
        protocol = (
            f"Square GEMMs in layout {figures.layouts(self.kernel)} by the burst protocol, with "
            "the 10th and 90th percentile of rounds in brackets. Results were checked before they "
            f"were timed: {figures.checks(self.kernel)}. *× parent* is the gain in the ratio to "
            f"cuBLAS within one campaign. {where}."
        )
        return join(
            (
                "## Measured",
                table(("N", "operands", "TFLOP/s", "× cuBLAS", "× parent"), timings),
                fill(protocol),
                self._documents(),
                self._variants(),
                self._counters(),
                self._cycles(),
            )
        )

    def _documents(self) -> str:
        rows = figures.documents(self.kernel)
        columns = ("document", "GPU", "N", "operands", "TFLOP/s", "× its cuBLAS")
        opening = "What the documents report, compared with the cuBLAS of their day:"
        return join((opening, table(columns, rows))) if rows else ""

    def _variants(self) -> str:
        rows = figures.variants(self.kernel)
        columns = ("config", "N", "TFLOP/s", "× cuBLAS")
        opening = "Other configs of this rung, from the same files:"
        return join((opening, table(columns, rows))) if rows else ""

    def _counters(self) -> str:
        rows, shape = figures.counters(self.kernel, self.parent)
        opening = f"Hardware counters at {shape}, by ncu:"
        return join((opening, self._beside("counter", rows))) if rows else ""

    def _cycles(self) -> str:
        rows = figures.cycles(self.kernel)
        reading = self._link("how to read them", LEARN / "where-the-cycles-go.md")
        opening = (
            "Cycles of each role at 4096. *Wait*, *load* and *tensor* are for a step along K, "
            f"*store* and *all* for a tile ({reading})."
        )
        columns = ("role", "wait", "load", "tensor", "store", "all")
        return join((fill(opening), table(columns, rows))) if rows else ""

    def _config(self) -> str:
        if self.kernel.name == PORTABLE:
            return ""
        before = rung(self.parent.name) if self.parent else None
        rows = config_rows(self.rung, before)
        fields = self._link("what each field means", DOCS / "reference" / "configs.md")
        if before is None:
            opening = f"The fields that matter here ({fields}):"
        elif rows:
            opening = f"Fields that differ from the parent's ({fields}):"
        else:
            opening = "The config is the parent's."
        numbers = self._beside("", number_rows(self.rung, before))
        return join(("## Config", opening, self._beside("field", rows), "In numbers:", numbers))

    def _machine_code(self) -> str:
        arch = figures.architecture(self.kernel)
        own = figures.code(self.kernel.name, arch)
        before = figures.code(self.parent.name, arch) if self.parent else None
        reading = self._link("how to read it", LEARN / "how-to-read.md")
        whose = "The rung's own config and its parent's" if before else "The rung's own config"
        opening = (
            f"{whose}, compiled for {arch} ({reading}). The figures are a snapshot which tests "
            f"compare with a fresh compile; the compilers are {figures.compilers(self.kernel.dsl)}."
        )
        totals = figures.totals(own, before)
        counts, same = figures.counts(own, before)
        closing = {0: "", 1: "One other kind of instruction is as frequent in both."}.get(
            same, f"{same} other kinds of instructions are as frequent in both."
        )
        if not counts:
            closing = f"All {same} kinds of instructions are as frequent in both."
        return join(
            (
                "## Machine code",
                fill(opening),
                self._beside("", totals),
                self._counts(counts),
                closing,
            )
        )

    def _counts(self, rows: Sequence[figures.Cells]) -> str:
        """How often instructions stand in the code: long names, so that the heads are short."""
        columns = ("instruction", "what it does", "parent", "here")
        if self.parent is None:
            return table((*columns[:2], "times"), ((*row[:-2], row[-1]) for row in rows))
        return table(columns, rows)

    # ---- code
    def _code(self) -> str:
        heading = "## The code"
        if self.kernel.name == PRODUCTION:
            story = self._link("the production kernel", LEARN / "production-kernel.md")
            return join((heading, f"It has a folder, which {story} goes through file by file."))
        module, names = self._definitions()
        if module == self.rung.module:
            text = f"From {self._file_link(module)}, without imports and registration:"
        else:
            text = (
                f"The rung adds no device code. It launches `{names[0]}` of "
                f"{self._file_link(module)} with its own config, which gives it other layouts:"
            )
        path = relative(module.path, self.path)
        includes = (
            block(f"{{literalinclude}} {path}", f":pyobject: {name}\n:language: python")
            for name in names
        )
        return join((heading, fill(text), *includes))

    def _definitions(self) -> tuple[Module, Sequence[str]]:
        """The definitions that the page shows, and the file that they are in."""
        if self.kernel.name == PORTABLE:
            return self.rung.module, _DEVICE_CODE_OF_PORTABLE
        module, body = self.rung.body
        return module, self.rung.definitions if module == self.rung.module else [body]

    def _differences(self) -> str:
        if self.parent is None or self.kernel.name == PRODUCTION:
            return ""
        heading = f"## The diff to {self.parent.name}"
        found = changes(self.rung, rung(self.parent.name))
        if not found:
            parent = self._rung_link(self.parent.name)
            text = f"No line of device code differs from {parent}. The config does, as shown above."
            return join((heading, fill(text)))
        text = "What is new or replaces a definition of the parent's, without docstrings:"
        return join((heading, text, block("diff", join(map(_titled, found)))))

    # ---- links and tables
    def _neighbours(self) -> str:
        if self.kernel.name == PORTABLE:
            return ""
        names = registry.LADDERS[self.kernel.ladder]
        at = names.index(self.kernel.name)
        found = [f"[{sentence(LADDERS[self.kernel.ladder])}](index.md)"]
        if at > 0:
            found.insert(0, f"Previous: {self._rung_link(names[at - 1])}")
        if at + 1 < len(names):
            found.append(f"Next: {self._rung_link(names[at + 1])}")
        return join(("---", " · ".join(found)))

    def _beside(self, first: str, rows: Iterable[Sequence[str]]) -> str:
        """A table whose last columns are for the parent, if there is one, and for the kernel."""
        if self.parent is None:
            return table((first, self.kernel.name), ((row[0], row[-1]) for row in rows))
        return table((first, self.parent.name, self.kernel.name), rows)

    def _rung_link(self, name: str) -> str:
        return self._link(f"`{name}`", LEARN / path_of(name))

    def _file_link(self, module: Module) -> str:
        return self._link(f"`{module.file}`", module.path)

    def _link(self, text: str, target: Path) -> str:
        return link(text, target, self.path)


def _titled(change: Change) -> str:
    title = f"# {change.name}"
    if change.replaces is None:
        title += ", new"
    elif change.replaces != change.name:
        title += f", in place of {change.replaces}"
    return "\n".join((title, *change.diff))


def _experiment(each: Experiment) -> str:
    how = f" {each.tested}" if each.tested else ""
    return join((fill(each.text), block(f"console{how}", f"$ {each.command}")))
