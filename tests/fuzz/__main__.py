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
    options = arguments()
    # On AMX, oneDNN (3.12) lets a NaN of a transposed operand through into the row before, if K is
    # odd: torch's results then depend on how an operand lies.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX10_1_512")
    os.environ.setdefault("OUTBLAS_COMPILE", "block")  # calls would be torch's for a while
    if options.only is not None:
        return show(options)
    start = time.monotonic()
    total = Total()
    chunks = range(options.first, options.first + options.calls, CHUNK)
    last = options.first + options.calls
    from .runner import prepare

    # A GPU cannot be used in a process forked from one that has looked for it.
    context = multiprocessing.get_context("fork" if options.device == "cpu" else "spawn")
    with ProcessPool(
        max_workers=options.jobs, max_tasks=40, initializer=prepare, context=context
    ) as pool:
        spans = [(low, min(low + CHUNK, last)) for low in chunks]
        waiting = collections.deque((span, schedule(pool, options, span)) for span in spans)
        shown = 0.0
        while waiting:
            (low, high), future = waiting.popleft()
            try:
                total.add(future.result())
            except (ProcessExpired, FutureTimeout) as error:
                if high - low > 1:  # which call was it?
                    middle = (low + high) // 2
                    halves = [(low, middle), (middle, high)]
                    waiting.extendleft((span, schedule(pool, options, span)) for span in halves)
                else:
                    total.died(options, low, error)
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                rate = total.count / (shown - start)
                print(
                    f"{total.count:>8} calls, {rate:.0f} a second, {total.unexplained} differences",
                    flush=True,
                )
    report(options, total, time.monotonic() - start)
    if options.save:
        with open(options.save, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in total.rows)
    return 1 if total.unexplained else 0


def schedule(pool: ProcessPool, options: argparse.Namespace, span: tuple[int, int]):
    from .runner import run

    return pool.schedule(run, (options.seed, *span, options.device, options.light), timeout=SECONDS)


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

    def died(self, options: argparse.Namespace, index: int, error: BaseException) -> None:
        from . import runner, spec

        call = spec.make(options.seed, index, options.device)["call"]
        text = f"{type(error).__name__} {error}"
        row = runner.row("the process ends", text, text) | {"index": index, "call": call}
        self.add({"count": 1, "outcomes": [((call, "differs"), 1)], "rows": [row]})


def report(options: argparse.Namespace, total: Total, seconds: float) -> None:
    from .runner import OUTCOMES

    print(f"\n{total.count} calls of seed {options.seed} on {options.device} in {seconds:.0f} s\n")
    print(f"{'function':24}" + "".join(f"{name:>16}" for name in OUTCOMES))
    for call in sorted({call for call, _ in total.outcomes}):
        print(f"{call:24}" + "".join(f"{total.outcomes[call, name]:>16}" for name in OUTCOMES))
    listed = collections.Counter(row["known"] for row in total.rows if row["known"] is not None)
    if listed:
        print("\nlisted differences (docs/migrate.md):")
        for name, n in listed.most_common():
            print(f"{n:>8}  {name}")
    groups: dict[tuple, list[dict]] = collections.defaultdict(list)
    for row in total.rows:
        if row["known"] is None:
            groups[row["kind"], row["cause"]].append(row)
    if groups:
        print(f"\n{total.unexplained} differences that are not listed, by cause:")
    for (kind, cause), rows in sorted(groups.items(), key=lambda item: -len(item[1])):
        calls = collections.Counter(row["call"] for row in rows)
        where = ", ".join(f"{call} {n}" for call, n in calls.most_common(4))
        first = next((row for row in rows if row["alone"]), rows[0])
        again = command(options, first)
        print(f"{len(rows):>8}  {kind}: {cause}\n{'':10}{where}\n{'':10}{again}")


def command(options: argparse.Namespace, row: dict) -> str:
    """What makes the call again: alone, or where it does not differ alone, after those
    before it.
    """
    text = f"{sys.executable} -m tests.fuzz --seed {options.seed} --device {options.device}"
    index = row["index"]
    if row["alone"]:
        return f"{text} --only {index}"
    low = index - (index - options.first) % CHUNK
    return f"{text} --first {low} --calls {index + 1 - low} --jobs 1   # differs after others only"


def show(options: argparse.Namespace) -> int:
    from . import runner, spec

    runner.prepare()
    description = spec.make(options.seed, options.only, options.device)
    print(json.dumps(description, indent=1))
    ours, theirs, rows = runner.once(description)
    print(f"outblas: {ours}\n  torch: {theirs}")
    for row in rows:
        print(f"{row['kind']}: {row['detail']}" + (f"   [{row['known']}]" if row["known"] else ""))
    return 1 if any(row["known"] is None for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
