"""Plants faults in copies of the kernels' sources, and says which test catches each.

python -m tests.mutation                     all faults; fails where one is not caught
python -m tests.mutation --only 'Split-K*'   some of them
"""

import argparse
import fnmatch
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from .faults import FAULTS, Check, Fault, StaleFault

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "outblas.hopper"  # that the faults are of
CAUGHT, SURVIVED, BROKEN, HUNG = "caught", "survived", "broken", "hung"
SECONDS = 600  # that a check is given

# What code raises that cannot run at all. Of such a fault no test can be said to have caught it.
BREAKAGE = (
    "AttributeError",
    "ImportError",
    "ModuleNotFoundError",
    "NameError",
    "SyntaxError",
    "TypeError",
    "UnboundLocalError",
)


class Outcome(NamedTuple):
    """What came of a run of tests.

    verdict: `SURVIVED` if all passed; `CAUGHT` if one failed for what it asserts; `BROKEN` if the
        code could not run, or no test did; `HUNG` if there was no end to it.
    test: the test that failed.
    detail: what it said, or pytest's last lines.
    """

    verdict: str
    test: str = ""
    detail: str = ""


def copy_packages(root: Path, folder: Path) -> None:
    """Lays out the packages of a checkout below `folder` as an installation does."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(root / "src" / "outblas", folder / "outblas", ignore=ignored)


def run_check(root: Path, packages: Path, check: Check, seconds: float = SECONDS) -> Outcome:
    """Runs tests of a checkout with the packages of another folder."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [
            *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"),
            *("-p", "no:randomly", "--hypothesis-seed=0", f"--basetemp={folder}/tmp"),
            *(f"--junitxml={report}", str(check.path(root / "tests"))),
            *("-m", "not gpu and not slow and not compile", "-k", check.select),
        ]
        environment = os.environ | {
            "PYTHONPATH": str(packages),
            "OUTBLAS_CACHE_DIR": f"{folder}/cache",
            "HYPOTHESIS_STORAGE_DIRECTORY": f"{folder}/hypothesis",
        }
        try:
            done = subprocess.run(
                command, env=environment, cwd=root, capture_output=True, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return Outcome(HUNG, detail=f"no end after {seconds:.0f} s")
        if done.returncode == 0:
            return Outcome(SURVIVED)
        cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
        for case in cases:
            failure = case.find("failure")
            if failure is not None:
                message = failure.get("message", "")
                error = message.partition(":")[0].rpartition(".")[2]
                verdict = BROKEN if error in BREAKAGE else CAUGHT
                return Outcome(verdict, f"{case.get('classname')}::{case.get('name')}", message)
        return Outcome(BROKEN, detail="\n".join(done.stdout.splitlines()[-15:]))


def try_fault(root: Path, package: str, fault: Fault) -> Outcome:
    """What the tests of a fault say to it, planted in a copy of the packages."""
    with tempfile.TemporaryDirectory(prefix="outblas-mutation-") as folder:
        copy_packages(root, Path(folder))
        sources = Path(folder, *package.split("."))
        (sources / fault.file).write_text(fault.planted(sources), encoding="utf-8")
        return run_check(root, Path(folder), fault.check)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every fault is caught, 1 if one is not, 2 where nothing can be said."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", metavar="PATTERN", default="*", help="faults, as 'Split-K*'")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="side by side")
    options = parser.parse_args(arguments)
    faults = [fault for fault in FAULTS if fnmatch.fnmatchcase(fault.what, options.only)]
    if not faults:
        parser.error(f"no fault says {options.only}")

    def check_baseline(check: Check) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="outblas-mutation-") as folder:
            copy_packages(ROOT, Path(folder))
            return run_check(ROOT, Path(folder), check)

    def plant(fault: Fault) -> Outcome:
        outcome = try_fault(ROOT, PACKAGE, fault)
        print(f"{outcome.verdict:8}  {fault.what} {outcome.test}", flush=True)
        return outcome

    checks = list(dict.fromkeys(fault.check for fault in faults))
    with ThreadPoolExecutor(options.jobs) as pool:
        for check, outcome in zip(checks, pool.map(check_baseline, checks), strict=True):
            if outcome.verdict != SURVIVED:
                print(f"fails without a fault: {check}\n{outcome.test} {outcome.detail}")
                return 2
        try:
            outcomes = list(pool.map(plant, faults))
        except StaleFault as error:
            print(error)
            return 2
    missed = [f for f, o in zip(faults, outcomes, strict=True) if o.verdict != CAUGHT]
    print(f"{len(faults) - len(missed)} of {len(faults)} faults are caught")
    for fault in missed:
        print(f"not caught: {fault.what}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
