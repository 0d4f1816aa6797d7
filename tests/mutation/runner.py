"""Runs tests against a shadow, and says whether a fault that is planted there was caught."""

import contextlib
import multiprocessing
import os
import queue
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from .fault import Check, Fault
from .shadow import Project, Shadow

CAUGHT, SURVIVED, BROKEN, HUNG = "caught", "survived", "broken", "hung"

# What code raises that cannot run at all. Of such a fault no test can be said to have caught it.
BREAKAGE = {
    "AttributeError",
    "CompilationError",
    "ImportError",
    "IndentationError",
    "ModuleNotFoundError",
    "NameError",
    "SyntaxError",
    "TypeError",
    "UnboundLocalError",
}
NOTHING_SELECTED = 5  # pytest's exit status
LEAST_SECONDS = 90.0  # that a check is given
SLOWER = 6.0  # times as long as without a fault a check may take


class BaselineFailed(Exception):
    """A check fails where no fault is planted."""


@dataclass(frozen=True)
class Outcome:
    """What came of a run of tests.

    verdict: `SURVIVED` if all passed; `CAUGHT` if one failed for what it asserts; `BROKEN` if the
        code could not run, or no test did; `HUNG` if there was no end to it.
    test: the test that failed.
    error: what it raised, by its class.
    detail: what pytest printed at last, where the verdict is `BROKEN` or `HUNG`.
    """

    verdict: str
    seconds: float
    test: str = ""
    error: str = ""
    detail: str = ""


def run_check(shadow: Shadow, check: Check, limit: float | None = None) -> Outcome:
    """Runs a check against a shadow, for so many seconds at most."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=shadow.folder.parent) as folder:
        report, log = Path(folder, "report.xml"), Path(folder, "log")
        arguments = [
            *("-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:randomly"),
            *("--hypothesis-seed=0", f"--junitxml={report}", f"--basetemp={folder}/tmp"),
            *(str(check.path(shadow.project.tests)), *check.options),
        ]
        status = _run_pytest(arguments, shadow, log, limit)
        seconds = time.monotonic() - start
        output = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        if status is None:
            return Outcome(HUNG, seconds, detail=f"no end after {limit:.0f} s")
        if status == 0:
            return Outcome(SURVIVED, seconds)
        if status == NOTHING_SELECTED or not report.exists():
            return Outcome(BROKEN, seconds, detail=_last_lines(output))
        return _failed_outcome(report, output, seconds)


_processes = multiprocessing.get_context("forkserver")


def start_from(modules: Sequence[str]) -> None:
    """From now on tests start in copies of a process that has imported these modules, which saves
    most of a short test's time. They must not be those of the project.
    """
    _processes.set_forkserver_preload(list(modules))


def _run_pytest(arguments: list[str], shadow: Shadow, log: Path, limit: float | None) -> int | None:
    """pytest's exit status, None where it took too long; none of its processes is left then."""
    environment = shadow.environment
    given = arguments, environment, str(shadow.folder), str(shadow.project.root), str(log)
    process = _processes.Process(target=_pytest, args=given)
    process.start()
    try:
        process.join(limit)
    finally:
        ended = process.exitcode is not None
        if not ended and process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
    return process.exitcode if ended else None


def _pytest(
    arguments: list[str], environment: dict[str, str], shadow: str, root: str, log: str
) -> None:
    """Runs pytest in a process of its own, which imports packages from the shadow."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(root)
    sys.path.insert(0, shadow)
    import pytest

    status = int(pytest.main(arguments))
    sys.stdout.flush()
    os._exit(status)  # whatever threads a fault leaves behind


def _failed_outcome(report: Path, output: str, seconds: float) -> Outcome:
    """The outcome of a run with failures: whether one is more than code that cannot run."""
    outcome = Outcome(BROKEN, seconds, detail=_last_lines(output))
    for case in ElementTree.parse(report).iter("testcase"):
        failure = case.find("failure")
        if failure is None:
            continue
        message, test = failure.get("message", ""), f"{case.get('classname')}::{case.get('name')}"
        if "from pytest-timeout" in message:
            return Outcome(HUNG, seconds, test, detail=message)
        error = error_class(message)
        if error not in BREAKAGE:
            return Outcome(CAUGHT, seconds, test, error)
        outcome = Outcome(BROKEN, seconds, test, error, _last_lines(output))
    return outcome


def error_class(message: str) -> str:
    """The class of the exception that a report's message begins with; a bare one is of assert."""
    found = re.match(r"(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)(?::|$)", message)
    return found[1] if found else "AssertionError"


def _last_lines(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-15:])


class Runner:
    """Tries faults, several at a time, each in a shadow of its own."""

    def __init__(self, project: Project, folder: Path, jobs: int) -> None:
        self.jobs = jobs
        self._shadows: queue.Queue[Shadow] = queue.Queue()
        for number in range(jobs):
            self._shadows.put(Shadow(project, folder / f"job{number}" / "shadow"))
        with self._shadow() as shadow:
            shadow.check_imported()
        self._seconds: dict[Check, float] = {}

    @contextlib.contextmanager
    def _shadow(self) -> Iterator[Shadow]:
        shadow = self._shadows.get()
        try:
            yield shadow
        finally:
            self._shadows.put(shadow)

    def check_baseline(
        self, checks: Iterable[Check], say: Callable[[Check, Outcome], None]
    ) -> None:
        """Runs checks without a fault. Raises BaselineFailed for those that do not pass."""
        distinct = list(dict.fromkeys(checks))

        def run(check: Check) -> Outcome:
            with self._shadow() as shadow:
                outcome = run_check(shadow, check)
            say(check, outcome)
            return outcome

        with ThreadPoolExecutor(self.jobs) as pool:
            outcomes = dict(zip(distinct, pool.map(run, distinct), strict=True))
        failed = [
            f"{check}: {outcome.test or outcome.verdict} {outcome.error}\n{outcome.detail}"
            for check, outcome in outcomes.items()
            if outcome.verdict != SURVIVED
        ]
        if failed:
            raise BaselineFailed("without a fault these checks fail:\n" + "\n".join(failed))
        self._seconds |= {check: outcome.seconds for check, outcome in outcomes.items()}

    def try_faults(
        self, faults: Sequence[Fault], say: Callable[[Fault, Outcome], None]
    ) -> list[Outcome]:
        """What came of each fault, in their order."""

        def run(fault: Fault) -> Outcome:
            outcome = self.try_fault(fault)
            say(fault, outcome)
            return outcome

        with ThreadPoolExecutor(self.jobs) as pool:
            return list(pool.map(run, faults))

    def try_fault(self, fault: Fault) -> Outcome:
        """Plants a fault and runs its checks until one catches it."""
        outcome = Outcome(SURVIVED, 0.0)
        with self._shadow() as shadow, shadow.with_fault(fault):
            for check in fault.checks:
                limit = max(LEAST_SECONDS, SLOWER * self._seconds.get(check, 0.0))
                outcome = run_check(shadow, check, limit)
                if outcome.verdict == CAUGHT:
                    break
        return outcome
