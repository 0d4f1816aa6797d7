"""What the claims about the CUDA cores read from ncu's counters."""

from collections.abc import Callable
from math import inf

from outblas.bench.statistics import BURST_TOLERANCE
from outblas.report.evidence import Evidence
from outblas.report.profiles import Passes, Profile

from ..claim import CONFIRMED, DIFFERS, NOT_MEASURED, REFUTED, Claim, Finding
from ..compare import WITHIN, Run, in_range

FREE = 0.02  # conflicts that add a smaller share of wavefronts count as none


def free(source: str, text: str, run: Run, kind: Callable[[Profile], Passes]) -> Claim:
    """A claim that bank conflicts add no wavefronts to loads, or to stores.

    The count is that of the instructions: the counters of L1 show "conflicts" also for stores that
    have none.
    """

    def test(evidence: Evidence) -> Finding:
        profile = run.profiled(evidence.profiles)
        added = kind(profile).added if profile else None
        if added is None:
            return NOT_MEASURED
        ours = f"{added:.1%} of the wavefronts are conflicts"
        return Finding(ours, CONFIRMED if added <= FREE else DIFFERS, added)

    return Claim(source, text, f"ncu at {run.n}", test)


def both(
    source: str,
    text: str,
    one: Run,
    other: Run,
    read: Callable[[Profile], float | None],
    judge: Callable[[float, float], str],
    wording: str,
) -> Claim:
    """A claim on one number of two profiles; `judge` gives the verdict.

    `wording` is our result in words, with {0:} and {1:} for the numbers and {2:} for their ratio.
    """

    def test(evidence: Evidence) -> Finding:
        first, second = (
            read(p) if p else None
            for p in (run.profiled(evidence.profiles) for run in (one, other))
        )
        if first is None or second is None:
            return NOT_MEASURED
        ratio = first / second if second else inf
        return Finding(
            wording.format(first, second, ratio), judge(first, second), ratio if second else None
        )

    return Claim(source, text, f"ncu at {one.n}, both", test)


def ahead(one: float, other: float) -> str:
    """The verdict on "one is higher"; a tie differs, for two profiles of one kernel could differ as
    much.
    """
    tie = abs(one - other) <= BURST_TOLERANCE * other
    return DIFFERS if tie else CONFIRMED if one > other else REFUTED


def as_bad(one: float, other: float) -> str:
    """The verdict on "one has as many conflicts"."""
    return CONFIRMED if one >= other * (1 - WITHIN) and other > FREE else DIFFERS


def times(stated: float) -> Callable[[float, float], str]:
    """The verdict on "one is so many times the other"."""
    return lambda one, other: in_range(one / other if other else inf, stated, "{}").verdict
