"""Random faults against real sweeps, stores and caches, and a check of what is promised in spite of
them.

`python -m tests.chaos` runs all campaigns; CONTRIBUTING.md says how. Each campaign is a module with
`NAME`, `UNIT` (what it counts), `TARGET` (how many of these a whole run has), `EPISODE` (how many
an episode has at most), `JOBS` (how many episodes may run side by side on two cores) and
`episode(setting) -> Episode`. An episode draws everything from its own seed, so a failure repeats
by its index, as far as the timing of processes can repeat.
"""

import sys
from pathlib import Path

# Where the package of helpers lies that the kernel takes its faults from. Every process that runs
# or measures the kernel imports this.
TESTS = str(Path(__file__).resolve().parents[1])
if TESTS not in sys.path:
    sys.path.append(TESTS)
