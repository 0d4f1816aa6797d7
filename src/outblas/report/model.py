"""What a sweep found: the trials of one kernel at one workload on one model of GPU."""

import statistics
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from outblas.autotune.store.records import BestConfig, Finalist, Gpu, Trial, Workload, base_name
from outblas.base.configs import items

Limits = Callable[[str], str]  # says of a config's text what bounds it, in a few words

# The fields of configs that give the tile along M and N.
TILES = (("tile_m", "tile_n"), ("block_m", "block_n"))
TOP = 10  # configs that the report lists
FEWEST = 3  # configs from which a rank correlation is given
NONE = "–"  # for figures that are missing


@dataclass(frozen=True)
class RankedConfig:
    """A config among the best. `final` says that its figures are of the finals, not of
    screening.
    """

    config: str
    us: float
    ratio: float
    ratio_low: float | None
    ratio_high: float | None
    final: bool
    predicted_us: float | None = None
    limits: str | None = None


@dataclass(frozen=True)
class Agreement:
    """The model's predictions beside what screening measured.

    `points` has the predicted and the measured µs of every config that has both, `best` is the
    index of the best measured one, `place` how many are predicted to be as fast. `rho` is
    Spearman's of the two orders; None for too few configs, or where all values of a side are equal.
    """

    points: tuple[tuple[float, float], ...]
    best: int
    place: int
    rho: float | None

    def __str__(self) -> str:
        n, place = len(self.points), self.place
        first = "the first" if place == 1 else f"among the first {place}"
        return (
            f"the best measured config is {first} of {n} in the predicted order ({place / n:.0%})"
        )


@dataclass(frozen=True)
class TuneReport:
    """The newest trial of each config, all of one source of the kernel.

    `gpus` are of one model, `left_out` counts the older trials. A ratio is the time of `base` over
    that of the config. On a CPU there is no base, and the fastest config stands in for it.
    """

    kernel: str
    workload: Workload
    gpus: tuple[Gpu, ...]
    trials: tuple[Trial, ...]
    winner: BestConfig | None
    top: tuple[RankedConfig, ...]
    agreement: Agreement | None
    left_out: int = 0

    @property
    def gpu(self) -> str:
        """The GPU's name."""
        return self.gpus[0].name

    @property
    def base(self) -> str:
        """What ratios compare with, as `records.base_name` has it: "" on a CPU."""
        return base_name(self.workload, on_gpu=self.gpus[0].arch > 0)

    @property
    def metric(self) -> str:
        """The name of the ratio, for the heads of columns and the axes of charts."""
        return f"× {self.base or 'fastest'}"

    @property
    def title(self) -> str:
        """The kernel, the workload and the GPU."""
        return f"{self.kernel}, {self.workload}, {self.gpu}"

    @cached_property
    def timed(self) -> tuple[Trial, ...]:
        """The trials that have figures, the best ratio first."""
        return tuple(sorted(filter(_timed, self.trials), key=_slowness))

    @property
    def right(self) -> int:
        """The number of trials whose product was right."""
        return sum(trial.ok for trial in self.trials)

    @cached_property
    def failures(self) -> dict[str, list[Trial]]:
        """The trials that failed, by status, the most frequent status first; within a status the
        most frequent reason comes first.
        """
        by_status: dict[str, list[Trial]] = {}
        for trial in self.trials:
            if not trial.ok:
                by_status.setdefault(trial.status, []).append(trial)
        for trials in by_status.values():
            often = Counter(trial.reason for trial in trials)
            trials.sort(key=lambda trial: (not trial.reason, -often[trial.reason]))
        return dict(sorted(by_status.items(), key=lambda item: -len(item[1])))

    @cached_property
    def tiles(self) -> dict[tuple[int, int], list[Trial]]:
        """All trials by the tile's sizes along M and N, the best of each tile first."""
        by_tile: dict[tuple[int, int], list[Trial]] = {}
        failed = (trial for trials in self.failures.values() for trial in trials)
        for trial in (*self.timed, *failed):
            fields = dict(items(trial.config))
            for m, n in TILES:
                if fields.get(m, "").isdecimal() and fields.get(n, "").isdecimal():
                    by_tile.setdefault((int(fields[m]), int(fields[n])), []).append(trial)
        return by_tile

    @cached_property
    def common(self) -> str:
        """The fields that all configs of `top` share."""
        shared, _ = split([entry.config for entry in self.top])
        return shared if len(self.top) > 1 else ""

    def record(self) -> dict[str, Any]:
        """The report as a JSON object."""
        agreement, tried = self.agreement, len(self.trials)
        tiles = [
            {
                "m": m,
                "n": n,
                "ratio": trials[0].ratio,
                "tried": len(trials),
                "right": sum(trial.ok for trial in trials),
            }
            for (m, n), trials in sorted(self.tiles.items())
        ]
        counts = {"tried": tried, "right": self.right, "failed": tried - self.right}
        return {
            "kernel": self.kernel,
            "workload": asdict(self.workload),
            "ratio_base": self.base or "fastest config",
            "gpus": [asdict(gpu) for gpu in self.gpus],
            "counts": {**counts, "left_out": self.left_out},
            "winner": self.winner and asdict(self.winner),
            "top": [asdict(entry) for entry in self.top],
            "tiles": tiles,
            "model": agreement
            and {
                "configs": len(agreement.points),
                "rho": agreement.rho,
                "best_place": agreement.place,
            },
            "failures": {
                status: {
                    "trials": len(trials),
                    "reason": trials[0].reason,
                    "config": trials[0].config,
                }
                for status, trials in self.failures.items()
            },
        }


