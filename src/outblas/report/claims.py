"""The claims table: what a seed document claims, how that is tested, what came out.

A claim is one record. Those that arithmetic settles are in `arithmetic`, those that a measurement
settles in `measured` (the speed of a rung), `measured_simt` (the CUDA cores: one run against
another, and ncu's counters), `measured_turing` (the same of tensor cores by mma.sync) and
`measured_001` (of Hopper's climb: power, the L2 cache); `settled` tests them all against the
results at hand.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from .evidence import Evidence

CONFIRMED, REFUTED, DIFFERS, OPEN = "confirmed", "refuted", "differs", "not yet measured"
COLUMNS = ("source", "claim", "ours", "verdict")
VERDICTS = (CONFIRMED, REFUTED, DIFFERS, OPEN)
# Ladder, and the sources of the claims about it; claims about hardware go to the ladder that they
# were written for.
_ABOUT = (
    ("simt", r"00[02]|003 (v0[1-6]|introduction)|004 introduction"),
    ("turing", r"003(?! v0[1-6])"),
    ("hopper", r"00[14]"),
)


@dataclass(frozen=True)
class Finding:
    """What a test found: `ours` in words with units, `value` the number behind it, `verdict` one of
    VERDICTS.

    "refuted": the arithmetic, or a measurement under the claim's own conditions, says otherwise.
    "differs": ours is another number, and conditions (versions, rounding, meaning) can account for
    it.
    """

    ours: str
    verdict: str
    value: float | None = None


NOT_MEASURED = Finding("–", OPEN)


@dataclass(frozen=True)
class Claim:
    """`source` is the document and its kernel, `text` the claim in our words, `how` the test in a
    few words.
    """

    source: str
    text: str
    how: str
    test: Callable[[Evidence], Finding]


ROUNDING = 0.03  # figures of the documents have two or three digits


def number(
    source: str,
    text: str,
    how: str,
    stated: float,
    compute: Callable[[], float],
    says: str,
    within: float = ROUNDING,
    otherwise: str = REFUTED,
) -> Claim:
    """A claim of a number: confirmed if the computed one is `within` a share of it, `otherwise` if
    not.

    `says` is our result in words, with {:} for the computed number.
    """

    def test(_: object) -> Finding:
        value = compute()
        agrees = abs(value - stated) <= within * abs(stated)
        return Finding(says.format(value), CONFIRMED if agrees else otherwise, value)

    return Claim(source, text, how, test)


@dataclass(frozen=True)
class Settled:
    """A claim beside what its test found."""

    claim: Claim
    finding: Finding

    def cells(self) -> tuple[str, ...]:
        """In the order of COLUMNS."""
        return self.claim.source, self.claim.text, self.finding.ours, self.finding.verdict

    def record(self) -> dict[str, object]:
        """For JSON."""
        claim, finding = self.claim, self.finding
        return {"source": claim.source, "claim": claim.text, "how": claim.how} | vars(finding)


def settled(evidence: Evidence) -> list[Settled]:
    """Every claim, tested: arithmetic first, then by measurement in order of the climb."""
    from . import arithmetic, measured, measured_001, measured_simt, measured_turing

    by_measurement = measured, measured_simt, measured_turing, measured_001
    every = (*arithmetic.CLAIMS, *(claim for module in by_measurement for claim in module.CLAIMS))
    return [Settled(claim, claim.test(evidence)) for claim in every]


def of_ladder(found: list[Settled], ladder: str | None) -> list[Settled]:
    """Those that are about a ladder, by the document and its kernel; all for no ladder."""
    own = [pattern for name, pattern in _ABOUT if name == ladder]
    return [
        s for s in found if not ladder or any(re.match(pattern, s.claim.source) for pattern in own)
    ]


def count(found: list[Settled]) -> str:
    """ "12 confirmed, 9 refuted, 3 differs, 40 not yet measured"."""
    numbers = {verdict: sum(s.finding.verdict == verdict for s in found) for verdict in VERDICTS}
    return ", ".join(f"{number} {verdict}" for verdict, number in numbers.items() if number)
