"""A search strategy of your own: a class with one method.

A strategy says which of the valid configs are measured, and in which order. This one measures the
best configs by the cost model first, and then whatever shares a tile with the fastest of them.
Without a GPU the example shows what it would measure first on an H100, for which no kernel has to
run.

    python examples/custom_strategy.py
    python examples/custom_strategy.py --budget 120
    cd examples && outblas tune --strategy custom_strategy:SameTile
"""

import argparse
from collections.abc import Iterable, Sequence

import torch

from outblas.autotune import Candidate, Gpu, Search, Strategy, TuneTarget, Workload, plan, sweep


# [strategy]
class SameTile(Strategy):
    """Measures the configs that the model ranks highest, then all with the tile of the fastest."""

    first = 8

    def propose(self, search: Search) -> Iterable[Sequence[Candidate]]:
        yield search.ranked()[: self.first]
        best = search.best()
        if best is not None:
            yield [each for each in search.candidates if tile(each) == tile(best)]


def tile(candidate: Candidate) -> tuple[int, int]:
    return candidate.footprint.tile_m, candidate.footprint.tile_n


# [end]


def main() -> None:
    parser = argparse.ArgumentParser(description="Tune with a search strategy of your own.")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds, on a GPU")
    budget = parser.parse_args().budget
    if torch.cuda.is_available():
        found = sweep("portable", (4096, 4096, 4096), strategy=SameTile, budget=budget)
        for trial in found.outcomes[0].trials:
            print(f"{trial.status:4} {trial.us or 0:9.1f} µs  {trial.config}")
        return

    h100 = Gpu("NVIDIA H100 80GB HBM3", arch=90, sms=132)
    target = TuneTarget("portable", "outblas.kernels.portable")
    proposed = plan([target], Workload(4096, 4096, 4096), h100, strategy=SameTile())
    print(f"{proposed.generated} configs, {proposed.valid} of them valid; the first batch:")
    for candidate in proposed.ranked:
        own = "  (the kernel's own)" if candidate.own else ""
        print(f"  {candidate.predicted_us:6.1f} µs predicted  {candidate.text}{own}")
    assert SameTile.first <= len(proposed.ranked) <= SameTile.first + 1


if __name__ == "__main__":
    main()