def build(
    trials: Sequence[Trial], winners: Iterable[BestConfig], limits: Limits | None = None
) -> TuneReport:
    """Builds the report on trials of one kernel at one workload on one model of GPU, at least one.

    Of several sources of the kernel the source of the newest trial counts, of several trials of a
    config the newest. Winners of anything else are left out.
    """
    ordered = sorted(trials, key=lambda trial: trial.when)
    newest = ordered[-1]
    subject = newest.kernel, newest.workload, newest.source, newest.gpu.model
    chosen = tuple({t.config: t for t in ordered if t.source == newest.source}.values())
    finals = [w for w in winners if (w.kernel, w.workload, w.source, w.gpu.model) == subject]
    winner = max(finals, key=lambda won: won.when, default=None)
    if newest.gpu.arch == 0:
        chosen = _beside_the_fastest(chosen)
        winner = winner and _finals_beside_the_fastest(winner)
    order = _order(chosen, winner)
    predictions = {trial.config: trial.predicted_us for trial in chosen}
    top = tuple(
        replace(
            entry,
            predicted_us=predictions.get(entry.config),
            limits=limits(entry.config) if limits else None,
        )
        for entry in order[:TOP]
    )
    return TuneReport(
        newest.kernel,
        newest.workload,
        tuple(dict.fromkeys(trial.gpu for trial in chosen)),
        chosen,
        winner,
        top,
        _agreement(chosen, order),
        len(ordered) - len(chosen),
    )


def _beside_the_fastest(trials: tuple[Trial, ...]) -> tuple[Trial, ...]:
    """The trials with ratios to the fastest of them."""
    least = min((t.us for t in trials if t.ok and t.us is not None), default=0.0)
    return tuple(
        replace(t, ratio=least / t.us, ratio_low=None, ratio_high=None) if t.ok and t.us else t
        for t in trials
    )


def _finals_beside_the_fastest(winner: BestConfig) -> BestConfig:
    """A winner with ratios of its finalists, the fastest first, to its own time. They have no
    spread.
    """
    finalists = tuple(
        replace(f, ratio=(r := winner.us / f.us), ratio_low=r, ratio_high=r)
        for f in sorted(winner.finalists, key=lambda f: f.us)
    )
    return replace(winner, ratio=1.0, ratio_low=1.0, ratio_high=1.0, finalists=finalists)


def _order(trials: Iterable[Trial], winner: BestConfig | None) -> list[RankedConfig]:
    """Every config with figures: the winner, the other finalists, then the others by their ratio in
    screening.
    """
    entries: dict[str, RankedConfig] = {}
    finalists: list[BestConfig | Finalist] = []
    if winner is not None:
        finalists = [winner, *(f for f in winner.finalists if f.kernel == winner.kernel)]
    for f in finalists:
        low, high = (f.ratio_low, f.ratio_high) if f.ratio_low < f.ratio_high else (None, None)
        entries.setdefault(f.config, RankedConfig(f.config, f.us, f.ratio, low, high, final=True))
    for t in sorted(filter(_timed, trials), key=_slowness):
        assert t.us is not None
        assert t.ratio is not None
        entries.setdefault(
            t.config,
            RankedConfig(t.config, t.us, t.ratio, t.ratio_low, t.ratio_high, final=False),
        )
    return list(entries.values())


def _agreement(trials: Iterable[Trial], order: Iterable[RankedConfig]) -> Agreement | None:
    """How well the model predicted the order; None for fewer than two predictions."""
    both = {
        t.config: (t.predicted_us, t.us)
        for t in trials
        if _timed(t) and t.predicted_us is not None and t.us
    }
    if len(both) < 2:
        return None
    predicted, measured = zip(*both.values(), strict=True)
    best = next(entry.config for entry in order if entry.config in both)
    ordered = len(both) >= FEWEST and len(set(predicted)) > 1 and len(set(measured)) > 1
    return Agreement(
        tuple(both.values()),
        list(both).index(best),
        sum(us <= both[best][0] for us in predicted),
        spearman(predicted, measured) if ordered else None,
    )


def _timed(trial: Trial) -> bool:
    return trial.ok and trial.us is not None and trial.ratio is not None


def _slowness(trial: Trial) -> tuple[float, float]:
    return -(trial.ratio or 0.0), trial.us or 0.0


def split(configs: Sequence[str]) -> tuple[str, list[str]]:
    """The fields that all configs share, and the other fields of each."""
    parsed = [items(config) for config in configs]
    shared = set.intersection(*map(set, parsed)) if parsed else set()
    return _join(item for item in parsed[0] if item in shared) if parsed else "", [
        _join(item for item in config if item not in shared) or NONE for config in parsed
    ]


def _join(items: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name}={value}" for name, value in items)


def spearman(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Returns the correlation of ranks, from -1 to 1; equal values share their mean rank.

    Raises ValueError for different lengths, for fewer than two values, and where all values of one
    side are equal, because those have no order.
    """
    return statistics.correlation(_ranks(predicted), _ranks(measured))


def _ranks(values: Sequence[float]) -> list[int]:
    """Returns twice the place of each value in ascending order, less a constant."""
    ordered = sorted(values)
    return [bisect_left(ordered, value) + bisect_right(ordered, value) for value in values]
