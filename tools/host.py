"""What outblas costs the host, beside torch and beside another checkout, by pyperf.

    python -m tools.host                    # this checkout
    python -m tools.host --against ../main  # another checkout in turns with this one

It prints for each call the time of outblas over that of torch in the same run; with `--against`
also that ratio over the one of the other checkout, and exits with code 1 where one is slower.
Times are wall times: the machine should be idle (`python -m pyperf system tune` helps).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pyperf

from tools.host_calls import OURS, THEIRS

ROOT = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("host_calls.py")
TURNS = 2  # of each checkout, with --against
SLOWER = 1.05  # a ratio above this is a finding, where runs of the two do not overlap

Ratios = dict[str, list[float]]  # outblas over torch in each process, by call


def package_path(checkout: Path) -> Path:
    """Returns the folder that a checkout's package is imported from. Raises ValueError for a folder
    that is no checkout.
    """
    folder = checkout.resolve() / "src"
    if not (folder / "outblas" / "__init__.py").is_file():
        raise ValueError(f"--against is {str(checkout)!r}, expected a checkout of outblas")
    return folder


def measured(path: Path, file: Path, arguments: Sequence[str]) -> Ratios:
    """Runs the script with the package in `path`, and returns the ratios that it wrote to `file`.
    Raises CalledProcessError where a call fails.
    """
    environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "--quiet", "--output", str(file), *arguments]
    subprocess.run(command, env=environment, cwd=path, check=True)
    suite = pyperf.BenchmarkSuite.load(str(file))
    runs = {
        bench.get_name(): [statistics.median(run.values) for run in bench.get_runs() if run.values]
        for bench in suite
    }
    return {
        name.removesuffix(f": {OURS}"): [
            ours / theirs
            for ours, theirs in zip(
                times, runs[name.replace(f": {OURS}", f": {THEIRS}")], strict=False
            )
        ]
        for name, times in runs.items()
        if name.endswith(f": {OURS}")
    }


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


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.host", description=__doc__)
    parser.add_argument("--against", type=Path, help="the root of another checkout")
    parser.add_argument("--fast", action="store_true", help="few and short runs, for a first look")
    options = parser.parse_args()
    arguments = ["--fast"] if options.fast else []
    checkouts = [ROOT] if options.against is None else [ROOT, options.against]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            paths = [package_path(checkout) for checkout in checkouts]
        except ValueError as error:
            parser.error(str(error))
        ratios: list[Ratios] = [{} for _ in checkouts]
        for turn in range(TURNS if options.against else 1):
            for i, path in enumerate(paths):
                run = measured(path, folder / f"{i}-{turn}.json", arguments)
                for call, values in run.items():
                    ratios[i].setdefault(call, []).extend(values)
    slower = False
    for call, here in ratios[0].items():
        line = f"{call:32} {statistics.median(here):6.2f} × torch"
        if options.against is not None and call in ratios[1]:
            there = ratios[1][call]
            word = verdict(here, there)
            slower |= word == "slower"
            line += f", {statistics.median(here) / statistics.median(there):5.3f} of the other's"
            line += f", {word}"
        print(line)
    sys.exit(1 if slower else 0)


if __name__ == "__main__":
    main()
