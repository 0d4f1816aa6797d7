"""Maps instructions to their source lines, and source lines to the operand of the product that they
access.
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


Places = tuple[Location, ...]  # a source line, then the line where it is inlined; () if unknown


def places(ptx: str) -> list[Places]:
    """Returns the source line of each line of PTX.

    LLVM counts the lines of an inline assembly on from its source line, so a load of four words,
    with four `mov` before it, claims to be four lines further down. Inside a block only the `.loc`
    before its first instruction is correct. Line 0, of code that the compiler moved, is left out.
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
    """Returns the source line of each instruction. `listing` is the output of `with_ptx_lines`,
    `ptx` the PTX that it was assembled from.
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
    """Returns the operand, "A", "B", "C" or "out", whose pointer (`a_ptr`) a source line names;
    None unless it names exactly one.
    """
    named = set(_POINTER.findall(line.partition("#")[0]))
    return _OPERANDS[named.pop()] if len(named) == 1 else None


def operands(cubin: bytes, ptx: str, mnemonics: Sequence[str]) -> list[str | None]:
    """Returns the operand that each instruction of a cubin accesses, found by its source line or
    the line where that is inlined.

    `mnemonics` are those of the code that ran. If the cubin has other mnemonics or another order,
    all operands are None.
    """
    listing = with_ptx_lines(cubin)
    if [instruction.name for instruction in sass.parse(listing)] != list(mnemonics):
        return [None] * len(mnemonics)
    return [_nearest(each) for each in locations(listing, ptx)]


def _loaded(file: str) -> str:
    """Returns the file of the loaded module whose path ends like this one; the path itself if no
    module has the same file and folder name.

    Triton's cache is keyed by the text of a source, not by its location. The PTX from another
    checkout names the files there, which may have changed since or no longer exist.
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
