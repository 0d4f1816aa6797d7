"""What outblas costs the host, beside torch and beside another checkout.

    python -m tools.host                    # this checkout: warm calls, by pyperf, first calls of
                                            # layers and numbers of rows, and the import
    python -m tools.host --quick            # fewer of each, in a minute
    python -m tools.host --against ../main  # another checkout in turns with this one

It prints for each call the time of outblas and of torch in the same run, in µs, and their ratio;
with `--against` also that ratio over the one of the other checkout, and exits with code 1 where one
is slower. Times are wall times, those of imports CPU times: the machine should be idle (`python -m
pyperf system tune` helps).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.host_calls import OURS, THEIRS

ROOT = Path(__file__).parents[1]
CALLS, PLANNING = (Path(__file__).with_name(f"host_{name}.py") for name in ("calls", "planning"))
TURNS = 2  # of each checkout, with --against
SLOWER = 1.05  # a ratio above this is a finding, where runs of the two do not overlap
IMPORT = """
import time, torch
start = time.process_time()
import outblas
print(time.process_time(), start)
"""

Times = dict[str, list[tuple[float, float]]]  # µs of outblas and of torch in each run, by call


def package_path(checkout: Path) -> Path:
    """Returns the folder that a checkout's package is imported from. Raises ValueError for a folder
    that is no checkout.
    """
    folder = checkout.resolve() / "src"
    if not (folder / "outblas" / "__init__.py").is_file():
        raise ValueError(f"--against is {str(checkout)!r}, expected a checkout of outblas")
    return folder


def measured(path: Path, folder: Path, quick: bool) -> Times:
    """Times all calls of the package in `path`. `folder`: for files that may be lost. Raises
    CalledProcessError where a call fails.
    """
    environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an import that compiles is no import
    environment["PYTHONPYCACHEPREFIX"] = str(folder)

    def output(*arguments: str) -> str:
        command = [sys.executable, *arguments, *(["--quick"] if quick else ())]
        return subprocess.run(
            command, env=environment, cwd=path, check=True, text=True, stdout=subprocess.PIPE
        ).stdout

    if quick:
        times: Times = json.loads(output(str(CALLS)))
    else:
        results = folder / "calls.json"
        output(str(CALLS), "--quiet", "--output", str(results))
        times = by_pyperf(results)
        results.unlink()
    for line in json.loads(output(str(PLANNING))):
        times[line["call"]] = [(line["us"], line["torch_us"])]
    runs = [output("-c", IMPORT).split() for _ in range(4 if quick else 16)]
    times["import"] = [(1e6 * float(ours), 1e6 * float(theirs)) for ours, theirs in runs[1:]]
    return times


def by_pyperf(results: Path) -> Times:
    """Returns the times of calls that pyperf measured and wrote to a file."""
    import pyperf  # `--quick` needs none

    runs = {
        bench.get_name(): [
            1e6 * statistics.median(run.values) for run in bench.get_runs() if run.values
        ]
        for bench in pyperf.BenchmarkSuite.load(str(results))
    }
    calls = [name.removesuffix(f": {OURS}") for name in runs if name.endswith(f": {OURS}")]
    return {
        call: list(zip(runs[f"{call}: {OURS}"], runs[f"{call}: {THEIRS}"], strict=False))
        for call in calls
    }


def ratios(times: Sequence[tuple[float, float]]) -> list[float]:
    """Returns outblas's time over torch's in each run."""
    return [ours / theirs for ours, theirs in times]


def verdict(here: Sequence[float], there: Sequence[float]) -> str:
    """How ratios of this checkout compare with those of another one: "slower" or "faster" where the
    medians differ by more than `SLOWER` and the quartiles of the two do not overlap.
    """
    (low, median, high), (their_low, their_median, their_high) = (
        statistics.quantiles(values, n=4) for values in (here, there)
    )
    if median > SLOWER * their_median and low > their_high:
        return "slower"
    if their_median > SLOWER * median and their_low > high:
        return "faster"
    return "as fast"


def lines(here: Times, there: Times) -> list[dict[str, Any]]:
    """The report: what `--json` prints. `there`: the times of the other checkout, if there is
    one.
    """
    report = []
    for call, times in here.items():
        ours, theirs = (statistics.median(of) for of in zip(*times, strict=True))
        ratio = statistics.median(ratios(times))
        line = {"call": call, "us": ours, "torch_us": theirs, "ratio": ratio}
        if call in there:
            others = ratios(there[call])
            line["of_the_others"] = ratio / statistics.median(others)
            line["verdict"] = verdict(ratios(times), others)
        report.append(line)
    return report


def text(line: dict[str, Any]) -> str:
    """A line of the report as a line of the table."""
    row = "{call:36} {us:11.1f} µs  {torch_us:11.1f} µs  {ratio:7.2f} × torch".format_map(line)
    if "verdict" in line:
        row += ", {of_the_others:5.3f} of the other's, {verdict}".format_map(line)
    return row


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.host", description=__doc__)
    parser.add_argument("--against", type=Path, help="the root of another checkout")
    parser.add_argument("--quick", action="store_true", help="fewer calls, for a first look")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    checkouts = [ROOT] if options.against is None else [ROOT, options.against]
    try:
        paths = [package_path(checkout) for checkout in checkouts]
    except ValueError as error:
        parser.error(str(error))
    times: list[Times] = [{}, {}]
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(TURNS if options.against else 1):
            for i, path in enumerate(paths):
                for call, values in measured(path, Path(folder), options.quick).items():
                    times[i].setdefault(call, []).extend(values)
    report = lines(*times)
    print(json.dumps(report, indent=1) if options.json else "\n".join(map(text, report)))
    sys.exit(any(line.get("verdict") == "slower" for line in report))


if __name__ == "__main__":
    main()
