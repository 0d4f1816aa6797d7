"""Plants faults in copies of the sources, and reports which test catches each.

python -m tests.mutation                     all faults; fails where one is not caught
python -m tests.mutation --only 'split_k*'   some of them
python -m tests.mutation --list              what there is to plant
"""

import argparse
import fnmatch
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from .fault import Check, Fault, StaleFault
from .faults import FAULTS
from .runner import BROKEN, CAUGHT, HUNG, BaselineFailed, Outcome, Runner, start_from
from .shadow import Project

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("torch", "triton.experimental.gluon", "cutlass.cute", "hypothesis", "pytest")
_printing = threading.Lock()


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", metavar="PATTERN", action="append", help="faults by name, such as 'split_k*'"
    )
    parser.add_argument("--list", action="store_true", help="list the faults and run nothing")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="faults tried side by side"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there too")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Returns 0 if every fault is caught, 1 if one is not, 2 where nothing can be said."""
    asked = arguments(given)
    patterns = asked.only or ["*"]
    faults = [f for f in FAULTS if any(fnmatch.fnmatchcase(f.name, p) for p in patterns)]
    if not faults:
        print(f"no fault is called {' or '.join(patterns)}; --list shows them", file=sys.stderr)
        return 2
    if asked.list:
        for fault in faults:
            print(f"{fault.name}  ({fault.file})\n    {fault.what}")
        return 0
    try:
        outcomes = try_all(faults, asked.jobs)
    except (StaleFault, BaselineFailed) as error:
        print(error, file=sys.stderr)
        return 2
    if asked.markdown:
        asked.markdown.write_text(markdown(faults, outcomes), encoding="utf-8")
    missed = [f.name for f, found in zip(faults, outcomes, strict=True) if found.verdict != CAUGHT]
    print(f"{len(faults) - len(missed)} of {len(faults)} faults are caught")
    if missed:
        print(f"not caught: {', '.join(missed)}")
    return 1 if missed else 0


def try_all(faults: Sequence[Fault], jobs: int) -> list[Outcome]:
    """What came of each fault. Raises StaleFault or BaselineFailed before any is tried."""
    start = time.monotonic()
    for fault in faults:
        fault.planted(ROOT)
    checks = list(dict.fromkeys(check for fault in faults for check in fault.checks))
    start_from(LIBRARIES)
    with tempfile.TemporaryDirectory(prefix="outblas-mutation-") as folder:
        runner = Runner(Project.at(ROOT), Path(folder), jobs)
        print(f"{len(checks)} checks without a fault, {len(faults)} faults, {jobs} at a time")
        runner.check_baseline(checks, _say_check)
        print(f"all pass without a fault, after {time.monotonic() - start:.0f} s")
        outcomes = runner.try_faults(faults, _say_fault)
    print(f"{time.monotonic() - start:.0f} s")
    return outcomes


def _say_check(check: Check, outcome: Outcome) -> None:
    with _printing:
        print(f"{outcome.seconds:7.1f} s  {check}", flush=True)


def _say_fault(fault: Fault, outcome: Outcome) -> None:
    with _printing:
        print(
            f"{outcome.verdict:8} {outcome.seconds:6.1f} s  {fault.name}: "
            f"{outcome.test} {outcome.error}".rstrip(),
            flush=True,
        )
        if outcome.verdict in (BROKEN, HUNG):
            print("    " + outcome.detail.replace("\n", "\n    "), flush=True)


def markdown(faults: Sequence[Fault], outcomes: Sequence[Outcome]) -> str:
    """A table of what was planted where, and which test caught it."""
    lines = ["| fault | file | what goes wrong | caught by |", "|---|---|---|---|"]
    for fault, outcome in zip(faults, outcomes, strict=True):
        test = outcome.test.split("[")[0].rpartition(".")[2]
        by = f"`{test}`" if outcome.verdict == CAUGHT else f"**{outcome.verdict}**"
        lines.append(f"| `{fault.name}` | `{fault.file}` | {fault.what} | {by} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
