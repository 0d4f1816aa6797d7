"""Campaigns of random faults, and a table of the promises that were not kept.

python -m tests.chaos --seed 7                     all campaigns
python -m tests.chaos --seed 7 --only kills:3      the episode 3 of one campaign again
python -m tests.chaos --scale 0.05                 a smoke run
"""

import argparse
import collections
import itertools
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from . import clocks, damage, disks, kills, objects, sharing
from .episode import Episode, Setting
from .nursery import PACKAGE, Nursery

CAMPAIGNS: dict[str, ModuleType] = {
    module.NAME: module for module in (kills, damage, clocks, disks, sharing, objects)
}
SHOWN = 5  # failures of one promise
LEAST_UNITS = 10  # that an episode is asked for, if so many are left
BROKEN = "fault of the campaign"
MOST_BROKEN = 3  # episodes of a campaign, before it is given up


@dataclass
class Total:
    """What came of the episodes of one campaign."""

    module: ModuleType
    seconds: float = 0.0
    episodes: int = 0
    units: int = 0
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    shares: dict[str, list[float]] = field(default_factory=lambda: collections.defaultdict(list))
    failures: dict[str, list[tuple[int, str]]] = field(
        default_factory=lambda: collections.defaultdict(list)
    )
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, index: int, found: Episode, seconds: float) -> None:
        with self._lock:
            self.seconds += seconds
            self.episodes += 1
            self.units += found.units
            self.counts.update(found.counts)
            for name, share in found.shares.items():
                self.shares[name].append(share)
            for failure in found.failures:
                self.failures[failure.promise].append((index, failure.detail))


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=int(os.environ.get("CHAOS_SEED", "0")))
    parser.add_argument(
        "--scale",
        type=float,
        default=float(os.environ.get("CHAOS_SCALE", "1")),
        help="of all targets",
    )
    parser.add_argument("--jobs", type=int, default=4, help="episodes side by side, at most")
    parser.add_argument(
        "--only", default="", help=f"campaigns ({', '.join(CAMPAIGNS)}), or an episode: kills:3"
    )
    parser.add_argument(
        "--keep", action="store_true", help="leave the folders of episodes that failed"
    )
    found = parser.parse_args(given)
    for name in filter(None, found.only.split(",")):
        campaign, _, index = name.partition(":")
        if campaign not in CAMPAIGNS or not (index or "0").isdecimal():
            parser.error(
                f"--only is {found.only!r}, expected of {', '.join(CAMPAIGNS)}, with :INDEX for "
                "one episode"
            )
    if found.jobs < 1:
        parser.error(f"--jobs is {found.jobs}, expected at least 1")
    if not found.scale > 0:
        parser.error(f"--scale is {found.scale}, expected a number above 0")
    return found


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    warnings.simplefilter("ignore")  # stores are damaged on purpose
    os.nice(10)
    return run_all(options)


def run_all(options: argparse.Namespace) -> int:
    """Runs the campaigns that are asked for and reports what came of them; 1 where anything
    failed.
    """
    begun = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="outblas-chaos-"))
    totals = []
    try:
        with Nursery(folder) as nursery:
            for name in filter(None, (options.only or ",".join(CAMPAIGNS)).split(",")):
                campaign, _, index = name.partition(":")
                totals.append(
                    run(
                        options, CAMPAIGNS[campaign], int(index) if index else None, folder, nursery
                    )
                )
    finally:
        if options.keep:
            print(f"folders are below {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    report(options, totals, time.monotonic() - begun)
    return 1 if any(any(total.failures.values()) for total in totals) else 0


def run(
    options: argparse.Namespace,
    module: ModuleType,
    only: int | None,
    folder: Path,
    nursery: Nursery,
) -> Total:
    """Episodes of a campaign until it has its units, some side by side; or one of them."""
    total = Total(module)
    target = max(1, round(module.TARGET * options.scale))
    if only is not None:
        episode(options, total, only, min(target, module.EPISODE), folder, nursery)
        return total
    indices = itertools.count()
    jobs = min(options.jobs, module.JOBS)
    running: set[Future[None]] = set()
    with ThreadPoolExecutor(jobs) as threads:
        while True:
            left = target - total.units
            while left > 0 and len(running) < jobs and len(total.failures[BROKEN]) < MOST_BROKEN:
                units = min(module.EPISODE, left, max(LEAST_UNITS, math.ceil(left / jobs)))
                running.add(
                    threads.submit(episode, options, total, next(indices), units, folder, nursery)
                )
                left -= units
            if not running:
                return total
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()


def episode(
    options: argparse.Namespace,
    total: Total,
    index: int,
    units: int,
    folder: Path,
    nursery: Nursery,
) -> None:
    """One episode, in a folder of its own, added to the total."""
    name = f"{total.module.NAME}:{index}"
    place = folder / name.replace(":", "-")
    place.mkdir()
    begun = time.monotonic()
    found = attempt(options, total.module, index, units, place, nursery)
    seconds = time.monotonic() - begun
    total.add(index, found, seconds)
    failed = f", {len(found.failures)} failures" if found.failures else ""
    print(f"{name} {found.units} {total.module.UNIT}, {seconds:.0f} s{failed}", flush=True)
    if not (options.keep and found.failures):
        shutil.rmtree(place, ignore_errors=True)


def attempt(
    options: argparse.Namespace,
    module: ModuleType,
    index: int,
    units: int,
    place: Path,
    nursery: Nursery,
) -> Episode:
    """One episode; what it raises is a failure too."""
    numbers = random.Random(f"{options.seed} {module.NAME} {index}")

    def another(environment: dict[str, str]) -> Nursery:
        return Nursery(place, environment)

    try:
        found: Episode = module.episode(Setting(index, units, numbers, place, nursery, another))
    except Exception as error:
        traceback.print_exc()
        found = Episode(units=1)
        found.fail(BROKEN, repr(error)[:300])
    found.units = max(found.units, 1)  # so that a campaign ends
    return found


def report(options: argparse.Namespace, totals: list[Total], seconds: float) -> None:
    print(f"\nseed {options.seed}, scale {options.scale:g}, {seconds:.0f} s\n")
    print(f"{'campaign':10}{'done':>20}{'episodes':>10}{'seconds':>9}{'failures':>10}")
    for total in totals:
        done = f"{total.units} {total.module.UNIT}"
        failed = sum(map(len, total.failures.values()))
        print(
            f"{total.module.NAME:10}{done:>20}{total.episodes:>10}{total.seconds:>9.0f}{failed:>10}"
        )
    for total in totals:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(total.counts.items()))
        if counts:
            print(f"\n{total.module.NAME}: {counts}")
        for name, shares in total.shares.items():
            print(f"  {name}: mean {statistics.mean(shares):.1%}, least {min(shares):.1%}")
        for promise, failures in sorted(total.failures.items(), key=lambda item: -len(item[1])):
            if not failures:
                continue
            print(f"\n{len(failures):>6}  {total.module.NAME}: {promise}")
            details = collections.Counter(detail for _, detail in failures)
            for detail, count in details.most_common(SHOWN):
                index = next(index for index, other in failures if other == detail)
                print(f"{count:>10}  {detail}")
                print(
                    f"{'':12}{sys.executable} -m {PACKAGE} --seed {options.seed} --only "
                    f"{total.module.NAME}:{index}"
                )
    if not any(any(total.failures.values()) for total in totals):
        print("\nno failures")


if __name__ == "__main__":
    sys.exit(main())
