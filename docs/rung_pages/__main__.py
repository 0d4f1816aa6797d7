"""Writes the pages of the rungs, or with --check says which are out of date (exit code 1)."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from . import pages

LEARN = Path(__file__).parents[1] / "learn"


def main(arguments: Sequence[str] | None = None, folder: Path = LEARN) -> int:
    """Runs the command on the arguments of the process, or on these; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs.rung_pages", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say which pages are out of date")
    check = parser.parse_args(arguments).check
    outdated = 0
    for name, text in pages().items():
        path = folder / name
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        outdated += 1
        if check:
            print(f"docs/learn/{name}: out of date: run make pages")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"docs/learn/{name}: written")
    return 1 if check and outdated else 0


if __name__ == "__main__":
    raise SystemExit(main())
