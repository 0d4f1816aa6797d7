"""Fails where a report of coverage has too few branches: `branch_coverage.py REPORT.json PERCENT`.

`fail_under` of coverage itself mixes branches with statements.
"""

import json
import sys
from pathlib import Path

WORST = 10  # files that are named, those with the most branches not taken first


def main(report: str, least: str) -> int:
    content = json.loads(Path(report).read_text())
    totals = content["totals"]
    if not totals.get("num_branches"):
        print(f"{report} has no branches: was branch coverage on?")
        return 1
    files = [
        (entry["summary"]["missing_branches"], name) for name, entry in content["files"].items()
    ]
    for missing, name in sorted(files, reverse=True)[:WORST]:
        print(f"{missing:5} branches not taken in {name}")
    percent = 100 * totals["covered_branches"] / totals["num_branches"]
    print(
        f"{totals['covered_branches']} of {totals['num_branches']} branches of host code: "
        f"{percent:.2f}%, expected at least {least}%"
    )
    return 0 if percent >= float(least) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
