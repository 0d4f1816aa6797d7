"""Writes the generated parts of docs/reference/, or with --check says which pages are out of date
(exit code 1).
"""

import argparse
from collections.abc import Sequence

from . import pages
from .parts import REFERENCE


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command on the arguments of the process, or on these; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs.reference_pages", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say which pages are out of date")
    check = parser.parse_args(arguments).check
    outdated = 0
    for name, text in pages().items():
        path = REFERENCE / name
        if path.read_text(encoding="utf-8") == text:
            continue
        outdated += 1
        if check:
            print(f"docs/reference/{name}: out of date: run make pages")
        else:
            path.write_text(text, encoding="utf-8")
            print(f"docs/reference/{name}: written")
    return 1 if check and outdated else 0


if __name__ == "__main__":
    raise SystemExit(main())
