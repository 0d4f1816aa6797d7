"""What a sweep found: the trials of one kernel at one workload on one model of GPU."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from outblas.autotune.search.rank import ranks, spearman
from outblas.autotune.store.records import BestConfig, Finalist, Gpu, Trial, Workload, base_name
from outblas.base.configs import items
from outblas.report.text import NONE

Limits = Callable[[str], str]  # says of a config's text what bounds it, in a few words
Tile = tuple[int, int]  # its sizes along M and N

# The fields of configs that give the tile, and the number of pipeline stages.
TILES = (("tile_m", "tile_n"), ("block_m", "block_n"))
STAGES = ("stages", "num_stages")
TOP = 10  # configs that the report lists
LINES = 6  # tiles whose line over the number of stages is shown
FEWEST = 3  # configs from which a rank correlation is given


@dataclass(frozen=True)
class RankedConfig:
    """A config among the best.

    `final` says that its figures are of the finals, not of screening. `predicted` is the first and
    the last place that it can claim in the model's order; they differ where the model predicts the
    same time for several configs.
    """

    config: str
    us: float
    ratio: float
    ratio_low: float | None
    ratio_high: float | None
    final: bool
    predicted: tuple[int, int] | None = None
    predicted_us: float | None = None
    limits: str | None = None


@dataclass(frozen=True)
class Agreement:
    """The model's predictions beside what screening measured.

    `points` has the predicted and the measured µs of every config that has both, `best` is the
    index of the best measured one, `place` its first and last place in the model's order. `rho` is
    Spearman's of the two orders; None for too few configs, or where all values of a side are equal.
    """

    points: tuple[tuple[float, float], ...]
    best: int
    place: tuple[int, int]
    rho: float | None

    def __str__(self) -> str:
        n, (first, last) = len(self.points), self.place
        tied = "" if first == last else f" to {_ordinal(last)}"
        return (
            f"the best measured config is {_ordinal(first)}{tied} of {n} in the predicted order "
            f"(top {math.ceil(100 * last / n)}%)"
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
    def tiles(self) -> dict[Tile, list[Trial]]:
        """All trials by tile, the best of each tile first."""
        by_tile: dict[Tile, list[Trial]] = {}
        for trial in (
            *self.timed,
            *(trial for trials in self.failures.values() for trial in trials),
        ):
            if tile := _tile(trial.config):
                by_tile.setdefault(tile, []).append(trial)
        return by_tile

    @cached_property
    def stage_field(self) -> str:
        """The name of the field that gives a config's stages; "" where there is none."""
        return next(
            (name for name in STAGES if any(name in fields(trial.config) for trial in self.timed)),
            "",
        )

    @cached_property
    def stages(self) -> dict[str, dict[int, float]]:
        """The best ratio by number of stages, for the best tiles; {} where no tile was tried with
        several numbers of stages.
        """
        lines: dict[str, dict[int, float]] = {}
        for trial in self.timed:
            count, tile = _integer(fields(trial.config).get(self.stage_field)), _tile(trial.config)
            name = f"{tile[0]}×{tile[1]}" if tile else "all configs"
            if (
                count is not None
                and trial.ratio is not None
                and (name in lines or len(lines) < LINES)
            ):
                lines.setdefault(name, {}).setdefault(count, trial.ratio)
        return lines if len({count for line in lines.values() for count in line}) > 1 else {}

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
        lines = [
            {"tile": tile, "ratios": {str(count): line[count] for count in sorted(line)}}
            for tile, line in self.stages.items()
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
            "stages": {"field": self.stage_field, "lines": lines},
            "model": agreement
            and {
                "configs": len(agreement.points),
                "rho": agreement.rho,
                "best_place": list(agreement.place),
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
    trials: Sequence[Trial],
    winners: Sequence[BestConfig],
    *,
    kernel: str,
    workload: Workload,
    gpu_name: str | None = None,
    limits: Limits | None = None,
) -> TuneReport:
    """Builds the report on `kernel` at `workload`, on the GPU of that name, or on the model with
    the most trials for None.

    Of several sources of the kernel the source of the newest trial counts, of several trials of a
    config the newest. Raises ValueError that names what is missing.
    """
    own = [
        t
        for t in trials
        if (t.kernel, t.workload) == (kernel, workload) and gpu_name in (None, t.gpu.name)
    ]
    if not own:
        where = f" on {gpu_name}" if gpu_name else ""
        subjects = sorted({f"{t.kernel} at {t.workload} on {t.gpu.name}" for t in trials})
        raise ValueError(f"no trials of {kernel} at {workload}{where}; {_there_are(subjects)}")
    model = Counter(t.gpu.model for t in own).most_common(1)[0][0]
    own = sorted((t for t in own if t.gpu.model == model), key=lambda t: t.when)
    source = own[-1].source
    chosen = tuple({t.config: t for t in own if t.source == source}.values())
    if chosen[0].gpu.arch == 0:
        chosen = _beside_the_fastest(chosen)
    finals = [
        w
        for w in winners
        if (w.kernel, w.workload, w.source, w.gpu.model) == (kernel, workload, source, model)
    ]
    winner = sorted(finals, key=lambda w: w.when)[-1] if finals else None
    if winner is not None and winner.gpu.arch == 0:
        winner = _finals_beside_the_fastest(winner)
    order = _order(chosen, winner)
    agreement, places = _agreement(chosen, order)
    predictions = {trial.config: trial.predicted_us for trial in chosen}
    top = [
        replace(
            entry,
            predicted=places.get(entry.config),
            predicted_us=predictions.get(entry.config),
            limits=limits(entry.config) if limits else None,
        )
        for entry in order[:TOP]
    ]
    gpus = tuple(dict.fromkeys(t.gpu for t in chosen))
    return TuneReport(
        kernel, workload, gpus, chosen, winner, tuple(top), agreement, len(own) - len(chosen)
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
            t.config, RankedConfig(t.config, t.us, t.ratio, t.ratio_low, t.ratio_high, final=False)
        )
    return list(entries.values())


def _agreement(
    trials: Iterable[Trial], order: Iterable[RankedConfig]
) -> tuple[Agreement | None, dict[str, tuple[int, int]]]:
    """How well the model predicted the order, and the places of every config in its order."""
    both = {
        t.config: (t.predicted_us, t.us)
        for t in trials
        if _timed(t) and t.predicted_us is not None and t.us
    }
    predicted, measured = [p for p, _ in both.values()], [us for _, us in both.values()]
    by_model = ranks(predicted)
    # A rank is the mean over equal values, which take as many places around it.
    equal = Counter(by_model)
    places = {
        config: (round(rank - (equal[rank] - 1) / 2), round(rank + (equal[rank] - 1) / 2))
        for config, rank in zip(both, by_model, strict=True)
    }
    if len(both) < 2:
        return None, places
    best = next(entry.config for entry in order if entry.config in both)
    ordered = len(both) >= FEWEST and len(set(predicted)) > 1 and len(set(measured)) > 1
    rho = spearman(predicted, measured) if ordered else None
    points = tuple(zip(predicted, measured, strict=True))
    return Agreement(points, list(both).index(best), places[best], rho), places


def _timed(trial: Trial) -> bool:
    return trial.ok and trial.us is not None and trial.ratio is not None


def _slowness(trial: Trial) -> tuple[float, float]:
    return -(trial.ratio or 0.0), trial.us or 0.0


def _tile(config: str) -> Tile | None:
    values = fields(config)
    for m, n in TILES:
        sizes = _integer(values.get(m)), _integer(values.get(n))
        if sizes[0] is not None and sizes[1] is not None:
            return sizes[0], sizes[1]
    return None


def _integer(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _there_are(subjects: Sequence[str], most: int = 5) -> str:
    if not subjects:
        return "there are none at all"
    more = f" and {len(subjects) - most} others" if len(subjects) > most else ""
    return f"there are some of {'; '.join(subjects[:most])}{more}"


def _ordinal(n: int) -> str:
    suffix = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"


def fields(config: str) -> dict[str, str]:
    """A config's text, "a=1,b=2", as a mapping."""
    return {name.strip(): value.strip() for name, value in items(config)}


def split(configs: Sequence[str]) -> tuple[str, list[str]]:
    """The fields that all configs share, and the other fields of each."""
    parsed = [fields(config) for config in configs]
    shared = set.intersection(*(set(config.items()) for config in parsed)) if parsed else set()
    return _join(item for item in (parsed[0].items() if parsed else ()) if item in shared), [
        _join(item for item in config.items() if item not in shared) or NONE for config in parsed
    ]


def _join(items: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name}={value}" for name, value in items)
