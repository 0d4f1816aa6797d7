"""Many random calls over several processes, and a table of what they found.

python -m tests.fuzz --calls 40000 --seed 7 [--device cuda]
python -m tests.fuzz --seed 7 --only 1234        one call again, in full
"""

import argparse
import collections
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import TimeoutError as FutureTimeout

from pebble import ProcessExpired, ProcessPool

CHUNK = 250
SECONDS = 300  # that a chunk may take


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--calls", type=int, default=int(os.environ.get("FUZZ_CALLS", "40000")))
    parser.add_argument("--seed", type=int, default=int(os.environ.get("FUZZ_SEED", "0")))
    parser.add_argument("--first", type=int, default=0, help="index of the first call")
    parser.add_argument(
        "--device", default=os.environ.get("FUZZ_DEVICE", "cpu"), help="cpu or cuda"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--light", action="store_true", help="without calls that take seconds")
    parser.add_argument("--only", type=int, help="make one call, and say all about it")
    parser.add_argument("--save", help="a file for all that was found, as JSON lines")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    if given.only is not None:
        return show(given)
    start = time.monotonic()
    found = Total()
    chunks = range(given.first, given.first + given.calls, CHUNK)
    last = given.first + given.calls
    from .runner import prepare

    # A GPU cannot be used in a process forked from one that has looked for it.
    context = multiprocessing.get_context("fork" if given.device == "cpu" else "spawn")
    with ProcessPool(
        max_workers=given.jobs, max_tasks=40, initializer=prepare, context=context
    ) as pool:
        spans = [(low, min(low + CHUNK, last)) for low in chunks]
        waiting = collections.deque((span, schedule(pool, given, span)) for span in spans)
        shown = 0.0
        while waiting:
            (low, high), future = waiting.popleft()
            try:
                found.add(future.result())
            except (ProcessExpired, FutureTimeout) as error:
                if high - low > 1:  # which call was it?
                    middle = (low + high) // 2
                    halves = [(low, middle), (middle, high)]
                    waiting.extendleft((span, schedule(pool, given, span)) for span in halves)
                else:
                    found.died(given, low, error)
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                rate = found.count / (shown - start)
                print(
                    f"{found.count:>8} calls, {rate:.0f} a second, {found.unexplained} differences",
                    flush=True,
                )
    report(given, found, time.monotonic() - start)
    if given.save:
        with open(given.save, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in found.rows)
    return 1 if found.unexplained else 0


def schedule(pool: ProcessPool, given: argparse.Namespace, span: tuple[int, int]):
    from .runner import run

    return pool.schedule(run, (given.seed, *span, given.device, given.light), timeout=SECONDS)


class Total:
    """What came of all calls. `rows` are the differences, those that are listed with the name of
    their entry.
    """

    def __init__(self) -> None:
        self.count = self.unexplained = 0
        self.outcomes: collections.Counter = collections.Counter()
        self.rows: list[dict] = []

    def add(self, part: dict) -> None:
        self.count += part["count"]
        self.outcomes.update({tuple(key): n for key, n in part["outcomes"]})
        for row in part["rows"]:
            self.rows.append(row)
            self.unexplained += row["known"] is None

    def died(self, given: argparse.Namespace, index: int, error: BaseException) -> None:
        from . import runner, spec

        call = spec.make(given.seed, index, given.device)["call"]
        text = f"{type(error).__name__} {error}"
        row = runner.row("the process ends", text, text) | {"index": index, "call": call}
        self.add({"count": 1, "outcomes": [((call, "differs"), 1)], "rows": [row]})


def report(given: argparse.Namespace, found: Total, seconds: float) -> None:
    from .runner import OUTCOMES

    print(f"\n{found.count} calls of seed {given.seed} on {given.device} in {seconds:.0f} s\n")
    print(f"{'function':24}" + "".join(f"{name:>16}" for name in OUTCOMES))
    for call in sorted({call for call, _ in found.outcomes}):
        print(f"{call:24}" + "".join(f"{found.outcomes[call, name]:>16}" for name in OUTCOMES))
    listed = collections.Counter(row["known"] for row in found.rows if row["known"] is not None)
    if listed:
        print("\nlisted differences (docs/migrate.md):")
        for name, n in listed.most_common():
            print(f"{n:>8}  {name}")
    groups: dict[tuple, list[dict]] = collections.defaultdict(list)
    for row in found.rows:
        if row["known"] is None:
            groups[row["kind"], row["cause"]].append(row)
    if groups:
        print(f"\n{found.unexplained} differences that are not listed, by cause:")
    for (kind, cause), rows in sorted(groups.items(), key=lambda item: -len(item[1])):
        calls = collections.Counter(row["call"] for row in rows)
        where = ", ".join(f"{call} {n}" for call, n in calls.most_common(4))
        first = next((row for row in rows if row["alone"]), rows[0])
        again = command(given, first)
        print(f"{len(rows):>8}  {kind}: {cause}\n{'':10}{where}\n{'':10}{again}")


def command(given: argparse.Namespace, row: dict) -> str:
    """What makes the call again: alone, or where it does not differ alone, after those
    before it.
    """
    text = f"{sys.executable} -m tests.fuzz --seed {given.seed} --device {given.device}"
    index = row["index"]
    if row["alone"]:
        return f"{text} --only {index}"
    low = index - (index - given.first) % CHUNK
    return f"{text} --first {low} --calls {index + 1 - low} --jobs 1   # differs after others only"


def show(given: argparse.Namespace) -> int:
    from . import runner, spec

    runner.prepare()
    made = spec.make(given.seed, given.only, given.device)
    print(json.dumps(made, indent=1))
    ours, theirs, rows = runner.once(made)
    print(f"outblas: {ours}\n  torch: {theirs}")
    for row in rows:
        print(f"{row['kind']}: {row['detail']}" + (f"   [{row['known']}]" if row["known"] else ""))
    return 1 if any(row["known"] is None for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
