"""Every claim beside what its test found."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from outblas.report.evidence import Evidence

from . import arithmetic, measured
from .claim import VERDICTS, Claim, Finding

COLUMNS = ("source", "claim", "ours", "verdict")

# The sources of the claims that are about a ladder. Claims about hardware go to the ladder for
# which the document states them.
_SOURCES = {
    "simt": r"00[02]|003 (v0[1-6]|introduction)|004 introduction",
    "turing": r"003(?! v0[1-6])",
    "hopper": r"00[14]",
}


@dataclass(frozen=True)
class Settled:
    """A claim beside what its test found."""

    claim: Claim
    finding: Finding

    def cells(self) -> tuple[str, ...]:
        """The cells of the row, in the order of COLUMNS."""
        return self.claim.source, self.claim.text, self.finding.ours, self.finding.verdict

    def record(self) -> dict[str, object]:
        """The claim and its finding as a JSON object."""
        claim, finding = self.claim, self.finding
        return {"source": claim.source, "claim": claim.text, "how": claim.how} | vars(finding)


def settled(evidence: Evidence) -> list[Settled]:
    """Every claim, tested: arithmetic first, then by measurement in order of the climb."""
    every = (*arithmetic.CLAIMS, *measured.CLAIMS)
    return [Settled(claim, claim.test(evidence)) for claim in every]


def of_ladder(found: Iterable[Settled], ladder: str | None) -> list[Settled]:
    """The claims about a ladder, by the document and its kernel; all of them for None."""
    if ladder is None:
        return list(found)
    pattern = _SOURCES.get(ladder)
    return [s for s in found if pattern and re.match(pattern, s.claim.source)]


def count(found: Iterable[Settled]) -> str:
    """The number of claims by verdict: "12 confirmed, 9 refuted, 40 not yet measured"."""
    numbers = Counter(s.finding.verdict for s in found)
    return ", ".join(f"{numbers[verdict]} {verdict}" for verdict in VERDICTS if numbers[verdict])
