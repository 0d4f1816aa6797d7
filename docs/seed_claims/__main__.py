"""Writes docs/claims.md, or with --check says whether it is up to date (exit code 1 if not)."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from outblas.report import evidence, results

from .page import page

PAGE = Path(__file__).parents[1] / "claims.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command on the arguments of the process, or on these; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs.seed_claims", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the page is current")
    check = parser.parse_args(arguments).check
    made = page(evidence.load(results.saved()))
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == made:
        return 0
    if check:
        print("docs/claims.md: out of date: run make claims")
        return 1
    PAGE.write_text(made, encoding="utf-8")
    print("docs/claims.md: made anew")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
