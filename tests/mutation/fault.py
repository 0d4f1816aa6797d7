"""What a planted fault is."""

import ast
from dataclasses import dataclass
from pathlib import Path


class StaleFault(Exception):
    """A fault that the sources have outgrown: its text is gone, or there more than once."""


@dataclass(frozen=True)
class Check:
    """Tests on which a fault is tried.

    file: the base name of a test file, wherever it lies below the folder of tests; or a folder
        there, such as `hopper/gemm`, which is to be tried after the files that are meant.
    select: what `pytest -k` takes of it; all tests where it is empty.
    compiles: whether tests that compile device code take part, which are slow.
    """

    file: str
    select: str = ""
    compiles: bool = False

    def __str__(self) -> str:
        return f"{self.file} -k '{self.select}'" if self.select else self.file

    @property
    def options(self) -> list[str]:
        """What says to pytest which tests of the file take part."""
        marks = "not gpu and not slow" + ("" if self.compiles else " and not compile")
        return ["-m", marks, *(("-k", self.select) if self.select else ())]

    def path(self, tests: Path) -> Path:
        """The test file or folder. Raises StaleFault unless there is exactly one of this name."""
        if not self.file.endswith(".py"):
            found = [tests / self.file] if (tests / self.file).is_dir() else []
        else:
            found = sorted(tests.rglob(self.file))
        if len(found) != 1:
            raise StaleFault(f"{self.file} stands {len(found)} times below {tests}, expected one")
        return found[0]


@dataclass(frozen=True)
class Fault:
    """One text of a source file, replaced by another.

    name: unique among all faults, for `--only`.
    file: the source file, from the root of the repository.
    old, new: the text, which the file has exactly once, and what takes its place.
    checks: tests of which at least one has to fail; they are tried in this order.
    what: a sentence that says what goes wrong.
    """

    name: str
    file: str
    old: str
    new: str
    checks: tuple[Check, ...]
    what: str

    def planted(self, root: Path) -> str:
        """The file's text with the fault in it. Raises StaleFault where the fault does not fit."""
        path = root / self.file
        if not path.is_file():
            raise StaleFault(f"{self.name}: there is no {self.file}")
        source = path.read_text(encoding="utf-8")
        count = source.count(self.old)
        if count != 1:
            raise StaleFault(
                f"{self.name}: {self.file} has its text {count} times, expected once:\n{self.old}"
            )
        text = source.replace(self.old, self.new)
        try:
            ast.parse(text)
        except SyntaxError as error:
            raise StaleFault(f"{self.name}: {self.file} does not parse with it: {error}") from None
        return text
