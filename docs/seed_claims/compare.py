"""One timing or profile set against another: what the measured claims share."""

from collections.abc import Callable
from dataclasses import dataclass

from outblas.bench.statistics import BURST_TOLERANCE
from outblas.core.registry import dtype_of, layout_of
from outblas.core.shapes import Shape
from outblas.report.evidence import Evidence
from outblas.report.lookup import find, profiled
from outblas.report.profiles import Profile, Profiles
from outblas.report.results import Measurement, Measurements, environments

from .claim import CONFIRMED, DIFFERS, NOT_MEASURED, REFUTED, Claim, Finding

N, GPU = 4096, "H100"
# Two TFLOP/s figures agree within this share: one GPU model varies by more with its temperature,
# its ratios to cuBLAS by less.
WITHIN = 0.05
# A gain agrees with the stated gain to a percentage point, or to half of it, as long as the factor
# of both speeds agrees with the stated factor to a quarter.
POINT = 0.01
SIZE_WITHIN = 0.5
FACTOR_WITHIN = 0.25

# What a document claims: a number, or the lowest and the highest.
Span = float | tuple[float, float]


@dataclass(frozen=True)
class Run:
    """A provider, the fields that its config changes, and the square product of edge `n` that it
    computed in the dtype and layout of a ladder.

    `addend` says that it computed alpha A B + beta C.
    """

    provider: str
    config: str = ""
    n: int = N
    ladder: str = "hopper"
    addend: bool = False

    @property
    def _conditions(self) -> tuple[str, Shape, str, str]:
        """The arguments with which `lookup` finds this run."""
        return self.provider, (self.n, self.n, self.n), dtype_of(self.ladder), GPU

    def find(self, measurements: Measurements, mode: str = "burst") -> Measurement | None:
        """The newest timing of this run, or None."""
        return find(
            measurements,
            *self._conditions,
            mode=mode,
            config=self.config,
            layout=layout_of(self.ladder),
        )

    def profiled(self, profiles: Profiles) -> Profile | None:
        """The last profile of this run, or None."""
        layout = layout_of(self.ladder)
        return profiled(
            profiles, *self._conditions, config=self.config, layout=layout, addend=self.addend
        )


def campaign(measurements: Measurements, *runs: Run) -> tuple[Measurement, ...] | None:
    """The timings of all runs from the newest campaign that has all of them: only figures of one
    campaign are comparable.
    """
    newest_first = sorted(
        environments(measurements), key=lambda e: str(e.get("date", "")), reverse=True
    )
    for environment in newest_first:
        of_one = tuple(m for m in measurements if m.environment == environment)
        found = tuple(m for run in runs if (m := run.find(of_one)) is not None)
        if len(found) == len(runs):
            return found
    return None


def together(
    measurements: Measurements, one: Run, other: Run
) -> tuple[Measurement, Measurement] | None:
    """The timings of both runs from the newest campaign that has both."""
    found = campaign(measurements, one, other)
    return (found[0], found[1]) if found else None


def against(
    source: str, text: str, faster: Run, slower: Run, stated: tuple[float, float] | None = None
) -> Claim:
    """A claim that one run is faster than another; `stated` are the document's TFLOP/s of both,
    where it has them.

    The gain is one ratio to cuBLAS over the other. A run is ahead if its gain exceeds 0.5%, or if
    the spreads of the rounds do not meet. The claim holds if the first run is ahead and agrees with
    the stated gain to half of that and a quarter of the stated factor, or to a percentage point, or
    if the two tie and the stated gain is within 0.5%; it is refuted if the other run is ahead.
    """

    def test(evidence: Evidence) -> Finding:
        both = together(evidence.measurements, faster, slower)
        if both is None:
            return NOT_MEASURED
        gain, ahead, behind = _gain(*both)
        size = f"{gain:+.1%}" if gain < 1 else f"{1 + gain:.2f} times"
        ours = f"{size} ({both[0].ratio:.3f} against {both[1].ratio:.3f} × cuBLAS)"
        if behind:
            return Finding(ours, REFUTED, gain)
        claimed = stated[0] / stated[1] - 1 if stated else gain
        if not ahead:
            return Finding(
                f"{ours}: a tie",
                CONFIRMED if stated and claimed <= BURST_TOLERANCE else DIFFERS,
                gain,
            )
        agrees = abs(gain - claimed) <= max(
            POINT, min(SIZE_WITHIN * claimed, FACTOR_WITHIN * (1 + claimed))
        )
        return Finding(ours, CONFIRMED if agrees else DIFFERS, gain)

    return Claim(source, text, f"burst at {faster.n}, in one campaign", test)


@dataclass(frozen=True)
class Comparison:
    """A claim that one run is faster than another, as `against` tests it."""

    source: str
    text: str
    faster: Run
    slower: Run
    stated: tuple[float, float] | None = None

    def claim(self) -> Claim:
        """The claim with its test."""
        return against(self.source, self.text, self.faster, self.slower, self.stated)


def _gain(a: Measurement, b: Measurement) -> tuple[float, bool, bool]:
    """The gain of a over b, whether a is ahead, and whether b is ahead."""
    (a_low, a_ratio, a_high), (b_low, b_ratio, b_high) = _spread(a), _spread(b)
    gain = a_ratio / b_ratio - 1
    return gain, gain > BURST_TOLERANCE or a_low > b_high, gain < -BURST_TOLERANCE or a_high < b_low


def _spread(m: Measurement) -> tuple[float, float, float]:
    """The ratio to cuBLAS between its 10th and 90th percentile."""
    assert m.ratio is not None  # `find` returns no other
    return m.ratio_low or m.ratio, m.ratio, m.ratio_high or m.ratio


def timed(
    source: str,
    text: str,
    run: Run,
    read: Callable[[Measurement], float | None],
    claimed: Span,
    wording: str,
) -> Claim:
    """A claim of a number that a burst shows; it "differs" outside the claimed range.

    `wording` is our result in words, with {:} for the number.
    """

    def test(evidence: Evidence) -> Finding:
        ours = run.find(evidence.measurements)
        return in_range(read(ours) if ours else None, claimed, wording)

    return Claim(source, text, f"burst at {run.n}", test)


def counted(
    source: str,
    text: str,
    run: Run,
    read: Callable[[Profile], float | None],
    claimed: Span,
    wording: str,
) -> Claim:
    """A claim of a number that ncu counts; it "differs" outside the claimed range.

    `wording` is our result in words, with {:} for the number.
    """

    def test(evidence: Evidence) -> Finding:
        ours = run.profiled(evidence.profiles)
        return in_range(read(ours) if ours else None, claimed, wording)

    return Claim(source, text, f"ncu at {run.n}", test)


def in_range(value: float | None, claimed: Span, wording: str) -> Finding:
    """Whether a value lies in the claimed range, give or take WITHIN."""
    if value is None:
        return NOT_MEASURED
    low, high = claimed if isinstance(claimed, tuple) else (claimed, claimed)
    agrees = low * (1 - WITHIN) <= value <= high * (1 + WITHIN)
    return Finding(wording.format(value), CONFIRMED if agrees else DIFFERS, value)
