"""The claims of the seed documents, each tested by arithmetic or by a measurement.

The documents are the worklogs 000 to 004 whose kernels the ladders implement. `python -m
docs.seed_claims` tests every claim against the files of `results/` and writes `docs/claims.md`;
`outblas report ladder` shows the same findings beside its ladder.
"""

from .claim import CONFIRMED, DIFFERS, NOT_MEASURED, OPEN, REFUTED, VERDICTS, Claim, Finding
from .table import COLUMNS, Settled, count, of_ladder, settled

__all__ = [
    "COLUMNS",
    "CONFIRMED",
    "DIFFERS",
    "NOT_MEASURED",
    "OPEN",
    "REFUTED",
    "VERDICTS",
    "Claim",
    "Finding",
    "Settled",
    "count",
    "of_ladder",
    "settled",
]
