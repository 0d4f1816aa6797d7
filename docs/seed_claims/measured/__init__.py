"""Claims that a measurement settles, in order of the climb: the speed of every rung, then one run
against another and ncu's counters, ladder by ladder.
"""

from ..claim import Claim
from . import hopper, simt_conflicts, simt_issue, simt_speed, simt_traffic, speed, turing

CLAIMS: tuple[Claim, ...] = (
    *speed.CLAIMS,
    *simt_speed.CLAIMS,
    *simt_conflicts.CLAIMS,
    *simt_issue.CLAIMS,
    *simt_traffic.CLAIMS,
    *turing.CLAIMS,
    *hopper.CLAIMS,
)
