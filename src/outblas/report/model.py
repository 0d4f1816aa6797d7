"""What a sweep found: the trials of one kernel at one workload on one model of GPU."""

import statistics
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
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
    """A config among the best. `final`: its figures are of the finals, not of screening."""

    config: str
    us: float
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    final: bool
    predicted_us: float | None
    limits: str | None


@dataclass(frozen=True)
class TuneReport:
    """The newest trial of each config, all of one source of the kernel.

    `gpus` are of one model, `left_out` counts the older trials. A ratio is the time of `base` over
    that of the config; on a CPU there is no base, and times are compared.
    """

    kernel: str
    workload: Workload
    gpus: tuple[Gpu, ...]
    trials: tuple[Trial, ...]
    winner: BestConfig | None
    left_out: int = 0
    limits: Limits | None = None

    @property
    def base(self) -> str:
        """What ratios compare with, as `records.base_name` has it: "" on a CPU."""
        return base_name(self.workload, on_gpu=self.gpus[0].arch > 0)

    @property
    def metric(self) -> str:
        """What configs are compared by, for the heads of columns: "× cuBLAS", or "µs"."""
        return f"× {self.base}" if self.base else "µs"

    @property
    def title(self) -> str:
        """The kernel, the workload and the GPU."""
        return f"{self.kernel}, {self.workload}, {self.gpus[0].name}"

    @cached_property
    def timed(self) -> tuple[Trial, ...]:
        """The trials that have figures, the best first."""
        timed = [trial for trial in self.trials if trial.ok and trial.us is not None]
        by_ratio = bool(self.base)
        return tuple(sorted(timed, key=lambda t: (-(t.ratio or 0.0) * by_ratio, t.us or 0.0)))

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
    def top(self) -> tuple[RankedConfig, ...]:
        """The best configs: the winner, the other finalists, then others by their screening."""
        best: dict[str, BestConfig | Finalist | Trial] = {}
        if self.winner is not None:
            best[self.winner.config] = self.winner
            for finalist in self.winner.finalists:
                if finalist.kernel == self.kernel:
                    best.setdefault(finalist.config, finalist)
        final = len(best)
        for trial in self.timed:
            best.setdefault(trial.config, trial)
        predicted = {trial.config: trial.predicted_us for trial in self.trials}
        return tuple(
            RankedConfig(
                config,
                record.us or 0.0,
                *(
                    (record.ratio, record.ratio_low, record.ratio_high)
                    if self.base
                    else (None,) * 3
                ),
                final=place < final,
                predicted_us=predicted.get(config),
                limits=self.limits(config) if self.limits else None,
            )
            for place, (config, record) in enumerate(list(best.items())[:TOP])
        )

    @cached_property
    def common(self) -> str:
        """The fields that all configs of `top` share."""
        shared, _ = split([entry.config for entry in self.top])
        return shared if len(self.top) > 1 else ""

    @cached_property
    def predictions(self) -> list[tuple[float, float]]:
        """The predicted and the measured µs of every config that has both, the best of the report
        first; empty for fewer than two.
        """
        both = {t.config: (t.predicted_us, t.us) for t in self.timed if t.predicted_us and t.us}
        order = dict.fromkeys((*(entry.config for entry in self.top), *both))
        return [both[config] for config in order if config in both] if len(both) > 1 else []

    @property
    def place(self) -> int:
        """How many configs are predicted to be as fast as the best one."""
        return sum(us <= self.predictions[0][0] for us, _ in self.predictions)

    @property
    def rho(self) -> float | None:
        """Spearman's of the predicted and the measured order; None for too few configs, or where
        all values of a side are equal.
        """
        sides = tuple(zip(*self.predictions, strict=True))
        if len(self.predictions) < FEWEST or any(len(set(side)) == 1 for side in sides):
            return None
        return spearman(*sides)

    @property
    def agreement(self) -> str:
        """How early a sweep in the predicted order finds the best config, in words."""
        n, place = len(self.predictions), self.place
        first = "the first" if place == 1 else f"among the first {place}"
        rho = "" if self.rho is None else f"; Spearman's ρ of the two orders is {self.rho:.2f}"
        return (
            f"the best measured config is {first} of {n} in the predicted order "
            f"({place / n:.0%}){rho}"
        )

    def record(self) -> dict[str, Any]:
        """The report as a JSON object."""
        tried = len(self.trials)
        tiles = [
            {
                "m": m,
                "n": n,
                "us": trials[0].us,
                "ratio": trials[0].ratio if self.base else None,
                "tried": len(trials),
                "right": sum(trial.ok for trial in trials),
            }
            for (m, n), trials in sorted(self.tiles.items())
        ]
        counts = {"tried": tried, "right": self.right, "failed": tried - self.right}
        model = {"configs": len(self.predictions), "rho": self.rho, "best_place": self.place}
        return {
            "kernel": self.kernel,
            "workload": asdict(self.workload),
            "ratio_base": self.base or None,
            "gpus": [asdict(gpu) for gpu in self.gpus],
            "counts": {**counts, "left_out": self.left_out},
            "winner": self.winner and asdict(self.winner),
            "top": [asdict(entry) for entry in self.top],
            "tiles": tiles,
            "model": model if self.predictions else None,
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
    return TuneReport(
        newest.kernel,
        newest.workload,
        tuple(dict.fromkeys(trial.gpu for trial in chosen)),
        chosen,
        max(finals, key=lambda winner: winner.when, default=None),
        len(ordered) - len(chosen),
        limits,
    )


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
