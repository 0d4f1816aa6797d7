"""Which source line an instruction comes from, and which operand of the product that line
touches.
"""

import linecache
import re
import sys
from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple

from . import sass
from .machine_code import with_ptx_lines

_PTX_LINE = re.compile(r'//## File "[^"]*", line (\d+)')
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.MULTILINE)
_LOC = re.compile(r"^\s*\.loc\s+(\d+) (\d+) \d+(?:.*\binlined_at (\d+) (\d+))?")
_POINTER = re.compile(r"\b(a|b|c|out)_ptr\b")
_OPERANDS = {"a": "A", "b": "B", "c": "C", "out": "out"}


class Location(NamedTuple):
    """A line of a source file, counted from 1."""

    file: str
    line: int


Places = tuple[Location, ...]  # a source line, then the line that it is inlined at; () if unknown


def places(ptx: str) -> list[Places]:
    """Where each line of PTX comes from.

    LLVM counts the lines of an inline assembly on from its source line, so that a load of four
    words, with four `mov` before it, claims to be four lines further down: inside a block only the
    `.loc` before its first instruction is true. Line 0, of code that the compiler moved, is left
    out.
    """
    files = {number: _loaded(file) for number, file in _FILE.findall(ptx)}
    found: list[Places] = []
    current: Places = ()
    inside, started = False, False
    for line in ptx.splitlines():
        text = line.strip()
        if text in ("// begin inline asm", "// end inline asm"):
            inside, started = text == "// begin inline asm", False
        elif loc := _LOC.match(line):
            if not (inside and started):
                pairs = ((loc[1], int(loc[2])), (loc[3], int(loc[4] or 0)))
                current = tuple(
                    Location(files[file], number)
                    for file, number in pairs
                    if number and file in files
                )
        elif text:
            started = True
        found.append(current)
    return found


def locations(listing: str, ptx: str) -> list[Places]:
    """Where each instruction comes from: `listing` is by `with_ptx_lines`, `ptx` what it was
    assembled from.
    """
    of_ptx = places(ptx)
    found: list[Places] = []
    current: Places = ()
    for line in listing.splitlines():
        if number := _PTX_LINE.search(line):
            current = of_ptx[int(number[1]) - 1] if 0 < int(number[1]) <= len(of_ptx) else ()
        elif sass.INSTRUCTION.match(line):
            found.append(current)
    return found


def operand(line: str) -> str | None:
    """The operand, "A", "B", "C" or "out", whose pointer (`a_ptr`) a source line names; None if not
    exactly one.
    """
    named = set(_POINTER.findall(line.partition("#")[0]))
    return _OPERANDS[named.pop()] if len(named) == 1 else None


def operands(cubin: bytes, ptx: str, mnemonics: Sequence[str]) -> list[str | None]:
    """The operand that each instruction of a cubin touches, by its source line or the line that it
    is inlined at.

    `mnemonics` are those of the code that ran: unless the cubin has the same, in the same order,
    all are None.
    """
    listing = with_ptx_lines(cubin)
    if [instruction.name for instruction in sass.parse(listing)] != list(mnemonics):
        return [None] * len(mnemonics)
    return [_nearest(each) for each in locations(listing, ptx)]


def _loaded(file: str) -> str:
    """The loaded module's file that a path ends like most, or the path if none has its name and its
    folder's.

    Triton's cache goes by what a source says and not by where it lies: the PTX of another checkout
    names the files there, which may have changed since or be gone.
    """
    files = [
        getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())
    ]
    loaded = [(PurePath(each).parts, each) for each in files if isinstance(each, str)]
    tail = PurePath(file).parts
    while len(tail) >= 2:
        for parts, each in loaded:
            if parts[-len(tail) :] == tail:
                return each
        tail = tail[1:]
    return file


def _nearest(of: Places) -> str | None:
    named = (operand(linecache.getline(place.file, place.line)) for place in of)
    return next((each for each in named if each is not None), None)
